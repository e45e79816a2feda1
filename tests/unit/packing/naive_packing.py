"""Packing written the slow way, row by row and slot by slot, from the definitions alone."""

from hypothesis import strategies as st

BLOCK = {None: 1, "delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}


def padded_rows(lengths, setup):
    """Padded length of each row, and of the filler row if there is one, by counting up until it fits."""
    cp = setup["cp_size"]
    tp = setup["tp_size"] if setup["sequence_parallel"] else 1
    chunks = 2 * cp if setup["cp_layout"] == "zigzag" and cp > 1 else cp

    def row_fits(slots):  # every chunk of every row, gathered per rank, can be cut for sequence parallelism
        return slots % (chunks * tp) == 0

    rows = []
    for length in lengths:
        slots = length
        while not row_fits(slots):
            slots += 1
        rows.append(slots)
    total, step = sum(rows), chunks * tp
    real = total

    def whole_fits(slots):
        if slots == 0 or slots % setup["pad_to_length_bucket"] or slots // cp < setup["min_local_rows"]:
            return False
        shards = [slots // cp // tp] * (cp * tp)
        return sum(shards) == slots and all(shard % BLOCK[setup["fp8_recipe"]] == 0 for shard in shards)

    while not whole_fits(total):
        total += step
    return rows if total == real else [*rows, total - real]


def slots_of_ranks(padded, setup):
    """For each rank, its slots in order as (row, position in row)."""
    cp = setup["cp_size"]
    if setup["cp_layout"] == "contiguous" or cp == 1:
        buffer = [(row, position) for row, slots in enumerate(padded) for position in range(slots)]
        slab = len(buffer) // cp
        return [buffer[rank * slab : (rank + 1) * slab] for rank in range(cp)]
    ranks = [[] for _ in range(cp)]
    for row, slots in enumerate(padded):
        size = slots // (2 * cp)
        chunks = [[(row, chunk * size + inside) for inside in range(size)] for chunk in range(2 * cp)]
        for rank in range(cp):
            ranks[rank] += chunks[rank] + chunks[2 * cp - 1 - rank]
    return ranks


def packed(rows, slots, fill):
    """What the slots hold when ``rows`` is a list of lists."""
    return [rows[row][at] if row < len(rows) and at < len(rows[row]) else fill for row, at in slots]


@st.composite
def setups(draw, max_cp=4):
    """Parallel setups and alignment rules, as keywords of ``PackingLayout.from_lengths``."""
    return {
        "cp_size": draw(st.integers(1, max_cp)),
        "tp_size": draw(st.sampled_from([1, 2, 4])),
        "sequence_parallel": draw(st.booleans()),
        "cp_layout": draw(st.sampled_from(["zigzag", "contiguous"])),
        "fp8_recipe": draw(st.sampled_from([None, None, "delayed", "mxfp8", "blockwise", "tensorwise"])),
        "min_local_rows": draw(st.sampled_from([1, 1, 5, 40])),
        "pad_to_length_bucket": draw(st.sampled_from([1, 1, 6, 64])),
    }


def row_lengths(max_rows=5, max_length=19):
    """Row lengths with many of the awkward ones: 0, 1, and shorter than any alignment."""
    return st.lists(st.one_of(st.sampled_from([0, 1, 2]), st.integers(0, max_length)), min_size=1, max_size=max_rows)
