"""What versions of the training libraries do differently: findings, closed forms and docs follow from it.

A fact is added with the run or the source that shows it. Nothing here imports the libraries.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

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

    @property
    def first(self) -> str:
        """The first version of which it is true. Raises StopIteration where all earlier ones are included."""
        return next(part.version for part in SpecifierSet(self.versions) if part.operator == ">=")

    def includes(self, given: str) -> bool:
        """Whether it is true of a version; never of one that PEP 440 does not know."""
        try:
            return SpecifierSet(self.versions).contains(given, prereleases=True)
        except InvalidVersion:
            return False

    def concerns(self, stage: int, precision: str, accumulation_steps: int) -> bool:
        """Whether a ZeRO run of this stage and job is affected."""
        return (
            (not self.stages or stage in self.stages)
            and (not self.precisions or precision in self.precisions)
            and (not self.accumulated or accumulation_steps > 1)
        )


FACTS = (
    LibraryFact(
        id="zero-clips-by-default", library="deepspeed", versions=">=0.19.3", effect="default",
        what="clips gradients at 1.0 if `gradient_clipping` is not set; earlier versions do not clip",
        handled="`gradient_clipping` is always set; a difference is the finding clipping-differs",
        source="https://github.com/deepspeedai/DeepSpeed/pull/8068; `GRADIENT_CLIPPING_DEFAULT` is 0. in "
        "0.19.2 and 1.0 in 0.19.3",
    ),
    LibraryFact(
        id="zero2-loses-micro-steps", library="deepspeed", versions=">=0.17.6,<0.18.3", effect="wrong",
        what="stage 2 computes wrong gradients when several micro-steps make a step",
        handled="the finding faulty-version",
        source="https://github.com/deepspeedai/DeepSpeed/issues/7718; seen in 0.18.0: the contract's losses "
        "differ by 2.7e-2 with two micro-steps, by 8.6e-7 with one",
        stages=(2,), accumulated=True,
    ),
    LibraryFact(
        id="zero0-bf16-scales-gradients", library="deepspeed", versions=">=0.17.6,<0.18.6", effect="wrong",
        what="stage 0 in bf16 divides gradients by a loss scale never applied, and does not clear them",
        handled="the finding faulty-version",
        source="https://github.com/deepspeedai/DeepSpeed/pull/7839, first released in 0.18.6; seen in 0.18.0 "
        "and 0.18.5, not in 0.18.6; 0.17.5 takes another optimizer (engine.py, `DDP_BFLOAT16`)",
        stages=(0,), precisions=("bf16-mixed",),
    ),
    LibraryFact(
        id="zero-broadcasts-bytes", library="deepspeed", versions=">=0.19.8", effect="traffic",
        what="initial weights are broadcast as bytes (uint8); earlier versions send them in their own dtype",
        handled="closed forms follow the version of the record",
        source="`DeepSpeedEngine._broadcast_model` of 0.19.7 and 0.19.8; seen in 0.18.6 and 0.19.3",
    ),
    LibraryFact(
        id="trainer-without-label-shift", library="transformers", versions="<5.10.1", effect="unsupported",
        what="Trainer lacks what says whether the model shifts its labels (`_loss_shifts_labels`)",
        handled="runs through Trainer are recorded as unsupported",
        source="trainer.py of 5.9.0 and 5.10.1; seen in 5.0.0",
    ),
)  # fmt: skip


def fact(name: str) -> LibraryFact:
    """One fact by its id."""
    return next(entry for entry in FACTS if entry.id == name)


def holds(name: str, versions: Mapping[str, str]) -> bool:
    """Whether a fact is true of these versions by distribution; of a library not named: as of its newest."""
    entry = fact(name)
    return entry.library not in versions or entry.includes(versions[entry.library])


def unsupported(packages: Collection[str]) -> list[str]:
    """Why the installed versions of a backend's libraries cannot run it, one sentence per fact."""
    entries = [entry for entry in FACTS if entry.effect == "unsupported" and entry.library in packages]
    installed = {entry.library: version(entry.library) for entry in entries}
    return [
        f"{entry.library} {installed[entry.library]} cannot: {entry.what} (versions {entry.versions})"
        for entry in entries
        if entry.includes(installed[entry.library])
    ]


def explain() -> str:
    """The table of facts in `docs/versions.md`."""
    lines = ["| library | versions | effect | what | what the harness does | source |", "|" + " --- |" * 6]
    lines += [
        f"| {entry.library} | `{entry.versions}` | {entry.effect} | {entry.what} | {entry.handled} "
        f"| {entry.source} |"
        for entry in FACTS
    ]
    return "\n".join(lines) + "\n"
