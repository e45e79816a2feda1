"""Run the findings' witnesses in both cells: confirmed is what passes on one side and fails on the other."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from mcore_compat.contract.rules.compare import Finding, FindingState
from mcore_compat.files.untrusted import parsed_json, printable
from mcore_compat.gate.model import Lines, WitnessState
from mcore_compat.matrix.cells import Cell
from mcore_compat.provision.child_env import cell_environment
from mcore_compat.provision.process import run_logged

__all__ = ["Outcome", "judge_usage_witness", "judge_witness", "run_witnesses", "witness_of"]

Result = Literal["pass", "fail", "error"]
_MARK = "mcore-compat witness "
_NOTE = 2000
_LIMIT_S = 180
# Read, never imported here: it needs torch, which only the cells must have.
_PRELUDE = Path(__file__).with_name("witness_prelude.py")
# Each witness in a child of its own, so that none can disturb another. The slow import is paid once, in the parent,
# after those witnesses that need a process without it.
_DRIVER = """
import json, os, sys, traceback, warnings
warnings.simplefilter("ignore")

def told(error, index, source):
    if str(error):
        return f"{type(error).__name__}: {error}"
    # A bare assert says nothing by itself; its own line does.
    places = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == f"witness {index}"]
    line = source.splitlines()[places[-1] - 1].strip() if places else "nowhere in the witness"
    return f"{type(error).__name__}: {line}"

def judge(index, source, fails_with):
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        exec(compile(source, f"witness {index}", "exec"), {"__name__": "witness"})
        result, note = "pass", ""
    except BaseException as error:
        expected = fails_with in {kind.__name__ for kind in type(error).__mro__}
        result, note = "fail" if expected else "error", told(error, index, source)
    print("\\n" + "MARK" + json.dumps([index, result, note[:300]]), flush=True)
    os._exit(0)

witnesses = list(enumerate(json.load(open(sys.argv[1]))))
for index, (source, isolated, fails_with) in witnesses:
    if isolated:
        judge(index, source, fails_with)
if not all(isolated for _, (_, isolated, _) in witnesses):
    try:
        import megatron.core.models.gpt.gpt_model
    except Exception as error:
        print("the import fails:", error)  # each witness will say so itself
for index, (source, isolated, fails_with) in witnesses:
    if not isolated:
        judge(index, source, fails_with)
""".replace("MARK", _MARK)


@dataclass(frozen=True)
class Outcome:
    """What one witness did on one side."""

    result: Result
    note: str = ""


def witness_of(finding: Finding) -> Lines | None:
    """The witness for this finding, or None where its rule has none."""
    witness = finding.rule.witness
    if witness is None:
        return None
    code = witness.code.replace("$detail", finding.detail).replace("$item", finding.item)
    prelude = _PRELUDE.read_text(encoding="utf-8") if witness.prelude else ""
    return Lines(f"{prelude}\n{code}", witness.isolated, witness.fails_with)


def run_witnesses(
    witnesses: Sequence[Lines], cell: Cell, folder: Path, host: Mapping[str, str], cancel: threading.Event | None = None
) -> list[Outcome]:
    """Run witnesses with a cell's own interpreter, from an empty folder and with the cell's environment only.

    Args:
        witnesses: their lines.
        cell: whose environment variables they get.
        folder: the cell's folder, with ``venv`` and ``home`` in it.
        host: the caller's environment; only an allow-list of it is passed on.
        cancel: set to kill them.
    """
    with tempfile.TemporaryDirectory(prefix="mcore-compat-witness-") as scratch:
        work = Path(scratch, "work")
        work.mkdir()
        listing, driver, log = Path(scratch, "witnesses.json"), Path(scratch, "driver.py"), Path(scratch, "output.log")
        listing.write_text(json.dumps([(w.source, w.isolated, w.fails_with) for w in witnesses]), encoding="utf-8")
        driver.write_text(_DRIVER, encoding="utf-8")
        finished = run_logged(
            [folder / "venv" / "bin" / "python", driver, listing],
            cwd=work,
            env=cell_environment(host, cell, home=folder / "home", temporary=Path(scratch), extra={}),
            log=log,
            limit_s=_LIMIT_S + 30 * len(witnesses),
            cancel=cancel or threading.Event(),
        )
    outcomes = [Outcome("error", "it did not run to its end") for _ in witnesses]
    for line in finished.output.splitlines():
        if line.startswith(_MARK) and (said := _said(line.removeprefix(_MARK))) is not None:
            index, outcome = said
            if 0 <= index < len(outcomes):
                outcomes[index] = outcome
    return outcomes


def _said(text: str) -> tuple[int, Outcome] | None:
    """Which reproducer ended how; None if the line is not one of the driver's own."""
    try:
        index, result, note = parsed_json(text)
    except (ValueError, TypeError):
        return None
    if type(index) is not int or result not in get_args(Result) or not isinstance(note, str):
        return None
    return index, Outcome(result, printable(note, _NOTE))


def judge_witness(state: FindingState, before: Outcome, after: Outcome) -> WitnessState:
    """Whether running bears a finding out: new ones pass before and fail after, fixed ones the other way round."""
    wanted = {
        FindingState.NEW: ("pass", "fail"),
        FindingState.FIXED: ("fail", "pass"),
        FindingState.SAME: ("fail", "fail"),
    }[state]
    if "error" in {before.result, after.result}:
        return "inconclusive"
    return "confirmed" if (before.result, after.result) == wanted else "refuted"


def judge_usage_witness(before: Outcome, after: Outcome) -> WitnessState:
    """Whether running bears out that the candidate takes something away.

    What does not work with the baseline either, such as a name that needs Transformer Engine, shows nothing.
    """
    if before.result != "pass" or after.result == "error":
        return "inconclusive"
    return "confirmed" if after.result == "fail" else "refuted"
