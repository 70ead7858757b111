"""What versions of the training libraries do differently: findings, closed forms and docs follow from it.

A fact is added with the run or the source that shows it. Nothing here imports the libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet

Effect = Literal["wrong", "default", "traffic", "unsupported"]


@dataclass(frozen=True, kw_only=True)
class LibraryFact:
    """What a range of versions of one library does."""

    id: str
    library: str
    """Name of the distribution."""
    versions: str
    """PEP 440; the versions of which it is true."""
    effect: Effect
    """wrong: trains something else without an error. default: an unset setting means something else.
    traffic: other bytes or dtypes cross the network. unsupported: the library cannot."""
    what: str
    handled: str
    """What the harness does about it."""
    source: str
    stages: tuple[int, ...] = ()
    """ZeRO stages that it concerns; empty: all."""
    precisions: tuple[str, ...] = ()
    """`training.precision`; empty: all."""
    accumulated: bool = False
    """Whether it concerns only several micro-steps per step."""

    def includes(self, version: str) -> bool:
        return SpecifierSet(self.versions).contains(version, prereleases=True)

    def concerns(self, stage: int, precision: str, accumulation_steps: int) -> bool:
        """Whether a ZeRO run of this stage and job is affected."""
        return (
            (not self.stages or stage in self.stages)
            and (not self.precisions or precision in self.precisions)
            and (not self.accumulated or accumulation_steps > 1)
        )


SUPPORTED: Mapping[str, str] = {
    "torch": ">=2.13,<2.14",
    "deepspeed": ">=0.18.6,<0.20",
    "transformers": ">=5.12.1,<6",
    "accelerate": ">=1.10,<2",
}
"""Ranges in which the lanes of `noxfile.py` passed; pyproject.toml has the same."""

FACTS = (
    LibraryFact(
        id="zero-broadcasts-bytes", library="deepspeed", versions=">=0.19.8", effect="traffic",
        what="initial weights are broadcast as bytes (uint8); earlier versions send them in their own dtype",
        handled="closed forms follow the version of the record",
        source="`DeepSpeedEngine._broadcast_model` of 0.19.7 and 0.19.8",
    ),
)  # fmt: skip


def fact(name: str) -> LibraryFact:
    """One fact by its id."""
    return next(entry for entry in FACTS if entry.id == name)


def holds(name: str, versions: Mapping[str, str]) -> bool:
    """Whether a fact is true of these versions by distribution; of a library not named: as of its newest."""
    entry = fact(name)
    return entry.library not in versions or entry.includes(versions[entry.library])
