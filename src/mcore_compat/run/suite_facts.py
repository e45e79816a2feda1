"""What the suite says of itself (``facts.json``) and what the harness's plugin saw (``origins-*.json``).

Both are files that a cell's processes write, so their size, their number and their texts are bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path

from pydantic import ValidationError

from mcore_compat.files.untrusted import cleaned, read_bounded
from mcore_compat.records import Origins, SuiteFacts, SuiteSeconds
from mcore_compat.results import Evidence

__all__ = ["read_facts", "read_origins"]

_FILE_LIMIT = 32 << 20
_FILES_LIMIT = 256


def read_facts(folder: Path) -> tuple[SuiteFacts | None, str]:
    """The facts in a cell's folder, or None and why there are none.

    Where the suite was spread over workers each of them wrote its own (``facts.<worker>.json``); they are summed.
    """
    paths = sorted(folder.glob("facts*.json"))
    if not paths:
        return None, "the suite wrote no facts.json"
    if len(paths) > _FILES_LIMIT:
        return None, f"the suite wrote {len(paths)} files of facts"
    found = []
    for path in paths:
        try:
            found.append(SuiteFacts.model_validate_json(read_bounded(path, _FILE_LIMIT)))
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"]) or "the whole file"
            return None, cleaned(f"the suite's {path.name} is wrong at `{key}`: {first['msg']}")
        except OSError as exc:
            return None, f"the suite's {path.name} cannot be read: {type(exc).__name__}"
    return _merged(found), ""


def read_origins(paths: Iterable[Path], attempt: str) -> tuple[Origins, ...]:
    """Those of the plugin's files that can be read and are of this attempt; any other file counts as missing."""
    found = []
    for path in sorted(paths)[:_FILES_LIMIT]:
        try:
            origins = Origins.model_validate_json(read_bounded(path, _FILE_LIMIT))
        except (OSError, ValidationError):
            continue
        if origins.attempt == attempt:
            found.append(origins)
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
            "launches": dict(sum((Counter(facts.launches) for facts in found), Counter())),
            "stock": {name: values for facts in found for name, values in facts.stock.items()},
            # One process that saw a control pass is enough to doubt them all.
            "controls": dict(sorted((pair for facts in found for pair in facts.controls.items()), key=itemgetter(1))),
            "not_applicable": {check: lacking for facts in found for check, lacking in facts.not_applicable.items()},
        }
    )
