"""The fused head over two (or more) tensor-parallel ranks, ours beside verl's kernel, in one interleaved run.

    torchrun --standalone --nproc-per-node 2 benchmarks/kernel_tp.py --out benchmarks/results/kernel_two_gpus.csv

Each rank holds an equal part of the vocabulary. ``part_ms`` is the same provider on one rank's part alone, without a
group: ``efficiency = part_ms / ms`` is what the collectives and the waiting for each other cost. ``collectives_ms`` are
our collectives alone, at the same sizes: the gather of four numbers a token, and for a step the sum of the hidden
gradient. verl's backward leaves the hidden gradient partial, one part a rank; ours sums it, and pays for that here.
Medians over rounds in a new random order, the slowest rank counts; L2 is flushed before each run.
"""

from __future__ import annotations

import argparse
import csv
import datetime as dt
import math
import os
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

SHAPES = [(8192, 4096, 151936), (4096, 2048, 32000)]  # tokens, hidden size, vocabulary over all ranks
COLUMNS = ["provider", "ranks", "n", "h", "v", "mode", "ms", "part_ms", "efficiency", "collectives_ms"]
COLUMNS += ["gpu", "torch", "triton", "date", "note"]
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]]


def ours() -> Run:
    from mcore_fused.kernel import linear_cross_entropy

    def run(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows, ranks = w.shape[0], 1 if group is None else dist.get_world_size(group)
        place = (0 if group is None else dist.get_rank(group) * rows, ranks * rows)  # as the head of a model says it
        return linear_cross_entropy(h, w, y, tp_group=group, vocab_shard=place, backend="triton")

    return run


def verl() -> Run:
    from kernel_peers import _verl

    _verl()  # puts the package's kernel modules within reach, without its trainers
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return lambda h, w, y, group: linear_cross_entropy(h, w, y, 1.0, "none", group)


class Case:
    """One shape: inputs of this rank, and the timed calls."""

    def __init__(self, n: int, h: int, v: int) -> None:
        make = torch.Generator(device="cuda").manual_seed(0)
        self.part = v // dist.get_world_size()
        self.hidden = torch.randn(n, h, device="cuda", generator=make).bfloat16().requires_grad_()
        weight = torch.randn(v, h, device="cuda", generator=make) * (2 / math.sqrt(h))
        first = dist.get_rank() * self.part
        self.weight = weight[first : first + self.part].bfloat16().requires_grad_()
        self.labels = torch.randint(0, v, (n,), device="cuda", generator=make)
        self.upstream = [torch.randn(n, device="cuda", generator=make) / n for _ in range(2)]
        self.statistics = torch.zeros(4, n, device="cuda")
        self.everyone = torch.zeros(dist.get_world_size(), 4, n, device="cuda")
        self.gradient = torch.zeros(n, h, device="cuda")

    def call(self, run: Run, mode: str, group: Any) -> Callable[[], None]:
        labels = self.labels if group is not None else self.labels % self.part

        def forward() -> None:
            with torch.no_grad():
                run(self.hidden, self.weight, labels, group)

        def step() -> None:
            self.hidden.grad = self.weight.grad = None
            outputs = run(self.hidden, self.weight, labels, group)
            torch.autograd.backward(outputs, [g.to(o.dtype) for g, o in zip(self.upstream, outputs, strict=True)])

        return forward if mode == "forward" else step

    def collectives(self, mode: str) -> Callable[[], None]:
        def run() -> None:
            dist.all_gather_into_tensor(self.everyone.view(-1), self.statistics.view(-1))
            if mode == "step":
                dist.all_reduce(self.gradient)

        return run


def measure(calls: dict[tuple, Callable[[], None]], rounds: int) -> dict[tuple, float]:
    """Median milliseconds of each call; of the slowest rank."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for run in calls.values():
        for _ in range(3):
            run()
    times: dict[tuple, list[float]] = {key: [] for key in calls}
    order = random.Random(0)  # the same on every rank: each call must meet its like
    for _ in range(rounds):
        for key in order.sample(list(calls), len(calls)):
            flush.zero_()
            dist.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            calls[key]()
            end.record()
            end.synchronize()
            times[key].append(start.elapsed_time(end))
    medians = torch.tensor([statistics.median(values) for values in times.values()], device="cuda")
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(times, medians.tolist(), strict=True))


def rows_of(shape: tuple[int, int, int], providers: dict[str, Run], rounds: int) -> list[dict[str, Any]]:
    case = Case(*shape)
    calls: dict[tuple, Callable[[], None]] = {}
    for mode in ("forward", "step"):
        calls["collectives", mode, ""] = case.collectives(mode)
        for name, run in providers.items():
            calls[name, mode, "all"] = case.call(run, mode, dist.group.WORLD)
            calls[name, mode, "part"] = case.call(run, mode, None)
    found = measure(calls, rounds)
    common = {"ranks": dist.get_world_size(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    common |= dict(zip("nhv", shape, strict=True)) | {"date": dt.datetime.now(dt.UTC).date().isoformat()}
    rows = []
    for name in providers:
        for mode in ("forward", "step"):
            ms, part = found[name, mode, "all"], found[name, mode, "part"]
            row = common | {"provider": name, "mode": mode, "ms": round(ms, 3), "part_ms": round(part, 3)}
            row |= {"efficiency": round(part / ms, 3)}
            rows.append(row | ({"collectives_ms": round(found["collectives", mode, ""], 3)} if name == "ours" else {}))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    import triton

    providers, missing = {"ours": ours()}, ""
    try:
        providers["verl"] = verl()
    except ImportError as exc:
        missing = f"verl was not measured: {exc}"
    rows = [row for shape in SHAPES for row in rows_of(shape, providers, options.rounds)]
    if dist.get_rank() == 0:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="")
            writer.writeheader()
            writer.writerows(row | {"triton": triton.__version__, "note": missing} for row in rows)
        for row in rows:
            print({name: row.get(name, "") for name in COLUMNS[:10]}, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
