"""Vocabulary shards over a process group: who owns which rows, and how statistics become global.

Per call: one all-gather of four numbers a token, and in backward one all-reduce of the hidden gradient. Where the
caller cannot say which rows are its own, also one all-gather of one integer a rank (the shard sizes, which may
differ), finished before the main kernel starts. It is not left to run beside the main kernel: that one fills every
multiprocessor, so on a rank where it comes first the exchange waits for its end, and holds a multiprocessor of the
other rank until then. Nothing is cached between calls: a rank that skipped a collective because it had seen its own
shard size before would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from mcore_fused.errors import CallArgumentError, CallTypeError

__all__ = ["VocabShard", "active_group", "find_shard", "gather_statistics", "start_all_reduce"]


def active_group(tp_group: object | None) -> dist.ProcessGroup | None:
    """The group, or None where there is nothing to exchange (no group, or a group of one).

    Raises:
        CallTypeError: ``tp_group`` is not a torch.distributed group.
        CallArgumentError: this process is not a member of it.
    """
    if tp_group is None:
        return None
    if not dist.is_available() or not isinstance(tp_group, dist.ProcessGroup):
        if dist.is_available() and tp_group is dist.GroupMember.NON_GROUP_MEMBER:
            raise CallArgumentError("this process is not a member of tp_group", "pass the group of this rank.")
        raise CallTypeError(
            f"tp_group is a {type(tp_group).__name__}", "pass a torch.distributed process group, or None."
        )
    return tp_group if dist.get_world_size(tp_group) > 1 else None


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows ``[offset, offset + rows)`` of the global vocabulary.

    Attributes:
        rows: rows of the local weight.
        group: the process group, or None for the whole vocabulary on one rank.
        sizes: ``[ranks]`` rows of every rank, on the device, where they had to be asked for.
        offset: first global row of this rank, if it is known on the host.
        total: rows of all ranks, if they are known on the host.
    """

    rows: int
    group: dist.ProcessGroup | None = None
    sizes: Tensor | None = None
    offset: int | None = None
    total: int | None = None

    def labels_for(
        self, path: str, labels: Tensor, ignore_index: int, real_rows: int
    ) -> tuple[int, Callable[[], Tensor]]:
        """The first row's id among a backend's labels, and those labels.

        The kernels of a GPU subtract a start that is known; elsewhere labels become local rows. A function: its small
        operations are queued while the main kernel runs, which needs no labels.
        """
        if self.offset is not None and path != "torch":
            return self.offset, lambda: labels
        return 0, lambda: self.local_labels(labels, ignore_index, real_rows)

    def local_labels(self, labels: Tensor, ignore_index: int, real_rows: int) -> Tensor:
        """Labels as local rows; ``ignore_index`` stays itself and never meets a shifted label.

        What this rank does not own is outside ``[0, real_rows)``, so that range is the whole owner test. No host
        synchronisation.
        """
        if self.group is None:
            return labels
        wide = labels.to(torch.int64)
        if self.offset is not None:
            before: int | Tensor = self.offset
        else:
            assert self.sizes is not None
            before = self.sizes[: dist.get_rank(self.group)].sum()
        shifted = wide - before
        # a shifted label that lands on ignore_index would be taken for an ignored one: any unowned value serves
        unowned = -1 if ignore_index != -1 else -2
        owned = (shifted >= 0) & (shifted < real_rows) & (wide != ignore_index)
        return torch.where(owned, shifted, torch.where(wide == ignore_index, ignore_index, unowned))

    def real_rows(self, vocab_size: int | None) -> int:
        """How many of the local rows lie below the global ``vocab_size``.

        Where the shard sizes had to be asked for, this reads them on the host, which waits for the device; leave
        ``vocab_size`` None where the weight has no padding.

        Raises:
            CallArgumentError: ``vocab_size`` is larger than the vocabulary held.
        """
        if vocab_size is None:
            return self.rows
        if self.offset is not None and self.total is not None:
            before, total = self.offset, self.total
        elif self.sizes is None:
            before, total = 0, self.rows
        else:
            sizes = self.sizes.tolist()
            before, total = sum(sizes[: dist.get_rank(self.group)]), sum(sizes)
        if vocab_size > total:
            raise CallArgumentError(
                f"vocab_size is {vocab_size} and the weight has {total} rows",
                "pass the size of the real vocabulary, not above the padded one.",
            )
        return min(max(vocab_size - before, 0), self.rows)

    def vocabulary(self, vocab_size: int | None) -> int:
        """The number of valid labels; reads the shard sizes on the host where they had to be asked for."""
        if vocab_size is not None:
            return vocab_size
        if self.total is not None:
            return self.total
        return self.rows if self.sizes is None else int(self.sizes.sum())


def find_shard(
    rows: int, group: dist.ProcessGroup | None, vocab_shard: tuple[int, int] | None, device: torch.device
) -> VocabShard:
    """Which rows of the vocabulary these are: as the caller says, or by asking the other ranks for their number.

    Work queued after this call starts once they have answered.

    Raises:
        CallArgumentError: ``vocab_shard`` does not fit the rows.
    """
    start = total = None
    if vocab_shard is not None:
        start, total = vocab_shard
        whole = group is not None or (start, total) == (0, rows)
        if not (start >= 0 and start + rows <= total and whole):
            raise CallArgumentError(
                f"vocab_shard is {vocab_shard} and the weight has {rows} rows"
                + ("" if group is not None else " and there is no tp_group"),
                "pass the first global row of this rank's weight and the rows of all ranks together, or None.",
            )
    if group is None:
        return VocabShard(rows)
    if vocab_shard is not None:
        return VocabShard(rows, group, offset=start, total=total)
    mine = torch.full((1,), rows, dtype=torch.int64, device=device)
    sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, mine, group=group)
    return VocabShard(rows, group, sizes)


def gather_statistics(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """``[4, N]`` of this rank -> ``[ranks, 4, N]`` of all, in rank order, so that every rank sums alike."""
    if group is None:
        return local[None]
    everyone = torch.empty((dist.get_world_size(group), *local.shape), dtype=local.dtype, device=local.device)
    dist.all_gather_into_tensor(everyone.view(-1), local.contiguous().view(-1), group=group)
    return everyone


def start_all_reduce(value: Tensor, group: dist.ProcessGroup | None) -> Callable[[], None]:
    """Start summing ``value`` over the group in place; the returned function waits for it."""
    if group is None:
        return lambda: None
    work = dist.all_reduce(value, group=group, async_op=True)
    assert work is not None
    return lambda: _wait(work)


def _wait(work: dist.Work) -> None:
    work.wait()
