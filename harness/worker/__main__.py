"""`python -m harness.worker RUN_DIRECTORY`: a rank started by torchrun, accelerate launch or deepspeed."""

import gc
import os
import sys
from pathlib import Path

from harness.worker.monitor import run_monitored


def train(run_directory: Path) -> int:
    """This rank's part; imports torch only here, in the monitored child."""
    from harness.run_directory.request import RunRequest

    request = RunRequest.read(run_directory)
    if request.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # libraries would prefer a GPU that they see
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    gc.disable()  # what is imported stays: collecting meanwhile takes an eighth of the time
    import transformers.modeling_utils  # noqa: F401

    from harness.run_directory.nodes import write_node
    from harness.worker.environment import world_of
    from harness.worker.rank import run_rank
    from harness.worker.termination import leave

    gc.freeze()
    gc.enable()
    world = world_of(request)
    if world.local_rank == 0:
        write_node(run_directory, world.rank // world.ranks_per_node)
    leave(run_rank(run_directory))


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    run_monitored(directory, int(os.environ["RANK"]), lambda: train(directory))
