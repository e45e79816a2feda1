"""What the suite says of itself (``facts.json``) and what the harness's plugin saw (``origins-*.json``)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from mcore_compat.report import Evidence

__all__ = ["Origins", "SuiteFacts", "read_facts", "read_origins"]


class _Fact(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SuiteMegatron(_Fact):
    """The megatron-core that the suite imported."""

    distribution: str | None = None
    attribute: str | None = None
    origin: str | None = None


class SuiteSeconds(_Fact):
    """The suite's own clock."""

    imports: float = 0.0
    suite: float = 0.0


class SuiteFacts(_Fact):
    """``facts.json``: written by the suite at the start and at the end of its session.

    Attributes:
        collected: node ids; at the start already.
        complete: the session came to its end.
    """

    megatron_core: SuiteMegatron
    python: str
    torch: str
    triton: str | None = None
    numpy: str | None = None
    device: str
    mode: Literal["hook", "legacy"] | None = None
    evidence: Evidence = Evidence()
    collected: tuple[str, ...] = ()
    seconds: SuiteSeconds = SuiteSeconds()
    complete: bool = False


class Origins(_Fact):
    """One pytest process, as the plugin saw it at its end."""

    modules: dict[str, int]
    foreign: dict[str, str]
    versions: dict[str, str]


def read_facts(path: Path) -> tuple[SuiteFacts | None, str]:
    """The facts, or None and why there are none."""
    try:
        return SuiteFacts.model_validate_json(path.read_text(encoding="utf-8")), ""
    except FileNotFoundError:
        return None, "the suite wrote no facts.json"
    except (OSError, ValidationError, UnicodeDecodeError) as exc:
        if isinstance(exc, ValidationError):
            first = exc.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"]) or "the whole file"
            return None, f"the suite's facts.json is wrong at `{key}`: {first['msg']}"
        return None, f"the suite's facts.json cannot be read: {exc}"


def read_origins(paths: Iterable[Path]) -> tuple[Origins, ...]:
    """Those of the plugin's files that can be read; a file that cannot is as good as missing."""
    found = []
    for path in sorted(paths):
        try:
            found.append(Origins.model_validate_json(path.read_text(encoding="utf-8")))
        except (OSError, ValidationError):
            continue
    return tuple(found)
