"""HybridModel (0.18 and later) and MambaModel (before), built from attention layers on hosts without TE.

Their stack hard-wires Transformer Engine's norm; without TE a torch norm stands in for that one class. The
model, its stack, its layers and its head are the real ones. No release gives these models the hook.
"""

import importlib
import inspect
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from megatron.core import utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from support.models import DEVICE, Shape, config_for, layer_spec

_WHERE = (
    ("megatron.core.models.hybrid.hybrid_model", "HybridModel", "megatron.core.models.hybrid.hybrid_block", "Hybrid"),
    ("megatron.core.models.mamba.mamba_model", "MambaModel", "megatron.core.ssm.mamba_block", "Mamba"),
)


@contextmanager
def _names_of_transformer_engine():
    """Up to 0.12 the stack's module does not import without Transformer Engine: for its import, give the names alone.

    Classes of Megatron's extension derive from these; none is ever made here. Afterwards neither the package nor the
    extension is there any more, and nothing remembers a version.
    """
    extension = "megatron.core.extensions.transformer_engine"
    try:
        importlib.import_module(extension)
    except ImportError:
        sys.modules["transformer_engine"] = _package()
        try:
            with mock.patch.object(utils, "_te_version", None):
                yield
        finally:
            del sys.modules["transformer_engine"]
            if sys.modules.pop(extension, None):
                del sys.modules["megatron.core.extensions"].transformer_engine
    else:
        yield


def _package():
    package = ModuleType("transformer_engine")
    layers = ("Linear", "LayerNormLinear", "DotProductAttention")
    package.pytorch = SimpleNamespace(
        **{name: type(name, (torch.nn.Module,), {}) for name in layers},
        distributed=SimpleNamespace(CudaRNGStatesTracker=type("CudaRNGStatesTracker", (), {})),
    )
    package.common = SimpleNamespace(recipe=SimpleNamespace(DelayedScaling=type("DelayedScaling", (), {})))
    package.__version__ = "0"
    return package


def _found():
    with _names_of_transformer_engine():
        return _model_and_stack()


def _model_and_stack():
    for model_module, model_name, stack_module, prefix in _WHERE:
        if importlib.util.find_spec(model_module.rpartition(".")[0]) and importlib.util.find_spec(model_module):
            stack = importlib.import_module(stack_module)
            model = getattr(importlib.import_module(model_module), model_name)
            return model, stack, getattr(stack, f"{prefix}Stack"), getattr(stack, f"{prefix}StackSubmodules")
    raise LookupError("this megatron-core has neither HybridModel nor MambaModel")


@contextmanager
def _torch_norm(stack_module):
    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        with mock.patch.object(stack_module, "TENorm", WrappedTorchNorm):
            yield
    else:
        yield


def build_hybrid(shape: Shape):
    """A hybrid model of attention layers, tied or not."""
    model_class, stack_module, stack_class, submodules_class = _found()
    torch.manual_seed(shape.seed)
    accepted = inspect.signature(model_class.__init__).parameters
    spec = ModuleSpec(module=stack_class, submodules=submodules_class(attention_layer=layer_spec(shape)))
    pattern = "*" * shape.layers
    arguments = {
        "hybrid_stack_spec" if model_class.__name__ == "HybridModel" else "mamba_stack_spec": spec,
        "hybrid_layer_pattern" if "hybrid_layer_pattern" in accepted else "hybrid_override_pattern": pattern,
    }
    with _torch_norm(stack_module):
        model = model_class(
            config=config_for(shape),
            vocab_size=shape.vocab,
            max_sequence_length=128,
            position_embedding_type="none",  # with rope, MambaModel of 0.13 fails in its own forward
            share_embeddings_and_output_weights=shape.tied,
            **arguments,
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                parameter.mul_(20)
    return model.to(device=DEVICE, dtype=shape.dtype)
