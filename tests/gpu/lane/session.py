"""What every GPU check gets beyond the property suite's set-up, as a pytest plugin."""

import os

import pytest
import torch

from lane import faults
from lane.paths import CUDA, expected_paths, launches

_FAULT = os.environ.get("MCORE_COMPAT_FAULT", "")
_FAILED = pytest.StashKey[bool]()


def pytest_configure(config):
    config.addinivalue_line("markers", "kernel(path): where the fused head of this check must run; default: the GPU's")
    # Bit-for-bit comparisons need an attention whose backward does not depend on the order of atomic additions.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    faults.plant(_FAULT)


def pytest_collection_modifyitems(items):
    """With a fault planted, what is demanded is one red check a cell; the search for small examples is left out."""
    if _FAULT:
        items[:] = [item for item in items if item.module.__name__ == "test_lane_numbers"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        item.stash[_FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def _the_promised_kernel_ran(request, subject):
    """Evidence for each check by itself: a kernel that was launched elsewhere proves nothing here."""
    if request.module.__name__.startswith("test_kernel_") or "evidence" not in subject.capabilities:
        yield
        return
    marker = request.node.get_closest_marker("kernel")
    before = launches(subject)
    yield
    if request.node.stash[_FAILED]:
        return  # why it failed is told; that it did not come to its kernel after that is no second reason
    ran = {path for path, count in launches(subject).items() if count > before[path]}
    expected = expected_paths(marker.args[0] if marker else "gpu")
    assert ran, "no fused head ran in this check"
    assert ran <= expected, f"the fused head ran on {sorted(ran)}, promised was {sorted(expected)}"


@pytest.fixture(autouse=True)
def _memory_is_given_back():
    """Cells share one GPU: what a check leaves in the cache, another cell lacks."""
    yield
    if CUDA:
        torch.cuda.empty_cache()
