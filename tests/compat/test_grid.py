"""Every pair of features at once: a covering array of layouts and features, fused against stock logits in float64.

A fault that shows only where two features meet (multi-token prediction with tensor parallelism, say) has no check of
its own; here some row has that pair. Each row runs in both modes, with gradients and without, on ranks that are started
once for all rows.

Error analysis: both sides are float64 in one layout and differ in the order of sums of some hundred terms, so by some
hundred roundings of 1.1e-16 relative to the whole. Stock computes MTP's loss in fp32 (6e-8): gradients that contain it
agree to some 1e-6.
"""

from functools import lru_cache

import pytest
from support.covering import covering_rows
from support.models import HAS_MTP, HAS_MUP
from support.models.release import mtp_takes_packed
from support.ranks.grid import WORLD, Row, run_rows
from support.subjects import load_subject

from mcore_compat.testing.ranks import run_ranks

pytestmark = pytest.mark.needs("call", "patch", "float64", "evidence")

CLOSE, CLOSE_WITH_MTP = 1e-11, 2e-6
_OFFERED = load_subject().capabilities
FLAGS = (False, True)
MTP_TAKES_PACKED = mtp_takes_packed()
FACTORS = {
    "tied": FLAGS,
    "tensor": ("1", "2", "2 + sequence") if "tensor_parallel" in _OFFERED else ("1",),
    "pipeline": (1, 2) if "pipeline" in _OFFERED else (1,),
    "context": (1, 2),
    "experts": ("none", "one rank", "two ranks") if "moe" in _OFFERED else ("none",),
    "mtp": (0, 1) if HAS_MTP and "mtp" in _OFFERED else (0,),
    "mup": FLAGS if HAS_MUP and "mup" in _OFFERED else (False,),
    "packed": FLAGS,
    "training": FLAGS,
    "recompute": FLAGS,
}


def allowed(values):
    """What Megatron itself can run, on four ranks."""
    tensor = 1 if values["tensor"] == "1" else 2
    return (
        tensor * values["pipeline"] * values["context"] <= WORLD
        # Megatron wants sequence parallelism where experts and tensor parallelism meet.
        and not (values["experts"] != "none" and values["tensor"] == "2")
        # Stock fails in 0.18 (Megatron-LM#4933); test_mtp.py asks for it by itself.
        and not (values["mtp"] and values["recompute"])
        and not (values["mtp"] and values["packed"] and not MTP_TAKES_PACKED)
    )


TABLE = [Row(**values) for values in covering_rows(FACTORS, allowed)]


@lru_cache(maxsize=1)
def _results():
    """For each row, what each rank found; or why the ranks did not come to their end."""
    try:
        return list(zip(*run_ranks(run_rows, TABLE, world=WORLD), strict=True))
    except AssertionError as error:  # once for all rows: a second try would take as long
        return [[str(error)]] * len(TABLE)


def _name(row):
    flags = [name for name in ("tied", "mup", "packed", "training", "recompute") if getattr(row, name)]
    sizes = [f"tp {row.tensor}", f"pp {row.pipeline}", f"cp {row.context}", f"experts {row.experts}", f"mtp {row.mtp}"]
    return ", ".join(sizes + flags)


@pytest.mark.parametrize("number", range(len(TABLE)), ids=[_name(row) for row in TABLE])
def test_grid(number):
    """Log-probs, entropy and every gradient of every rank."""
    row, launches = TABLE[number], 0
    for rank, found in enumerate(_results()[number]):
        assert not isinstance(found, str), f"rank {rank}:\n{found}"
        for mode, differences in found.items():
            launches += differences.pop("launches")
            for what, difference in differences.items():
                tolerance = CLOSE_WITH_MTP if row.mtp and what not in {"log_probs", "entropy"} else CLOSE
                assert difference <= tolerance, f"{mode}, rank {rank}: {what} differs by {difference:.3g}"
    assert launches > 0, "no fused head ran in this row"
