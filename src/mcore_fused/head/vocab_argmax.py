"""Largest logit and its column per token, without materialising the logits.

megatron-core 0.19 counts how many of MTP's predictions would have been accepted, by ``argmax`` of MTP's logits
(``_compute_mtp_acceptance_counts`` in ``transformer/multi_token_prediction.py``). Those logits are deferred too,
so the maximum is computed in chunks of the vocabulary. It is used for logging only and has no gradient.
"""

from __future__ import annotations

import torch

from mcore_fused.head.tensor_parallel import gather_sequence

__all__ = ["vocabulary_maximum"]

_CHUNK_BYTES = 64 << 20


@torch.no_grad()
def vocabulary_maximum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    scale: float,
    sequence_group: torch.distributed.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the maximum over this rank's vocabulary shard.

    Args:
        hidden: ``[seq, batch, hidden]``, a shard of seq when ``sequence_group`` is given.
        weight: ``[vocab shard, hidden]``.
        scale: multiplies the logits.
        sequence_group: group to gather the sequence over, or None.

    Returns:
        values ``[seq, batch]`` in the model's dtype and column indices ``[seq, batch]``, the first of equals.
    """
    if sequence_group is not None:
        hidden = gather_sequence(hidden, sequence_group)
    rows = max(1, hidden[..., 0].numel())
    step = max(1, _CHUNK_BYTES // (rows * hidden.element_size()))
    best = hidden.new_full(hidden.shape[:-1], float("-inf"))
    column = torch.zeros(hidden.shape[:-1], dtype=torch.long, device=hidden.device)
    for start in range(0, weight.shape[0], step):
        values, indices = torch.max((hidden @ weight[start : start + step].T) * scale, dim=-1)
        better = values > best
        best = torch.where(better, values, best)
        column = torch.where(better, indices + start, column)
    return best, column
