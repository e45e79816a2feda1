"""The names that blocks of the documentation run with where they need no Megatron."""

from types import SimpleNamespace

import torch


def hugging_face():
    """A model whose body returns ``last_hidden_state`` and whose head is ``lm_head``."""
    head = torch.nn.Linear(32, 97, bias=False)
    body = torch.nn.Embedding(97, 32)
    model = SimpleNamespace(model=lambda ids: SimpleNamespace(last_hidden_state=body(ids)), lm_head=head)
    return {"model": model, "input_ids": torch.randint(0, 97, (2, 9))}


def tensors():
    """Hidden states, a head's weight, labels and advantages."""
    return {
        "hidden": torch.randn(7, 32, requires_grad=True),
        "weight": torch.randn(97, 32, requires_grad=True),
        "labels": torch.randint(0, 97, (7,)),
        "advantages": torch.randn(7),
        "old_log_probs": torch.randn(7),
    }


def jagged_batch():
    """Two rows of different lengths, and what belongs to them."""
    rows = [torch.randint(0, 97, (length,)) for length in (5, 9)]
    ids = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return {"input_ids": ids, "per_row": torch.tensor([0.7, 1.0])}


WORLDS = {"hugging face": hugging_face, "tensors": tensors, "jagged batch": jagged_batch}
