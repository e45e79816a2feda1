"""verl's fused forward as a subject: the real package, loaded without Ray and the trainers.

Loaded are verl's own ``models/mcore/model_forward_fused.py`` (the patch, the forward functions), what these import of
verl, and ``utils/kernel``. Three kinds of stand-ins make that possible, and only while it is loaded:

- ``verl``, ``verl.models.mcore`` and ``verl.utils`` are bare packages: their own top modules import Ray, tensordict
  and every trainer, and change Megatron, which a judged process must not;
- ``transformers`` and ``tensordict`` are names only, but for the plain record that verl's output class derives from;
- ``verl.workers.config`` is names only.

On a GPU no code of verl is replaced. Without one its Triton kernel cannot run: :func:`chunked_kernel` stands in, and
the report's title says so. Three of its functions are counted on the way through, for evidence.
"""

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mcore_fused import linear_cross_entropy

_BARE = {"verl": ".", "verl.models.mcore": "models/mcore", "verl.utils": "utils"}
# Imported before the stand-ins are there, so that no module of Megatron can meet one.
_OF_MEGATRON = (
    "megatron.core.config_logger",
    "megatron.core.distributed",
    "megatron.core.inference.contexts",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.packed_seq_params",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.transformer.multi_token_prediction",
)


@dataclass
class CausalLMOutputWithPast:
    """The fields of transformers' record of this name, without its dictionary."""

    loss: Any = None
    logits: Any = None
    past_key_values: Any = None
    hidden_states: Any = None
    attentions: Any = None


class _Names(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _stand_ins():
    outputs = _Names("transformers.modeling_outputs")
    outputs.CausalLMOutputWithPast = CausalLMOutputWithPast
    names = ("transformers", "tensordict", "tensordict.tensorclass", "verl.workers", "verl.workers.config")
    return {name: _Names(name) for name in names} | {outputs.__name__: outputs}


@contextlib.contextmanager
def _in_place(modules):
    """Modules in ``sys.modules`` for a block; afterwards it is what it was."""
    absent = object()
    before = {name: sys.modules.get(name, absent) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is absent:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@functools.cache
def load():
    """verl's module ``model_forward_fused``.

    Raises:
        ModuleNotFoundError: verl is not installed here, or imports something of this megatron-core that is not there.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("verl is not installed in this environment: `ci/gpu --subject verl` brings it")
    for name in _OF_MEGATRON:
        importlib.import_module(name)
    root = Path(next(iter(spec.submodule_search_locations)))
    for name, place in _BARE.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(root / place)]
        if "." in name and name != "verl.models.mcore":
            setattr(sys.modules["verl"], name.rpartition(".")[2], sys.modules[name])
    with _in_place(_stand_ins()):
        return importlib.import_module("verl.models.mcore.model_forward_fused")


def torch_kernel(hidden, weight, labels, temperature=1.0, reduction="none", group=None):
    """The arguments and the flat outputs of verl's kernel: hidden and labels are flattened as they lie in memory."""
    assert reduction == "none"
    rows, flat = hidden.view(-1, hidden.shape[-1]), labels.view(-1)
    log_probs = torch.log_softmax((rows.double() @ weight.double().t()) / temperature, -1)
    chosen = log_probs.gather(-1, flat.clamp(min=0)[:, None])[:, 0]
    return chosen.float(), -(log_probs.exp() * log_probs).sum(-1).float()


def chunked_kernel(hidden, weight, labels, temperature=1.0, reduction="none", group=None):
    """As :func:`torch_kernel`, in chunks: verl's kernel never has all logits, so what has its place must not either."""
    assert reduction == "none"
    return linear_cross_entropy(hidden.view(-1, hidden.shape[-1]), weight, labels.view(-1), temperature=temperature)


class Verl:
    """verl's patch, its forward functions and its Triton kernel, which needs a GPU.

    What verl does not offer is not claimed: forcing legacy mode where the hook is, refusals with a reason, a schedule
    plan, float64, a temperature for each token (its engine refuses one), labels that are ignored (its callers mask
    afterwards).
    """

    name = "verl"
    capabilities = frozenset({"call", "patch", "mode", "evidence", "jagged", "mup", "mtp"})

    def __init__(self):
        self._verl = load()
        self._counts = dict.fromkeys(("hook_calls", "heads", "launches"), 0)
        if not hasattr(self._verl, "_resolve_fused_forward_mode"):  # versions that have one mode
            self.capabilities -= {"mode"}
        if hasattr(self._verl, "fused_output_processor"):
            self._count(self._verl, "fused_output_processor", "hook_calls")
        if torch.cuda.is_available():
            self._count(importlib.import_module("verl.utils.kernel.kernels"), "efficient_entropy_forward", "launches")
        elif getattr(self._verl.linear_cross_entropy, "__module__", None) != __name__:
            # Counted as what it stands for; a test that has put another one there itself counts nothing.
            self._verl.linear_cross_entropy = chunked_kernel
            self._count(self._verl, "linear_cross_entropy", "launches")
        self._count(self._verl, "linear_cross_entropy", "heads")

    def _count(self, module, function, counter):
        counted = getattr(module, function)

        @functools.wraps(counted)
        def counting(*args, **kwargs):
            found = counted(*args, **kwargs)
            self._counts[counter] += 1
            return found

        setattr(module, function, counting)

    def patch(self, model, mode="auto"):
        """As verl's engine does: chunk by chunk."""
        if mode != "auto":
            raise LookupError(f"verl chooses its mode by itself; {mode!r} cannot be forced")
        for chunk in model if isinstance(model, list) else [model]:
            self._verl.patch_fused_forward(chunk)

    def unpatch(self, model):
        for chunk in model if isinstance(model, list) else [model]:
            self._verl.unpatch_fused_forward(chunk)

    def mode(self, model):
        """What verl resolves for the model inside the wrappers, without patching it."""
        inner = self._verl._get_patching_model(model)
        if inner is None:
            raise LookupError(f"verl patches no {type(model).__name__}")
        return self._verl._resolve_fused_forward_mode(inner)

    def call(self, model, *inputs, labels, temperature=1.0, **kwargs):
        """As verl's forward functions call a patched model; outputs ``[batch, seq]``, like the labels."""
        if getattr(self._verl, "_use_output_processor_hook", lambda _: False)(model):
            kwargs |= {
                "output_processor": self._verl.fused_output_processor,
                "output_processor_context": self._verl.FusedOutputProcessorContext(temperature=temperature),
            }
        else:
            kwargs["temperature"] = temperature
        output = model(*inputs, labels=labels, **kwargs)
        if not hasattr(output, "log_probs"):
            return output
        # verl's kernel is documented to give one flat row in the labels' order.
        return replace(output, log_probs=output.log_probs.view(labels.shape), entropy=output.entropy.view(labels.shape))

    def jagged_forward(self, mode="auto"):
        """verl's engine forward for jagged micro-batches."""
        if mode != "auto":
            raise LookupError(f"verl chooses its mode by itself; {mode!r} cannot be forced")
        return self._verl.fused_forward_model_engine()

    def evidence(self):
        """``deferred_head_calls`` are the heads of its replaced forward: those outside of the hook."""
        heads, hooks = self._counts["heads"], self._counts["hook_calls"]
        return {
            "hook_calls": hooks,
            "deferred_head_calls": heads - hooks,
            "kernel_launches": self._counts["launches"],
            "unfused_fallbacks": 0,
        }
