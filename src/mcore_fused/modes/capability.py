"""Which mode a model has: what its signature declares, and what a dry run then shows.

A signature alone is not reliable: wrappers hide the hook, ``functools.wraps`` shows one that is not there, and a
replaced ``_postprocess`` may accept ``output_processor`` and never call it. Therefore a declared hook is verified by a
dry run: the model's own forward is called on a few made-up hidden states, with decoder, MTP block and head stubbed on
that instance, and the processor must be reached with everything that the fused head needs. Version numbers play no
part in the decision.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from mcore_fused.errors import McoreFusedError, ModeError, UnusableHookWarning, qualified_name
from mcore_fused.head.supported import get_head
from mcore_fused.head.tensor_parallel import tensor_parallel_group
from mcore_fused.model.instance import replaced
from mcore_fused.modes.hook import HOOK_PARAMETERS, REQUIRED_KEYWORDS

__all__ = ["Mode", "declares_hook", "hook_defect", "hook_reached", "proved_mode"]

Mode = Literal["hook", "legacy"]


class _HookReachedError(Exception):
    """Ends the dry run at the moment the hook calls its processor."""

    def __init__(self, keywords: frozenset[str]) -> None:
        super().__init__()
        self.keywords = keywords


def declares_hook(forward: Callable[..., Any]) -> bool:
    """Whether ``forward`` itself names both parameters of the hook.

    ``__wrapped__`` is not followed, because the body of a decorator decides what is passed on, and not the function
    that it decorates.
    """
    try:
        signature = inspect.signature(forward, follow_wrapped=False)
    except (TypeError, ValueError):
        return False
    return all(name in signature.parameters for name in HOOK_PARAMETERS)


def proved_mode(model: nn.Module) -> Mode:
    """Return the mode of an unwrapped model: "hook" if it is declared and works, else "legacy".

    For a stage without a head the signature decides. A declared hook that cannot be used gives "legacy" and one
    :class:`UnusableHookWarning` with the reason.

    Raises:
        ModeError: the dry run of a model that declares the hook failed, so that nothing is known either way.
    """
    if not declares_hook(model.forward):
        return "legacy"
    if get_head(model) is None:
        return "hook"
    defect = hook_defect(model)
    if defect is None:
        return "hook"
    warnings.warn(
        f"The output_processor hook of {qualified_name(model)} is not used, because {defect}. Legacy mode gives the "
        "same results.",
        UnusableHookWarning,
        stacklevel=2,
    )
    return "legacy"


def hook_reached(model: nn.Module) -> bool:
    """Whether the model's hook calls its processor in a way that the fused head can use; see :func:`hook_defect`."""
    return get_head(model) is not None and hook_defect(model) is None


def hook_defect(model: nn.Module) -> str | None:
    """Run the forward of a model with a head, everything heavy stubbed, and return what is wrong with its hook.

    No collective and no hook runs, no parameter is read, no random number is drawn, and the instance is left
    unchanged.

    Returns:
        None if the hook can be used, otherwise the reason why it cannot.

    Raises:
        ModeError: the dry run ended in an unexpected error.
    """
    layer = get_head(model)
    if layer is None:
        return "this pipeline stage has no head"
    reference = next(model.parameters())
    group = tensor_parallel_group(layer)
    length = group.size() if group is not None else 1
    config: Any = model.config
    hidden = torch.zeros(1, 1, config.hidden_size, dtype=reference.dtype, device=reference.device)
    tokens = torch.zeros(1, length, dtype=torch.long, device=reference.device)

    mtp_ran: list[bool] = []

    def reached(**keywords: Any) -> None:
        raise _HookReachedError(frozenset(keywords))

    try:
        with torch.no_grad(), _stubbed(model, layer, hidden, mtp_ran):
            model.forward(
                tokens,
                tokens,
                None,
                decoder_input=hidden,
                labels=None,
                output_processor=reached,
                output_processor_context=None,
            )
    except _HookReachedError as end:
        missing = sorted(REQUIRED_KEYWORDS - end.keywords)
        if missing:
            return f"it no longer hands over {', '.join(missing)}"
        if not mtp_ran and isinstance(getattr(model, "mtp", None), nn.Module):
            # MTP would lose its loss silently; the deferred head keeps the model's own order.
            return "it is called before MTP has run"
        return None
    except McoreFusedError:
        raise
    except Exception as error:
        raise ModeError(
            f"{qualified_name(model)} declares the output_processor hook, and the dry run that verifies it failed: "
            f"{type(error).__name__}: {error}",
            'pass mode="hook" or mode="legacy" to patch_fused_forward; every fused call is verified in any case.',
        ) from error
    return "it accepts a processor and never calls it"


@contextlib.contextmanager
def _stubbed(model: nn.Module, layer: nn.Module, hidden: torch.Tensor, mtp_ran: list[bool]) -> Iterator[None]:
    """Stub the parts of one instance that compute, communicate or change state; note in ``mtp_ran`` that MTP ran."""
    with contextlib.ExitStack() as stack:

        def stub(owner: object, name: str, function: Callable[..., Any]) -> None:
            if isinstance(owner, nn.Module) and callable(getattr(owner, name, None)):
                stack.enter_context(replaced(owner, name, function))
                if name == "forward":
                    # Torch calls this instead of hooks and forward: no hook may see a dry run.
                    stack.enter_context(replaced(owner, "_compiled_call_impl", function))

        depths = int(getattr(model.config, "mtp_num_layers", None) or 0)
        columns = hidden.new_zeros(hidden.shape[0], hidden.shape[1], 1)
        stub(getattr(model, "decoder", None), "forward", lambda *_, **__: hidden)

        def mtp_forward(*_: Any, **__: Any) -> torch.Tensor:
            mtp_ran.append(True)
            return hidden.repeat(1 + depths, 1, 1)

        stub(getattr(model, "mtp", None), "forward", mtp_forward)
        stub(layer, "forward", lambda *_, **__: (columns, None))
        stub(model, "compute_language_model_loss", lambda labels, _: labels.new_zeros(labels.shape, dtype=hidden.dtype))
        # Rotary tables go to the stubbed decoder only; those of one token cannot be split over context parallelism.
        yarn = getattr(model, "position_embedding_type", None) == "yarn"
        stub(getattr(model, "rotary_pos_emb", None), "forward", lambda *_, **__: (None, 1.0) if yarn else None)
        if getattr(model.config, "config_logger_dir", ""):  # a model that ignores the hook would log the dry run
            stack.enter_context(replaced(model.config, "config_logger_dir", ""))
        # Stateful bookkeeping of activation offloading (0.16) and paged stash (0.18) must not see a dry run.
        stub(model, "preprocess_for_fine_grained_offloading", lambda *_, **__: None)
        stub(model, "preprocess_for_paged_stash", lambda *_, **__: None)
        yield
