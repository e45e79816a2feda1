"""Vectorised packing against a loop over rows: layout, ids, shifted labels and unpacking of one micro-batch.

Usage: python benchmarks/packing.py [--device cpu|cuda] [--output benchmarks/results/packing_<device>.csv]

The loop does what frameworks do today: row lengths on the host once, then slices row by row into a zeroed buffer,
labels by a roll with one correction a row, results by a slice a row. Both variants run in random order in one
loop; a time is the median over rounds, the device idle before and after. Both results are compared first.
"""

import argparse
import csv
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch

from mcore_fused.packing import PackingLayout, PackingSettings

ROWS = (8, 256, 4096)
MEAN_LENGTH = 128
IGNORED = -100


def batch_of(rows, device):
    """Row lengths between 1 and twice the mean, as a jagged tensor."""
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(1, 2 * MEAN_LENGTH, (rows,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    values = torch.randint(1, 32000, (int(offsets[-1]),), generator=generator)
    return torch.nested.nested_tensor_from_jagged(values.to(device), offsets.to(device))


def with_layout(nested, settings):
    layout = PackingLayout.from_nested(nested, settings)
    ids, labels = layout.pack_ids(nested), layout.pack_labels(nested)
    # Stand-in for the other ranks' results: unpacking costs the same whatever their values.
    result = layout.unpack_ranks([ids] * settings.cp_size)
    return ids, labels, result


def with_loop(nested, settings):
    cp_size, rank = settings.cp_size, settings.cp_rank
    bounds = nested.offsets().tolist()
    values = nested.values()
    multiple = settings.row_multiple
    lengths = [end - start for start, end in pairwise(bounds)]
    padded = [-(-length // multiple) * multiple for length in lengths]
    local = sum(padded) // cp_size
    ids, labels = (torch.full((local,), fill, device=values.device) for fill in (0, IGNORED))
    at = 0
    for start, length, slots in zip(bounds, lengths, padded, strict=False):
        row = values[start : start + length]
        shifted = torch.cat([row[1:], row.new_full((1,), IGNORED)])
        chunks = [(0, slots)] if cp_size == 1 else _chunks(slots, cp_size, rank)
        for begin, end in chunks:
            real = max(min(end, length) - begin, 0)
            if real:
                ids[at : at + real] = row[begin : begin + real]
                labels[at : at + real] = shifted[begin : begin + real]
            at += end - begin
    rows, at = [], 0
    for length, slots in zip(lengths, padded, strict=True):
        size = slots // cp_size
        if cp_size == 1:
            rows.append(ids[at : at + length])
        else:
            whole = ids.new_empty(slots)
            for other in range(cp_size):
                taken = at
                for begin, end in _chunks(slots, cp_size, other):
                    whole[begin:end] = ids[taken : taken + end - begin]
                    taken += end - begin
            rows.append(whole[:length])
        at += size
    return ids[None], labels[None], torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _chunks(slots, cp_size, rank):
    size = slots // (2 * cp_size)
    return [(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * cp_size - 1 - rank)]


def timed(function, nested, settings):
    if nested.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function(nested, settings)
    if nested.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def measure(rows, cp_size, device, rounds):
    nested = batch_of(rows, device)
    settings = PackingSettings(cp_size=cp_size, cp_rank=cp_size - 1)
    variants = {"layout": with_layout, "loop": with_loop}
    results = [variant(nested, settings) for variant in variants.values()]
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(*(item.values() if item.is_nested else item for item in (ours, theirs)))
    times = {name: [] for name in variants}
    for _ in range(rounds):
        for name in random.sample(sorted(variants), k=len(variants)):
            times[name].append(timed(variants[name], nested, settings))
    medians = {name: statistics.median(values) for name, values in times.items()}
    kind = torch.cuda.get_device_name() if device == "cuda" else "cpu, 1 thread"
    return {
        "device": kind,
        "torch": torch.__version__,
        "cp_size": cp_size,
        "rows": rows,
        "tokens": nested.values().shape[0],
        "rounds": rounds,
        "layout_ms": round(medians["layout"], 3),
        "loop_ms": round(medians["loop"], 3),
        "loop_over_layout": round(medians["loop"] / medians["layout"], 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    output = options.output or Path(__file__).parent / "results" / f"packing_{options.device}.csv"
    random.seed(0)
    torch.set_num_threads(1)  # the index arithmetic is one thread's work beside a training step
    with torch.no_grad():
        table = [
            measure(rows, cp_size, options.device, rounds=11 if rows > 1000 else 51)
            for cp_size in (1, 4)
            for rows in ROWS
        ]
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    for row in table:
        print(row)


if __name__ == "__main__":
    main()
