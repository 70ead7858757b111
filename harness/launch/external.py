"""Recognises a process that torchrun, accelerate launch or srun started as one of several ranks."""

from __future__ import annotations

import os

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def started_as_rank() -> bool:
    """Whether all the variables of torchrun's contract are set."""
    return all(name in os.environ for name in VARIABLES)


def external_rank() -> int:
    """This process's global rank."""
    return int(os.environ["RANK"])


def external_world_size() -> int:
    """Number of ranks that the launcher started."""
    return int(os.environ["WORLD_SIZE"])


def local_rank() -> int:
    """This process's rank on its node; 0 where no launcher started it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def external_ranks_per_node() -> int:
    """Ranks on this node; all of them where the launcher does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
