"""Speed, memory and accuracy of the fused head, ours against everyone's, in one interleaved run on one GPU.

    python benchmarks/kernel.py --out benchmarks/results/kernel_h200.csv

Every shape is one pool of measurements: the cuBLAS products that make the floor, and each provider's forward and
step. Rounds go over the pool in a new random order (the peers' in every third round: they are slow, and ours needs the
samples), L2 is flushed before each run, medians are reported. A large GPU is limited by power at these sizes: whatever
runs after a pause is up to 20% faster, so only numbers of one such run compare, and the products of a floor run one
right after the other, as those of a step do.

Columns: ``ratio`` is ``floor_ms / ms``. The floor of a forward is the logits product; of a step the products that the
method cannot avoid, named in ``floor``: "8NHV" (logits twice, dX, dW) where logits are recomputed, "6NHV" where they
are kept or the gradients are made in the forward. ``extra_mib`` is peak memory beyond the inputs and, for a step,
beyond the two gradients. ``iqr_ms`` is the interquartile range over the rounds. Errors are against float64: largest
absolute over all tokens; relative norm over 256 rows.
"""

from __future__ import annotations

import argparse
import csv
import datetime as dt
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from kernel_peers import PROVIDERS, Provider

SHAPES = [  # tokens, hidden size, vocabulary
    (8192, 4096, 151936),
    (8192, 4096, 128256),
    (4096, 2048, 32000),
    (16384, 3584, 152064),
    (1024, 896, 151936),
    (8192, 4096, 18992),  # one rank of eight of the first shape
]
OURS = "ours"
COLUMNS = ["provider", "n", "h", "v", "mode", "ms", "floor_ms", "ratio", "extra_mib"]
ERRORS = ["logp_abs_err", "entropy_abs_err", "dh_rel_err", "dw_rel_err"]
COLUMNS += [*ERRORS, "gpu", "torch", "triton", "date", "floor", "version", "runs", "iqr_ms", "note"]


@dataclass
class Problem:
    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    upstream: tuple[torch.Tensor, torch.Tensor]


def make(n: int, h: int, v: int) -> Problem:
    """Logits of standard deviation 2, random labels, distinct upstream gradients for both outputs."""
    rng = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(n, h, device="cuda", generator=rng).bfloat16()
    weight = (torch.randn(v, h, device="cuda", generator=rng) * (2 / math.sqrt(h))).bfloat16()
    labels = torch.randint(0, v, (n,), device="cuda", generator=rng)
    upstream = tuple(torch.randn(n, device="cuda", generator=rng) / n for _ in range(2))
    return Problem(hidden.requires_grad_(), weight.requires_grad_(), labels, upstream)


def step(provider: Provider, run, p: Problem) -> tuple:
    p.hidden.grad = p.weight.grad = None
    with provider.around():
        first, second = run(p.hidden, p.weight, p.labels)
        if provider.scalar:
            second.backward()
        elif provider.entropy:
            upstream = [g.to(o.dtype) for g, o in zip(p.upstream, (first, second), strict=True)]
            torch.autograd.backward([first, second], upstream)
        else:
            first.backward(p.upstream[0].to(first.dtype))
    return first, second


def forward(provider: Provider, run, p: Problem) -> tuple:
    with torch.no_grad(), provider.around():
        return run(p.hidden, p.weight, p.labels)


class Reference:
    """float64: both outputs of all tokens, both gradients on 256 rows, for upstream (g1, g2) and (g1, 0)."""

    def __init__(self, p: Problem, rows: int = 256) -> None:
        h, w = p.hidden.detach(), p.weight.detach()
        n, v = h.shape[0], w.shape[0]
        self.tokens = torch.linspace(0, n - 1, min(rows, n), device="cuda").long()
        # half of the vocabulary rows are labels, as their gradients are the large ones
        self.rows = torch.cat(
            [p.labels[:: max(1, n // (rows // 2))], torch.arange(0, v, max(1, v // (rows // 2)), device="cuda")]
        ).unique()
        wide = w.double()
        columns, lse, entropy, dh = [], [], [], {True: [], False: []}
        chosen = set(self.tokens.tolist())
        for a in range(0, n, 1024):
            z = h[a : a + 1024].double() @ wide.T
            log_sum = torch.logsumexp(z, 1)
            z.sub_(log_sum[:, None])
            ent = -(z.exp() * z).sum(1)
            lse.append(z.gather(1, p.labels[a : a + 1024, None])[:, 0])
            entropy.append(ent)
            columns.append(z[:, self.rows].clone())
            mine = [t - a for t in range(a, min(a + 1024, n)) if t in chosen]
            if mine:
                part = z[mine]
                index = torch.tensor(mine, device="cuda") + a
                for both in (True, False):
                    d = self._dlogits(part, ent[mine], p, index, both)
                    d[torch.arange(len(mine), device="cuda"), p.labels[index]] += p.upstream[0][index].double()
                    dh[both].append(d @ wide)
            del z
        self.log_probs, self.entropy = torch.cat(lse), torch.cat(entropy)
        self.dh = {both: torch.cat(parts) for both, parts in dh.items()}
        part = torch.cat(columns)
        everyone = torch.arange(n, device="cuda")
        self.dw = {}
        for both in (True, False):
            d = self._dlogits(part, self.entropy, p, everyone, both)
            d += (p.labels[:, None] == self.rows[None, :]) * p.upstream[0].double()[:, None]
            self.dw[both] = d.T @ h.double()

    @staticmethod
    def _dlogits(log_p, entropy, p: Problem, index, both: bool):
        d = -p.upstream[0][index].double()[:, None] * log_p.exp()
        if both:
            d -= p.upstream[1][index].double()[:, None] * log_p.exp() * (log_p + entropy[:, None])
        return d

    def errors(self, provider: Provider, run, p: Problem) -> dict[str, float | str]:
        found: dict[str, float | str] = dict.fromkeys(ERRORS, "")
        first, second = step(provider, run, p)
        if provider.scalar:
            return found
        found["logp_abs_err"] = float((first.detach().double() - self.log_probs).abs().max())
        if provider.entropy:
            found["entropy_abs_err"] = float((second.detach().double() - self.entropy).abs().max())
        dh, dw = self.dh[provider.entropy], self.dw[provider.entropy]
        found["dh_rel_err"] = float((p.hidden.grad[self.tokens].double() - dh).norm() / dh.norm())
        found["dw_rel_err"] = float((p.weight.grad[self.rows].double() - dw).norm() / dw.norm())
        return found


def peak_mib(action, beyond: int) -> float:
    """Peak memory of an action beyond what there was and beyond ``beyond`` bytes of results."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - beyond) / 2**20


def interleaved(actions: dict, often: set, seconds: float, rng: random.Random) -> dict[object, list[float]]:
    """Milliseconds of every action, in a new random order each round; those not in ``often`` in every third round."""
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    events: dict = {key: [] for key in actions}
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end or rounds < 9:
        turn = [key for key in actions if key in often or rounds % 3 == 0]
        for key in rng.sample(turn, len(turn)):
            for _ in range(4):  # four times, so that the host is ahead when the measurement starts
                flush.zero_()
            begin, finish = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            actions[key]()
            finish.record()
            events[key].append((begin, finish))
        torch.cuda.synchronize()
        rounds += 1
    return {key: sorted(a.elapsed_time(b) for a, b in pairs) for key, pairs in events.items()}


def median(values: list[float]) -> float:
    return statistics.median(values)


def spread(values: list[float]) -> str:
    """Interquartile range of sorted times."""
    return f"{values[3 * (len(values) - 1) // 4] - values[(len(values) - 1) // 4]:.4f}"


def measure(shape: tuple[int, int, int], providers: list[Provider], seconds: float, seed: int) -> list[dict]:
    n, h, v = shape
    p = make(n, h, v)
    grads = 2 * (n * h + v * h)
    reference = Reference(p)
    actions, facts, failed = {}, {}, {}
    for provider in providers:
        began = time.monotonic()
        try:
            run = provider.load()
            errors = reference.errors(provider, run, p)
            p.hidden.grad = p.weight.grad = None
            memory = {"step": peak_mib(lambda r=run, q=provider: step(q, r, p), grads)}
            p.hidden.grad = p.weight.grad = None
            if not provider.own_backward:
                forward(provider, run, p)
                memory["forward"] = peak_mib(lambda r=run, q=provider: forward(q, r, p), 0)
        except Exception as error:  # noqa: BLE001  (whatever a peer raises: the row says so)
            failed[provider.name] = f"{type(error).__name__}: {error}".replace("\n", " ")[:160]
            print(f"{shape} {provider.name}: {failed[provider.name]}", flush=True)
            torch.cuda.empty_cache()
            continue
        facts[provider.name] = (provider, errors, memory)
        actions[provider.name, "step"] = lambda r=run, q=provider: step(q, r, p)
        if not provider.own_backward:
            actions[provider.name, "forward"] = lambda r=run, q=provider: forward(q, r, p)
        print(f"{shape} {provider.name}: ready after {time.monotonic() - began:.1f} s", flush=True)
    hidden, weight = p.hidden.detach(), p.weight.detach()
    del reference
    p.hidden.grad = p.weight.grad = None
    torch.cuda.empty_cache()
    logits = torch.randn(n, v, device="cuda", dtype=torch.bfloat16)
    dx, dw, scratch = torch.empty_like(hidden), torch.empty_like(weight), torch.empty_like(logits)

    def products(forwards: int) -> None:
        for _ in range(forwards):
            torch.mm(hidden, weight.t(), out=scratch)
        torch.mm(logits, weight, out=dx)
        torch.mm(logits.t(), hidden, out=dw)

    actions["cuBLAS", "logits"] = lambda: torch.mm(hidden, weight.t(), out=scratch)
    actions["cuBLAS", "6NHV"] = lambda: products(1)
    actions["cuBLAS", "8NHV"] = lambda: products(2)
    for action in actions.values():
        action()
    often = {key for key in actions if key[0].startswith((OURS, "cuBLAS"))}
    times = interleaved(actions, often, seconds, random.Random(seed))
    floors = {name: median(times["cuBLAS", name]) for name in ("logits", "6NHV", "8NHV")}
    common = {
        "n": n,
        "h": h,
        "v": v,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
    }
    rows = [
        {
            **common,
            "provider": f"cuBLAS {name}",
            "mode": "forward" if name == "logits" else "step",
            "ms": f"{value:.4f}",
            "runs": len(times["cuBLAS", name]),
            "iqr_ms": spread(times["cuBLAS", name]),
        }
        for name, value in floors.items()
    ]
    for name, (provider, errors, memory) in facts.items():
        for mode, extra in memory.items():
            ms = median(times[name, mode])
            floor = "logits" if mode == "forward" else provider.floor
            shown = {k: f"{x:.2e}" if x != "" else "" for k, x in errors.items()}
            if mode == "forward":
                shown["dh_rel_err"] = shown["dw_rel_err"] = ""
            rows.append({
                **common, **shown, "provider": name, "mode": mode, "ms": f"{ms:.4f}", "floor": floor,
                "floor_ms": f"{floors[floor]:.4f}", "ratio": f"{floors[floor] / ms:.4f}", "extra_mib": f"{extra:.0f}",
                "version": provider.version(), "runs": len(times[name, mode]), "iqr_ms": spread(times[name, mode]),
            })  # fmt: skip
            print(
                f"{shape} {name:26} {mode:8} {ms:9.3f} ms  {floors[floor] / ms:.3f} of {floor:6} "
                f"{extra:8.0f} MiB {shown}",
                flush=True,
            )
    rows += [{**common, "provider": name, "mode": "failed", "note": note} for name, note in failed.items()]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default="4,5,2,0,1,3", help="indices, in the order to measure")
    parser.add_argument("--providers", default="", help="names to measure, separated by ';'; all by default")
    parser.add_argument("--seconds", type=float, default=5.0, help="measuring time a shape")
    parser.add_argument("--budget", type=float, default=480.0, help="start no shape after this many seconds")
    options = parser.parse_args()
    wanted = options.providers.split(";") if options.providers else [p.name for p in PROVIDERS]
    began = time.monotonic()
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for index in map(int, options.shapes.split(",")):
            if time.monotonic() - began > options.budget:
                print(f"out of time before shape {SHAPES[index]}", flush=True)
                break
            chosen = [p for p in PROVIDERS if p.name in wanted]
            writer.writerows(measure(SHAPES[index], chosen, options.seconds, index))
            file.flush()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
