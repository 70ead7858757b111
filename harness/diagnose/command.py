"""`harness diagnose`: reads two runs, has their difference looked into, and prints through click."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.cli import EXIT_STRICT
from harness.diagnose.diagnosis import CLEAN, Diagnosis, diagnose
from harness.diagnose.pair import read_pair
from harness.worker.events import finite


def diagnose_runs(first: Path, second: Path, *, strict: bool, as_json: bool) -> int:
    """Say whether two runs differ by more than noise and, if so, in which step, tensors and ratio, and why.

    0, or with `strict` EXIT_STRICT if they differ.
    """
    pair = read_pair(first, second)
    diagnosis = diagnose(pair, lambda text: click.echo(text, err=True))
    if as_json:
        runs = {"runs": [run.record.run_id for run in pair]}
        click.echo(json.dumps(finite(runs | diagnosis.as_json()), indent=1))
    else:
        _print(diagnosis)
    return EXIT_STRICT if strict and not diagnosis.clean else 0


def _print(diagnosis: Diagnosis) -> None:
    names = f"{diagnosis.other.name} beside {diagnosis.baseline.name}"
    if diagnosis.verdict is None:
        click.echo(f"{names}: {CLEAN}")
    elif diagnosis.verdict.parts:
        click.echo(f"{names}: they part in step {diagnosis.verdict.step}")
    else:
        click.echo(f"{names}: they differ, but no examined step parts")
    for sentence in diagnosis.said:
        click.echo(f"- {sentence}")
    click.echo("noise:")
    for sentence in diagnosis.derivation:
        click.echo(f"- {sentence}")
