"""What mcore_fused computes in upstream's place, and whether a method is what its class shows.

A body that is stood in for is never run by us, so nothing else notices that upstream changed it: its digest is an item
of its own. What the source cannot answer (a decorator, a wrapper, a method that is set from elsewhere) is listed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from mcore_compat.contract.extract.modules import ModuleIndex
from mcore_compat.contract.model import Direction, Item, Json
from mcore_compat.files.digest import digest_of_text

__all__ = ["binding_items", "replaced_items"]

_LANGUAGE = "megatron.core.models.common.language_module.language_module"
_LAYERS = "megatron.core.tensor_parallel.layers"
_ENTROPY = "megatron.core.tensor_parallel.cross_entropy"
# name, module: the head's product and its gradients, and the loss of its logits
_REPLACED = (
    ("ColumnParallelLinear._forward_impl", _LAYERS),
    ("ColumnParallelLinear.forward", _LAYERS),
    ("LanguageModule.compute_language_model_loss", _LANGUAGE),
    ("LinearWithGradAccumulationAndAsyncCommunication", _LAYERS),
    ("VocabParallelCrossEntropy", _ENTROPY),
    ("_VocabParallelCrossEntropy", _ENTROPY),
    ("linear_with_grad_accumulation_and_async_allreduce", _LAYERS),
    ("vocab_parallel_cross_entropy", _ENTROPY),
)
_DIGEST_LENGTH = 16

_MODEL_METHODS = (
    "__call__",
    "__init__",
    "_postprocess",
    "_preprocess",
    "_scale_logits",
    "build_schedule_plan",
    "compute_language_model_loss",
    "forward",
    "shared_embedding_or_output_weight",
)
_BOUND = (
    ("GPTModel", "megatron.core.models.gpt.gpt_model", _MODEL_METHODS),
    ("HybridModel", "megatron.core.models.hybrid.hybrid_model", _MODEL_METHODS),
    ("MambaModel", "megatron.core.models.mamba.mamba_model", _MODEL_METHODS),
    ("ColumnParallelLinear", _LAYERS, ("__call__", "__init__", "_forward_impl", "forward")),
)
_BOUND_FUNCTIONS = (("process_mtp_loss", "megatron.core.transformer.multi_token_prediction"),)


def replaced_items(index: ModuleIndex) -> Iterator[Item]:
    """One item per body that is stood in for; value None where a release does not have it."""
    for dotted, module in _REPLACED:
        path = index.path_of(module)
        owner, _, name = dotted.rpartition(".")
        node: ast.AST | None = None
        where = ""
        if path is not None and owner:
            model = index.find_class(owner, module)
            method = index.method(model, name) if model else None
            node, where = (method.node, method.where) if method else (None, "")
        elif path is not None:
            found = index.follow(path, name)
            node, where = (found.node, f"{found.path}:{found.line}") if found else (None, "")
        value: Json = _digest(node) if node is not None else None
        yield Item(f"replaced.{dotted}", Direction.REPLACE, value, where)


def binding_items(index: ModuleIndex) -> Iterator[Item]:
    """One item per class or function: what may make it something else than the source shows."""
    for name, module, methods in _BOUND:
        owner = index.find_class(name, module)
        if owner is None:
            continue
        notes = [f"{name} is {note}" for note in index.name_notes(name, module)]
        for method in methods:
            notes += [f"{method} is {note}" for note in index.bound_method(owner, method).notes]
        yield Item(f"bindings.{name}", Direction.REPLACE, list[Json](notes), owner.where)
    for name, module in _BOUND_FUNCTIONS:
        found = index.symbol(f"{module}.{name}")
        if found is not None:
            values = [f"{name} is {note}" for note in index.name_notes(name, module)]
            yield Item(f"bindings.{name}", Direction.REPLACE, list[Json](values), f"{found.path}:{found.line}")


class _Normal(ast.NodeTransformer):
    """Drops what does not run: docstrings, annotations, decorators' and arguments' types."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self._without_docstring(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._without_docstring(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def _without_docstring(self, node: ast.FunctionDef | ast.ClassDef) -> ast.AST:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)


def _digest(node: ast.AST) -> str:
    """Digest of what a definition does; comments, layout, docstrings and annotations make no difference."""
    copy = ast.parse(ast.unparse(node))
    return digest_of_text(ast.dump(_Normal().visit(copy)))[:_DIGEST_LENGTH]
