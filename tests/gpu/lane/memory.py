"""What a block of code needs of the device, and the largest tensor that it made."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.cuda.is_available()


class LargestTensor(TorchDispatchMode):
    """Records the largest storage of any tensor that an operation returns, in bytes; forward and backward."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.untyped_storage().nbytes())
        return result


def device_peak(block):
    """Bytes that ``block`` needed at its worst beyond what was allocated before; None without a GPU."""
    if not CUDA:
        block()
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    block()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
