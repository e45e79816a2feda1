"""Mode detection over generated forwards: whatever a signature looks like, what the model does decides."""

import functools
import inspect
import sys
import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import Shape, batch_for, build, model_class
from support.models.release import features
from support.subjects import load_subject, patched

import mcore_fused
from mcore_compat.testing.reference import stock_forward

pytestmark = pytest.mark.needs("mode", "patch", "legacy", "library")

BATCH = batch_for(97, 2, 4)
HOOK = ("output_processor", "output_processor_context")
STYLES = {  # where the hook's parameters are in the signature
    "positional": (", output_processor=None, output_processor_context=None", ""),
    "keyword-only": ("", ", output_processor=None, output_processor_context=None"),
    "split": (", output_processor=None", ", output_processor_context=None"),
    "one only": ("", ", output_processor=None"),
    "kwargs": ("", ""),
}
DECORATIONS = ("plain", "wraps", "other names", "partial method", "shown signature")


@dataclass(frozen=True)
class Written:
    """How somebody wrote the forward of a subclass."""

    style: str
    decoration: str
    passes_on: bool
    extras: int

    @property
    def named(self):
        """Whether the outermost function itself names both parameters; a decorator's own names count."""
        return self.style in {"positional", "keyword-only", "split"} and self.decoration in {
            "plain", "partial method", "shown signature",
        }  # fmt: skip


def _forward(written):
    before, after = STYLES[written.style]
    extras = "".join(f", extra_{number}=None" for number in range(written.extras))
    source = (
        "def forward(self, input_ids, position_ids, attention_mask, decoder_input=None, labels=None"
        f"{extras}{before}, *{after}, **kwargs):\n    return body(dict(locals()))\n"
    ).replace(", *, **kwargs", ", **kwargs")
    stock = model_class().forward

    def body(given_names):
        self, kwargs = given_names.pop("self"), given_names.pop("kwargs")
        hook = {name: given_names.pop(name) for name in HOOK if name in given_names}
        hook |= {name: kwargs.pop(name) for name in HOOK if name in kwargs}
        names = {name: value for name, value in given_names.items() if not name.startswith("extra_")}
        hook = {name: value for name, value in hook.items() if value is not None}
        return stock(self, **names, **kwargs, **(hook if written.passes_on else {}))

    made = {"body": body}
    exec(source, made)
    return _decorated(made["forward"], written.decoration)


def _decorated(forward, decoration):
    if decoration == "wraps":

        @functools.wraps(forward)
        def wrapped(*args, **kwargs):
            return forward(*args, **kwargs)

        return wrapped
    if decoration == "other names":

        def other_names(*args, **kwargs):
            return forward(*args, **kwargs)

        return other_names
    if decoration == "partial method":
        return functools.partialmethod(forward, runtime_gather_output=None)
    if decoration == "shown signature":

        def shown(self, *args, **kwargs):
            return forward(self, *args, **kwargs)

        shown.__signature__ = inspect.signature(forward)
        return shown
    return forward


def _is_reached(model):
    seen = []

    def processor(**hook):
        seen.append(1)
        return hook["hidden_states"]

    try:
        model(*BATCH.inputs, labels=BATCH.labels, output_processor=processor)
    except TypeError:
        return False
    return bool(seen)


@given(
    written=st.builds(
        Written,
        style=st.sampled_from(sorted(STYLES)),
        decoration=st.sampled_from(DECORATIONS),
        passes_on=st.booleans() if "hook" in features() else st.just(False),
        extras=st.integers(0, 2),
    )
)
def test_the_mode_of_any_forward(written):
    """Hook mode where the hook is named and reached; legacy mode otherwise, with one warning if it was named."""
    subject = load_subject()
    model = build(Shape(), cls=type("Generated", (model_class(),), {"forward": _forward(written)}))
    with torch.no_grad():
        reached = _is_reached(model)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            mode = subject.mode(model)
            assert subject.mode(model) == mode
            with patched(subject, model):
                assert subject.mode(model) == mode
                output = subject.call(model, *BATCH.inputs, labels=BATCH.labels, temperature=0.7)
        stock = stock_forward(model, *BATCH.inputs, labels=BATCH.labels, temperature=0.7)
    assert mode == ("hook" if written.named and reached else "legacy")
    named_and_unused = [each for each in warned if issubclass(each.category, mcore_fused.UnusableHookWarning)]
    assert len(named_and_unused) == (written.named and not reached)
    assert torch.allclose(output.log_probs, stock.log_probs, atol=1e-10)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_signatures_are_read_when_patching_and_not_in_a_call(subject, mode, monkeypatch):
    """``inspect.signature`` takes as long as all checks of a call together, several times over."""
    from support.models.packed import Rows

    from mcore_fused.frameworks.forward import fused_forward_no_padding_gen

    model, rows = build(Shape(packed=True)), Rows.of(97, (3, 2))
    stock = inspect.signature

    def signature(*args, **kwargs):
        caller = sys._getframe(1).f_globals["__name__"]
        assert not caller.startswith("mcore_fused"), f"{caller} read a signature in a call"
        return stock(*args, **kwargs)

    with torch.no_grad(), patched(subject, model, mode):
        monkeypatch.setattr(inspect, "signature", signature)
        model(*BATCH.inputs)
        subject.call(model, *BATCH.inputs, labels=BATCH.labels)
        mcore_fused.call_fused_forward(model, *BATCH.inputs, None, BATCH.labels)
        model(*BATCH.inputs, labels=BATCH.labels, output_processor=mcore_fused.fused_output_processor)
        fused_forward_no_padding_gen()(model, rows.nested, rows.nested, None, 1.0, True, 0)
        monkeypatch.undo()
