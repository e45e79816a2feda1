import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # tiny tensors: threads that wait for each other cost seconds on a busy host
