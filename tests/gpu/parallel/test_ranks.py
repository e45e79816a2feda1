"""Tensor, sequence, pipeline and context parallelism over real ranks equal one rank, in fp32 and bf16.

Error analysis: in fp32 (unit roundoff 6e-8) the same sums of some hundred terms in another order, relative to the size
of the whole: 2e-5 has a factor of ten to spare and is far below any missing term. In bf16 (4e-3) the yardstick is the
unfused model on one rank: both sides round every layer, so they agree to some roundings of the whole.
"""

import pytest
import torch
from rank_jobs import EXPERT_LAYOUTS
from support.ranks.moe import gathered

pytestmark = pytest.mark.needs("call", "patch", "legacy", "factories")

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
TIED = pytest.mark.parametrize("tied", [False, True])
SEQUENCE = pytest.mark.parametrize("sequence", [False, True])
CLOSE = {"": 2e-5, "bf16-": 4e-2}


def _close(actual, expected, what, tolerance):
    assert actual.shape == expected.shape, what
    error = (actual.double() - expected.double()).norm().item()
    assert error <= tolerance * max(1.0, expected.double().norm().item()), f"{what} differs by {error:.3g}"


def _whole(parts, name, tolerance):
    """One gradient from those of the tensor-parallel ranks."""
    _, split, partial = parts[0]
    if split is not None and split >= 0:
        return torch.cat([gradient for gradient, _, _ in parts], dim=split)
    if partial:  # Megatron sums these over the group after backward
        return sum(gradient for gradient, _, _ in parts)
    _close(parts[1][0], parts[0][0], f"{name} between the ranks", tolerance)
    return parts[0][0]


@pytest.mark.parametrize("kind", ["", "bf16-"])
@SEQUENCE
@TIED
@MODES
def test_tensor_parallel(ranks, on_the_kernel, mode, tied, sequence, kind):
    """Log-probs, entropy, gradient of the hidden states and of every weight, with and without sequence parallelism."""
    single, found, tolerance = ranks(f"tp1-{kind}{tied}")[0], ranks(f"tp2-{kind}{tied}-{sequence}-{mode}"), CLOSE[kind]
    on_the_kernel(found)
    for rank, result in enumerate(found):
        _close(result["log_probs"], single["log_probs"], f"log_probs of rank {rank}", tolerance)
        _close(result["entropy"], single["entropy"], f"entropy of rank {rank}", tolerance)
        hidden = single["hidden_gradient"].chunk(2)[rank] if sequence else single["hidden_gradient"]
        _close(result["hidden_gradient"], hidden, f"hidden gradient of rank {rank}", tolerance)
    assert found[0]["gradients"].keys() == single["gradients"].keys()
    for name, (expected, _, _) in single["gradients"].items():
        whole = _whole([result["gradients"][name] for result in found], name, tolerance)
        _close(whole, expected, name, tolerance)


def _same(first, second, path="result"):
    """Bit for bit, however deep."""
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), path
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for name in first.keys() - {"evidence", "mode", "paths"}:
            _same(first[name], second[name], f"{path}.{name}")
    elif isinstance(first, tuple | list):
        assert len(first) == len(second), path
        for place, pair in enumerate(zip(first, second, strict=True)):
            _same(*pair, f"{path}[{place}]")
    else:
        assert first == second, path


@TIED
@pytest.mark.parametrize(
    "job", ["tp2-{}-False", "tp2-{}-True", "tp2-bf16-{}-True", "pp2-{}-0", "cp2-{}-zigzag", "cp2-{}-contiguous"]
)
def test_hook_and_forced_legacy_are_equal_bit_for_bit(ranks, job, tied):
    for first, second in zip(*(ranks(f"{job.format(tied)}-{mode}") for mode in ("auto", "legacy")), strict=True):
        _same(first, second)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unequal_vocabulary_shards(ranks, on_the_kernel, dtype):
    """The kernel alone against float64 logits of the whole vocabulary; 70 and 27 rows, neither a tile."""
    found = ranks(f"kernel-{dtype}")
    on_the_kernel(found)
    hidden, weight, labels, temperature, upstream = found[0]["inputs"]
    hidden, weight = (tensor.double().requires_grad_() for tensor in (hidden, weight))
    spread = torch.log_softmax(hidden @ weight.t() / temperature.double()[:, None], -1)
    keep = labels != -100
    log_probs = torch.where(keep, spread.gather(-1, labels.clamp(min=0)[:, None])[:, 0], 0)
    entropy = torch.where(keep, -(spread.exp() * spread).sum(-1), 0)
    (upstream[0] * log_probs + upstream[1] * entropy).sum().backward()
    # Outputs come from fp32 sums of exact products; gradients are rounded to the operands' type.
    exact, rounded = 2e-5, {"float32": 2e-5, "bfloat16": 1e-2}[dtype]
    for rank, result in enumerate(found):
        _close(result["log_probs"], log_probs.detach(), f"log_probs of rank {rank}", exact)
        _close(result["entropy"], entropy.detach(), f"entropy of rank {rank}", exact)
        _close(result["hidden_gradient"], hidden.grad, f"hidden gradient of rank {rank}", rounded)
    _close(torch.cat([result["weight_gradient"] for result in found]), weight.grad, "weight gradient", rounded)


def _whole_name(name, stage, tied):
    """What the whole model calls a stage's parameter."""
    if name.startswith("decoder.layers."):
        _, _, index, rest = name.split(".", 3)
        return f"decoder.layers.{int(index) + stage}.{rest}"
    return "embedding.word_embeddings.weight" if tied and name == "output_layer.weight" else name


def _pipeline(ranks, on_the_kernel, mode, tied, mtp, tolerance):
    single, found = ranks(f"pp1-{tied}-{mtp}")[0], ranks(f"pp2-{tied}-{mtp}-{mode}")
    on_the_kernel(found, which=slice(1, None))
    assert not found[0]["paths"], "a stage without a head ran one"
    _close(found[1]["log_probs"], single["log_probs"], "log_probs", CLOSE[""])
    _close(found[1]["entropy"], single["entropy"], "entropy", CLOSE[""])
    both = {}
    for stage, result in enumerate(found):
        for own, (gradient, _, _) in result["gradients"].items():
            name = _whole_name(own, stage, tied)
            both[name] = both[name] + gradient if name in both else gradient
    assert both.keys() == single["gradients"].keys()
    for name, (expected, _, _) in single["gradients"].items():
        _close(both[name], expected, name, tolerance)


@TIED
@MODES
def test_pipeline_parallel(ranks, on_the_kernel, mode, tied):
    """Two stages: with tied weights the last one owns a copy, and each has half of its gradient."""
    _pipeline(ranks, on_the_kernel, mode, tied, 0, CLOSE[""])


@pytest.mark.since("mtp")
@TIED
@MODES
def test_pipeline_parallel_with_mtp(ranks, on_the_kernel, mode, tied):
    """Tied, two stages and MTP: the head's own weight is allocated and means nothing."""
    _pipeline(ranks, on_the_kernel, mode, tied, 1, CLOSE[""])


@TIED
@MODES
def test_context_parallel_packing(ranks, on_the_kernel, mode, tied):
    """A packed batch split over two ranks, zigzag and contiguous, is the batch on one.

    Contiguous needs ``PackedSeqParams.cp_partition_mode``; where the release lacks it, a model of it is in its place.

    Every rank returns all rows; the gradients of the ranks are parts of one sum, as Megatron adds them.
    """
    single = ranks(f"cp1-{tied}")[0]
    for layout in ("zigzag", "contiguous"):
        found = ranks(f"cp2-{tied}-{layout}-{mode}")
        on_the_kernel(found)
        for rank, result in enumerate(found):
            _close(result["log_probs"], single["log_probs"], f"{layout}: log_probs of rank {rank}", CLOSE[""])
            _close(result["entropy"], single["entropy"], f"{layout}: entropy of rank {rank}", CLOSE[""])
        for name, expected in single["gradients"].items():
            total = sum(result["gradients"][name] for result in found)
            _close(total, expected, f"{layout}: {name}", CLOSE[""])


@TIED
def test_five_steps_of_policy_gradient(ranks, on_the_kernel, tied):
    """Two tensor-parallel ranks in bf16 on packed rows: one curve in both modes and on both ranks; that of one rank."""
    curves = [result["losses"] for mode in ("auto", "legacy") for result in ranks(f"train2-{tied}-{mode}")]
    single = ranks(f"train1-{tied}-auto")[0]["losses"]
    on_the_kernel(ranks(f"train2-{tied}-auto"))
    assert all(torch.equal(curve, curves[0]) for curve in curves)
    assert curves[0][-1] < curves[0][0]
    assert (curves[0] - single).abs().max() <= 2e-2, f"two ranks {curves[0].tolist()}, one {single.tolist()}"


def _same_step(actual, expected, what, tolerance):
    for name in ("log_probs", "entropy", "hidden"):
        _close(actual[name], expected[name], f"{name} of {what}", tolerance)
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        _close(actual["gradients"][name], gradient, f"gradient of {name} of {what}", tolerance)


@pytest.mark.parametrize("layout", ["unit", "root", "tied"])
def test_fully_sharded(ranks, on_the_kernel, layout):
    """Megatron's wrapper of FSDP2, a batch a rank: the whole model on both batches, and the unfused sharded one.

    The head's weight is a shard before the call and after the backward, and what was gathered for it is freed.
    """
    results = ranks(f"fsdp2-{layout}")
    on_the_kernel(results)
    for rank, result in enumerate(results):
        step, training = result["step"], result["training"]
        _same(step["auto"], step["legacy"])
        _same(training["auto"], training["legacy"])
        for mode in ("stock", "auto"):
            _same_step(step[mode], step["whole"], f"{mode} on rank {rank}", CLOSE[""])
            assert training[mode]["curve"] == pytest.approx(training["whole"]["curve"], rel=1e-4), f"{mode}, {rank}"
        assert step["auto"]["shard"] == step["stock"]["shard"]
        assert step["auto"]["shard"][0]
        assert step["auto"]["shard"][2]
        assert step["auto"]["gathered_bytes"] == 0


def test_fully_sharded_in_bf16(ranks, on_the_kernel):
    """Float16Module is the root and holds the head's weight; against the unfused model in the same units."""
    results = ranks("fsdp2-bf16")
    on_the_kernel(results)
    for rank, result in enumerate(results):
        _same(result["auto"], result["legacy"])
        _same_step(result["auto"], result["stock"], f"rank {rank}", CLOSE["bf16-"])


@pytest.mark.since("megatron_fsdp")
@TIED
def test_megatron_fsdp(ranks, on_the_kernel, tied):
    """Five steps under Megatron-FSDP are those of the whole model, fused and unfused, and one curve in both modes."""
    results = ranks(f"megatron-fsdp-{tied}")
    on_the_kernel(results)
    for rank, result in enumerate(results):
        assert result["auto"]["curve"] == result["legacy"]["curve"]
        for mode in ("stock", "auto"):
            assert result[mode]["curve"] == pytest.approx(result["whole"]["curve"], rel=1e-4), f"{mode} on rank {rank}"


def _same_gradients_as_one_rank(results, single, what):
    found, drift = gathered(results)
    assert drift <= CLOSE[""], f"{what}: replicas on tensor-parallel ranks differ by {drift:.3g}"
    assert found.keys() == single["gradients"].keys()
    for name, expected in single["gradients"].items():
        _close(found[name], expected, f"{what}: {name}", CLOSE[""])


@TIED
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts(ranks, on_the_kernel, layout, tied):
    """Expert parallelism alone, and with tensor and sequence parallelism: stock on one rank, and both modes alike."""
    single, found = ranks(f"experts1-{tied}-{EXPERT_LAYOUTS[layout][1]}")[0], ranks(f"experts-{layout}-{tied}")
    on_the_kernel(found)
    assert (single["tokens"] > 0).all(), "every expert must have tokens"
    for mode in ("auto", "legacy"):
        results = [result[mode] for result in found]
        for result in results:
            for name in ("log_probs", "entropy"):
                _close(result[name], single[name][result["rows"]], f"{mode}: {name}", CLOSE[""])
        _same_gradients_as_one_rank(results, single, mode)


@pytest.mark.since("schedule_plan")
@TIED
def test_the_schedule_plan_run_whole(ranks, on_the_kernel, tied):
    """Two micro-batches through the 1F1B plan, on streams of their own, with experts over both ranks."""
    single, found = ranks(f"plan1-{tied}")[0], ranks(f"plan-ep2-{tied}")
    on_the_kernel(found)
    for mode in ("auto", "legacy"):
        results = [result[mode] for result in found]
        for result in results:
            for actual, expected in zip(result["outputs"], single["outputs"], strict=True):
                _close(actual, expected[:, result["rows"]], f"{mode}: outputs", CLOSE[""])
        _same_gradients_as_one_rank(results, single, mode)
