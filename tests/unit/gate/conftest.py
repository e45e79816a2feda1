"""The helpers of these tests are imported as plain modules."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "contract", Path(__file__).parents[2]):
    sys.path.insert(0, str(folder))
