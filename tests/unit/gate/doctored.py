"""Wheels of a real release with one change of upstream's planted in them, to ask the gate about; deterministic.

``python tests/unit/gate/doctored.py WHEEL FOLDER [NAME …]`` writes ``FOLDER/NAME/<the wheel's own file name>`` for each
doctoring (default: all) of a megatron-core 0.18.2 wheel. The version, the file name and RECORD are those of an honest
wheel: only what the package does has changed.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_GPT = "megatron/core/models/gpt/gpt_model.py"
_HYBRID = "megatron/core/models/hybrid/hybrid_model.py"
_LANGUAGE = "megatron/core/models/common/language_module/language_module.py"


@dataclass(frozen=True)
class Edit:
    """One replacement in one file of the wheel.

    Attributes:
        file: its name in the wheel.
        old: text that must be there.
        new: what stands in its place.
        everywhere: replace each occurrence; otherwise there must be exactly one.
    """

    file: str
    old: str
    new: str
    everywhere: bool = False


DOCTORINGS: Mapping[str, tuple[Edit, ...]] = {
    "hook-keyword-removed": (Edit(_GPT, "                scale_logits=self._scale_logits,\n", ""),),
    "hook-ignored": (
        Edit(
            _GPT,
            "            output_processor=output_processor,\n"
            "            output_processor_context=output_processor_context,\n"
            "        )\n\n    def _postprocess(",
            "        )\n\n    def _postprocess(",
        ),
    ),
    "postprocess-gone": (Edit(_GPT, "    def _postprocess(\n", "    def _finish(\n"),),
    "new-required-parameter": (
        Edit(
            _GPT,
            "        padding_mask: Optional[Tensor] = None,\n        output_processor: Optional[Callable",
            "        padding_mask: Optional[Tensor] = None,\n        loss_scale: float,\n"
            "        output_processor: Optional[Callable",
        ),
    ),
    "output-layer-renamed": tuple(
        Edit(file, "self.output_layer", "self.lm_head", everywhere=True) for file in (_GPT, _HYBRID, _LANGUAGE)
    ),
}


def doctor(wheel: Path, edits: Sequence[Edit], target: Path) -> Path:
    """Write ``wheel`` with the edits to ``target``; equal inputs give equal bytes.

    Raises:
        ValueError: a text to replace is not there, or not once where it must be.
    """
    with zipfile.ZipFile(wheel) as archive:
        members = {info.filename: (info, archive.read(info)) for info in archive.infolist()}
    for edit in edits:
        if edit.file not in members:
            raise ValueError(f"{wheel.name} has no {edit.file}")
        info, content = members[edit.file]
        text = content.decode("utf-8")
        count = text.count(edit.old)
        if count == 0 or (count > 1 and not edit.everywhere):
            raise ValueError(f"the text to replace stands {count} times in {edit.file}: {edit.old!r}")
        members[edit.file] = info, text.replace(edit.old, edit.new).encode("utf-8")
    record = next(name for name in members if name.endswith(".dist-info/RECORD"))
    info, content = members[record]
    lines = [_line(line, members, {edit.file for edit in edits}) for line in content.decode("utf-8").splitlines()]
    members[record] = info, ("\n".join(lines) + "\n").encode("utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w") as archive:
        for member, content in members.values():
            archive.writestr(member, content, compress_type=member.compress_type)
    return target


def _line(line: str, members: Mapping[str, tuple[zipfile.ZipInfo, bytes]], edited: set[str]) -> str:
    name = line.partition(",")[0]
    if name not in edited:
        return line
    content = members[name][1]
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"


def main(arguments: Sequence[str]) -> None:
    """Write the doctored wheels and print where they are."""
    wheel, folder, *names = arguments
    for name in names or DOCTORINGS:
        sys.stdout.write(f"{doctor(Path(wheel), DOCTORINGS[name], Path(folder, name, Path(wheel).name))}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
