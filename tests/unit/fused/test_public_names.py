"""The package's public names, and the form of its errors' messages."""

import ast
import inspect
from pathlib import Path

import pytest

import mcore_fused
from mcore_fused import errors

SOURCE = Path(mcore_fused.__file__).parent


def error_classes():
    found = [errors.MCoreFusedError]
    for kind in found:
        found += kind.__subclasses__()
    return sorted(set(found), key=lambda kind: kind.__name__)


def test_all_is_sorted_and_everything_in_it_is_documented() -> None:
    assert mcore_fused.__all__ == sorted(mcore_fused.__all__)
    for name in mcore_fused.__all__:
        thing = getattr(mcore_fused, name)
        assert inspect.getdoc(thing), name
        assert thing.__module__.startswith("mcore_fused."), name


def test_all_holds_what_the_public_modules_offer() -> None:
    """Every error class and the kernel's whole interface; no public name of the package itself is left out."""
    assert errors.MCoreFusedError is errors.McoreFusedError  # the older spelling of the root, and its name
    more = {"MCoreFusedError", "UnusableHookWarning"}
    assert set(errors.__all__) == {kind.__name__ for kind in error_classes()} | more
    assert set(errors.__all__) <= set(mcore_fused.__all__)
    assert set(mcore_fused.kernel.__all__) <= set(mcore_fused.__all__)
    public = {name for name, value in vars(mcore_fused).items() if not name.startswith("_") and callable(value)}
    assert public == set(mcore_fused.__all__)


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("problem", "step"), [("labels are floats", "pass integers"), ("It is so. ", "Stop?")])
def test_errors_are_two_sentences(kind, problem, step) -> None:
    error = kind(problem, step, about_megatron=False)
    assert str(error) == f"{problem.strip().rstrip('.')}. Next step: {step.rstrip('?')}{'?' if '?' in step else '.'}"
    assert str(kind("a", "b", about_megatron=True)).startswith("a. [megatron-core")


def raise_sites():
    """Every place that makes one of the errors, with the ends of both texts."""
    names = {kind.__name__ for kind in error_classes()}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                yield path, node


def test_every_error_says_what_to_do() -> None:
    """Both sentences are given at every place that makes an error; neither is empty."""
    sites = list(raise_sites())
    assert len(sites) > 40
    for path, node in sites:
        where = f"{path.relative_to(SOURCE)}:{node.lineno}"
        assert len(node.args) == 2, where
        for text in node.args:
            assert not isinstance(text, ast.Constant) or str(text.value).strip(), where


def test_a_message_of_the_kernel_reads_as_two_sentences() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(errors.CallArgumentError) as caught:
        mcore_fused.linear_cross_entropy(
            torch.zeros(4, 2), torch.zeros(16, 2), torch.tensor([0, 1, 2, 99]), check_labels=True
        )
    assert str(caught.value) == (
        "label 99 at token 3 is outside the vocabulary of 16. "
        "Next step: pass ids below 16, or ignore_index (-100) for tokens that do not count."
    )
