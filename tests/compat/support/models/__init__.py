"""The suite's models: the tiny real ones of ``mcore_compat.testing`` in this cell's model class, and modelled ones."""

from functools import lru_cache
from typing import Any

import torch

from mcore_compat.testing import models as tiny
from mcore_compat.testing.models import (
    CONFIG_FIELDS,
    DEVICE,
    HAS_MTP,
    HAS_MUP,
    Batch,
    Shape,
    batch_for,
    config_for,
    half_chain,
    layer_spec,
    spread_the_logits,
    unwrapped,
)

from .backport import model_class

__all__ = [
    "CONFIG_FIELDS",
    "DEVICE",
    "HAS_MTP",
    "HAS_MUP",
    "Batch",
    "Shape",
    "batch_for",
    "build",
    "config_for",
    "half_chain",
    "layer_spec",
    "model_class",
    "shared",
    "spread_the_logits",
    "unwrapped",
]


def build(shape: Shape, *, cls: type | None = None, **options: Any) -> torch.nn.Module:
    """A fresh model of the cell's class (the release's own GPTModel, or a backport)."""
    return tiny.build(shape, cls=cls or model_class(), **options)


@lru_cache(maxsize=32)
def shared(shape: Shape) -> torch.nn.Module:
    """A model that examples share: they must leave it as they found it (a fixture checks that)."""
    return build(shape)
