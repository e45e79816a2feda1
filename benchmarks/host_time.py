"""Host microseconds per call: how long Python and the launch path keep the CPU, in which no kernel can hide.

    python benchmarks/host_time.py --out benchmarks/results/host_time_h200.csv
    python benchmarks/host_time.py --device cpu --calls 20 --out /dev/null

``host_us`` is the time until the calls have returned, ``total_us`` until the device is idle, per call; the shape is
small, so that the device does not hold the host up. On a CPU both are the time of the arithmetic as well. The rows of a
model need megatron-core and are left out without it. ``--profile`` prints where the host's time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import csv
import datetime as dt
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

COLUMNS = ["case", "mode", "host_us", "total_us", "calls", "tokens", "hidden", "vocab", "gpu", "torch", "date"]
TOKENS, HIDDEN, VOCAB = 256, 256, 4096
Case = tuple[str, str, Callable[[], object]]


def kernel_cases(device: str) -> Iterator[Case]:
    """The kernel alone: ours with its options, and what eager torch needs."""
    from mcore_fused import PolicyLoss, fused_linear_policy_loss, linear_cross_entropy

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=rng).to(device, dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=rng).to(device, dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=rng).to(device)
    ones = torch.ones(TOKENS, device=device)
    half = torch.where(torch.arange(TOKENS, device=device) < TOKENS // 2, labels, -100)
    policy = PolicyLoss("policy_gradient", entropy_coefficient=0.01)

    def ours(which: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_cross_entropy(hidden, weight, which, 0.9, **options)

    def eager() -> tuple[torch.Tensor, torch.Tensor]:
        log_p = torch.log_softmax((hidden @ weight.t()).float() / 0.9, -1)
        return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def stepping(call: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        def step() -> None:
            hidden.grad = weight.grad = None
            torch.autograd.backward(call(), [ones, ones])

        return step

    def folded() -> None:
        hidden.grad = weight.grad = None
        fused_linear_policy_loss(hidden, weight, labels, ones, policy, temperature=0.9).loss.backward()

    calls = {
        "ours": lambda: ours(labels),
        "ours, counted rows": lambda: ours(half, counted_rows=TOKENS // 2),
        "eager": eager,
    }
    for name, call in calls.items():
        yield name, "forward", torch.no_grad()(call)
        yield name, "step", stepping(call)
    yield "ours, loss folded in", "step", folded


def model_cases(device: str) -> Iterator[Case]:
    """A one-layer model: its stock loss, and the fused call in both modes; forwards without gradient."""
    from training_models import ModelShape, build, make_batch, start

    import mcore_fused

    start(device, 1)
    shape = ModelShape(1, HIDDEN, 4, 4, 2 * HIDDEN, VOCAB)
    model, batch = build(shape, device, 1), make_batch(shape, TOKENS, TOKENS, 0.0, device)
    inputs = (batch.ids, batch.positions, None)
    labels = batch.labels.clamp(min=0)

    @torch.no_grad()
    def stock() -> object:
        return model(*inputs, labels=labels, packed_seq_params=batch.packed)

    @torch.no_grad()
    def fused() -> object:
        return mcore_fused.call_fused_forward(
            model, *inputs, labels=labels, temperature=0.9, packed_seq_params=batch.packed
        )

    yield "model, stock loss", "forward", stock
    for mode in ("hook", "legacy"):
        mcore_fused.patch_fused_forward(model, mode=mode)
        yield f"model, ours, {mode}", "forward", fused
        mcore_fused.unpatch_fused_forward(model)


def microseconds(call: Callable[[], object], calls: int, device: str) -> tuple[float, float]:
    """Medians of five series: until the calls have returned, and until the device is idle, per call."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(5):
        call()
    host, total = [], []
    for _ in range(5):
        wait()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        host.append(time.perf_counter() - begun)
        wait()
        total.append(time.perf_counter() - begun)
    return statistics.median(host) / calls * 1e6, statistics.median(total) / calls * 1e6


def main() -> int:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--calls", type=int, default=200, help="calls per series")
    parser.add_argument("--profile", action="store_true", help="print the functions that take most of the host's time")
    options = parser.parse_args()
    facts = {
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }
    rows = []

    def measure(cases: Iterator[Case]) -> None:
        for name, mode, call in cases:
            host, total = microseconds(call, options.calls, options.device)
            row = {"case": name, "mode": mode, "host_us": round(host), "total_us": round(total), "calls": options.calls}
            rows.append(row | {"tokens": TOKENS, "hidden": HIDDEN, "vocab": VOCAB, **facts})
            print(row, flush=True)
            if options.profile:
                profile = cProfile.Profile()
                profile.runcall(lambda call=call: [call() for _ in range(options.calls)])
                pstats.Stats(profile).sort_stats("tottime").print_stats(15)

    measure(kernel_cases(options.device))
    try:
        measure(model_cases(options.device))
    except ImportError as error:
        print(f"no model: {error}", file=sys.stderr)
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
