"""What examples are made of."""

import torch
from hypothesis import strategies as st
from support.models import HAS_MUP, Shape, batch_for
from support.subjects import load_subject

_OFFERED = load_subject().capabilities
_IGNORED = 4 if "ignored_labels" in _OFFERED else 0
# On and off every tile, one column, and the two sides of a power of two.
VOCABS = (2, 97, 127, 128, 129)

temperatures = st.sampled_from([1.0, 0.5, 0.9, 2.0, 1e-2, 1e3]) | st.floats(0.05, 20, allow_subnormal=False)


def shapes(**fixed):
    """Shapes of models that run on one rank."""
    options = {
        "tied": st.booleans(),
        "vocab": st.sampled_from(VOCABS),
        "mup": st.booleans() if HAS_MUP and "mup" in _OFFERED else st.just(False),
    }
    return st.builds(Shape, **(options | {name: st.just(value) for name, value in fixed.items()}))


@st.composite
def batches(draw, vocab, min_seq=1):
    """A batch with up to three rows; some labels may be ignored, if the subject knows ignored labels."""
    batch = batch_for(vocab, draw(st.integers(1, 3)), draw(st.integers(min_seq, 9)), draw(st.integers(0, 1 << 16)))
    ignored = draw(st.lists(st.integers(0, batch.labels.numel() - 1), max_size=_IGNORED))
    batch.labels.reshape(-1)[torch.tensor(ignored, dtype=torch.long, device=batch.labels.device)] = -100
    return batch


@st.composite
def token_temperatures(draw, labels):
    """One temperature a token, shaped like the labels."""
    values = draw(st.lists(temperatures, min_size=labels.numel(), max_size=labels.numel()))
    return torch.tensor(values, dtype=torch.float64, device=labels.device).reshape(labels.shape)


def call_temperatures(labels):
    """What a call takes as its temperature: a number, or one per token if the subject knows that."""
    return temperatures | token_temperatures(labels) if "temperature_per_token" in _OFFERED else temperatures
