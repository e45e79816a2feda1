"""Kinds of breakage that adopters met: code written here, of such a form, against the shipped indices of real releases.

A thread that is named is one of the kind; its own code is not repeated, and the symbol may be another.
"""

import pytest
from usage_builders import MemoryCache, uses

from mcore_compat.contract.source.candidate import parse_candidate
from mcore_compat.usage.check import Side, check_uses
from mcore_compat.usage.resolve import Resolver
from mcore_compat.usage.shipped import shipped_tree

CACHE = MemoryCache()
SIDES: dict[str, Side] = {}
MPU = "from megatron.core import parallel_state as mpu\n"
MTP = "from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as H\n"
ROUTER = "from megatron.core.transformer.moe.router import TopKRouter\n"
BASE = "megatron.core.dist_checkpointing.strategies.base"
SAVE = "from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy as strategy\n"
LAYERS = "from megatron.core.models.gpt import gpt_layer_specs as specs\n"
FROZEN = "from megatron.core.tensor_parallel.layers import linear_with_frozen_weight as f\n"
CONTEXT = "from megatron.core.inference.contexts import BaseInferenceContext\n"

# (where it was reported, or what changed), good release, bad release, code, rule
CASES = [
    ("verl#3640", "0.13.1", "0.14.0", f"{MPU}def t(): mpu.is_inside_encoder()", "missing-attribute"),
    ("verl#3640 split", "0.13.1", "0.14.0", f"{MPU}def t(): mpu.is_pipeline_stage_before_split()", "missing-attribute"),
    (
        "verl#3534",
        "0.13.1",
        "0.14.0",
        f"{MPU}def t(): mpu.initialize_model_parallel(1, pipeline_model_parallel_split_rank=None)",
        "call-does-not-fit",
    ),
    (
        "verl#6927, #6936",
        "0.16.1",
        "0.17.1",
        "from megatron.core.enums import ModelType\ndef t(kind): return kind == ModelType.encoder_and_decoder",
        "missing-attribute",
    ),
    (
        "mbridge#155",
        "0.16.1",
        "0.17.1",
        "from megatron.core.enums import ModelType\ndef t(kind=ModelType.encoder_and_decoder): ...",
        "missing-attribute",
    ),
    ("verl#8000", "0.16.1", "0.17.1", f"def t():\n  from {BASE} import async_calls", "missing-import"),
    ("Megatron-Bridge#5119", "0.18.2", "0.19.2", f"from {BASE} import SaveShardedStrategy", "missing-import"),
    ("SkyRL with 0.19", "0.18.2", "0.19.2", f"import {BASE} as base", "missing-import"),
    (
        "a keyword of the optimizer",
        "0.15.3",
        "0.16.1",
        "from megatron.core.optimizer import get_megatron_optimizer as g\ndef t(): g(1, 2, no_weight_decay_cond=None)",
        "call-does-not-fit",
    ),
    (
        "the other keyword of the optimizer",
        "0.15.3",
        "0.16.1",
        "from megatron.core.optimizer import get_megatron_optimizer as g\ndef t(): g(1, 2, lr_mult=1.0)",
        "call-does-not-fit",
    ),
    (
        "a parameter that is no longer read",
        "0.16.1",
        "0.17.1",
        f"{SAVE}def t(): strategy(backend='x', version=1)",
        "argument-ignored",
    ),
    ("ms-swift#9743", "0.18.2", "0.19.2", f"{SAVE}def t(): strategy('x', 1)", "call-does-not-fit"),
    ("miles#2673", "0.18.2", "0.19.2", f"{MTP}def t(): H.save_loss_to_tracker(1, 2, 3)", "missing-attribute"),
    ("ROLL with 0.19", "0.18.2", "0.19.2", f"{MTP}def t(): H.clean_loss_in_tracker()", "missing-attribute"),
    ("slime and miles with 0.19", "0.18.2", "0.19.2", f"{MTP}def t():\n  if 'values' in H.tracker: ...", "missing-key"),
    (
        "verl#5372",
        "0.15.3",
        "0.16.1",
        (
            "from megatron.core.transformer.multi_latent_attention import MLASelfAttention as A\n"
            "def t(a: A):\n  q, k, v = a.get_query_key_value_tensors(1)"
        ),
        "result-length",
    ),
    (
        "verl#6596, a replaced function",
        "0.15.3",
        "0.16.1",
        f"{ROUTER}def routing(self, logits): ...\nTopKRouter.routing = routing",
        "patch-misfit",
    ),
    (
        "verl#6648, a replaced function",
        "0.17.1",
        "0.18.2",
        (
            "from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer as L\n"
            "def get(self, input_ids, position_ids, embedding, hidden_states, packed_seq_params=None): ...\n"
            "L._get_embeddings = get"
        ),
        "patch-misfit",
    ),
    (
        "verl#7326, an override",
        "0.15.3",
        "0.16.1",
        f"{ROUTER}class Mine(TopKRouter):\n  def forward(self, input): ...",
        "override-misfit",
    ),
    (
        "routing by another function",
        "0.13.1",
        "0.14.0",
        "from megatron.core.transformer.moe.moe_utils import topk_softmax_with_capacity",
        "missing-import",
    ),
    (
        "optimizer's groups, replaced",
        "0.15.3",
        "0.16.1",
        (
            "from megatron.core import optimizer\n"
            "def groups(chunks, no_weight_decay_cond, scale_lr_cond, lr_mult, lr, min_lr, *rest): ...\n"
            "optimizer._get_param_groups = groups"
        ),
        "patch-misfit",
    ),
    ("a new required parameter", "0.12.3", "0.13.1", f"{CONTEXT}def t(): BaseInferenceContext()", "call-does-not-fit"),
    (
        "the parameter goes again",
        "0.16.1",
        "0.17.1",
        f"{CONTEXT}def t(): BaseInferenceContext(materialize_only_last_token_logits=True)",
        "call-does-not-fit",
    ),
    (
        "a deprecated module goes",
        "0.16.1",
        "0.17.1",
        "from megatron.core.transformer.custom_layers.transformer_engine import TENorm",
        "missing-import",
    ),
    (
        "a keyword of the layer spec",
        "0.16.1",
        "0.17.1",
        f"{LAYERS}def t(): specs.get_mlp_module_spec(moe_use_legacy_grouped_gemm=True)",
        "call-does-not-fit",
    ),
    (
        "ms-swift's NPU patch",
        "0.16.1",
        "0.17.1",
        (
            "from megatron.core.tensor_parallel.layers import linear_with_frozen_weight as f\n"
            "def t(): f(1, 2, 3, 4, 5, 6, 7, async_grad_allreduce=True)"
        ),
        "call-does-not-fit",
    ),
    (
        "a parameter between two others",
        "0.12.3",
        "0.13.1",
        f"{FROZEN}def t(): f(1, 2, 3, 4, 5, 6, 7)",
        "argument-moved",
    ),
    (
        "ms-swift with 0.19, caught by its own handler",
        "0.18.2",
        "0.19.2",
        "try:\n  from megatron.core.msc_utils import open_file\nexcept ImportError:\n  open_file = open",
        "hidden-import",
    ),
]


def side(version: str) -> Side:
    if version not in SIDES:
        tree = shipped_tree(version, CACHE)
        assert tree is not None, parse_candidate(version)
        SIDES[version] = Side.of(Resolver(tree, CACHE), version)
    return SIDES[version]


@pytest.mark.parametrize(("good", "bad", "code", "rule"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_breakage_is_found_where_it_began(good, bad, code, rule):
    found = uses(code)
    assert rule in {finding.rule for finding in check_uses(found, side(bad), side(good))}
    assert check_uses(found, side(good), side(good)) == ()


def test_there_are_enough_of_them():
    assert len(CASES) >= 25
