"""Position ids of a padded batch: axes before rows, also where there are as many rows as axes."""

from types import SimpleNamespace

import pytest
import torch

from mcore_fused.errors import PackingError
from mcore_fused.frameworks.inputs import position_ids_for
from mcore_fused.packing import PackingLayout

STAGE = SimpleNamespace(chain=SimpleNamespace(model=SimpleNamespace(position_embedding_type="mrope")))


def positions(images):
    """``[3, rows, 9]``: two tokens of text, an image of ``height`` x ``width``, and text to the end of the row."""
    rows = []
    for height, width in images:
        grid = [(2, 2 + y, 2 + x) for y in range(height) for x in range(width)]
        end = 2 + max(height, width, 1)
        text = [(place,) * 3 for place in range(end, end + 9 - 2 - len(grid))]
        rows.append([(0,) * 3, (1,) * 3, *grid, *text])
    return torch.tensor(rows).permute(2, 0, 1)


def layout_for(lengths):
    return PackingLayout.from_mask(torch.arange(9) < torch.tensor(lengths)[:, None])


IMAGES = {
    "different images": [(2, 2), (1, 3), (2, 1)],
    "the same prompt three times": [(2, 2)] * 3,
    "an image in one row": [(0, 0), (1, 3), (0, 0)],
}


@pytest.mark.parametrize("lengths", [(9, 9, 9), (9, 8, 9)])
@pytest.mark.parametrize("name", IMAGES)
def test_three_rows_are_told_from_three_axes(name, lengths):
    layout, given = layout_for(lengths), positions(IMAGES[name])
    packed = position_ids_for(STAGE, layout, given)
    assert packed.shape == (3, 1, layout.local_tokens)
    assert torch.equal(packed, torch.stack([layout.pack(axis) for axis in given]))
    with pytest.raises(PackingError, match="axes come before rows") as refusal:
        position_ids_for(STAGE, layout, given.transpose(0, 1))
    assert "[axes, rows, width]" in refusal.value.next_step


def test_text_alone_reads_the_same_either_way():
    given = positions([(0, 0)] * 3)
    layout = layout_for((9, 4, 7))
    assert torch.equal(position_ids_for(STAGE, layout, given), position_ids_for(STAGE, layout, given.transpose(0, 1)))


@pytest.mark.parametrize("rows", [2, 4])
def test_other_numbers_of_rows_are_told_by_their_shape(rows):
    given = positions([(2, 2)] * rows)
    layout = layout_for((9,) * rows)
    assert position_ids_for(STAGE, layout, given).shape == (3, 1, layout.local_tokens)
    with pytest.raises(PackingError):
        position_ids_for(STAGE, layout, given.transpose(0, 1))
