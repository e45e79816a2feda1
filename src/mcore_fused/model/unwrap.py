"""Find the language model that owns the head, below its wrappers.

A framework holds ``DDP(Float16Module(GPTModel))``, a list of such chunks, a VLM with a ``.language_model``, or a
PEFT model around any of them. Config, head and stage are always read from the innermost language model. Known
wrappers are listed below; an unknown one is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from mcore_fused.errors import UnsupportedModelError, qualified_name

__all__ = ["WrapperChain", "register_wrapper", "unwrap_chain", "unwrap_model"]

# Class (anywhere in the object's MRO) -> attribute that holds the wrapped module.
_TRANSPARENT: dict[str, str] = {
    "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel": "module",
    "megatron.core.distributed.torch_fully_sharded_data_parallel.TorchFullyShardedDataParallel": "module",
    "megatron.core.distributed.custom_fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "module",
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter.FullyShardedDataParallel": "module",
    # On upstream's main the name above is a function that chooses between two classes; the second is not tested here.
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter.FullyShardedDataParallelV1": "module",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp.MegatronFSDP": "module",
    "megatron_fsdp.megatron_fsdp.MegatronFSDP": "module",
    "megatron.core.transformer.module.Float16Module": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
}
# These look for tensors in the model's output, and find them only in a tensor, a tuple or a list.
_TENSORS_ONLY = frozenset(
    {
        "megatron.core.distributed.custom_fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
        "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp.MegatronFSDP",
        "megatron_fsdp.megatron_fsdp.MegatronFSDP",
    }
)
# These have a forward of their own that may not pass unknown keywords on to the module inside.
_OPAQUE: dict[str, str] = {
    "peft.peft_model.PeftModel": "base_model",
    "peft.tuners.tuners_utils.BaseTuner": "model",
}


@dataclass(frozen=True)
class WrapperChain:
    """One chunk, from the outermost wrapper to the language model.

    Attributes:
        outer: the object that the caller holds and calls.
        model: the language model that owns config, stage and head.
        wrappers: the modules around ``model``, outermost first.
        transparent: whether every wrapper passes unknown keywords on to ``model``.
        tensors_only: whether a wrapper supports only tensors, tuples and lists as the model's output.
    """

    outer: nn.Module
    model: nn.Module
    wrappers: tuple[nn.Module, ...]
    transparent: bool
    tensors_only: bool = False


def register_wrapper(class_name: str, attribute: str, *, transparent: bool) -> None:
    """Register a wrapper class.

    Args:
        class_name: qualified name, ``package.module.Class``; subclasses are included.
        attribute: attribute that holds the wrapped module.
        transparent: whether its ``forward`` passes unknown keywords on unchanged.
    """
    (_TRANSPARENT if transparent else _OPAQUE)[class_name] = attribute


def _wrapped_attribute(module: nn.Module) -> tuple[str, bool] | None:
    for kind in type(module).__mro__:
        name = qualified_name(kind)
        if name in _TRANSPARENT:
            return _TRANSPARENT[name], True
        if name in _OPAQUE:
            return _OPAQUE[name], False
    if isinstance(getattr(module, "language_model", None), nn.Module):
        return "language_model", False
    return None


def _is_language_model(module: nn.Module) -> bool:
    # Looked up on the class: PEFT's wrappers delegate attributes that they lack to the module inside.
    return callable(getattr(type(module), "compute_language_model_loss", None)) and hasattr(module, "post_process")


def unwrap_chain(model: nn.Module) -> WrapperChain:
    """Return the wrapper chain of one model chunk.

    Raises:
        UnsupportedModelError: an object of the chain is neither a known wrapper nor a language model, or no module.
    """
    wrappers: list[nn.Module] = []
    transparent = True
    current: object = model
    while True:
        if not isinstance(current, nn.Module):
            raise UnsupportedModelError(
                f"{qualified_name(current)} is not a torch module.", "pass the model, or a list of its chunks."
            )
        if _is_language_model(current):
            tensors_only = any(qualified_name(kind) in _TENSORS_ONLY for w in wrappers for kind in type(w).__mro__)
            return WrapperChain(model, current, tuple(wrappers), transparent, tensors_only)
        step = _wrapped_attribute(current)
        if step is None or len(wrappers) > 32:
            raise UnsupportedModelError(
                f"{qualified_name(current)} is neither a known wrapper nor a Megatron language model"
                + (f" (reached through {' > '.join(type(w).__name__ for w in wrappers)})." if wrappers else "."),
                "pass the inner GPTModel, or register the wrapper with mcore_fused.register_wrapper(...).",
            )
        wrappers.append(current)
        attribute, hands_on = step
        transparent = transparent and hands_on
        current = getattr(current, attribute)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the language model inside ``model``; see :func:`unwrap_chain` for what is refused."""
    return unwrap_chain(model).model


def get_chunks(model: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """Return a model, or a list of virtual-pipeline chunks, as a tuple of chunks.

    Raises:
        UnsupportedModelError: an empty list.
    """
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        return (model,)
    if isinstance(model, (Sequence, nn.ModuleList)) and len(model):
        return tuple(model)
    raise UnsupportedModelError(
        f"{qualified_name(model)} holds no model chunk.", "pass the model, or a non-empty list of its chunks."
    )
