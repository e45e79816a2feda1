"""verl's own engine on a CPU: the real ``workers/engine/megatron/transformer_impl.py`` of the installed package.

What is under test are verl's own lines between its trainer and the fused forward: how the engine patches its models
and how ``forward_step`` calls. Everything that these lines run is verl's. Stand-ins are there for what the module
imports and these lines do not use: transformers, omegaconf, configuration classes, checkpoints, profilers, adapters.
"""

import contextlib
import functools
import importlib
import sys
import types
from pathlib import Path

from support.subjects.verl import CausalLMOutputWithPast, _in_place, _Names, load

import mcore_fused

#: The module whose place this project's library takes.
SWAPPED = "verl.models.mcore.model_forward_fused"
_BARE = ("verl.models", "verl.utils.dataset", "verl.workers", "verl.workers.engine", "verl.workers.engine.megatron")
_NAMES = (
    "omegaconf",
    "transformers",
    "verl.models.registry",
    "verl.protocol",
    "verl.trainer",
    "verl.trainer.config",
    "verl.utils.checkpoint",
    "verl.utils.checkpoint.megatron_checkpoint_manager",
    "verl.utils.debug",
    "verl.utils.fs",
    "verl.utils.import_utils",
    "verl.utils.megatron_peft_utils",
    "verl.utils.seqlen_balancing",
    "verl.utils.torch_functional",
    "verl.utils.transformers_compat",
    "verl.workers.config",
)


@functools.cache
def _modules():
    """verl's modules as the engine needs them, beside those that ``load`` made: with the real tensordict."""
    load()  # what it imports of Megatron comes before any stand-in
    root = Path(sys.modules["verl"].__path__[0])
    bare = {name: types.ModuleType(name) for name in ("verl", "verl.models.mcore", "verl.utils", *_BARE)}
    for name, module in bare.items():
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    outputs = _Names("transformers.modeling_outputs")
    outputs.CausalLMOutputWithPast = CausalLMOutputWithPast
    with _without_verl(), _in_place({name: _Names(name) for name in _NAMES} | {outputs.__name__: outputs}):
        sys.modules.update(bare)
        registry = importlib.import_module("verl.models.mcore.registry")
        for name in ("get_mcore_forward_fused_model_engine_fn", "get_mcore_weight_converter"):
            setattr(bare["verl.models.mcore"], name, getattr(registry, name))
        importlib.import_module("verl.workers.engine.megatron.transformer_impl")
        return {name: module for name, module in sys.modules.items() if _is_verl(name)}


def _is_verl(name):
    return name == "verl" or name.startswith("verl.")


@contextlib.contextmanager
def _without_verl():
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_verl(name)}
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_verl(name)]:
            del sys.modules[name]
        sys.modules.update(before)


@contextlib.contextmanager
def engine_module(swapped):
    """verl's ``transformer_impl``, for a block.

    Args:
        swapped: whether this project's library is in the place of verl's module of fused forwards, for every import of
            it; verl's registry, which has the names already, is given them too.
    """
    modules = _modules()
    with _without_verl(), contextlib.ExitStack() as stack:
        sys.modules.update(modules)
        if swapped:
            sys.modules[SWAPPED] = mcore_fused
            registry, package = modules["verl.models.mcore.registry"], modules["verl.models.mcore"]
            for owner, name in (
                (package, "model_forward_fused"),
                (registry, "fused_forward_model_gen"),
                (registry, "fused_forward_model_engine"),
            ):
                stack.callback(setattr, owner, name, getattr(owner, name))
            package.model_forward_fused = mcore_fused
            registry.fused_forward_model_gen = mcore_fused.fused_forward_model_gen
            registry.fused_forward_model_engine = mcore_fused.fused_forward_model_engine
        yield sys.modules["verl.workers.engine.megatron.transformer_impl"]
