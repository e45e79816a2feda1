"""The example of a subject with a chunked head: it loads by name, and chunks change no number."""

from pathlib import Path

import torch

from mcore_compat.subjects.protocol import load_subject

NAME = f"{Path(__file__).parents[3] / 'examples' / 'chunked_head_subject.py'}:ChunkedHead"


def test_chunks_give_the_numbers_and_gradients_of_all_logits():
    torch.manual_seed(0)
    hidden = torch.randn(37, 2, 8, dtype=torch.float64, requires_grad=True)  # no multiple of the chunk
    weight = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(11, (2, 37))

    def layer(rows, weight):
        return rows @ weight.T, None

    def model(labels, output_processor, output_processor_context):
        return output_processor(
            hidden_states=hidden, output_layer=layer, output_weight=weight, labels=labels,
            scale_logits=lambda logits: 3 * logits, context=output_processor_context,
        )  # fmt: skip

    found = load_subject(NAME, {}).call(model, labels=labels, temperature=0.7)
    logits = 3 * (hidden @ weight.T).transpose(0, 1) / 0.7
    expected = torch.distributions.Categorical(logits=logits)
    for given, wanted in ((found.log_probs, expected.log_prob(labels)), (found.entropy, expected.entropy())):
        torch.testing.assert_close(given, wanted, rtol=1e-10, atol=1e-10)
        for one, other in zip(
            torch.autograd.grad(given.sum(), (hidden, weight), retain_graph=True),
            torch.autograd.grad(wanted.sum(), (hidden, weight), retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
