"""Settings that should only decide cost, under which one backend trains otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from harness.backends.options import COST_ALONE
from harness.judge.distance import distance
from harness.judge.findings.finding import Finding
from harness.judge.noise import measure_noise
from harness.judge.parity import has_dropout
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.judge.wording import words


def find(runs: Runs) -> list[Finding]:
    """One finding per pair of cells that differ in such settings only and lie further apart than rounding."""
    found: dict[tuple[str, str], Finding] = {}
    for left, right in _pairs(runs):
        labels = (left.label, right.label)
        if labels not in found and (finding := _judged(left, right)) is not None:
            found[labels] = finding
    return list(found.values())


def _pairs(runs: Runs) -> Iterator[tuple[Row, Row]]:
    """Runs of one job, backend and world whose options differ in what decides cost alone."""
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in runs.rows:
        record = row.record
        if record.status != "ok" or record.resumed is not None:
            continue
        rest = {
            k: v for k, v in record.backend.options.items() if k not in {*COST_ALONE, "row"} and v is not None
        }
        world = record.world
        place = (record.job_id, record.backend.name, world.world_size, world.nodes, world.preset)
        alike.setdefault((*place, repr(sorted(rest.items(), key=str))), []).append(row)
    for rows in alike.values():
        for left, right in combinations(rows, 2):
            if settings_of(left) != settings_of(right):
                yield left, right


def settings_of(row: Row) -> dict[str, Any]:
    """Options in force that decide cost alone, as typed."""
    options = row.record.backend.options
    return {name: options[name] for name in sorted(COST_ALONE & options.keys()) if options[name] is not None}


def _judged(left: Row, right: Row) -> Finding | None:
    if has_dropout(left.record) or has_dropout(right.record) or right.judgement.not_same_job:
        return None
    noise = left.noise or measure_noise(left.record, ())
    limits = noise.band or noise.tight
    beyond = limits.exceeded(distance(left.record, right.record))
    if not beyond:
        return None
    names = {name: _side(left, right, name) for name in settings_of(left).keys() | settings_of(right).keys()}
    changed = {name: sides for name, sides in sorted(names.items()) if sides[0] != sides[1]}
    what, (value, allowed) = next(iter(beyond.items()))
    settings = "; ".join(f"{name} {words(a)} against {words(b)}" for name, (a, b) in changed.items())
    return Finding(
        id="cost-setting-changes-training",
        about=(left.label, right.label),
        text=f"{settings}: should decide cost alone, but {what} differs by {value:.2g}, rounding explains "
        f"{allowed:.2g}",
        values={"settings": changed, "beyond": {name: list(pair) for name, pair in beyond.items()}},
    )


def _side(left: Row, right: Row, name: str) -> tuple[Any, Any]:
    """An option of both runs; 'default' where it was not given."""
    return tuple(settings_of(row).get(name, "default") for row in (left, right))  # type: ignore[return-value]
