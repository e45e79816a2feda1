"""Prelude of witnesses: run upstream's real forward on a stand-in model, without process groups or weights.

The file is shown to a cell's interpreter as text, so it imports nothing of this project.
"""

import types
from collections.abc import Callable
from typing import Any

import torch


class Stub:
    """Answers None to every attribute that it was not given: every option is off."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Head(Stub):
    """An output layer: what it is called with is seen, and every attribute of it is off."""

    def __call__(self, input_: Any, **arguments: Any) -> tuple["Logits", None]:
        """Logits and no bias, as the stock layer gives them."""
        del input_  # named as in the stock layer, which some callers rely on
        self.seen.order.append("head")
        self.seen.head_arguments = arguments
        return Logits(), None


class Logits:
    """What the head returns here: it can be scaled and asked for its largest columns, and nothing else."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __mul__(self, factor: float) -> "Logits":
        return Logits(self.scale * factor)

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        if func is torch.argmax and kwargs == {"dim": -1}:
            return torch.zeros((), dtype=torch.long)
        raise TypeError(f"logits were given to {func}")


def defaults() -> dict[str, Any]:
    """Upstream's own defaults of its configuration: a new option is as harmless here as it is there."""
    import dataclasses

    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = dataclasses.fields(TransformerConfig)
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def own_methods(owner: type) -> dict[str, Callable[..., Any]]:
    """Upstream's methods of a model class, along its bases; those of torch and Python are left out."""
    found: dict[str, Callable[..., Any]] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.partition(".")[0] not in {"torch", "builtins", "abc"}:
            functions = {name: value for name, value in vars(base).items() if isinstance(value, types.FunctionType)}
            found |= {name: value for name, value in functions.items() if not name.startswith("__")}
    return found


def trace_forward(
    owner: type, *, processor: Callable[..., Any] | None = None, post_process: bool = True, **config: Any
) -> Stub:
    """Call the class's own forward with labels; report what reached the head, the hook and the loss.

    Args:
        owner: the model class.
        processor: passed as ``output_processor`` where given.
        post_process: whether this is the stage that has the head.
        config: options that are on.
    """
    hidden = torch.zeros(2, 1, 4)
    seen = Stub(order=[], hidden=hidden)
    tokens = torch.zeros(1, 2, dtype=torch.long)
    labels = tokens.clone()

    def loss(given: Any, logits: Any) -> object:
        seen.order.append("loss")
        seen.own_labels, seen.logits, seen.loss = given is labels, logits, object()
        return seen.loss

    def hooked(**arguments: Any) -> Any:
        seen.order.append("hook")
        seen.hook_arguments = arguments
        assert processor is not None
        return processor(**arguments)

    model = Stub(
        config=Stub(**defaults() | {"config_logger_dir": "", "hidden_size": 4, "mup_output_mult": 1.0} | config),
        pre_process=True,
        post_process=post_process,
        training=True,
        decoder=lambda *_, **__: hidden,
        embedding=Stub(),
        pg_collection=Stub(),
        output_layer=Head(seen=seen),
        compute_language_model_loss=loss,
    )
    for name, method in own_methods(owner).items():
        if name not in vars(model):
            setattr(model, name, types.MethodType(method, model))
    extra = {"output_processor": hooked} if processor is not None else {}
    forward: Callable[..., Any] = owner.forward  # type: ignore[attr-defined]
    seen.result = forward(model, tokens, tokens, None, decoder_input=hidden, labels=labels, **extra)
    return seen


def owner_of(item: str) -> type:
    """The model class that a contract item such as ``gpt.head.logits`` is about."""
    import importlib

    modules = {
        "gpt": ("megatron.core.models.gpt.gpt_model", "GPTModel"),
        "hybrid": ("megatron.core.models.hybrid.hybrid_model", "HybridModel"),
        "mamba": ("megatron.core.models.mamba.mamba_model", "MambaModel"),
    }
    module, name = modules[item.partition(".")[0]]
    owner: type = getattr(importlib.import_module(module), name)
    return owner
