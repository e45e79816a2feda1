"""The proof of an environment: the true one passes, each fault is named."""

import harness_builders as build
import pytest

from mcore_compat.provision.verify import problems


def found(cell=None, locked=None, **changes):
    return problems(cell or build.cell(), build.facts(**changes), locked or build.LOCKED, "0.1.0")


def test_the_true_environment_has_no_problem():
    assert found() == ()


FAULTS = {
    "another interpreter": ({"python": "3.11.9"}, "3.11.9"),
    "the user's site": ({"user_site": True}, "site-packages"),
    "torch replaced": ({"distributions": {"torch": ("2.12.0",)}}, "torch is 2.12.0, not 2.11.0"),
    "torch gone": ({"distributions": {"torch": ()}}, "torch is not installed"),
    "triton replaced": ({"distributions": {"triton": ("3.9.0",)}}, "triton is 3.9.0, but 3.6.0 was resolved"),
    "numpy too new": ({"distributions": {"numpy": ("2.5.0",)}}, "numpy<2.5"),
    "two versions over each other": ({"distributions": {"numpy": ("2.4.6", "1.26.4")}}, "more than once"),
    "no megatron": ({"distributions": {"megatron-core": ()}}, "not installed"),
    "wrong megatron": ({"distributions": {"megatron-core": ("0.17.1",)}}, "0.17.1 is installed, not 0.18.2"),
    "files changed": (
        {"megatron_files": build.files(changed=("megatron/core/x.py",), changed_count=1)},
        "megatron/core/x.py",
    ),
    "a second root": (
        {"megatron_roots": ("lib/python3.12/site-packages/megatron", "/src/Megatron-LM/megatron")},
        "2 roots",
    ),
    "only a foreign root": ({"megatron_roots": ("/src/Megatron-LM/megatron",)}, "1 roots"),
    "a foreign module": (
        {"imported": build.imported(foreign={"megatron.training": "/src/megatron/training/__init__.py"})},
        "megatron.training",
    ),
    "attribute disagrees": ({"imported": build.imported(attribute="0.19.1")}, "says that it is 0.19.1"),
    "another torch imported": (
        {"imported": build.imported(versions={"torch": "2.12.0"})},
        "torch says that it is 2.12.0",
    ),
    "no subject": ({"distributions": {"mcore-compat": ()}}, "subject is not installed"),
    "old subject": ({"distributions": {"mcore-compat": ("0.0.9",)}}, "subject is 0.0.9"),
    "edited subject": ({"subject_files": build.files(changed=("mcore_fused/patch.py",), changed_count=1)}, "patch.py"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(fault):
    changes, words = FAULTS[fault]
    assert any(words in problem for problem in found(**changes))


def test_a_source_build_may_call_itself_what_it_likes():
    candidate = build.cell(source="git+file:///x@main", megatron_core="main")
    changes = {
        "distributions": {"megatron-core": ("0.20.0",)},
        "imported": build.imported(attribute="0.20.0+1d78d85"),
    }
    assert found(candidate, **changes) == ()
