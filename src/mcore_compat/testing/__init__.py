"""Tools for tests of code that builds on Megatron-Core: tiny real models, ranks and references on a host without a GPU.

Importing this package imports neither torch nor Megatron; each name below is loaded when it is first used.

- :func:`install_cpu_seam`: Megatron's device queries answer without a GPU. Call it before importing Megatron.
- :class:`Shape`, :func:`build`, :func:`batch_for`: real ``GPTModel`` instances that build in milliseconds, and batches.
- :func:`process_group`, :func:`run_ranks`: one gloo rank in this process, or a function on several ranks;
  :func:`preload_in_ranks` lets all ranks share one import of your modules.
- :class:`LogitsCounter`: fails a block of code that materialises ``[tokens, vocabulary]``.
- :func:`stock_forward`, :func:`log_probs_and_entropy`, :func:`gradients`, :func:`assert_same_gradients`: float64
  references from the model's own logits.

A first test on a laptop::

    from mcore_compat.testing import install_cpu_seam

    install_cpu_seam()
    from mcore_compat.testing import Shape, batch_for, build, process_group

    with process_group():
        model, batch = build(Shape(tied=True)), batch_for(97, batch=2, seq=8)
        loss = model(*batch.inputs, labels=batch.labels)

The package needs torch and megatron-core, which the environment under test provides.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_compat.testing.cpu_seam import install_cpu_seam
    from mcore_compat.testing.logits import LogitsCounter, LogitsMaterialisedError
    from mcore_compat.testing.models import Batch, Shape, batch_for, build, config_for, half_chain, unwrapped
    from mcore_compat.testing.process_groups import process_group
    from mcore_compat.testing.ranks import preload_in_ranks, run_ranks
    from mcore_compat.testing.reference import (
        StockResult,
        assert_same_gradients,
        gradients,
        log_probs_and_entropy,
        stock_forward,
    )

__all__ = [
    "Batch",
    "LogitsCounter",
    "LogitsMaterialisedError",
    "Shape",
    "StockResult",
    "assert_same_gradients",
    "batch_for",
    "build",
    "config_for",
    "gradients",
    "half_chain",
    "install_cpu_seam",
    "log_probs_and_entropy",
    "preload_in_ranks",
    "process_group",
    "run_ranks",
    "stock_forward",
    "unwrapped",
]

_HOMES = {
    "cpu_seam": ("install_cpu_seam",),
    "logits": ("LogitsCounter", "LogitsMaterialisedError"),
    "models": ("Batch", "Shape", "batch_for", "build", "config_for", "half_chain", "unwrapped"),
    "process_groups": ("process_group",),
    "ranks": ("preload_in_ranks", "run_ranks"),
    "reference": ("StockResult", "assert_same_gradients", "gradients", "log_probs_and_entropy", "stock_forward"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
