"""One forward and one cuBLAS logits product of a shape, to be run under ncu.

    ncu --clock-control none --section SpeedOfLight --section MemoryWorkloadAnalysis \
        --kernel-name 'regex:hopper_statistics|combine|gemm|nvjet' --launch-skip 3 python benchmarks/kernel_profile.py 5
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from kernel import SHAPES, make

from mcore_fused.kernel import linear_cross_entropy

problem = make(*SHAPES[int(sys.argv[1])])
logits = torch.empty(problem.hidden.shape[0], problem.weight.shape[0], device="cuda", dtype=torch.bfloat16)
with torch.no_grad():
    for _ in range(2):
        linear_cross_entropy(problem.hidden, problem.weight, problem.labels, backend="triton")
        torch.mm(problem.hidden, problem.weight.t(), out=logits)
torch.cuda.synchronize()
