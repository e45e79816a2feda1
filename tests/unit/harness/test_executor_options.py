"""The options that say where cells run."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcore_compat.cli.executor import ExecutorName, choose_executor, executor_words
from mcore_compat.cli.main import app
from mcore_compat.errors import UsageError
from mcore_compat.pipeline.cluster import ClusterExecutor, Request
from mcore_compat.pipeline.executors import LocalThreads

USUAL = {"cpus": 1.0, "gpus": None, "memory": None, "resources": None, "wait_s": 600.0, "node_cache": None}


def test_local_threads_are_the_default_and_ray_is_chosen_by_name():
    assert choose_executor(ExecutorName.LOCAL, 3, **USUAL) == LocalThreads(3)
    chosen = choose_executor(ExecutorName.RAY, 3, **USUAL)
    assert isinstance(chosen, ClusterExecutor)
    assert (chosen.request, chosen.patience_s) == (Request(), 600.0)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("8GiB", 8 << 30), ("500MB", 500_000_000), ("512 MiB", 512 << 20), ("1024", 1024), ("2G", 2_000_000_000)],
)
def test_amounts_of_memory(text, amount):
    assert choose_executor(ExecutorName.RAY, 1, **USUAL | {"memory": text}).request.memory == amount


@pytest.mark.parametrize(
    "change", [{"memory": "much"}, {"memory": "-1"}, {"resources": ["H200"]}, {"resources": ["=1"]}]
)
def test_what_is_not_an_amount_is_refused(change):
    with pytest.raises(UsageError, match="is not"):
        choose_executor(ExecutorName.RAY, 1, **USUAL | change)


def test_the_command_that_resumes_a_run_names_the_executor():
    assert executor_words(ExecutorName.LOCAL, **USUAL) == []
    assert executor_words(ExecutorName.RAY, **USUAL) == ["--executor ray"]
    place = {
        "cpus": 2.0,
        "gpus": 4.0,
        "memory": "8GiB",
        "resources": ["H200=1"],
        "wait_s": 5.0,
        "node_cache": Path("/x"),
    }
    words = executor_words(ExecutorName.RAY, **place)
    assert " ".join(words) == (
        "--executor ray --ray-cpus 2 --ray-gpus 4 --ray-memory 8GiB --ray-wait 5 --node-cache /x --ray-resource H200=1"
    )
    chosen = choose_executor(ExecutorName.RAY, 1, **place)
    assert chosen.request == Request(2, 4, 8 << 30, (("H200", 1.0),))


@pytest.mark.parametrize("command", [["run"], ["gpu", "run"]])
def test_both_lanes_have_the_options(command):
    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"}).output
    for option in (
        "--executor",
        "--ray-cpus",
        "--ray-gpus",
        "--ray-memory",
        "--ray-resource",
        "--ray-wait",
        "--node-cache",
    ):
        assert option in shown
