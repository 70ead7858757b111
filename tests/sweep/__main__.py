"""Runs jobs of many shapes, sound and with one planted fault each, and counts what is said of them.

Of sound cells any finding is false but those that the shape names as true. Exits 1 if one is false, if more
than 5 % are unjudged, or if fewer than 95 % of the faults are named.

Usage: python -m tests.sweep [-k PART ...] [--precision bf16-mixed] [--part I/N] [--without-faults]
"""

import argparse
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.doctor.self_check import ABOUT_TIME
from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding
from tests.traps.matrix import Matrix, planted_matrix

from .table import FAULTS, SHAPES, UNUSED, Shape

MOST_UNJUDGED, LEAST_NAMED = 0.05, 0.95


@dataclass
class Tally:
    """What was seen so far."""

    cells: int = 0
    not_run: list[str] = field(default_factory=list)
    false: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def sound(self, shape: Shape, comparison: Comparison) -> None:
        """Judge the sound cells of a shape."""
        for row in comparison.rows:
            if row.is_reference:
                continue
            cell = f"{shape.name}: {row.label}"
            if row.record.status != "ok":
                why = row.record.reasons or row.record.error
                self.not_run.append(f"{cell}: {row.record.status}: {str(why)[:300]}")
                continue
            self.cells += 1
            if row.judgement.parity == "unjudged":
                self.unjudged.append(f"{cell}: {row.judgement.reason}")
            elif row.judgement.parity == "diverged" and not is_said(shape, "diverged", (row.label,)):
                self.false.append(f"{cell}: diverged: {row.judgement.exceeded}")
        for finding in comparison.findings:
            if finding.id not in ABOUT_TIME and not is_true(shape, finding):
                self.false.append(f"{shape.name}: {finding.id}: {finding.message}")

    def planted(self, shape: Shape, comparison: Comparison) -> None:
        """Judge the cell with the fault."""
        name = f"{shape.name}: {shape.fault}"
        ids = [finding.id for finding in comparison.findings if finding.id not in ABOUT_TIME]
        wanted = FAULTS[shape.fault]
        shown = "; ".join(f"{f.id}: {f.message}" for f in comparison.findings if f.id not in ABOUT_TIME)
        for row in comparison.rows:
            if row.record.status == "unsupported" or (row.is_reference and not row.record.steps):
                why = row.record.reasons or row.record.error
                self.not_run.append(f"{name}: {row.label}: {why}"[:300])
                return
        shown = shown or f"{[(r.label, r.record.status, r.record.error) for r in comparison.rows]}"
        (self.named if any(one in ids for one in wanted) else self.missed).append(f"{name}: {shown}")

    def failures(self) -> list[str]:
        """Why the sweep is not passed."""
        found = []
        if self.false:
            found.append(f"{len(self.false)} false findings")
        if self.cells and len(self.unjudged) > MOST_UNJUDGED * self.cells:
            found.append(f"{len(self.unjudged)} of {self.cells} cells unjudged")
        faults = len(self.named) + len(self.missed)
        if len(self.named) < LEAST_NAMED * faults:
            found.append(f"{len(self.named)} of {faults} faults named")
        return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", "--only", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--without-faults", action="store_true", help="sound cells alone")
    parser.add_argument("--part", help="I/N: every Nth shape from the Ith, from 1")
    parser.add_argument("--without-sound", action="store_true", help="planted faults alone")
    parser.add_argument("--precision", help="of every shape, in place of its own")
    options = parser.parse_args()
    further = [f"training.precision={options.precision}"] if options.precision else []
    if options.precision == "fp16-mixed":
        further.append("training.initial_loss_scale=256")  # which skips no step of these jobs
    chosen = [
        replace(shape, settings=(*shape.settings, *further))
        for shape in SHAPES if any(part in shape.name for part in options.only)
    ]  # fmt: skip
    first, _, every = (options.part or "1/1").partition("/")
    chosen = chosen[int(first) - 1 :: int(every)]
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder, planted_matrix(Path(folder)) as matrix:
        for shape in chosen:
            before = len(tally.false), len(tally.missed)
            if not options.without_sound:
                attempt(tally, lambda s=shape: tally.sound(s, compared(matrix, s, s.labels)), shape)
            if not options.without_faults:
                attempt(tally, lambda s=shape: tally.planted(s, compared(matrix, s, planted(s))), shape)
            added = [*tally.false[before[0] :], *(f"missed: {one}" for one in tally.missed[before[1] :])]
            say(f"{shape.name}: {'; '.join(added) or 'as it should be'}")
    report(tally)
    return 1 if tally.failures() else 0


def is_true(shape: Shape, finding: Finding) -> bool:
    return is_said(shape, finding.id, finding.backends)


def is_said(shape: Shape, kind: str, labels: tuple[str, ...]) -> bool:
    """Whether the shape says that a finding is true, of any backend or of this one."""
    said = [one.partition(" of ") for one in shape.true]
    return any(name == kind and (not of or labels == (of,)) for name, _, of in said)


def planted(shape: Shape) -> Sequence[str]:
    """The cell with the fault: DDP, told of unused parameters where the shape has some."""
    option = ":find_unused_parameters=True" if shape.labels[0] == UNUSED[0] else ""
    return [*(["ddp" + option] if shape.fault == "Bf16Reduction" else []), f"planted-{shape.fault}{option}"]


def compared(matrix: Matrix, shape: Shape, labels: Sequence[str]) -> Comparison:
    return matrix.compare(labels, shape.world_size if labels else 1, shape.settings)


def attempt(tally: Tally, work: object, shape: Shape) -> None:
    """What cannot be judged at all is false."""
    try:
        work()  # type: ignore[operator]
    except Exception:
        tally.false.append(f"{shape.name}: {traceback.format_exc(limit=-3)}")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def report(tally: Tally) -> None:
    for title in ("false", "unjudged", "missed", "not_run"):
        for line in getattr(tally, title):
            say(f"{title}: {line}")
    faults = len(tally.named) + len(tally.missed)
    say(
        f"{tally.cells} sound cells: {len(tally.false)} false findings, {len(tally.unjudged)} unjudged; "
        f"{len(tally.not_run)} more did not run; {len(tally.named)} of {faults} faults named"
    )
    say("; ".join(tally.failures()) or "passed")


if __name__ == "__main__":
    raise SystemExit(main())
