"""Which mode a model has: what its signature promises, and what it is then seen to do.

A signature alone lies in both directions: wrappers hide the hook, ``functools.wraps`` shows one that is not
there, and a replaced ``_postprocess`` may accept ``output_processor`` and never call it. So the promise of the
unwrapped model is proved by a dry run: its own forward is called on a few made-up hidden states with the
decoder, the MTP block and the head stubbed out on that instance, and the processor must be reached.
No version number takes part in the decision.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from mcore_fused.errors import MCoreFusedError, ModeError, qualified_name
from mcore_fused.head.supported import head_of
from mcore_fused.head.tensor_parallel_group import tensor_parallel_group
from mcore_fused.model.instance_attribute import replaced
from mcore_fused.modes.hook import HOOK_PARAMETERS

__all__ = ["Mode", "promises_hook", "proved_mode", "shows_hook"]

Mode = Literal["hook", "legacy"]


class _HookReachedError(Exception):
    """Ends the dry run at the moment the hook calls its processor."""


def promises_hook(forward: Callable[..., Any]) -> bool:
    """Whether ``forward`` names both parameters of the hook itself.

    Looks at the callable's own signature: ``__wrapped__`` is not followed, because a decorator's body decides
    what is handed on, not the function it decorates.
    """
    try:
        signature = inspect.signature(forward, follow_wrapped=False)
    except (TypeError, ValueError):
        return False
    return all(name in signature.parameters for name in HOOK_PARAMETERS)


def proved_mode(model: nn.Module) -> Mode:
    """Mode of an unwrapped model: "hook" if promised and seen, else "legacy".

    A stage without a head has nothing to prove: its signature decides.

    Raises:
        ModeError: the dry run of a model that promises the hook failed, so nothing is proved either way.
    """
    if not promises_hook(model.forward):
        return "legacy"
    if head_of(model) is None:
        return "hook"
    return "hook" if shows_hook(model) else "legacy"


def shows_hook(model: nn.Module) -> bool:
    """Run the model's forward with everything heavy stubbed out, and see whether the processor is called.

    No collective and no hook runs, no parameter is read, no random number is drawn, and the instance is left as
    it was.

    Raises:
        ModeError: the dry run ended in an unforeseen error.
    """
    layer = head_of(model)
    if layer is None:
        return False
    reference = next(model.parameters())
    group = tensor_parallel_group(layer)
    length = group.size() if group is not None else 1
    config: Any = model.config
    hidden = torch.zeros(1, 1, config.hidden_size, dtype=reference.dtype, device=reference.device)
    tokens = torch.zeros(1, length, dtype=torch.long, device=reference.device)

    mtp_ran: list[bool] = []

    def reached(**_: Any) -> None:
        raise _HookReachedError

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
    except _HookReachedError:
        # A hook that comes before MTP costs MTP its loss, silently; the deferred head keeps the model's own order.
        return bool(mtp_ran) or not isinstance(getattr(model, "mtp", None), nn.Module)
    except MCoreFusedError:
        raise
    except Exception as error:
        raise ModeError(
            f"{qualified_name(model)} promises the output_processor hook, and the dry run that should prove it "
            f"failed: {type(error).__name__}: {error}",
            'pass mode="hook" or mode="legacy" to patch_fused_forward yourself; every fused call is proved anyway.',
        ) from error
    return False


@contextlib.contextmanager
def _stubbed(model: nn.Module, layer: nn.Module, hidden: torch.Tensor, mtp_ran: list[bool]) -> Iterator[None]:
    """Stub the parts of one instance that compute, communicate or advance state; note in ``mtp_ran`` that MTP came."""
    with contextlib.ExitStack() as stack:

        def stub(owner: object, name: str, function: Callable[..., Any]) -> None:
            if isinstance(owner, nn.Module) and callable(getattr(owner, name, None)):
                stack.enter_context(replaced(owner, name, function))
                if name == "forward":
                    # What torch calls in place of hooks and forward: nobody's hook may see a dry run.
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
        # Rotary tables only go to the stubbed decoder; made for one token they cannot be cut over context parallelism.
        yarn = getattr(model, "position_embedding_type", None) == "yarn"
        stub(getattr(model, "rotary_pos_emb", None), "forward", lambda *_, **__: (None, 1.0) if yarn else None)
        if getattr(model.config, "config_logger_dir", ""):  # a model that ignores the hook would log the dry run
            stack.enter_context(replaced(model.config, "config_logger_dir", ""))
        # Stateful bookkeeping of activation offloading (0.16) and paged stash (0.18) must not see a dry run.
        stub(model, "preprocess_for_fine_grained_offloading", lambda *_, **__: None)
        stub(model, "preprocess_for_paged_stash", lambda *_, **__: None)
        yield
