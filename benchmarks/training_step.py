"""What a user gains: log-probs and one training step of real ``GPTModel``s, providers side by side in one run.

    python benchmarks/training_step.py --out benchmarks/results/training_h200.csv
    torchrun --nproc-per-node 2 benchmarks/training_step.py --tensor-parallel 2 --out FILE
    python benchmarks/training_step.py --device cpu --tiny --out /dev/null

megatron-core must be importable. Every model is one pool of measurements: rounds go over the providers in a new random
order, and medians are reported, because a large GPU is limited by power and whatever runs after a pause is faster.
``peak_mib`` is the peak of one call beyond what was allocated before it (weights, batch); a step's holds the gradients.
``loss_difference`` is relative to stock's loss; a provider without entropy is compared with stock's loss without it.
``largest_tokens`` is the largest power of two of tokens whose step fits (``--largest``).
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime as dt
import gc
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from training_models import MODELS, TINY, build, make_batch, start
from training_providers import ENTROPY, PROVIDERS, TrainingProvider

COLUMNS = [
    "model", "provider", "mode", "tokens", "counted", "ms", "iqr_ms", "tokens_per_s", "peak_mib", "loss",
    "loss_difference", "largest_tokens", "runs", "note", "gpu", "gpus", "sm_mhz", "max_sm_mhz", "power_w",
    "power_limit_w", "temperature_c", "torch", "triton", "megatron", "date",
]  # fmt: skip
_STATE = ("clocks.sm", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")


class Clock:
    """Times of calls, and their peak memory, on one device."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def measure(self, call) -> tuple[float, float, Any]:
        """Milliseconds, MiB beyond what was there, and what the call returns."""
        if not self.cuda:
            begun = time.perf_counter()
            value = call()
            return (time.perf_counter() - begun) * 1e3, 0.0, value
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        value = call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end), (torch.cuda.max_memory_allocated() - before) / 2**20, value


def machine(device: str) -> dict[str, Any]:
    """The GPU and its state under load: clocks, power, temperature."""
    facts: dict[str, Any] = {"torch": torch.__version__, "date": dt.datetime.now(dt.UTC).date().isoformat()}
    facts["gpus"] = torch.distributed.get_world_size()
    with contextlib.suppress(ImportError):
        import triton

        facts["triton"] = triton.__version__
    import megatron.core

    facts["megatron"] = megatron.core.__version__
    facts["gpu"] = "CPU"
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            query = ["nvidia-smi", f"--query-gpu={','.join(_STATE)}", "--format=csv,noheader,nounits"]
            found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
            names = ("sm_mhz", "max_sm_mhz", "power_w", "power_limit_w", "temperature_c")
            facts |= dict(zip(names, found[0].split(", "), strict=True))
    return facts


class Pool:
    """All providers on one model and one batch."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        self.shape = (TINY if options.tiny else MODELS)[name]
        self.clock = Clock(options.device)
        self.model = build(self.shape, options.device, options.tensor_parallel)
        self.model.train()
        self.batch = self.make(options.tokens)
        self.samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self.losses: dict[str, float] = {}
        self.largest: dict[str, int] = {}
        self.notes: dict[str, str] = {}

    def make(self, tokens: int):
        return make_batch(self.shape, tokens, self.options.row, self.options.prompt_share, self.options.device)

    def step(self, provider: TrainingProvider, batch) -> torch.Tensor:
        loss = provider.step_loss(self.model, batch)
        loss.backward()
        if provider.main_grad:
            weight = self.head_weight()
            if not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False):
                weight.main_grad.add_(weight.grad)
            weight.grad, weight.grad_added_to_main_grad = None, False
        return loss.detach()

    def head_weight(self):
        return self.model.shared_embedding_or_output_weight() if self.shape.tied else self.model.output_layer.weight

    @contextlib.contextmanager
    def ready(self, provider: TrainingProvider):
        """The provider installed, buffers as it needs them, no gradients before and after."""
        weight = self.head_weight()
        if provider.main_grad:
            weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
            weight.grad_added_to_main_grad = False
        around = provider.around(self.model) if provider.around else contextlib.nullcontext()
        try:
            with around:
                yield
        finally:
            self.model.zero_grad(set_to_none=True)
            for name in ("main_grad", "grad_added_to_main_grad"):
                if hasattr(weight, name):
                    delattr(weight, name)

    def once(self, provider: TrainingProvider, *, keep: bool) -> None:
        with self.ready(provider):
            with torch.no_grad():
                ms, mib, _ = self.clock.measure(lambda: provider.outputs(self.model, self.batch))
            step_ms, step_mib, loss = self.clock.measure(lambda: self.step(provider, self.batch))
        self.losses[provider.name] = float(loss)
        if keep:
            self.samples.setdefault((provider.name, "log-probs"), []).append((ms, mib))
            self.samples.setdefault((provider.name, "step"), []).append((step_ms, step_mib))

    def usable(self) -> list[TrainingProvider]:
        """Providers that run here; each is warmed up (twice: compilers, allocators)."""
        found = []
        for provider in PROVIDERS:
            if not provider.tensor_parallel and self.options.tensor_parallel > 1:
                continue
            try:
                provider.needs()
                for _ in range(2):
                    self.once(provider, keep=False)
                found.append(provider)
            except torch.cuda.OutOfMemoryError:
                self.notes[provider.name] = "out of memory"
            except Exception as error:  # noqa: BLE001 - a peer that is missing or fails is a row of the table
                self.notes[provider.name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
                if provider.name.startswith(("stock", "ours")):
                    print(f"{self.name}: {provider.name}: {self.notes[provider.name]}", file=sys.stderr)
            self.free()
        return found

    def free(self) -> None:
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.options.device == "cuda":
            torch.cuda.empty_cache()

    def run(self, seconds: float) -> None:
        providers, ends, shuffler, rounds = self.usable(), time.monotonic() + seconds, random.Random(0), 0
        while rounds < self.options.rounds and self.agreed(time.monotonic() < ends or rounds < 3):
            rounds += 1
            shuffler.shuffle(providers)
            for provider in providers:
                self.once(provider, keep=True)
        if self.options.largest:
            for provider in sorted(providers, key=lambda provider: provider.name):
                self.largest[provider.name] = self.search(provider)

    def agreed(self, go_on: bool) -> bool:
        """The same answer on every rank."""
        answer = torch.tensor(int(go_on), device=self.options.device)
        torch.distributed.broadcast(answer, 0)
        return bool(answer)

    def search(self, provider: TrainingProvider) -> int:
        tokens = best = self.options.tokens
        while tokens < self.options.most_tokens:
            tokens *= 2
            try:
                batch = self.make(tokens)
                with self.ready(provider):
                    self.step(provider, batch)
            except torch.cuda.OutOfMemoryError:
                break
            finally:
                self.free()
            best = tokens
        return best

    def expected_loss(self, provider: TrainingProvider) -> float | None:
        """Stock's loss, without its entropy for a provider that has none."""
        if "stock logits" in self.notes:
            return None
        with torch.no_grad(), self.ready(PROVIDERS[0]):
            log_probs, entropy = PROVIDERS[0].outputs(self.model, self.batch)
        counted = self.batch.labels != -100
        value = -(self.batch.advantages * log_probs)[counted].sum()
        if provider.name != "Megatron's fused cross entropy":
            value = value - ENTROPY * entropy[counted].sum()
        return float(value / self.batch.counted)

    def rows(self) -> list[dict[str, Any]]:
        facts, found = machine(self.options.device), []
        for provider in PROVIDERS:
            base = {"model": self.name, "provider": provider.name, "tokens": self.batch.tokens, **facts}
            base |= {"counted": self.batch.counted, "note": self.notes.get(provider.name, "")}
            if provider.name in self.notes:
                found.append(base)
                continue
            for mode in ("log-probs", "step"):
                samples = self.samples.get((provider.name, mode))
                if not samples:
                    continue
                times = sorted(ms for ms, _ in samples)
                middle = statistics.median(times)
                row = base | {"mode": mode, "ms": round(middle, 3), "runs": len(times)}
                row["iqr_ms"] = round(times[(3 * len(times)) // 4] - times[len(times) // 4], 3)
                row["tokens_per_s"] = round(self.batch.tokens / middle * 1e3)
                row["peak_mib"] = round(max(mib for _, mib in samples))
                if mode == "step":
                    loss, expected = self.losses[provider.name], self.expected_loss(provider)
                    row |= {"loss": loss, "largest_tokens": self.largest.get(provider.name, "")}
                    if expected is not None:
                        row["loss_difference"] = f"{abs(loss - expected) / abs(expected):.2e}"
                found.append(row)
        return found


def main() -> int:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes: a rehearsal, also without a GPU")
    parser.add_argument("--models", help="comma-separated; default: all")
    parser.add_argument("--tokens", type=int, help="tokens per micro-batch")
    parser.add_argument("--row", type=int, help="mean length of a packed row")
    parser.add_argument("--prompt-share", type=float, default=0.5, help="part of each row that is prompt")
    parser.add_argument("--rounds", type=int, default=12, help="at most so many rounds over the providers")
    parser.add_argument("--seconds", type=float, default=480, help="time for all models together, warm-up not counted")
    parser.add_argument("--largest", action="store_true", help="also search the largest batch that fits")
    parser.add_argument("--most-tokens", type=int, default=1 << 18, help="end of that search")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    options = parser.parse_args()
    options.tokens = options.tokens or (64 if options.tiny else 8192)
    options.row = options.row or (12 if options.tiny else 1024)
    names = options.models.split(",") if options.models else list(TINY if options.tiny else MODELS)
    start(options.device, options.tensor_parallel)
    rows: list[dict[str, Any]] = []
    for name in names:
        pool = Pool(name, options)
        pool.run(options.seconds / len(names))
        rows += pool.rows()
        if torch.distributed.get_rank() == 0:
            for row in (row for row in rows if row["model"] == name):
                print({key: row.get(key) for key in COLUMNS[:12] if row.get(key) not in (None, "")}, flush=True)
            with options.out.open(
                "w", newline=""
            ) as file:  # after every model: a run that is cut short leaves the rest
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(rows)
        pool.free()
        del pool
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
