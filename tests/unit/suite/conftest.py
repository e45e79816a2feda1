import sys
from pathlib import Path

# By file name: the package `support` imports torch and Megatron.
sys.path.insert(0, str(Path(__file__).parents[2] / "compat" / "support"))
