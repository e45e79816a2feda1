"""What an implementation of the fused forward must offer to be judged, and how it is named.

A third party adds one class with the methods of :class:`Subject` and names it on the command line. This module needs
the standard library alone: the wheel is installed in every cell, where the suite loads the subject with it.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any, Literal, Protocol

__all__ = [
    "BUILT_IN",
    "CAPABILITIES",
    "COUNTERS",
    "DEFAULT_SUBJECT",
    "FORMS",
    "OWN_INTERFACE",
    "VARIABLE",
    "Output",
    "Subject",
    "SubjectNameError",
    "SubjectSpec",
    "checked",
    "load_subject",
    "parse_subject",
]

VARIABLE = "MCORE_COMPAT_SUBJECT"
DEFAULT_SUBJECT = "mcore_fused"
BUILT_IN = (DEFAULT_SUBJECT, "stock", "verl")
FORMS = f"{', '.join(BUILT_IN)}, path/to/file.py:Class, package.module:Class"
COUNTERS = ("hook_calls", "deferred_head_calls", "kernel_launches", "unfused_fallbacks")

# Every capability, with the consequence of its absence. `call` is the only one that is required.
CAPABILITIES: Mapping[str, str] = MappingProxyType(
    {
        "call": "nothing can be judged",
        "patch": "no patch algebra (idempotence, residue, copies, foreign patches), no training",
        "mode": "no mode detection, so the expected mode of a cell is not asked for",
        "legacy": "no comparison of forced legacy mode with the hook, no futures",
        "refusal": "no check that unsupported models and calls are refused with a reason",
        "evidence": "nothing is counted; a subject that patches models is then called unproven",
        "jagged": "no forward function for jagged micro-batches on the GPU lane",
        "float64": "no numbers against the float64 reference",
        "ignored_labels": "no check that an ignored label (-100) gives exactly zero",
        "label_range": "no check that a label outside the vocabulary gives NaN",
        "temperature_per_token": "one temperature per batch, none per token",
        "tensor_parallel": "no tensor, sequence or expert parallelism",
        "pipeline": "no pipeline stages and no model chunks without a head",
        "sharded": "no models whose parameters are sharded over data-parallel ranks (FSDP)",
        "mup": "no models with MuP",
        "mtp": "no models with multi-token prediction",
        "main_grad": "no gradient accumulation fusion (weight gradients added to main_grad)",
        "moe": "no models with experts",
        "hybrid": "no HybridModel or MambaModel",
        "vlm": "no vision-language models",
        "thread_safety": "no forwards inside forwards and no calls from several threads",
        "config_logger": "no check of what Megatron's config logger writes",
        # Of mcore_fused alone: these checks call its own functions.
        "library": "no checks of the functions of mcore_fused beyond this protocol",
        "factories": "no forward functions for padded and jagged micro-batches, no packing",
        "schedule_plan": "no fused 1F1B schedule plans",
        "kernel": "no kernel properties",
    }
)
OWN_INTERFACE = frozenset({"library", "factories", "schedule_plan", "kernel"})

_IN_A_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class Output(Protocol):
    """What a fused call returns.

    Attributes:
        log_probs: ``[batch, seq]`` tensor, fp32 or, for a float64 model, float64.
        entropy: likewise.
    """

    log_probs: Any
    entropy: Any


class Subject(Protocol):
    """An implementation of the fused forward.

    A subject may also have an attribute ``since``: the first megatron-core release that it supports, as text
    (``"0.18"``). Nothing is judged in the cells of earlier releases.

    Attributes:
        name: as reports name it.
        capabilities: names from :data:`CAPABILITIES`. A check about a capability that is not listed is not run, and
            the report counts it as "does not apply".
    """

    name: str
    capabilities: frozenset[str]

    def patch(self, model: Any, mode: str = "auto") -> None:
        """Install on a model, wrapped or not, or on a list of chunks."""

    def unpatch(self, model: Any) -> None:
        """Remove the patch; afterwards ``vars(model)`` is what it was."""

    def mode(self, model: Any) -> str:
        """The mode of a model, "hook" or "legacy"; asked only of subjects with the capability ``mode``."""

    def call(self, model: Any, *inputs: Any, labels: Any, temperature: Any = 1.0, **kwargs: Any) -> Output:
        """One fused call on a patched model; without labels, whatever the model returns."""

    def jagged_forward(self, mode: str = "auto") -> Any:
        """The forward function for jagged micro-batches, with the signature of verl's engine forward."""

    def evidence(self) -> Mapping[str, int]:
        """The :data:`COUNTERS` of this process so far."""


class SubjectNameError(ValueError):
    """A subject's name is not one of the forms, or what it names is not a subject."""


@dataclass(frozen=True)
class SubjectSpec:
    """A subject's name, understood.

    Attributes:
        kind: a built-in name, a class in a file, or a class in an importable module.
        place: the name, the file, or the module.
        attribute: the class; empty for a built-in name.
    """

    kind: Literal["built-in", "file", "module"]
    place: str
    attribute: str = ""


def parse_subject(text: str) -> SubjectSpec:
    """Understand a subject's name.

    Raises:
        SubjectNameError: it has none of the allowed forms.
    """
    if text in BUILT_IN:
        return SubjectSpec("built-in", text)
    place, separator, attribute = text.rpartition(":")
    if separator and place.endswith(".py") and attribute.isidentifier():
        return SubjectSpec("file", place, attribute)
    if _IN_A_MODULE.fullmatch(text):
        return SubjectSpec("module", place, attribute)
    raise SubjectNameError(f"There is no subject `{text}`. Use one of: {FORMS}.")


def load_subject(text: str, built_in: Mapping[str, Callable[[], Subject]]) -> Subject:
    """Import and create the subject that ``text`` names.

    Args:
        text: a name in one of the :data:`FORMS`.
        built_in: how the built-in subjects are made.

    Raises:
        SubjectNameError: the name is wrong, or the class claims capabilities that do not exist.
    """
    spec = parse_subject(text)
    if spec.kind == "built-in":
        return built_in[spec.place]()
    module = _file(spec.place) if spec.kind == "file" else importlib.import_module(spec.place)
    if not hasattr(module, spec.attribute):
        raise SubjectNameError(f"{spec.place} has no class `{spec.attribute}`. Name one that it defines.")
    return checked(getattr(module, spec.attribute)(), text)


def checked(subject: Subject, text: str) -> Subject:
    """The subject, if what it claims can be judged.

    Raises:
        SubjectNameError: it does not claim `call`, or claims what is unknown or belongs to mcore_fused alone.
    """
    unknown = sorted(set(subject.capabilities) - CAPABILITIES.keys())
    if unknown:
        raise SubjectNameError(f"{text!r} claims unknown capabilities {unknown}. Known are: {', '.join(CAPABILITIES)}.")
    own = sorted(OWN_INTERFACE & set(subject.capabilities))
    if own:
        raise SubjectNameError(f"{text!r} claims {own}, which are functions of mcore_fused itself. Do not claim them.")
    if "call" not in subject.capabilities:
        raise SubjectNameError(f"{text!r} does not claim `call`. Add it, or there is nothing to judge.")
    return subject


def _file(place: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("subject_under_test", place)
    if spec is None or spec.loader is None:
        raise SubjectNameError(f"{place} cannot be loaded. Name a Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
