"""Packed batches for the suite: jagged rows on the cell's device, and their reference row by row."""

from dataclasses import dataclass

import torch

from mcore_compat.testing.reference import log_probs_and_entropy, stock_forward
from support.models import DEVICE


@dataclass(frozen=True)
class Rows:
    """Rows of token ids on the cell's device; each row is its own list of labels, shifted by one."""

    ids: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, vocab, lengths, seed=0):
        """Random rows of the given lengths."""
        generator = torch.Generator().manual_seed(seed)
        return cls(tuple(torch.randint(0, vocab, (length,), generator=generator).to(DEVICE) for length in lengths))

    @property
    def nested(self):
        """As one jagged tensor."""
        offsets = torch.tensor([0, *torch.tensor([len(row) for row in self.ids]).cumsum(0).tolist()], device=DEVICE)
        return torch.nested.nested_tensor_from_jagged(torch.cat(self.ids), offsets)

    def padded(self, columns, width, fill=0):
        """Dense ids, shifted labels and mask ``[rows, width]``, row i lying in ``columns[i]``."""
        shape = (len(self.ids), width)
        ids, labels = (torch.full(shape, fill, device=DEVICE) for _ in range(2))
        mask, counted = (torch.zeros(shape, dtype=torch.bool, device=DEVICE) for _ in range(2))
        for row, (tokens, where) in enumerate(zip(self.ids, columns, strict=True)):
            ids[row, where] = tokens
            mask[row, where] = True
            labels[row, where[:-1]] = tokens[1:]
            counted[row, where[:-1]] = True
        return ids, labels, mask, counted


def rows_alone(model, rows, temperatures):
    """Stock log-probs and entropy of every row run by itself, in float64; differentiable; one pair a row."""
    results = []
    for tokens, temperature in zip(rows.ids, temperatures, strict=True):
        labels = torch.cat([tokens[1:], tokens.new_full((min(len(tokens), 1),), -100)])[None]
        if len(tokens) == 0:
            results.append(log_probs_and_entropy(tokens.new_zeros(0, 1, dtype=torch.float64), tokens))
            continue
        positions = torch.arange(len(tokens), device=DEVICE)[None]
        mask = torch.tril(torch.ones(1, 1, len(tokens), len(tokens), device=DEVICE)).lt(0.5)
        stock = stock_forward(model, tokens[None], positions, mask, labels=labels, temperature=float(temperature))
        results.append((stock.log_probs[0], stock.entropy[0]))
    return results
