"""What this release has, found by looking."""

import inspect
from importlib.util import find_spec
from pathlib import Path

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch.distributed import device_mesh

from . import HAS_MTP, HAS_MUP, Shape, model_class, shared


def features() -> frozenset[str]:
    """What this release (or backport) has, as names for the ``since`` marker."""
    found = {"mtp"} if HAS_MTP else set()
    if HAS_MUP:
        found.add("mup")
    if "output_processor" in inspect.signature(model_class().forward).parameters:
        found.add("hook")
    if "output_processor" in inspect.signature(GPTModel.forward).parameters:
        found.add("upstream_hook")  # in the release's own model, not only in a backport's
    if hasattr(model_class(), "build_schedule_plan"):
        found.add("schedule_plan")
    if "tp_group" in inspect.signature(ColumnParallelLinear.__init__).parameters:
        found.add("layer_group")
    if "padding_mask" in inspect.signature(GPTModel.forward).parameters:
        found.add("router_padding_mask")
    if _has_megatron_fsdp():
        found.add("megatron_fsdp")
        # From 0.18 on the hooks of the wrapper say what becomes of gradients that layers add to its buffers themselves.
        wrapper = Path(find_spec("megatron.core.distributed.fsdp").origin).parent / "src/megatron_fsdp/megatron_fsdp.py"
        if "gradient accumulation is fused" in wrapper.read_text():
            found.add("megatron_fsdp_accumulation")
    return frozenset(found)


def mtp_takes_packed() -> bool:
    """Whether multi-token prediction takes packed rows; up to 0.15 its layer asserts that there are none."""
    if not HAS_MTP:
        return False
    from megatron.core.transformer import multi_token_prediction

    return "sequence packing is not yet supported" not in inspect.getsource(multi_token_prediction)


def release_mode(subject) -> str | None:
    """The mode that the subject finds on a plain model of this release; None when it has no modes."""
    if "mode" not in subject.capabilities:
        return None
    return subject.mode(shared(Shape()))


def _has_megatron_fsdp() -> bool:
    """Whether the release has a Megatron-FSDP that can train the suite's model, unfused too.

    0.14 and 0.15.0 read a table of meshes that torch 2.11 lacks. 0.15.1 to 0.15.3 put a view in front of every module,
    and the local attention masks its scores in place; later ones say in the code that they keep clear of that.
    """
    spec = find_spec("megatron.core.distributed.fsdp")
    if spec is None:
        return False
    sources = Path(spec.origin).parent / "src/megatron_fsdp"
    meshes, wrapper = (sources / name for name in ("utils.py", "megatron_fsdp.py"))
    finds_meshes = "_get_root_mesh" in meshes.read_text() or hasattr(
        device_mesh._mesh_resources, "child_to_root_mapping"
    )
    return finds_meshes and "being modified in-place" in wrapper.read_text()
