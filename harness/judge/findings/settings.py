"""Settings in force that change what is trained, or what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from harness.backends.options import COST_ALONE
from harness.judge.agreement.causes import read_outside
from harness.judge.agreement.noise import is_repetition, measure_noise
from harness.judge.agreement.parity import has_dropout
from harness.judge.distance import distance
from harness.judge.effective import GROUPS, SETTINGS, SettingDifference, reduce_dtypes
from harness.judge.findings.finding import Finding, of_cells
from harness.judge.rows import JudgedRun, Runs
from harness.judge.wording import words
from harness.record import Record
from harness.record.workload import batch_statistics

BY_SETTING = {setting.name: setting.finding for setting in SETTINGS} | {GROUPS: "optimizer-differs"}
PROBE_TOLERANCE = 1e-6
"""Relative. Equal weights give equal losses up to the choice of kernels on another device."""


def find_settings(runs: Runs) -> list[Finding]:
    """Differences from the reference, then between backends, then between the ranks of one run."""
    trained = [row for row in runs.rows if row.record.status in ("ok", "diverged")]
    found = []
    for row in trained:
        if is_repetition(row.record):
            continue
        for difference in row.judgement.settings:
            kind = BY_SETTING.get(difference.setting)
            if kind is not None:
                found.append(
                    _about(
                        row,
                        kind,
                        _message(difference),
                        {"reference": difference.reference, "given": difference.given},
                    )
                )
        found += _strategy(row) + _skipped(row)
    return found + _reduction(trained) + [f for row in trained for f in _replicas(row)]


def _message(difference: SettingDifference) -> str:
    """Both values; of constants by parameter, those of the first and how many more have others."""
    if difference.setting == GROUPS:
        name, *others = difference.given
        given, reference = difference.given[name], difference.reference[name]
        more = f", and {len(others)} more parameters have constants of another group" if others else ""
        return f"{difference.differs}: {name} has {given} against {reference} in the reference{more}"
    given, reference = difference.texts
    return f"{difference.differs}: {given} against {reference} in the reference{difference.when}"


def _strategy(row: JudgedRun) -> list[Finding]:
    effective = row.record.backend.effective
    if effective is None:
        return []
    asked, runs = effective.requested_strategy, effective.strategy
    if asked is None or asked == runs:
        return []
    return [
        _about(
            row,
            "strategy-differs",
            f"runs {runs}, although {asked} was requested",
            {"requested": asked, "effective": runs},
        )
    ]


def _skipped(row: JudgedRun) -> list[Finding]:
    skipped, steps = row.record.skipped_steps, len(row.record.steps)
    if not skipped:
        return []
    return [
        _about(
            row,
            "skipped-steps",
            f"the loss scaler skipped {skipped} of {steps} optimizer steps",
            {"skipped": skipped, "steps": steps},
        )
    ]


def _reduction(rows: Sequence[JudgedRun]) -> list[Finding]:
    """Runs that reduce in another dtype although others of the same job use fp32."""
    found = []
    for job_id in dict.fromkeys(row.record.job_id for row in rows):
        dtypes = [(row, reduce_dtypes(row.record)) for row in rows if row.record.job_id == job_id]
        if any(given == ["float32"] for _, given in dtypes):
            found += [
                _about(
                    row,
                    "reduce-dtype-differs",
                    f"gradients are reduced in {', '.join(given)}, in other runs in float32",
                    {"given": given, "others": ["float32"]},
                )
                for row, given in dtypes
                if given and given != ["float32"]
            ]
    return found


def _replicas(row: JudgedRun) -> list[Finding]:
    ranks = row.record.ranks
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.final_digest is not None:
            groups.setdefault(rank.final_digest, []).append(rank.rank)
    if len(groups) > 1:
        cut = " against ".join("ranks " + ", ".join(map(str, group)) for group in groups.values())
        return [
            _about(
                row,
                "replicas-differ",
                f"replicas diverge: final weights of {cut}",
                {"groups": list(groups.values())},
            )
        ]
    losses = _probe_losses(row.record)
    if batch_statistics(row.record) or read_outside(row.record):
        return []  # each rank evaluates with running statistics, or parts of weights, of its own
    if losses and max(losses.values()) - min(losses.values()) > PROBE_TOLERANCE * abs(max(losses.values())):
        return [
            _about(
                row,
                "replicas-differ",
                "ranks compute different losses from the same batch after training, although the masters "
                f"agree: their compute weights{_or_buffers(row.record)} or the code that they run differ",
                {"probe_losses": losses},
            )
        ]
    return []


def _or_buffers(record: Record) -> str:
    """What else may differ, where the model keeps numbers that no gradient changes."""
    names = (
        [buffer.name for buffer in record.layout.buffers if "float" in buffer.dtype] if record.layout else []
    )
    return f", buffers such as {names[0]}" if names else ""


def _probe_losses(record: Record) -> dict[int, float]:
    """By data rank, the loss of one batch that is the same for all of them; parts of it added up."""
    mesh, found = record.world.mesh, dict[int, float]()
    for rank in record.ranks:
        if rank.probe_loss is not None and mesh.counts_loss(rank.rank):
            data_rank = mesh.data_rank(rank.rank)
            found[data_rank] = found.get(data_rank, 0.0) + rank.probe_loss
    return found


def _about(row: JudgedRun, kind: str, text: str, values: dict[str, Any]) -> Finding:
    return Finding(
        id=kind,
        about=row.cell,
        text=text,
        values=values,
    )


def find_cost_settings(runs: Runs) -> list[Finding]:
    """One finding per pair of cells that differ in such settings only and lie further apart than rounding."""
    found: dict[tuple[str, str], Finding] = {}
    for left, right in _cost_pairs(runs):
        labels = (left.label, right.label)
        if labels not in found and (finding := _costs(left, right)) is not None:
            found[labels] = finding
    return list(found.values())


def _cost_pairs(runs: Runs) -> Iterator[tuple[JudgedRun, JudgedRun]]:
    """Runs of one job, backend and world whose options differ in what decides cost alone."""
    alike: dict[tuple[Any, ...], list[JudgedRun]] = {}
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


def settings_of(row: JudgedRun) -> dict[str, Any]:
    """Options in force that decide cost alone, as typed."""
    options = row.record.backend.options
    return {name: options[name] for name in sorted(COST_ALONE & options.keys()) if options[name] is not None}


def _costs(left: JudgedRun, right: JudgedRun) -> Finding | None:
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
        text=f"{settings}: should change only the cost, but {what} differs by {value:.2g}, rounding explains "
        f"{allowed:.2g}",
        values={"settings": changed, "beyond": {name: list(pair) for name, pair in beyond.items()}},
    )


def _side(left: JudgedRun, right: JudgedRun, name: str) -> tuple[Any, Any]:
    """An option of both runs; 'default' where it was not given."""
    return tuple(settings_of(row).get(name, "default") for row in (left, right))  # type: ignore[return-value]


def find_muon(runs: Runs) -> list[Finding]:
    """One finding per cell."""
    return of_cells(runs, _muon)


def _muon(row: JudgedRun) -> Finding | None:
    observed = row.record.observed
    parts = observed.matrices_in_parts if observed else None
    if not parts:
        return None
    return Finding(
        id="muon-on-parts",
        about=row.cell,
        text=f"no optimizer keeps the complete momentum of {parts} matrices: Muon orthogonalises what each "
        "rank holds of them, which is another update",
        values={"matrices_in_parts": parts},
    )
