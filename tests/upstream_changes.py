"""Changes of upstream's, in one place: what witnesses must tell apart, and patched wheels to ask the gate about.

``python tests/upstream_changes.py WHEEL FOLDER [NAME …]`` writes ``FOLDER/NAME/<the wheel's own file name>`` for each
of :data:`WHEELS` (default: all) from a megatron-core 0.18.2 wheel. The version, the file name and RECORD are those of an
honest wheel: only what the package does has changed. Equal inputs give equal bytes.
"""

# ruff: noqa: E501 - the tables read best with one change a line

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BASE = "0.18.2"
GPT = "megatron/core/models/gpt/gpt_model.py"
HYBRID = "megatron/core/models/hybrid/hybrid_model.py"
LANGUAGE = "megatron/core/models/common/language_module/language_module.py"
LAYERS = "megatron/core/tensor_parallel/layers.py"
MTP = "megatron/core/transformer/multi_token_prediction.py"
MODULE = "megatron/core/transformer/module.py"
DDP = "megatron/core/distributed/distributed_data_parallel.py"
FSDP = "megatron/core/distributed/fsdp/mcore_fsdp_adapter.py"
BASE_DP = "megatron/core/distributed/data_parallel_base.py"
PACKING = "megatron/core/packed_seq_params.py"
NODES = "megatron/core/models/gpt/fine_grained_callables.py"
PLAN = "megatron/core/models/common/model_chunk_schedule_plan.py"
PIPELINE = "megatron/core/pipeline_parallel/utils.py"
LLAVA = "megatron/core/models/multimodal/llava_model.py"
STATE = "megatron/core/parallel_state.py"
CONFIG = "megatron/core/transformer/transformer_config.py"
MODEL_CONFIG = "megatron/core/model_parallel_config.py"

HEAD = "        logits, _ = self.output_layer(\n            hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output\n        )\n"
LOSS = "        loss = self.compute_language_model_loss(labels, logits)\n"
SCALE = "        # Apply MuP output scaling to logits\n"
HOOK = "            return output_processor(\n"
HOOK_END = "                scale_logits=self._scale_logits,\n                config=self.config,\n            )\n"
FORWARD_END = "        padding_mask: Optional[Tensor] = None,\n        output_processor: Optional[Callable[..., Tensor]] = None,\n"


@dataclass(frozen=True)
class Edit:
    """One replacement in one file.

    Attributes:
        file: relative to the folder that holds ``megatron/``.
        old: text that must be there.
        new: text that replaces it.
        everywhere: replace each occurrence; otherwise there must be exactly one.
    """

    file: str
    old: str
    new: str
    everywhere: bool = False

    def apply(self, text: str) -> str:
        """The file's text with the replacement.

        Raises:
            ValueError: the text to replace is not there, or not once although it must be.
        """
        count = text.count(self.old)
        if count == 0 or (count > 1 and not self.everywhere):
            raise ValueError(f"the text to replace is there {count} times in {self.file}: {self.old!r}")
        return text.replace(self.old, self.new)


# rule -> edits of BASE that set it off
RULE_CHANGES: Mapping[str, tuple[Edit, ...]] = {
    "binding-not-followed": (Edit(GPT, "    def _postprocess(\n", "    @functools.lru_cache(maxsize=0)\n    def _postprocess(\n"), Edit(GPT, "from collections import OrderedDict\n", "import functools\nfrom collections import OrderedDict\n")),
    "call-overridden": (Edit(GPT, "    def build_schedule_plan(\n", "    def __call__(self, *args, **kwargs):\n        return self.replay(args, kwargs)\n\n    def replay(self, args, kwargs):\n        return 'graph'\n\n    def build_schedule_plan(\n"),),
    "config-field-missing": (Edit(MODEL_CONFIG, "    sequence_parallel: bool = False\n", "    sequence_parallelism: bool = False\n"),),
    "float16-converts-other": (Edit(MODULE, "    if not isinstance(val, (tuple, list)):\n        return conversion(val)\n    rtn =", "    if isinstance(val, dict):\n        return {k: conversion_helper(v, conversion) for k, v in val.items()}\n    if not isinstance(val, (tuple, list)):\n        return conversion(val)\n    rtn ="),),
    "forward-refuses": (Edit(GPT, "        packed_seq_params: PackedSeqParams = None,\n        extra_block_kwargs: dict = None,\n        runtime_gather_output: Optional[bool] = None,\n        *,\n        inference_params", "        packed: PackedSeqParams = None,\n        extra_block_kwargs: dict = None,\n        runtime_gather_output: Optional[bool] = None,\n        *,\n        inference_params"),),
    "forward-requires": (Edit(GPT, FORWARD_END, "        loss_scale: float,\n" + FORWARD_END),),
    "forward-parameter-added": (Edit(GPT, FORWARD_END, "        loss_scale: float = 1.0,\n" + FORWARD_END),),
    "head-arguments-unknown": (Edit(GPT, HEAD, HEAD.replace("hidden_states, weight", "hidden_states, chunked=True, weight")),),
    "head-missing": (Edit(GPT, "    def _postprocess(\n", "    def _finish(\n"),),
    "head-not-output-layer": (Edit(GPT, HEAD, HEAD.replace("self.output_layer(", "self.lm_head(")),),
    "head-weight-not-given": (Edit(GPT, HEAD, HEAD.replace("weight=output_weight, ", "")),),
    "hook-argument-other": (Edit(GPT, "                labels=labels,\n                loss_mask=loss_mask,\n                input_ids=input_ids,\n", "                labels=labels.transpose(0, 1),\n                loss_mask=loss_mask,\n                input_ids=input_ids,\n"),),
    "hook-conditional": (Edit(GPT, "        if output_processor is not None:\n", "        if output_processor is not None and self.config.use_hooks:\n"),),
    "hook-handed-on": (Edit(GPT, HOOK, "            return OrderedDict(\n                processor=output_processor,\n"),),
    "hook-ignored": (Edit(GPT, "            output_processor=output_processor,\n            output_processor_context=output_processor_context,\n        )\n\n    def _postprocess(", "        )\n\n    def _postprocess("),),
    "hook-keyword-missing": (Edit(GPT, "                scale_logits=self._scale_logits,\n", ""),),
    "hook-keyword-added": (Edit(GPT, "                scale_logits=self._scale_logits,\n", "                scale_logits=self._scale_logits,\n                scheduler=None,\n"),),
    "hook-out-of-place": (Edit(GPT, "        sequence_parallel_override = False\n\n        if output_processor", "        sequence_parallel_override = False\n        logits, _ = self.output_layer(hidden_states, weight=output_weight)\n\n        if output_processor"),),
    "hook-result-used": (Edit(GPT, HOOK, "            return str(output_processor(\n"), Edit(GPT, HOOK_END, HOOK_END[:-1] + ")\n")),
    "labels-transformed": (Edit(GPT, LOSS, "        labels = labels.contiguous().clone()\n" + LOSS),),
    "layer-attribute-missing": (Edit(LAYERS, "        self.gather_output = gather_output\n", "        self.gathers = gather_output\n"),),
    "logits-operation-unknown": (Edit(GPT, SCALE, "        logits = torch.tanh(logits)\n" + SCALE),),
    "logits-scaling-unknown": (Edit(LANGUAGE, "        return logits * self.config.mup_output_mult\n", "        return logits / self.config.mup_output_mult\n"),),
    "loss-not-asked": (Edit(GPT, LOSS, "        loss = self.criterion(labels, logits)\n"),),
    "loss-result-used": (Edit(GPT, LOSS + "\n        return loss\n", LOSS + "\n        return (loss, None)\n"),),
    "loss-signature": (Edit(LANGUAGE, "def compute_language_model_loss(self, labels: Tensor, logits: Tensor)", "def compute_language_model_loss(self, labels: Tensor, logits: Tensor, group)"),),
    "model-missing": (Edit(GPT, "class GPTModel(", "class GenerativeModel("),),
    "mtp-logits-operation-unknown": (Edit(MTP, "        if scale_logits_fn is not None:\n            mtp_logits = scale_logits_fn(mtp_logits)\n        mtp_labels, _", "        mtp_logits = torch.softmax(mtp_logits, dim=-1)\n        if scale_logits_fn is not None:\n            mtp_logits = scale_logits_fn(mtp_logits)\n        mtp_labels, _"),),
    "packing-field-missing": (Edit(PACKING, "    max_seqlen_kv: int = None\n", ""),),
    "packing-field-required": (Edit(PACKING, "    qkv_format: str = None\n", "    layout: str\n    qkv_format: str = None\n"),),
    "plan-attribute-missing": (Edit(PIPELINE, "        self.forward_func = forward_func\n", "        self.function = forward_func\n"),),
    "plan-requires": (Edit(GPT, "        padding_mask: Optional[Tensor] = None,\n        *,\n        output_processor", "        padding_mask: Optional[Tensor] = None,\n        *,\n        stream,\n        output_processor"),),
    "plan-result-unknown": (Edit(NODES, "        return float16_to_fp32(loss)\n", "        return float16_to_fp32(loss).sum()\n"),),
    "replaced-body-changed": (Edit(LAYERS, "        gather_output = self.gather_output\n        # Use the runtime", "        output_parallel = 30 * torch.tanh(output_parallel / 30)\n        gather_output = self.gather_output\n        # Use the runtime"),),
    "stage-return-missing": (Edit(GPT, "        if not self.post_process:\n            return hidden_states\n\n        if self.config.mtp_num_layers:", "        if self.config.mtp_num_layers:"),),
    "symbol-missing": (Edit(STATE, "def get_tensor_model_parallel_group(", "def tensor_model_parallel_group("),),
    "symbol-requires": (Edit(STATE, "def is_pipeline_first_stage(ignore_virtual=True, vp_stage=None)", "def is_pipeline_first_stage(mesh, ignore_virtual=True, vp_stage=None)"),),
    "vlm-drops-keyword": (Edit(LLAVA, "            labels=new_labels,\n            inference_context=inference_context,\n            runtime_gather_output=runtime_gather_output,\n            packed_seq_params=packed_seq_params,\n", "            labels=new_labels,\n            inference_context=inference_context,\n            runtime_gather_output=runtime_gather_output,\n"),),
    "wrapper-has-no-module": (Edit(BASE_DP, "        self.module = module\n", "        self.inner = module\n"),),
    "wrapper-missing": (Edit(FSDP, "class FullyShardedDataParallel(_BaseDataParallel):\n", "def FullyShardedDataParallel(*given, **named):\n    return FullyShardedDataParallelV1(*given, **named)\n\n\nclass FullyShardedDataParallelV1(_BaseDataParallel):\n"),),
    "wrapper-requires": (Edit(DDP, "        module: torch.nn.Module,\n        disable_bucketing", "        module: torch.nn.Module,\n        mesh: object,\n        disable_bucketing"),),
}  # fmt: skip

# rule -> two releases between which upstream really did it; each the newest of its contract class, so that CI
# makes no further environment for it. A rule about what is absent is asked from the newer to the older.
RELEASE_CHANGES: Mapping[str, tuple[str, str]] = {
    "float16-swallows": ("0.13.1", "0.15.3"),
    "forward-parameter-removed": ("0.17.1", "0.18.2"),
    "hook-absent": ("0.18.2", "0.17.1"),
    "import-new": ("0.17.1", "0.18.2"),
    "layer-group-unnamed": ("0.13.1", "0.12.3"),
    "packing-field-added": ("0.15.3", "0.16.1"),
    "packing-refused-by-model": ("0.16.1", "0.15.3"),
    "plan-refuses-processor": ("0.18.2", "0.17.1"),
    "symbol-optional-missing": ("0.15.3", "0.13.1"),
    "wrapper-moved": ("0.13.1", "0.15.3"),
}

# wheels to ask the gate about: each edited as a rule's change is, and one renamed throughout
WHEELS: Mapping[str, tuple[Edit, ...]] = {
    "hook-keyword-removed": RULE_CHANGES["hook-keyword-missing"],
    "hook-ignored": RULE_CHANGES["hook-ignored"],
    "postprocess-gone": RULE_CHANGES["head-missing"],
    "new-required-parameter": RULE_CHANGES["forward-requires"],
    "output-layer-renamed": tuple(
        Edit(file, "self.output_layer", "self.lm_head", everywhere=True) for file in (GPT, HYBRID, LANGUAGE)
    ),
}


def edit_folder(folder: Path, edits: Sequence[Edit]) -> None:
    """Apply edits to the files of an unpacked megatron-core.

    Raises:
        ValueError: an edit does not fit.
    """
    for edit in edits:
        path = folder / edit.file
        path.write_text(edit.apply(path.read_text(encoding="utf-8")), encoding="utf-8")


def patch_wheel(wheel: Path, edits: Sequence[Edit], target: Path) -> Path:
    """Write ``wheel`` with the edits to ``target``.

    Raises:
        ValueError: an edit does not fit, or names a file that the wheel does not have.
    """
    with zipfile.ZipFile(wheel) as archive:
        members = {info.filename: (info, archive.read(info)) for info in archive.infolist()}
    for edit in edits:
        if edit.file not in members:
            raise ValueError(f"{wheel.name} has no {edit.file}")
        info, content = members[edit.file]
        members[edit.file] = info, edit.apply(content.decode("utf-8")).encode("utf-8")
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
    """Write the patched wheels and print where they are."""
    wheel, folder, *names = arguments
    for name in names or WHEELS:
        sys.stdout.write(f"{patch_wheel(Path(wheel), WHEELS[name], Path(folder, name, Path(wheel).name))}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
