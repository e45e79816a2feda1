"""What the suite says of itself (``facts.json``) and what the harness's plugin saw (``origins-*.json``)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from mcore_compat.records import Origins, SuiteFacts, SuiteSeconds
from mcore_compat.results import Evidence

__all__ = ["read_facts", "read_origins"]


def read_facts(folder: Path) -> tuple[SuiteFacts | None, str]:
    """The facts in a cell's folder, or None and why there are none.

    Where the suite was spread over workers each of them wrote its own (``facts.<worker>.json``); they are summed.
    """
    paths = sorted(folder.glob("facts*.json"))
    if not paths:
        return None, "the suite wrote no facts.json"
    found = []
    for path in paths:
        try:
            found.append(SuiteFacts.model_validate_json(path.read_text(encoding="utf-8")))
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"]) or "the whole file"
            return None, f"the suite's {path.name} is wrong at `{key}`: {first['msg']}"
        except (OSError, UnicodeDecodeError) as exc:
            return None, f"the suite's {path.name} cannot be read: {type(exc).__name__}"
    return _merged(found), ""


def read_origins(paths: Iterable[Path]) -> tuple[Origins, ...]:
    """Those of the plugin's files that can be read; a file that cannot is as good as missing."""
    found = []
    for path in sorted(paths):
        try:
            found.append(Origins.model_validate_json(path.read_text(encoding="utf-8")))
        except (OSError, ValidationError):
            continue
    return tuple(found)


def _merged(found: list[SuiteFacts]) -> SuiteFacts:
    counters = {name: sum(getattr(facts.evidence, name) for facts in found) for name in Evidence.model_fields}
    return found[0].model_copy(
        update={
            "evidence": Evidence(**counters),
            "mode": next((facts.mode for facts in found if facts.mode is not None), None),
            "collected": tuple(dict.fromkeys(node for facts in found for node in facts.collected)),
            "seconds": SuiteSeconds(
                imports=max(facts.seconds.imports for facts in found), suite=max(facts.seconds.suite for facts in found)
            ),
            "complete": all(facts.complete for facts in found),
            "not_applicable": {check: lacking for facts in found for check, lacking in facts.not_applicable.items()},
        }
    )
