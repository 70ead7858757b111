"""`python -m harness.launch RUN_DIRECTORY`: a rank started by torchrun, accelerate launch or deepspeed."""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

from harness.launch import external_rank
from harness.launch.external import supervise
from harness.run_directory.request import RunRequest, rank_state


def train(run_directory: Path, request: RunRequest, tell: Callable[[str], object]) -> int:
    """This rank's part; imports torch only here, in the watched child."""
    from harness.rank.process.start import dump_stacks_when_asked

    dump_stacks_when_asked(rank_state(run_directory, external_rank()))
    tell(request.run_id)
    if request.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # libraries would prefer a GPU that they see
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    gc.disable()  # what is imported stays: collecting meanwhile takes an eighth of the time
    import transformers.modeling_utils  # noqa: F401

    from harness.rank.process.environment import world_of
    from harness.rank.process.start import leave
    from harness.rank.rank import run_rank
    from harness.run_directory.assemble import write_node

    gc.freeze()
    gc.enable()
    world = world_of(request.device, request.ranks_per_node)
    if world.local_rank == 0:
        write_node(run_directory, world.rank // world.ranks_per_node)
    leave(run_rank(run_directory))


def main(run_directory: Path) -> None:
    """Train beside a process that notes the rank's end and ends ranks that stand still; leave as it did."""
    request = RunRequest.read(run_directory)
    supervise(
        external_rank(),
        request.world_size,
        run_directory.parent,
        lambda tell: train(run_directory, request, tell),
    ).leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
