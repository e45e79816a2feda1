"""The rest of the surface: loss, output layer class, wrappers, packing fields, schedule plan, symbols by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from mcore_compat.contract.extract.head import model_items, multi_token_items
from mcore_compat.contract.extract.modules import CandidateSyntaxError, ClassRef, FunctionRef, ModuleIndex
from mcore_compat.contract.extract.replaced import binding_items, replaced_items
from mcore_compat.contract.extract.requirements import extra_items, import_items, metadata_items, version_labels
from mcore_compat.contract.extract.value_flow import calls, keywords_of, text
from mcore_compat.contract.model import Contract, Direction, Item, Json
from mcore_compat.contract.source.tree import SourceTree

__all__ = ["LAYER_ATTRIBUTES", "MODELS", "SYMBOLS", "extract"]

# prefix, class, modules to look in first
MODELS = (
    ("gpt", "GPTModel", "megatron.core.models.gpt.gpt_model"),
    ("hybrid", "HybridModel", "megatron.core.models.hybrid.hybrid_model"),
    ("mamba", "MambaModel", "megatron.core.models.mamba.mamba_model"),
)
LAYER_ATTRIBUTES = (
    "allreduce_dgrad",
    "bias",
    "explicit_expert_comm",
    "gather_output",
    "sequence_parallel",
    "skip_bias_add",
    "tp_group",
    "weight",
)
_WRAPPERS = (
    ("ddp", "DistributedDataParallel", "megatron.core.distributed.distributed_data_parallel"),
    ("float16", "Float16Module", "megatron.core.transformer.module"),
    ("torch_fsdp2", "TorchFullyShardedDataParallel", "megatron.core.distributed.torch_fully_sharded_data_parallel"),
    ("mcore_fsdp", "FullyShardedDataParallel", "megatron.core.distributed.fsdp.mcore_fsdp_adapter"),
)
# Everything that the library, the suite or the adapters import by name; a test compares this with their sources.
SYMBOLS = (
    "megatron.core.config_logger.has_config_logger_enabled",
    "megatron.core.config_logger.log_config_to_disk",
    "megatron.core.inference.contexts.BaseInferenceContext",
    "megatron.core.inference.utils.InferenceMode",
    "megatron.core.packed_seq_params.PackedSeqParams",
    "megatron.core.parallel_state.destroy_model_parallel",
    "megatron.core.parallel_state.get_context_parallel_group",
    "megatron.core.parallel_state.get_context_parallel_rank",
    "megatron.core.parallel_state.get_context_parallel_world_size",
    "megatron.core.parallel_state.get_tensor_model_parallel_group",
    "megatron.core.parallel_state.get_tensor_model_parallel_rank",
    "megatron.core.parallel_state.get_tensor_model_parallel_world_size",
    "megatron.core.parallel_state.initialize_model_parallel",
    "megatron.core.parallel_state.is_pipeline_first_stage",
    "megatron.core.parallel_state.is_pipeline_last_stage",
    "megatron.core.parallel_state.model_parallel_is_initialized",
    "megatron.core.process_groups_config.ModelCommProcessGroups",
    "megatron.core.process_groups_config.ProcessGroupCollection",
    "megatron.core.tensor_parallel.ColumnParallelLinear",
    "megatron.core.tensor_parallel.copy_to_tensor_model_parallel_region",
    "megatron.core.tensor_parallel.gather_from_sequence_parallel_region",
    "megatron.core.tensor_parallel.gather_from_tensor_model_parallel_region",
    "megatron.core.tensor_parallel.random.model_parallel_cuda_manual_seed",
    "megatron.core.transformer.transformer_config.TransformerConfig",
    "megatron.core.utils.get_attr_wrapped_model",
    "megatron.core.utils.unwrap_model",
)
_CONFIG_FIELDS = (
    "bf16",
    "cross_entropy_loss_fusion",
    "fp16",
    "fp8",
    "mtp_num_layers",
    "mup_output_mult",
    "overlap_moe_expert_parallel_comm",
    "sequence_parallel",
    "use_mup",
)


def extract(tree: SourceTree, name: str | None = None) -> Contract:
    """Read the whole contract of a source tree; nothing in it is run.

    Raises:
        CandidateSyntaxError: a module that we depend on does not parse, or is nested too deeply.
    """
    index = ModuleIndex(tree)
    labels = version_labels(tree)
    try:
        items = list(_items(index))
    except RecursionError as error:
        raise CandidateSyntaxError(
            f"{tree.name} has an expression that is nested too deeply to be read.",
            "Look at what this source is; no megatron-core has one.",
        ) from error
    return Contract.of(name or labels.distribution or tree.name, labels, items)


def _items(index: ModuleIndex) -> Iterator[Item]:
    for prefix, class_name, module in MODELS:
        yield from model_items(index, prefix, class_name, module)
    yield from multi_token_items(index)
    yield from _llava_items(index)
    yield from _loss_items(index)
    yield from _layer_items(index)
    yield from _wrapper_items(index)
    yield from _packing_items(index)
    yield from _plan_items(index)
    yield from _symbol_items(index)
    yield from _config_items(index)
    yield from metadata_items(index.tree)
    yield from extra_items(index.tree)
    yield from import_items(index)
    yield from replaced_items(index)
    yield from binding_items(index)


def _method_item(index: ModuleIndex, item_id: str, direction: Direction, owner: ClassRef | None, name: str) -> Item:
    method = index.method(owner, name) if owner else None
    return Item(item_id, direction, list(method.signature) if method else None, method.where if method else "")


def _llava_items(index: ModuleIndex) -> Iterator[Item]:
    """The multimodal wrapper: its forward, and what it hands to the language model inside, by any of its calls."""
    model = index.find_class("LLaVAModel", "megatron.core.models.multimodal.llava_model")
    yield _method_item(index, "llava.forward", Direction.CALL, model, "forward")
    forward = index.method(model, "forward") if model else None
    inner = [call for call in calls(forward.node) if text(call.func) == "self.language_model"] if forward else []
    handed: Json = None
    if forward is not None and inner:
        # Up to 0.15 a MambaModel inside has a call of its own, without packed sequences.
        handed = sorted({keyword for call in inner for keyword in keywords_of(call, forward.node.body)})
    where = f"{forward.path}:{inner[0].lineno}" if forward and inner else ""
    yield Item("llava.language_model", Direction.READ, handed, where)


def _loss_items(index: ModuleIndex) -> Iterator[Item]:
    module = "megatron.core.models.common.language_module.language_module"
    owner = index.find_class("LanguageModule", module)
    for name, direction in (
        ("compute_language_model_loss", Direction.REPLACE),
        ("shared_embedding_or_output_weight", Direction.CALL),
    ):
        yield _method_item(index, f"language_module.{name}", direction, owner, name)


def _self_attributes(index: ModuleIndex, owner: ClassRef, depth: int = 0) -> set[str]:
    """Names that ``__init__`` sets on self, here and in base classes of the tree."""
    found: set[str] = set()
    init = index.own_method(owner, "__init__").function
    if init is not None:
        for node in ast.walk(init.node):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and text(node.value) == "self":
                found.add(node.attr)
        for call in calls(init.node):
            if text(call.func) in {"self.register_parameter", "self.register_buffer", "self.add_module"} and call.args:
                first = call.args[0]
                found |= {first.value} if isinstance(first, ast.Constant) and isinstance(first.value, str) else set()
    if depth < 6:
        for base in index.bases(owner):
            found |= _self_attributes(index, base, depth + 1)
    return found


def _layer_items(index: ModuleIndex) -> Iterator[Item]:
    owner = index.find_class("ColumnParallelLinear", "megatron.core.tensor_parallel.layers")
    yield _method_item(index, "output_layer.forward", Direction.REPLACE, owner, "forward")
    attributes = _self_attributes(index, owner) if owner else set()
    present: dict[str, Json] = {name: name in attributes for name in LAYER_ATTRIBUTES}
    yield Item("output_layer.attributes", Direction.READ, present, owner.where if owner else "")


def _wrapper_items(index: ModuleIndex) -> Iterator[Item]:
    for short, class_name, module in _WRAPPERS:
        path = index.path_of(module)
        owner = index.find_class(class_name, module)
        yield Item(
            f"wrapper.{short}.class",
            Direction.READ,
            index.module_of(owner.path) if owner else None,
            owner.where if owner else (f"{path}:1" if path else ""),
        )
        yield _method_item(index, f"wrapper.{short}.__init__", Direction.CALL, owner, "__init__")
        forward = index.method(owner, "forward") if owner else None
        signature: Json = list(forward.signature) if forward else None
        yield Item(f"wrapper.{short}.forward", Direction.CALL, signature, forward.where if forward else "")
        inner: Json = "module" in _self_attributes(index, owner) if owner else None
        yield Item(f"wrapper.{short}.module", Direction.READ, inner)
    converter = index.function("megatron/core/transformer/module.py", "conversion_helper")
    yield Item(
        "wrapper.float16.converts",
        Direction.CALLED_BY,
        _isinstance_kinds(converter) if converter else None,
        converter.where if converter else "",
    )


def _isinstance_kinds(function: FunctionRef) -> list[str]:
    """Container types that Float16Module's conversion looks into (``isinstance`` tests of the function)."""
    kinds: set[str] = set()
    for call in calls(function.node):
        if text(call.func) == "isinstance" and len(call.args) == 2:
            second = call.args[1]
            kinds |= {text(kind) for kind in (second.elts if isinstance(second, ast.Tuple) else [second])}
    return sorted(kinds)


def _packing_items(index: ModuleIndex) -> Iterator[Item]:
    owner = index.find_class("PackedSeqParams", "megatron.core.packed_seq_params")
    fields = [
        statement.target.id + ("=" if statement.value is not None else "")
        for statement in (owner.node.body if owner else [])
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]
    yield Item("packing.fields", Direction.CALL, fields if owner else None, owner.where if owner else "")


def _plan_items(index: ModuleIndex) -> Iterator[Item]:
    """The schedule plan's node that calls ``_postprocess``: who it hands over, and what it does to the result."""
    yield Item("plan.attributes", Direction.READ, _plan_attributes(index))
    owner = index.find_class("PostProcessNode")
    forward = index.own_method(owner, "forward_impl").function if owner else None
    call = next((c for c in calls(forward.node) if text(c.func).endswith("._postprocess")), None) if forward else None
    if owner is None or forward is None or call is None:
        yield Item("plan.postprocess", Direction.CALLED_BY, None)
        return
    last = forward.node.body[-1]
    result = text(last.value) if isinstance(last, ast.Return) and last.value is not None else "nothing"
    value: dict[str, Json] = {
        "keywords": sorted(keywords_of(call, forward.node.body)),
        "model": text(call.func).rpartition(".")[0],
        "result": result,
    }
    yield Item("plan.postprocess", Direction.CALLED_BY, value, f"{forward.path}:{call.lineno}")


def _plan_attributes(index: ModuleIndex) -> Json:
    """Whether a plan has its last node, and a node its function, under the names by which legacy mode finds them."""
    plan = index.find_class(
        "TransformerModelChunkSchedulePlan", "megatron.core.models.common.model_chunk_schedule_plan"
    )
    node = index.find_class("ScheduleNode", "megatron.core.pipeline_parallel.utils")
    if plan is None or node is None:
        return None
    return {"post_process": "post_process" in _stored(plan), "forward_func": "forward_func" in _stored(node)}


def _stored(owner: ClassRef) -> set[str]:
    """Names that any method of a class sets on self."""
    return {
        attribute.attr
        for attribute in ast.walk(owner.node)
        if isinstance(attribute, ast.Attribute)
        and isinstance(attribute.ctx, ast.Store)
        and text(attribute.value) == "self"
    }


def _symbol_items(index: ModuleIndex) -> Iterator[Item]:
    for dotted in SYMBOLS:
        found = index.symbol(dotted)
        value: Json = None
        if found is not None:
            value = {"kind": found.kind}
            if found.signature is not None:
                value["signature"] = list(found.signature)
        where = f"{found.path}:{found.line}" if found else ""
        yield Item(f"symbol.{dotted.removeprefix('megatron.core.')}", Direction.CALL, value, where)


def _config_items(index: ModuleIndex) -> Iterator[Item]:
    owner = index.find_class("TransformerConfig", "megatron.core.transformer.transformer_config")
    known = _field_names(index, owner) if owner else set()
    present: dict[str, Json] = {name: name in known for name in _CONFIG_FIELDS}
    yield Item("config.fields", Direction.READ, present, owner.where if owner else "")


def _field_names(index: ModuleIndex, owner: ClassRef, depth: int = 0) -> set[str]:
    own = {s.target.id for s in owner.node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
    if depth < 6:
        for base in index.bases(owner):
            own |= _field_names(index, base, depth + 1)
    return own
