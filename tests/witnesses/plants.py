"""Upstream changes planted in a real megatron-core 0.18.2, one or more for each rule that has a witness.

Rules about what really changed between releases are confirmed on the releases instead (:data:`RELEASES`).
"""

# ruff: noqa: E501 - the tables read best with one change a line

from __future__ import annotations

from collections.abc import Mapping

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

# rule -> edits of BASE: (file, old, new); each old must stand there exactly once
PLANTS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "call-overridden": ((GPT, "    def build_schedule_plan(\n", "    def __call__(self, *args, **kwargs):\n        return self.replay(args, kwargs)\n\n    def replay(self, args, kwargs):\n        return 'graph'\n\n    def build_schedule_plan(\n"),),
    "config-field-missing": ((MODEL_CONFIG, "    sequence_parallel: bool = False\n", "    sequence_parallelism: bool = False\n"),),
    "float16-converts-other": ((MODULE, "    if not isinstance(val, (tuple, list)):\n        return conversion(val)\n    rtn =", "    if isinstance(val, dict):\n        return {k: conversion_helper(v, conversion) for k, v in val.items()}\n    if not isinstance(val, (tuple, list)):\n        return conversion(val)\n    rtn ="),),
    "forward-refuses": ((GPT, "        packed_seq_params: PackedSeqParams = None,\n        extra_block_kwargs: dict = None,\n        runtime_gather_output: Optional[bool] = None,\n        *,\n        inference_params", "        packed: PackedSeqParams = None,\n        extra_block_kwargs: dict = None,\n        runtime_gather_output: Optional[bool] = None,\n        *,\n        inference_params"),),
    "forward-requires": ((GPT, FORWARD_END, "        loss_scale: float,\n" + FORWARD_END),),
    "forward-parameter-added": ((GPT, FORWARD_END, "        loss_scale: float = 1.0,\n" + FORWARD_END),),
    "head-arguments-unknown": ((GPT, HEAD, HEAD.replace("hidden_states, weight", "hidden_states, chunked=True, weight")),),
    "head-missing": ((GPT, "    def _postprocess(\n", "    def _finish(\n"),),
    "head-not-output-layer": ((GPT, HEAD, HEAD.replace("self.output_layer(", "self.lm_head(")),),
    "head-weight-not-given": ((GPT, HEAD, HEAD.replace("weight=output_weight, ", "")),),
    "hook-argument-other": ((GPT, "                labels=labels,\n                loss_mask=loss_mask,\n                input_ids=input_ids,\n", "                labels=labels.transpose(0, 1),\n                loss_mask=loss_mask,\n                input_ids=input_ids,\n"),),
    "hook-conditional": ((GPT, "        if output_processor is not None:\n", "        if output_processor is not None and self.config.use_hooks:\n"),),
    "hook-ignored": ((GPT, "            output_processor=output_processor,\n            output_processor_context=output_processor_context,\n        )\n\n    def _postprocess(", "        )\n\n    def _postprocess("),),
    "hook-keyword-missing": ((GPT, "                scale_logits=self._scale_logits,\n", ""),),
    "hook-keyword-added": ((GPT, "                scale_logits=self._scale_logits,\n", "                scale_logits=self._scale_logits,\n                scheduler=None,\n"),),
    "hook-out-of-place": ((GPT, "        sequence_parallel_override = False\n\n        if output_processor", "        sequence_parallel_override = False\n        logits, _ = self.output_layer(hidden_states, weight=output_weight)\n\n        if output_processor"),),
    "hook-result-used": ((GPT, HOOK, "            return str(output_processor(\n"), (GPT, HOOK_END, HOOK_END[:-1] + ")\n")),
    "labels-transformed": ((GPT, LOSS, "        labels = labels.contiguous().clone()\n" + LOSS),),
    "layer-attribute-missing": ((LAYERS, "        self.gather_output = gather_output\n", "        self.gathers = gather_output\n"),),
    "logits-operation-unknown": ((GPT, SCALE, "        logits = torch.tanh(logits)\n" + SCALE),),
    "logits-scaling-unknown": ((LANGUAGE, "        return logits * self.config.mup_output_mult\n", "        return logits / self.config.mup_output_mult\n"),),
    "loss-not-asked": ((GPT, LOSS, "        loss = self.criterion(labels, logits)\n"),),
    "loss-result-used": ((GPT, LOSS + "\n        return loss\n", LOSS + "\n        return (loss, None)\n"),),
    "loss-signature": ((LANGUAGE, "def compute_language_model_loss(self, labels: Tensor, logits: Tensor)", "def compute_language_model_loss(self, labels: Tensor, logits: Tensor, group)"),),
    "model-missing": ((GPT, "class GPTModel(", "class GenerativeModel("),),
    "mtp-logits-operation-unknown": ((MTP, "        if scale_logits_fn is not None:\n            mtp_logits = scale_logits_fn(mtp_logits)\n        mtp_labels, _", "        mtp_logits = torch.softmax(mtp_logits, dim=-1)\n        if scale_logits_fn is not None:\n            mtp_logits = scale_logits_fn(mtp_logits)\n        mtp_labels, _"),),
    "packing-field-missing": ((PACKING, "    max_seqlen_kv: int = None\n", ""),),
    "packing-field-required": ((PACKING, "    qkv_format: str = None\n", "    layout: str\n    qkv_format: str = None\n"),),
    "plan-attribute-missing": ((PIPELINE, "        self.forward_func = forward_func\n", "        self.function = forward_func\n"),),
    "plan-requires": ((GPT, "        padding_mask: Optional[Tensor] = None,\n        *,\n        output_processor", "        padding_mask: Optional[Tensor] = None,\n        *,\n        stream,\n        output_processor"),),
    "plan-result-unknown": ((NODES, "        return float16_to_fp32(loss)\n", "        return float16_to_fp32(loss).sum()\n"),),
    "stage-return-missing": ((GPT, "        if not self.post_process:\n            return hidden_states\n\n        if self.config.mtp_num_layers:", "        if self.config.mtp_num_layers:"),),
    "symbol-missing": ((STATE, "def get_tensor_model_parallel_group(", "def tensor_model_parallel_group("),),
    "symbol-requires": ((STATE, "def is_pipeline_first_stage(ignore_virtual=True, vp_stage=None)", "def is_pipeline_first_stage(mesh, ignore_virtual=True, vp_stage=None)"),),
    "vlm-drops-keyword": ((LLAVA, "            labels=new_labels,\n            inference_context=inference_context,\n            runtime_gather_output=runtime_gather_output,\n            packed_seq_params=packed_seq_params,\n", "            labels=new_labels,\n            inference_context=inference_context,\n            runtime_gather_output=runtime_gather_output,\n"),),
    "wrapper-has-no-module": ((BASE_DP, "        self.module = module\n", "        self.inner = module\n"),),
    "wrapper-missing": ((FSDP, "class FullyShardedDataParallel(_BaseDataParallel):\n", "def FullyShardedDataParallel(*given, **named):\n    return FullyShardedDataParallelV1(*given, **named)\n\n\nclass FullyShardedDataParallelV1(_BaseDataParallel):\n"),),
    "wrapper-requires": ((DDP, "        module: torch.nn.Module,\n        disable_bucketing", "        module: torch.nn.Module,\n        mesh: object,\n        disable_bucketing"),),
}  # fmt: skip

# rule -> two releases between which upstream really did it; each the newest of its contract class, so that CI
# makes no further environment for it. A rule about what is absent is asked from the newer to the older.
RELEASES: Mapping[str, tuple[str, str]] = {
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
