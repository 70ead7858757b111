"""Starts the ranks of a run and watches them. Loads torch only in processes that become ranks.

Here: what torchrun, accelerate launch and srun tell a process that they start as a rank.
"""

import os
import signal
import sys

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What tells a command to end its ranks and write their record; batch systems announce the end by SIGUSR1."""
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


def require_rank_variables() -> None:
    """Raises HarnessError for a variable by which no launcher can mean a rank."""
    if not started_as_rank():
        return
    from harness.bounds import MOST_RANKS  # `--help` loads neither
    from harness.errors import HarnessError

    def of(name: str, least: int, most: int) -> int:
        given = os.environ.get(name, os.environ["WORLD_SIZE"])
        if not given.isdecimal() or not least <= int(given[:20]) <= most:
            allowed = f"a whole number from {least} to {most}" if most > least else str(most)
            raise HarnessError(
                f"{name} was given '{given}'; launchers give {allowed}: unset it to run without one"
            )
        return int(given)

    of("RANK", 0, of("WORLD_SIZE", 1, MOST_RANKS) - 1)
    of("LOCAL_RANK", 0, of("LOCAL_WORLD_SIZE", 1, external_world_size()) - 1)
    of("MASTER_PORT", 1, 65535)


def speaks_for_ranks() -> bool:
    """Whether this process is the first rank, or none."""
    if not started_as_rank():
        return True
    from harness.errors import HarnessError

    try:
        require_rank_variables()
    except HarnessError:
        return True
    return external_rank() == 0


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
