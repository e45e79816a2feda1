"""The session of a suite in a cell, as a pytest plugin.

The CPU seam comes before Megatron is imported; then one process group, the subject, the selection of what applies to
it, and the facts. A suite puts ``tests/compat`` on the path and says ``pytest_plugins = ["support.session"]``.
"""

import faulthandler
import os
import time
import warnings

import hypothesis
import pytest

faulthandler.enable()
_started = time.monotonic()

import torch  # noqa: E402

from mcore_compat.testing import process_groups  # noqa: E402
from mcore_compat.testing.cpu_seam import install_cpu_seam  # noqa: E402
from mcore_compat.testing.ranks import preload_in_ranks  # noqa: E402
from support import applicable, controls  # noqa: E402
from support import facts as cell_facts  # noqa: E402

install_cpu_seam()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing old releases warns about what is not installed; that is not judged here
    from megatron.core.models.gpt.gpt_model import GPTModel

    from support.models.release import features, release_mode
from support.subjects import load_subject  # noqa: E402
from support.subjects.spoiled import Spoiled  # noqa: E402

_import_seconds = time.monotonic() - _started
_SUBJECT = load_subject()
_OFFERED = applicable.capabilities(_SUBJECT, cell_facts.release())
_NOT_APPLICABLE = pytest.StashKey()
preload_in_ranks("mcore_fused", type(_SUBJECT).__module__, "support.ranks.sharded_jobs", "support.ranks.megatron_fsdp")

_common = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
}
hypothesis.settings.register_profile("dev", max_examples=10, **_common)
hypothesis.settings.register_profile("ci", max_examples=20, derandomize=True, database=None, **_common)
hypothesis.settings.register_profile("nightly", max_examples=300, **_common)
hypothesis.settings.register_profile("gpu", max_examples=15, derandomize=True, database=None, **_common)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_configure(config):
    config.addinivalue_line("markers", "needs(*capabilities): capabilities of the subject this check is about")
    config.addinivalue_line("markers", "since(feature): only where the release has the feature: mtp, mup, hook …")
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config, items):
    """Drop what the subject or the release does not have; the inventory knows what must remain."""
    here = features()
    kept, dropped, lacking = [], [], {}
    for item in items:
        missing = applicable.missing(item, _OFFERED)
        since = {name for mark in item.iter_markers("since") for name in mark.args}
        (kept if not missing and since <= here else dropped).append(item)
        if since <= here and missing:
            lacking[item.nodeid.split("[")[0]] = sorted(missing)
    items[:] = kept
    ran = {item.nodeid.split("[")[0] for item in kept}
    config.stash[_NOT_APPLICABLE] = {check: names for check, names in lacking.items() if check not in ran}
    config.hook.pytest_deselected(items=dropped)


class _Facts:
    """What the judge is told, at the start and again, complete, at the end."""

    def __init__(self):
        self.collected = []
        self.not_applicable = {}
        self.controls = {}
        self.launches = {}
        self.spoiled = False
        self.evidence = None
        self.started = time.monotonic()

    def write(self, *, complete):
        cell_facts.write(
            cell_facts.versions()
            | {
                "subject": _SUBJECT.name,
                "capabilities": sorted(_OFFERED),
                "lacks": applicable.lacks(_SUBJECT, _OFFERED),
                "not_applicable": self.not_applicable,
                "mode": self.mode(),
                "evidence": self.evidence or dict(_SUBJECT.evidence()),
                "controls": self.controls,
                "launches": self.launches,
                "stock": cell_facts.stock(),
                "collected": self.collected,
                "seconds": {"imports": round(_import_seconds, 2), "suite": round(time.monotonic() - self.started, 2)},
                "complete": complete,
            }
        )

    def run_controls(self, session):
        """The live controls; what they call is no evidence of the subject."""
        self.evidence, self.spoiled = dict(_SUBJECT.evidence()), True
        try:
            self.controls = controls.run(session)
        finally:
            self.spoiled = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        """Count how often the fused head runs in each check; what the controls do is no evidence."""
        before = _SUBJECT.evidence().get("kernel_launches", 0)
        try:
            return (yield)
        finally:
            ran = _SUBJECT.evidence().get("kernel_launches", 0) - before
            if ran and not self.spoiled:
                check = item.nodeid.split("[")[0]
                self.launches[check] = self.launches.get(check, 0) + ran

    def mode(self):
        """The mode found; None where even finding it fails, which test_mode.py then reports check by check."""
        try:
            return release_mode(_SUBJECT) if _OFFERED else None
        except Exception:  # noqa: BLE001 - facts must be written whatever the candidate does
            return None

    def pytest_collection_finish(self, session):
        self.collected = [item.nodeid for item in session.items]
        self.not_applicable = session.config.stash.get(_NOT_APPLICABLE, {})  # unset where collecting failed
        self.write(complete=False)

    def pytest_sessionfinish(self, session):
        if "MCORE_COMPAT_CELL_OUT" in os.environ and not session.config.option.collectonly:
            self.run_controls(session)
        self.write(complete=True)
        if torch.distributed.is_initialized():
            process_groups.stop()


def pytest_sessionstart(session):
    if not session.config.option.collectonly or "MCORE_COMPAT_CELL_OUT" in os.environ:
        process_groups.start(0, 1, None)
        session.config.pluginmanager.register(_Facts(), "mcore-compat-facts")


@pytest.fixture
def subject(request):
    facts = request.config.pluginmanager.get_plugin("mcore-compat-facts")
    return Spoiled(_SUBJECT) if facts.spoiled else _SUBJECT


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """No check may leave an attribute on a class that others use (a leaked patch shows up here, by name)."""
    watched = [kind for kind in GPTModel.__mro__ if kind.__module__.startswith("megatron")]
    before = [dict(vars(kind)) for kind in watched]
    yield
    for kind, attributes in zip(watched, before, strict=True):
        now = vars(kind)
        changed = {name for name in attributes.keys() | now.keys() if attributes.get(name) is not now.get(name)}
        assert not changed, f"{kind.__qualname__} was left with changed attributes: {sorted(changed)}"
