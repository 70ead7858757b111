"""Starts the ranks of a run and watches them. Loads torch only in processes that become ranks.

Here: what torchrun, accelerate launch and srun tell a process that they start as a rank.
"""

import os
import sys

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def open_standard_streams() -> None:
    """Lead standard streams that are closed (`>&-`) nowhere, so that no file or socket gets their numbers."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - for as long as Python runs


def started_as_rank() -> bool:
    return all(name in os.environ for name in VARIABLES)


def speaks_for_ranks() -> bool:
    """Whether this process is the first rank, or none."""
    return not started_as_rank() or external_rank() == 0


def external_rank() -> int:
    return int(os.environ["RANK"])


def external_world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def local_rank() -> int:
    """This process's rank on its node; 0 where no launcher started it."""
    return int(os.environ["LOCAL_RANK"]) if started_as_rank() else 0


def external_ranks_per_node() -> int:
    """Ranks on this node; all of them where the launcher does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
