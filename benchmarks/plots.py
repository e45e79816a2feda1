"""Plots and tables of the kernel benchmark, drawn only from its CSV.

    python benchmarks/plots.py benchmarks/results/kernel_h200.csv --plots benchmarks/plots --page docs/kernel.md

Writes ``kernel_step.svg``, ``kernel_forward.svg`` and ``kernel_memory_accuracy.svg``, and replaces what stands between
the marks ``<!-- table:NAME -->`` and ``<!-- end -->`` on the page.
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path

Row = dict[str, str]
# Fixed colours: ours in one hue, the others in greys and one accent each, so that plots compare at a glance.
COLOURS = {
    "ours": "#0b6e4f", "ours, workspace 280 MiB": "#3a9b7a", "ours, all kept": "#73c2a5",
    "ours, loss folded in": "#a9dcc8", "ours, plain Triton": "#d2eee3", "Liger sm_90": "#c1440e",
    "verl Triton": "#3d5a98", "torch.compile": "#7a7a7a", "eager": "#b5b5b5", "quack": "#b08900",
    "Liger FLCE": "#e08a66", "cut-cross-entropy": "#8a5a9e",
}  # fmt: skip


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def shapes(rows: list[Row]) -> list[tuple[str, str, str]]:
    found = {(r["n"], r["h"], r["v"]) for r in rows}
    return sorted(found, key=lambda s: int(s[0]) * int(s[1]) * int(s[2]))


def pick(rows: list[Row], shape: tuple[str, str, str], mode: str) -> dict[str, Row]:
    return {
        r["provider"]: r
        for r in rows
        if (r["n"], r["h"], r["v"]) == shape and r["mode"] == mode and r["provider"] in COLOURS
    }


def eight(rows: list[Row], shape: tuple[str, str, str]) -> float:
    """The floor with one recomputation, of a shape."""
    return next(float(r["floor_ms"]) for r in rows if (r["n"], r["h"], r["v"]) == shape and r.get("floor") == "8NHV")


def bars(rows: list[Row], mode: str, title: str, path: Path) -> None:
    """Time over the cuBLAS products of the same run: bars of 1 are as fast as the products alone."""
    from matplotlib import pyplot as plt

    sizes = shapes(rows)
    figure, axes = plt.subplots(2, 3, figsize=(15, 9), constrained_layout=True)
    for axis, shape in zip(axes.flat, sizes, strict=False):
        found = pick(rows, shape, mode)
        floor = eight(rows, shape) if mode == "step" else None
        names = [name for name in COLOURS if name in found][::-1]
        values = [float(found[n]["ms"]) / (floor or float(found[n]["floor_ms"])) for n in names]
        axis.barh(names, values, color=[COLOURS[n] for n in names])
        for y, (name, value) in enumerate(zip(names, values, strict=True)):
            axis.text(min(value, 5.6) + 0.05, y, f"{float(found[name]['ms']):.4g} ms", va="center", fontsize=8)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xlim(0, 6.6)
        axis.set_title("N={} H={} V={}".format(*shape), fontsize=10)
        axis.tick_params(labelsize=8)
    figure.suptitle(title)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def memory_accuracy(rows: list[Row], path: Path) -> None:
    """Step time against extra memory, and against the log-prob error, at the largest vocabulary of 8192 tokens."""
    from matplotlib import pyplot as plt

    shape = ("8192", "4096", "151936")
    found = pick(rows, shape, "step")
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), constrained_layout=True)
    for name, row in found.items():
        ms = float(row["ms"])
        left.scatter(max(float(row["extra_mib"]), 1), ms, color=COLOURS[name], s=60)
        left.annotate(
            name, (max(float(row["extra_mib"]), 1), ms), fontsize=8, xytext=(4, 4), textcoords="offset points"
        )
        if row["logp_abs_err"]:
            right.scatter(float(row["logp_abs_err"]), ms, color=COLOURS[name], s=60)
            right.annotate(
                name, (float(row["logp_abs_err"]), ms), fontsize=8, xytext=(4, 4), textcoords="offset points"
            )
    for axis, label in ((left, "peak memory beyond the gradients, MiB"), (right, "largest log-prob error")):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(label)
        axis.set_ylabel("step, ms")
    figure.suptitle("N={} H={} V={}: lower left is better".format(*shape))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def table(rows: list[Row], mode: str) -> str:
    sizes = shapes(rows)
    names = [n for n in COLOURS if any(n in pick(rows, s, mode) for s in sizes)]
    head = "| ms (part of the floor) | " + " | ".join("{} x {} x {}".format(*s) for s in sizes) + " |"
    lines = [head, "|" + "---|" * (len(sizes) + 1)]
    for name in names:
        cells = []
        for shape in sizes:
            row = pick(rows, shape, mode).get(name)
            cells.append("-" if row is None else f"{float(row['ms']):.4g} ({float(row['ratio']):.2f})")
        floor = {pick(rows, s, mode)[name]["floor"] for s in sizes if name in pick(rows, s, mode)}
        mark = " *" if "6NHV" in floor else ""
        lines.append(f"| {name}{mark} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def memory_table(rows: list[Row]) -> str:
    sizes = shapes(rows)
    lines = [
        "| MiB beyond the gradients, a step | " + " | ".join("{} x {} x {}".format(*s) for s in sizes) + " |",
        "|" + "---|" * (len(sizes) + 1),
    ]
    for name in COLOURS:
        cells = [pick(rows, s, "step").get(name, {}).get("extra_mib", "-") for s in sizes]
        if set(cells) != {"-"}:
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def accuracy_table(rows: list[Row]) -> str:
    """The worst over all shapes."""
    lines = ["| largest over the shapes | log-prob | entropy | dH | dW |", "|---|---|---|---|---|"]
    for name in COLOURS:
        mine = [r for r in rows if r["provider"] == name and r["mode"] == "step"]
        cells = []
        for column in ("logp_abs_err", "entropy_abs_err", "dh_rel_err", "dw_rel_err"):
            values = [float(r[column]) for r in mine if r[column]]
            cells.append(f"{max(values):.1e}" if values else "-")
        if set(cells) != {"-"}:
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def facts(rows: list[Row]) -> str:
    first = next(r for r in rows if r["gpu"])
    versions = sorted({f"{r['provider']} {r['version']}" for r in rows if r.get("version")})
    failed = {}
    for row in rows:
        if row["mode"] == "failed":
            note = re.sub(r" at 0x[0-9a-f]+", "", row["note"])
            failed.setdefault(f"{row['provider']}: {note}", []).append(f"{row['n']} x {row['h']} x {row['v']}")
    text = f"{first['gpu']}, torch {first['torch']}, triton {first['triton']}, {first['date']}. {'; '.join(versions)}."
    shapes = len({(row["n"], row["h"], row["v"]) for row in rows})
    notes = [f"{note} (at {'every shape' if len(at) == shapes else ', '.join(at)})" for note, at in failed.items()]
    return text + (f" Not measured: {'; '.join(notes)}." if notes else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--plots", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    rows = read(options.csv)
    if options.plots:
        import matplotlib as mpl

        mpl.use("svg")
        mpl.rcParams["svg.hashsalt"] = "kernel"
        mpl.rcParams["svg.fonttype"] = "none"
        options.plots.mkdir(parents=True, exist_ok=True)
        bars(rows, "step", "Step, in units of four cuBLAS products (8NHV)", options.plots / "kernel_step.svg")
        bars(rows, "forward", "Forward, in units of the cuBLAS logits product", options.plots / "kernel_forward.svg")
        memory_accuracy(rows, options.plots / "kernel_memory_accuracy.svg")
    if options.page:
        page = options.page.read_text()
        parts = {
            "facts": facts(rows), "step": table(rows, "step"), "forward": table(rows, "forward"),
            "memory": memory_table(rows), "accuracy": accuracy_table(rows),
        }  # fmt: skip
        for name, text in parts.items():
            mark = rf"(<!-- table:{name} -->\n).*?(<!-- end -->)"
            page = re.sub(mark, lambda m, t=text: m[1] + t + "\n" + m[2], page, flags=re.DOTALL)
        options.page.write_text(page)


if __name__ == "__main__":
    main()
