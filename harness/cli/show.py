"""`harness show`: one run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import click

from harness.cli.options import completion
from harness.cli.options.selection import LATEST, one_run
from harness.cli.options.shared import common, json_option, runs_option
from harness.cli.terminal.output import echo
from harness.job.experiment import Experiment
from harness.judge.comparison import Comparison
from harness.judge.metrics import METRICS
from harness.judge.rows import reason
from harness.nested import leaves
from harness.record import ObservationPart, Record
from harness.record.store import record_text
from harness.tell.formats import line_width, megabytes
from harness.tell.tables import figure_text
from harness.tell.terminal import finding_lines


@click.command()
@click.argument("run", default=LATEST, shell_complete=completion.run)
@runs_option
@json_option
@common
def show(run: str, runs: Path, as_json: bool) -> int:
    """Show one run: how it ended, its figures, and the settings that differ from the defaults.

    RUN is a run id or a part of it that no other run has, a folder or file of one, or 'latest' (default).
    """
    path, record = one_run(run, runs)
    if as_json:
        echo(json.dumps(json.loads(record_text(record)), indent=1, ensure_ascii=False))
        return 0
    comparison = Comparison([record])
    for title, lines in _parts(path, record, comparison):
        echo(title)
        for line in _beside(lines):
            echo(line)
    for line in finding_lines(comparison):
        echo(line)
    return 0


def _beside(lines: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Names, and next to them values, whose words continue below their beginning."""
    width = max((len(name) for name, _ in lines), default=0)
    for name, value in lines:
        head = f"  {name:<{width}}  "
        pieces = wrap(value, line_width() - len(head), break_long_words=False, break_on_hyphens=False) or [""]
        yield head + pieces[0]
        yield from (" " * len(head) + piece for piece in pieces[1:])


def _parts(path: Path, record: Record, comparison: Comparison) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    world = record.world
    about = [
        ("status", record.status),
        ("started", record.created_at),
        ("backend", record.backend.label),
        ("ranks", f"{world.world_size} on {world.nodes} node(s), {world.device}, {world.collectives}"),
        *([("dimensions", str(world.mesh))] if world.dimensions else []),
        ("batch", f"micro-batch {world.micro_batch_size}, accumulation {world.accumulation_steps}"),
        ("job", record.job_id),
        ("record", str(path)),
    ]
    why = reason(record)
    yield record.run_id, [*about[:1], *([("why", why)] if why else []), *about[1:]]
    figures = list(_figures(record, comparison))
    if figures:
        yield "Figures", figures
    if record.prediction is not None:
        predicted = megabytes(record.prediction.peak_bytes)
        yield "Predicted", [("peak MB", f"{predicted} ({record.prediction.verdict or 'no limit known'})")]
    if record.observation is not None:
        yield "Observed", list(_observed(record.observation))
    yield "Non-default settings", list(_settings(record)) or [("-", "none")]
    versions = record.backend.versions
    yield "Versions", [(name, version) for name, version in versions.items()] or [("-", "not known")]
    yield "Command", [("$", " ".join(record.command))]
    if record.artifacts:
        yield "Files", [(part.kind, str(path.parent / part.path)) for part in record.artifacts]


def _figures(record: Record, comparison: Comparison) -> Iterator[tuple[str, str]]:
    if record.steps:
        yield "steps", str(len(record.steps))
        loss = record.steps[-1].loss
        yield "last loss", "n/a" if loss is None else f"{loss}"
    for row in comparison.rows:
        for metric in METRICS:
            value = row.figures.get(metric.key)
            if value is not None:
                yield metric.title, figure_text(metric, value)


def _observed(observation: ObservationPart) -> Iterator[tuple[str, str]]:
    """What a script's figures are taken from, and what is n/a."""
    yield "command", " ".join(observation.command)
    yield "driven by", ", ".join(observation.frameworks) or "torch alone"
    yield "loss", observation.loss or "n/a"
    for note in observation.notes:
        yield "note", note
    for name, why in observation.unknown.items():
        yield f"n/a: {name}", why


def _settings(record: Record) -> Iterator[tuple[str, str]]:
    """Settings of the job and of measuring, with their values."""
    default = Experiment().model_dump(mode="json")
    given: dict[str, Any] = record.job.model_dump(mode="json")
    if record.measure is not None:
        given["measure"] = record.measure.model_dump(mode="json")
    for section, values in given.items():
        for keys, value in leaves(values):
            known: Any = default.get(section)
            for key in keys:
                known = known.get(key) if isinstance(known, dict) else None
            if value != known and not (value is None and record.observation is not None):
                yield ".".join([section, *keys]), json.dumps(value)
