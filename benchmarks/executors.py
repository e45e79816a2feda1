"""What an executor costs for each cell, apart from the cell: stub cells on local threads and on Ray nodes.

A stub cell provides no environment and runs no suite; what is left is planning, sending, judging and storing. All Ray
nodes are on this machine, so more of them show their own cost and no speed-up. Usage::

    python benchmarks/executors.py --out benchmarks/results/executors.csv [--cells 18 50 200 1000] [--nodes 1 2 4]
"""

import argparse
import csv
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
STUBS = ROOT / "tests" / "unit" / "harness"
sys.path[:0] = [str(STUBS), str(ROOT / "tests" / "cluster")]

import cluster_stubs as stubs
from harness_project import Recorder
from ray_nodes import started

from mcore_compat.pipeline.cluster import ClusterExecutor
from mcore_compat.pipeline.execute import execute
from mcore_compat.pipeline.executors import LocalThreads
from mcore_compat.pipeline.ray_cluster import RayCluster

FIELDS = ["executor", "nodes", "at_a_time", "cells", "seconds", "ms_per_cell", "cores", "load_before"]


def stub_cells(count):
    """So many cells of one release, each with its own name."""
    first = stubs.MATRIX.cell("0.18.2")
    return [first.model_copy(update={"id": f"stub-{number:04}"}) for number in range(count)]


def seconds_of(count, executor):
    """Wall time of a run of so many cells, from the start of the first to the last stored result."""
    with tempfile.TemporaryDirectory() as folder:
        session = stubs.stub_session(stubs.stub_project(folder), stub_cells(count))
        started = time.monotonic()
        report = execute(session, Recorder(), executor(Path(folder)))
        seconds = time.monotonic() - started
        session.folder.alive.release()
        assert len(report.cells) == count
        assert report.verdict == "ok", [cell.reason for cell in report.cells if not cell.verdict.green][:3]
    return seconds


def row(executor, nodes, at_a_time, count, seconds, load):
    return {
        "executor": executor,
        "nodes": nodes,
        "at_a_time": at_a_time,
        "cells": count,
        "seconds": f"{seconds:.2f}",
        "ms_per_cell": f"{1000 * seconds / count:.1f}",
        "cores": len(os.sched_getaffinity(0)),
        "load_before": f"{load:.1f}",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", type=int, nargs="+", default=[18, 50, 200, 1000])
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--no-local", action="store_true", help="leave local threads out")
    options = parser.parse_args()
    with options.out.open("w", newline="", encoding="utf-8") as stream:
        table = csv.DictWriter(stream, FIELDS, lineterminator="\n")
        table.writeheader()

        def measured(name, nodes, at_a_time, executor):
            for count in options.cells:
                load = os.getloadavg()[0]
                entry = row(name, nodes, at_a_time, count, seconds_of(count, executor), load)
                table.writerow(entry)
                stream.flush()
                print(entry, flush=True)

        for jobs in () if options.no_local else (1, 2, 4):
            measured("local", 0, jobs, lambda _folder, jobs=jobs: LocalThreads(jobs))
        for count in options.nodes:
            with started([{"num_cpus": 1}] * count):
                seconds_of(2 * count, lambda folder: ClusterExecutor(RayCluster(folder / "store")))  # starts workers
                measured("ray", count, count, lambda folder: ClusterExecutor(RayCluster(folder / "store")))


if __name__ == "__main__":
    main()
