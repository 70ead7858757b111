"""How a training script that is not the harness's was observed."""

from __future__ import annotations

from harness.command_lines import KeptCommand
from harness.record.part import Part


class ObservationPart(Part):
    """What a script ran on, what its figures are taken from, and what could not be known.

    Of such a run `job` holds the settings that were seen. Those that were not are null.
    """

    command: KeptCommand
    """The command that was observed."""
    frameworks: list[str]
    """Libraries that drove the training, such as 'accelerate' or 'lightning', with their versions."""
    base: str | None = None
    """The built-in backend that runs the same strategy, such as 'fsdp'; None: there is none."""
    loss: str = ""
    """What the loss of the steps is taken from."""
    learning_rates: list[list[float | None]] = []
    """Of each group of the optimizers, in the order of `observed.optimizer_groups`, the rate in each step;
    None: the group has no rate, or its optimizer did not step."""
    unknown: dict[str, str] = {}
    """Fields of the record that are n/a, each with the reason."""
    notes: list[str] = []
    """What a reader must know of the figures."""
