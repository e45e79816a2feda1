"""Live controls: a few checks run once more, against a subject that is wrong on purpose, and must fail.

They run in the cell's own process, after the checks, through pytest's own hooks. Whatever makes failures pass there (a
conftest, a plugin, a start-up file, a changed comparison of torch) makes a control pass, and the judge sees it.

Facts get ``"controls": {"<check>": "failed" or "passed"}``. Only the plugins that report to people and files are left
out, since a control's failure is not a failure of the session.
"""

from _pytest import runner

CHECKS = (
    "test_labels.py::test_labels_that_do_not_fit",
    "test_no_logits.py::test_forward_and_backward",
    "test_numbers.py::test_ignored_labels_are_exactly_zero",
    "test_safety.py::test_every_fused_call_leaves_evidence",
    "test_stock_loss.py::test_minus_log_prob_is_the_stock_loss",
)
# Modules of the plugins that count, print and save what is reported to them.
_REPORTING = ("_pytest.", "pytest_reportlog", "xdist.")


def run(session):
    """Run one case of each control that was collected; its outcome by check."""
    cases = {}
    for item in session.items:
        cases.setdefault(item.nodeid.split("[")[0], item)
    return {check: _outcome(session.config, cases[check]) for check in CHECKS if check in cases}


def _outcome(config, item):
    """What pytest and every other plugin make of the case."""
    item._initrequest()  # it has run before
    reports = runner.runtestprotocol(item, log=False, nextitem=None)
    tell = config.pluginmanager.subset_hook_caller("pytest_runtest_logreport", _reporting(config.pluginmanager))
    for report in reports:
        tell(report=report)
    return "failed" if any(report.failed for report in reports) else "passed"


def _reporting(manager):
    return [
        plugin
        for name, plugin in manager.list_name_plugin()
        if plugin is not None and _module(plugin).startswith(_REPORTING)
    ]


def _module(plugin):
    return getattr(plugin, "__name__", None) or type(plugin).__module__
