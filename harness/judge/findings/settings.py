"""Settings in force that differ from the reference's, or between backends, and change the mathematics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.judge.effective import GROUPS, SettingDifference, reduce_dtypes
from harness.judge.findings.finding import Finding
from harness.judge.noise import is_repetition
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.record import Record
from harness.record.together import batch_statistics

BY_SETTING = {
    "gradient clipping": "clipping-differs",
    "norm that clips": "clipping-differs",
    "optimizer": "optimizer-differs",
    "optimizer constants": "optimizer-differs",
    GROUPS: "optimizer-differs",
    "parameters without optimizer": "optimizer-differs",
    "frozen parameters": "optimizer-differs",
    "dtype of masters": "master-dtype-differs",
    "dtype of optimizer states": "master-dtype-differs",
    "attention kernel": "step-environment-differs",
    "TF32": "step-environment-differs",
    "settings of NCCL": "step-environment-differs",
    "activation checkpointing": "step-environment-differs",
    "compiled": "step-environment-differs",
}
PROBE_TOLERANCE = 1e-6
"""Relative. Equal weights give equal losses up to the choice of kernels on another device."""


def find(runs: Runs) -> list[Finding]:
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
    return f"{difference.differs}: {given} against {reference} in the reference"


def _strategy(row: Row) -> list[Finding]:
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


def _skipped(row: Row) -> list[Finding]:
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


def _reduction(rows: Sequence[Row]) -> list[Finding]:
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


def _replicas(row: Row) -> list[Finding]:
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
    if batch_statistics(row.record):
        return []  # each rank evaluates with running statistics of its own
    if losses and max(losses.values()) - min(losses.values()) > PROBE_TOLERANCE * abs(max(losses.values())):
        return [
            _about(
                row,
                "replicas-differ",
                "ranks compute different losses from the same batch after training: their compute weights "
                "differ although the masters agree",
                {"probe_losses": losses},
            )
        ]
    return []


def _probe_losses(record: Record) -> dict[int, float]:
    """By data rank, the loss of one batch that is the same for all of them; parts of it added up."""
    mesh, found = record.world.mesh, dict[int, float]()
    for rank in record.ranks:
        if rank.probe_loss is not None and mesh.counts_loss(rank.rank):
            data_rank = mesh.data_rank(rank.rank)
            found[data_rank] = found.get(data_rank, 0.0) + rank.probe_loss
    return found


def _about(row: Row, kind: str, text: str, values: dict[str, Any]) -> Finding:
    return Finding(
        id=kind,
        about=row.cell,
        text=text,
        values=values,
    )
