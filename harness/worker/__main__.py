"""`python -m harness.worker RUN_DIRECTORY`: a rank started by torchrun, accelerate launch or srun."""

import sys
from pathlib import Path

from harness.worker.environment import leave
from harness.worker.rank import run_rank

if __name__ == "__main__":
    leave(run_rank(Path(sys.argv[1])))
