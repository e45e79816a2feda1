"""A packed micro-batch with what a policy-gradient step needs: rows, shifted labels, old log-probs, advantages."""

from dataclasses import dataclass

import torch
from support.models import DEVICE
from support.models.packed import Rows

LENGTHS = (29, 1, 40, 7, 18)


@dataclass(frozen=True)
class PackedBatch:
    """One packed row ``[1, slots]`` and its boundaries."""

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    params: object

    @property
    def inputs(self):
        """As the model's forward takes them; the boundaries are the mask."""
        return self.ids, self.positions, None


def packed_batch(vocab, seed=0, lengths=LENGTHS):
    """Random rows packed for one rank; the last token of a row has no label."""
    from mcore_fused.packing import PackingLayout, packed_seq_params

    rows = Rows.of(vocab, lengths, seed)
    layout = PackingLayout.from_nested(rows.nested)
    positions = torch.cat([torch.arange(length, device=DEVICE) for length in lengths])
    slots = layout.total_tokens
    padded = torch.zeros(slots, dtype=torch.long, device=DEVICE)
    padded[: len(positions)] = positions
    return PackedBatch(
        layout.pack_ids(rows.nested), padded[None], layout.pack_labels(rows.nested), packed_seq_params(layout)
    )
