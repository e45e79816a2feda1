"""A megatron-core of a hundred lines with everything that the contract looks at, and edits of it."""

from __future__ import annotations

from collections.abc import Mapping

from mcore_compat.contract.source.tree import SourceTree

GPT_MODEL = """\
import torch
from collections import OrderedDict
from megatron.core import tensor_parallel
from megatron.core.config_logger import has_config_logger_enabled, log_config_to_disk
from megatron.core.models.common.language_module.language_module import LanguageModule
from ...transformer.multi_token_prediction import process_mtp_loss


class GPTModel(LanguageModule):
    def __init__(self, config):
        self.output_layer = tensor_parallel.ColumnParallelLinear(
            config.hidden_size, self.vocab_size, config=config, bias=False, skip_bias_add=False,
            gather_output=not self.parallel_output,
            skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
        )

    def _preprocess(self, input_ids, position_ids, decoder_input=None):
        return decoder_input

    def forward(self, input_ids, position_ids, attention_mask, decoder_input=None, labels=None,
                packed_seq_params=None, *, loss_mask=None, output_processor=None, output_processor_context=None):
        hidden_states = self.decoder(self._preprocess(input_ids, position_ids, decoder_input))
        return self._postprocess(
            hidden_states=hidden_states, labels=labels, loss_mask=loss_mask,
            output_processor=output_processor, output_processor_context=output_processor_context,
        )

    def _postprocess(self, hidden_states, labels, loss_mask=None, runtime_gather_output=None,
                     output_processor=None, output_processor_context=None):
        output_weight = None
        if self.share_embeddings_and_output_weights:
            output_weight = self.shared_embedding_or_output_weight()
        if self.mtp_process:
            hidden_states = self.mtp(hidden_states)
        if not self.post_process:
            return hidden_states
        if self.config.mtp_num_layers:
            hidden_states = process_mtp_loss(hidden_states, labels, self.output_layer)
        if output_processor is not None:
            return output_processor(
                hidden_states=hidden_states, output_layer=self.output_layer, output_weight=output_weight,
                labels=labels, context=output_processor_context, runtime_gather_output=runtime_gather_output,
                scale_logits=self._scale_logits, config=self.config,
            )
        logits, _ = self.output_layer(
            hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output
        )
        logits = self._scale_logits(logits)
        if has_config_logger_enabled(self.config):
            payload = OrderedDict({'labels': labels, 'logits': logits})
            log_config_to_disk(self.config, payload, prefix='input_and_logits')
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        loss = self.compute_language_model_loss(labels, logits)
        return loss

    def build_schedule_plan(self, input_ids, position_ids, attention_mask, labels=None, *,
                            output_processor=None, output_processor_context=None):
        return None
"""

LANGUAGE_MODULE = """\
class LanguageModule:
    def compute_language_model_loss(self, labels, logits):
        return logits

    def _scale_logits(self, logits):
        if not self.config.use_mup:
            return logits
        return logits * self.config.mup_output_mult

    def shared_embedding_or_output_weight(self):
        if self.pre_process or getattr(self, 'mtp_process', False):
            return self.embedding.word_embeddings.weight
        elif self.post_process:
            return self.output_layer.weight
        return None
"""

MTP = """\
def process_mtp_loss(hidden_states, labels, output_layer, scale_logits_fn=None, is_training=True):
    for depth in range(2):
        mtp_logits, _ = output_layer(hidden_states, weight=None)
        if scale_logits_fn is not None:
            mtp_logits = scale_logits_fn(mtp_logits)
        mtp_labels = labels
        mtp_loss = compute_language_model_loss(mtp_labels, mtp_logits)
    return hidden_states
"""

LAYERS = """\
class ColumnParallelLinear:
    def __init__(self, input_size, output_size, *, config, bias=True, gather_output=False, skip_bias_add=False):
        self.tp_group = None
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.sequence_parallel = config.sequence_parallel
        self.weight = None
        self.allreduce_dgrad = self.explicit_expert_comm = False
        self.register_parameter('bias', None)

    def forward(self, input_, weight=None, runtime_gather_output=None):
        return input_, None
"""

PARALLEL_STATE = "\n".join(
    f"def {name}():\n    return 1\n"
    for name in (
        "destroy_model_parallel",
        "get_context_parallel_group",
        "get_context_parallel_rank",
        "get_context_parallel_world_size",
        "get_tensor_model_parallel_group",
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_world_size",
        "initialize_model_parallel",
        "is_pipeline_first_stage",
        "is_pipeline_last_stage",
        "model_parallel_is_initialized",
    )
)

FILES: Mapping[str, str] = {
    "megatron/core/__init__.py": "from megatron.core import parallel_state, tensor_parallel\n",
    "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 18\nPATCH = 0\nPRE_RELEASE = ''\n",
    "megatron/core/config_logger.py": (
        "def has_config_logger_enabled(config):\n    return False\ndef log_config_to_disk(*a, **k):\n    return None\n"
    ),
    "megatron/core/parallel_state.py": PARALLEL_STATE,
    "megatron/core/tensor_parallel/__init__.py": (
        "from .layers import ColumnParallelLinear\n"
        "from .mappings import (copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region,\n"
        "    gather_from_tensor_model_parallel_region)\n"
    ),
    "megatron/core/tensor_parallel/layers.py": LAYERS,
    "megatron/core/tensor_parallel/mappings.py": (
        "def copy_to_tensor_model_parallel_region(input_, group=None):\n    return input_\n"
        "def gather_from_sequence_parallel_region(input_, group=None):\n    return input_\n"
        "def gather_from_tensor_model_parallel_region(input_, group=None):\n    return input_\n"
    ),
    "megatron/core/tensor_parallel/random.py": "def model_parallel_cuda_manual_seed(seed):\n    return None\n",
    "megatron/core/packed_seq_params.py": (
        "class PackedSeqParams:\n"
        + "".join(
            f"    {name}: int = None\n"
            for name in ("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        )
        + "    max_seqlen_q: int = None\n    max_seqlen_kv: int = None\n"
    ),
    "megatron/core/transformer/transformer_config.py": (
        "class TransformerConfig:\n    sequence_parallel: bool = False\n    fp16: bool = False\n"
        "    bf16: bool = False\n    mtp_num_layers: int = 0\n"
    ),
    "megatron/core/transformer/multi_token_prediction.py": MTP,
    "megatron/core/transformer/module.py": (
        "def conversion_helper(val, conversion):\n    if isinstance(val, (tuple, list)):\n        return val\n"
        "class Float16Module:\n    def __init__(self, config, module):\n        self.add_module('module', module)\n"
        "    def forward(self, *inputs, **kwargs):\n        return None\n"
    ),
    "megatron/core/distributed/data_parallel_base.py": (
        "class _Base:\n    def __init__(self, module):\n        self.module = module\n"
        "    def forward(self, *inputs, **kwargs):\n        return None\n"
    ),
    "megatron/core/distributed/distributed_data_parallel.py": (
        "from .data_parallel_base import _Base\n"
        "class DistributedDataParallel(_Base):\n    def __init__(self, config, ddp_config, module):\n        pass\n"
    ),
    "megatron/core/distributed/fsdp/mcore_fsdp_adapter.py": (
        "from ..data_parallel_base import _Base\n"
        "class FullyShardedDataParallel(_Base):\n    def __init__(self, config, ddp_config, module):\n        pass\n"
    ),
    "megatron/core/distributed/torch_fully_sharded_data_parallel.py": (
        "from .data_parallel_base import _Base\n"
        "class TorchFullyShardedDataParallel(_Base):\n"
        "    def __init__(self, config, ddp_config, module):\n        pass\n"
    ),
    "megatron/core/models/common/language_module/language_module.py": LANGUAGE_MODULE,
    "megatron/core/models/common/model_chunk_schedule_plan.py": (
        "class TransformerModelChunkSchedulePlan:\n    def __init__(self, model):\n        self.post_process = None\n"
    ),
    "megatron/core/pipeline_parallel/utils.py": (
        "class ScheduleNode:\n    def __init__(self, forward_func):\n        self.forward_func = forward_func\n"
    ),
    "megatron/core/models/common/utils.py": (
        "class PostProcessNode:\n    def forward_impl(self, hidden_states):\n"
        "        loss = self.model._postprocess(hidden_states=hidden_states)\n        return float16_to_fp32(loss)\n"
    ),
    "megatron/core/models/gpt/gpt_model.py": GPT_MODEL,
    "megatron_core-0.18.0.dist-info/METADATA": (
        "Metadata-Version: 2.4\nName: megatron-core\nVersion: 0.18.0\nRequires-Python: >=3.12\n"
        "Requires-Dist: torch>=2.6.0\nRequires-Dist: numpy\nRequires-Dist: wandb; extra == 'dev'\n"
    ),
}


def edited(*changes: tuple[str, str]) -> SourceTree:
    """The fake tree after replacing each ``old`` by ``new`` in the one file that has it."""
    files = dict(FILES)
    for old, new in changes:
        holders = [path for path, text in files.items() if old in text]
        assert holders, f"nothing in the fake upstream reads {old!r}"
        files[holders[0]] = files[holders[0]].replace(old, new, 1)
    return SourceTree("fake", "directory", files)
