"""Install, remove and use the fused forward; the only module that knows what is installed on which model.

Hook mode installs nothing. Legacy mode stores one :class:`LegacyForward` as ``forward`` on the instance, and removing
it deletes that attribute again: afterwards ``vars(model)`` is what it was.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from mcore_fused import evidence
from mcore_fused.errors import (
    CallTypeError,
    ForeignPatchError,
    FusionDidNotRunError,
    ModeError,
    PatchOrderError,
    UnsupportedConfigError,
    qualified_name,
)
from mcore_fused.evidence import FusedForwardEvidence
from mcore_fused.head.supported import check_head, get_head
from mcore_fused.model.instance import get_lock, own_attribute, replaced
from mcore_fused.model.signature import arguments_by_name, forward_parameters
from mcore_fused.model.unwrap import WrapperChain, get_chunks, unwrap_chain, unwrap_model
from mcore_fused.modes.capability import Mode, declares_hook, proved_mode
from mcore_fused.modes.hook import HOOK_PARAMETERS, fused_output_processor
from mcore_fused.modes.legacy import LegacyForward
from mcore_fused.outputs import FusedCall, FusedForwardOutput, FusedOutputProcessorContext

__all__ = [
    "call_fused_forward",
    "fused_forward",
    "fused_forward_evidence",
    "fused_forward_mode",
    "patch_fused_forward",
    "unpatch_fused_forward",
]

ModeRequest = Literal["auto", "hook", "legacy"]
Model = nn.Module | Sequence[nn.Module]

# Models patched in hook mode, and modes verified before; keyed by the language model, never stored on it.
_patched_hook: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_proved: weakref.WeakKeyDictionary[nn.Module, Mode] = weakref.WeakKeyDictionary()


def fused_forward_mode(model: Model) -> Mode:
    """Return how fused calls reach this model's head: "hook" or "legacy".

    For a patched model this is the mode that it was patched in, otherwise the mode that "auto" would choose. The
    decision is verified once per model (see :mod:`mcore_fused.modes.capability`) and remembered.

    Raises:
        UnsupportedModelError: there is no language model inside, or the fused path does not equal its head.
        ForeignPatchError: another patch has replaced ``forward`` on the instance.
        ModeError: a declared hook could not be verified.
    """
    modes = {_mode_of(unwrap_chain(chunk)) for chunk in get_chunks(model)}
    return "legacy" if "legacy" in modes else "hook"  # legacy serves every chunk, the hook only those that have it


def _mode_of(chain: WrapperChain) -> Mode:
    model = chain.model
    own_forward = own_attribute(model, "forward")
    if isinstance(own_forward, LegacyForward):
        return "legacy"
    if model in _patched_hook:
        return "hook"
    check_head(model, chain.wrappers)
    _refuse_foreign(model, own_forward)
    if model not in _proved:
        _proved[model] = proved_mode(model)
    return _proved[model]


def _refuse_foreign(model: nn.Module, own_forward: object) -> None:
    if own_forward is not None and not isinstance(own_forward, LegacyForward):
        raise ForeignPatchError(
            f"forward of this {qualified_name(model)} instance is already replaced by {qualified_name(own_forward)}.",
            "remove that patch first, or install it after this one and remove it before this one.",
        )


def patch_fused_forward(model: Model, mode: ModeRequest = "auto") -> Mode:
    """Enable fused calls on a model or on a list of its chunks; patching again changes nothing.

    Args:
        model: a language model, a known wrapper around one, or a list of virtual-pipeline chunks. Stages without a
            head are patched too, so that every stage accepts the same keywords.
        mode: "auto" uses the hook if it is verified to work, and legacy mode otherwise; "legacy" can be forced on
            every model; "hook" is not verified, for models whose hook cannot be verified by a dry run.

    Returns:
        The mode in use.

    Raises:
        UnsupportedModelError: (also its subclasses for output layer and config) the fused path would lose something.
        ForeignPatchError: another patch has replaced ``forward`` on the instance.
        ModeError: the model has no hook, or is already patched in the other mode.
    """
    if mode not in {"auto", "hook", "legacy"}:
        raise ModeError(f"there is no mode {mode!r}.", 'pass "auto", "hook" or "legacy".')
    chains = [unwrap_chain(chunk) for chunk in get_chunks(model)]
    wanted = {_wanted_mode(chain, mode) for chain in chains}  # everything is checked before anything is changed
    chosen: Mode = "legacy" if "legacy" in wanted else "hook"
    for chain in chains:
        inner = chain.model
        if chosen == "hook":
            _patched_hook.add(inner)
        elif not isinstance(own_attribute(inner, "forward"), LegacyForward):
            _patched_hook.discard(inner)
            inner.forward = LegacyForward(inner)
        _read_signatures(chain)
    return chosen


def _read_signatures(chain: WrapperChain) -> None:
    """Read the signatures that calls need, so that no call has to."""
    methods: list[Any] = [module.forward for module in (*chain.wrappers, chain.model)]
    methods += [getattr(chain.model, name, None) for name in ("build_schedule_plan", "_preprocess")]
    for method in methods:
        if callable(method):
            forward_parameters(method)


def _wanted_mode(chain: WrapperChain, mode: ModeRequest) -> Mode:
    model = chain.model
    check_head(model, chain.wrappers)
    own_forward = own_attribute(model, "forward")
    _refuse_foreign(model, own_forward)
    legacy, hook = isinstance(own_forward, LegacyForward), model in _patched_hook
    if legacy or hook:
        installed: Mode = "legacy" if legacy else "hook"
        if mode not in {"auto", installed}:
            raise ModeError(f"this model is already patched in {installed} mode.", "unpatch it first.")
        return installed
    if mode == "auto":
        return _mode_of(chain)
    if mode == "hook" and not declares_hook(model.forward):
        raise ModeError(
            f"{qualified_name(model)}.forward has no parameters {' and '.join(HOOK_PARAMETERS)}.",
            'use mode="auto"; legacy mode gives every release the same results.',
        )
    return mode


def unpatch_fused_forward(model: Model) -> None:
    """Remove what :func:`patch_fused_forward` installed; a model that is not patched is left unchanged.

    Raises:
        PatchOrderError: another patch was installed on top of this one; nothing is changed then.
    """
    models = [unwrap_model(chunk) for chunk in get_chunks(model)]
    for inner in models:
        own_forward = own_attribute(inner, "forward")
        if own_forward is not None and not isinstance(own_forward, LegacyForward):
            raise PatchOrderError(
                f"forward of this {qualified_name(inner)} instance was replaced by {qualified_name(own_forward)} "
                "after it was patched.",
                "remove that patch first.",
            )
    for inner in models:
        _patched_hook.discard(inner)
        if own_attribute(inner, "forward") is not None:
            del inner.forward


def is_patched(model: Model) -> bool:
    """Whether every chunk is patched, in either mode."""
    return all(
        inner in _patched_hook or isinstance(own_attribute(inner, "forward"), LegacyForward)
        for inner in map(unwrap_model, get_chunks(model))
    )


@contextlib.contextmanager
def fused_forward(model: Model, mode: ModeRequest = "auto") -> Iterator[Mode]:
    """Patch, yield the mode, and always unpatch; a model that was patched before stays patched."""
    before = is_patched(model)
    yield_mode = patch_fused_forward(model, mode)
    try:
        yield yield_mode
    finally:
        if not before:
            unpatch_fused_forward(model)


def fused_forward_evidence(model: nn.Module) -> FusedForwardEvidence:
    """Return what has run on this model so far; see :class:`FusedForwardEvidence`."""
    return evidence.evidence_for(get_head(unwrap_model(model)))


def call_fused_forward(
    model: nn.Module,
    *args: Any,
    temperature: float | torch.Tensor = 1.0,
    context: FusedOutputProcessorContext | None = None,
    **kwargs: Any,
) -> Any:
    """Call a patched model through its wrappers in its mode, and verify that fusion ran.

    Args:
        model: one chunk, as the framework holds it. If an outer model does not pass unknown keywords on (a VLM
            around its language model), the inner model's forward gets them for this one call.
        *args: as the model's own forward.
        temperature: float above 0, or ``[batch, seq]`` packed in the same way as the labels.
        context: all settings of the call, instead of ``temperature``.
        **kwargs: as the model's own forward; without ``labels`` the stock forward runs.

    Returns:
        What the outer model returns: :class:`FusedForwardOutput` for a plain chain, hidden states on a stage
        without a head, stock logits without labels.

    Raises:
        ModeError: the model is not patched.
        UnsupportedModelError: (also its subclasses for output layer and config) the head changed after patching.
        UnsupportedConfigError: a wrapper cannot pass on what was requested.
        FusionDidNotRunError: labels were given, the model has a head, and the fused head did not run exactly once.
    """
    chain = unwrap_chain(model)
    if not is_patched(chain.model):
        raise ModeError("this model is not patched.", "call patch_fused_forward(model) or use fused_forward(model).")
    labels = kwargs["labels"] if kwargs.get("labels") is not None else _positional_labels(chain, args)
    settings = context or FusedOutputProcessorContext(temperature=temperature)
    if labels is None:
        return model(*args, **kwargs)
    as_tensor = chain.tensors_only and not settings.single_tensor
    if as_tensor:
        settings = _as_single_tensor(chain, settings)
    call = FusedCall(settings, labels if chain.transparent else None)  # an outer model may cut or merge labels
    hook_kwargs = {"output_processor": fused_output_processor, "output_processor_context": call}
    with get_lock(chain.model):
        if chain.transparent:
            result = model(*args, **kwargs, **hook_kwargs)
        else:
            with replaced(chain.model, "forward", _ForwardWithHook(chain.model, hook_kwargs)):
                result = model(*args, **kwargs)
    if get_head(chain.model) is not None and len(call.receipts) != 1:
        raise FusionDidNotRunError(
            f"{qualified_name(chain.model)} ran its fused head {len(call.receipts)} times in one call.",
            'patch it with mode="legacy", which does not depend on the hook being called.',
        )
    return FusedForwardOutput(*result.unbind(0)) if as_tensor and call.receipts else result


def _as_single_tensor(chain: WrapperChain, settings: FusedOutputProcessorContext) -> FusedOutputProcessorContext:
    """Return settings whose outputs pass through wrappers that support tensors only."""
    if settings.return_hidden_states or not chain.transparent:
        what = "return_hidden_states" if settings.return_hidden_states else f"the outer {qualified_name(chain.outer)}"
        raise UnsupportedConfigError(
            f"Megatron-FSDP around {qualified_name(chain.model)} passes on one tensor of outputs, and not {what}.",
            "pass a context with single_tensor=True, and take [2, batch, seq] out of what the model returns.",
        )
    return replace(settings, single_tensor=True)


def _positional_labels(chain: WrapperChain, args: tuple[Any, ...]) -> Any:
    if not chain.transparent or not args:
        return None
    own_forward = own_attribute(chain.model, "forward")
    forward = own_forward.original if isinstance(own_forward, LegacyForward) else chain.model.forward
    return arguments_by_name(forward_parameters(forward), args, {}).get("labels")


class _ForwardWithHook:
    """The inner model's forward with the fused processor added, for one call through an outer model."""

    def __init__(self, model: nn.Module, hook_kwargs: dict[str, Any]) -> None:
        self.forward = model.forward
        self.hook_kwargs = hook_kwargs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the inner forward with the fused processor."""
        both = sorted(self.hook_kwargs.keys() & kwargs.keys())
        if both:
            raise CallTypeError(
                f"the outer model passed {', '.join(both)} itself.", "call it directly with output_processor=."
            )
        return self.forward(*args, **kwargs, **self.hook_kwargs)
