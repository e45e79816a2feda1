"""A lane is a place where the same tests run: device, backend, dtypes."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Lane:
    device: str
    backend: str
    dtypes: tuple[torch.dtype, ...]
    dtype: torch.dtype = torch.float32  # of the tests whose numbers are exact in any

    def tensor(self, *values, dtype=None):
        return torch.tensor(*values, device=self.device, dtype=dtype)

    def poison(self, count: int = 64) -> None:
        """Leave NaN in the memory that the allocator hands out next."""
        blocks = [
            torch.full((1 << k,), torch.nan, device=self.device) for k in range(4, 16) for _ in range(count // 16)
        ]
        del blocks


TORCH = Lane("cpu", "torch", (torch.float64, torch.float32, torch.bfloat16))
INTERPRETER = Lane("cpu", "triton", (torch.float32, torch.bfloat16))
