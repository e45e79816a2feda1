"""A Ray cluster of three nodes on this machine, and the stub cells of the harness's own tests."""

import sys

import pytest
from ray_nodes import STUBS, started

sys.path.insert(0, str(STUBS))


@pytest.fixture(scope="module")
def nodes():
    """A head with two cores, and two nodes of which one says that it has two GPUs."""
    with started([{"num_cpus": 2}, {"num_cpus": 1, "num_gpus": 2}, {"num_cpus": 1}]) as cluster:
        yield cluster
