"""Library versions with traps that were measured, and what this project does about each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KnownTrap:
    """A version of a library that does what its user does not expect."""

    package: str
    since: tuple[int, ...]
    """First version in which it was seen; whether a later one still does it is not known."""
    trap: str
    here: str
    """What this project does about it."""


KNOWN = (
    KnownTrap(
        package="deepspeed",
        since=(0, 19),
        trap="clips gradients at 1.0 when its configuration says nothing",
        here="the key is always written",
    ),
    KnownTrap(
        package="deepspeed",
        since=(0, 19),
        trap="stage 0 in low precision takes an optimizer step on zero gradients while it sets up, so that "
        "Adam begins at its second step",
        here="the step count is set back",
    ),
    KnownTrap(
        package="deepspeed",
        since=(0, 19),
        trap="accumulates micro-steps in bf16 at bf16-mixed; told to use fp32, stage 0 refuses and stage 1 "
        "reports a gradient norm that is off by half",
        here="fp32 at stages 2 and 3; the dtype of accumulation is part of the effective configuration",
    ),
    KnownTrap(
        package="deepspeed",
        since=(0, 19),
        trap="stages 1 and 2 all-reduce gradients whatever reduce_scatter says: 1.5 times the textbook",
        here="the expected volume is that of the implementation",
    ),
    KnownTrap(
        package="accelerate",
        since=(1, 15),
        trap="without an accelerator it ignores an FSDP plugin and runs DDP or unsynchronised processes",
        here="Accelerate's FSDP is unsupported on the CPU",
    ),
    KnownTrap(
        package="accelerate",
        since=(1, 15),
        trap="steps a DeepSpeed optimizer inside backward",
        here="the step is held back until the loop has set the learning rate",
    ),
    KnownTrap(
        package="torch",
        since=(2, 11),
        trap="FSDP1 takes NO_SHARD on one rank whatever was asked",
        here="the finding strategy-differs",
    ),
)


def traps_of(versions: Mapping[str, str]) -> list[KnownTrap]:
    """Known traps of the installed versions."""
    return [trap for trap in KNOWN if _number(versions.get(trap.package, "0")) >= trap.since]


def _number(version: str) -> tuple[int, ...]:
    digits = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        digits.append(int(part))
    return tuple(digits)
