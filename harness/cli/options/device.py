"""Says on which device a command will run, where that may surprise."""

from __future__ import annotations

from harness.cli.terminal.output import echo
from harness.launch import local_rank
from harness.launch.launcher import ON_THE_CPU, choose_device


def resolve_device(asked: str, cpu_option: str = ON_THE_CPU) -> str:
    """'cpu' or 'cuda' for `runtime.device`. Raises HarnessError where GPUs cannot be used as they are.

    Writes to standard error why a run is on the CPU, where something speaks for GPUs.
    """
    chosen = choose_device(asked, cpu_option)
    if chosen.is_surprising and local_rank() == 0:
        echo(f"on the CPU: {chosen.why}", err=True)
    return chosen.name
