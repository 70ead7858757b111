"""`harness diagnose`: reads two runs and prints why they differ."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.cli.options import EXIT_STRICT, PATH, common, json_option
from harness.cli.output import echo
from harness.diagnose import diagnosis as diagnosing
from harness.diagnose.diagnosis import CLEAN, PARTED, Diagnosis
from harness.diagnose.pair import read_pair
from harness.nested import finite


@click.command()
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@click.option("--strict", is_flag=True, help="Exit with 3 if the runs differ by more than noise.")
@json_option
@common
def diagnose(first: Path, second: Path, strict: bool, as_json: bool) -> int:
    """Explain why two runs of one job differ, given their folders.

    Lists the settings that differ, the first step, the tensors and the ratio of the difference, or reports
    that there is none beyond noise. Reruns both on this machine, and the reference if noise was not
    measured. Of an observed script only the records are compared.
    """
    pair = read_pair(first, second)
    diagnosis = diagnosing.diagnose(pair, lambda text: echo(text, err=True))
    if as_json:
        runs = {"runs": [run.record.run_id for run in pair]}
        echo(json.dumps(finite(runs | diagnosis.as_json()), indent=1))
    else:
        _print(diagnosis)
    return EXIT_STRICT if strict and not diagnosis.clean else 0


def _print(diagnosis: Diagnosis) -> None:
    names = f"{diagnosis.other.name} and {diagnosis.baseline.name}"
    if diagnosis.verdict is None:
        echo(f"{names}: {CLEAN if diagnosis.clean else PARTED}")
    elif diagnosis.verdict.parts:
        echo(f"{names} diverge in step {diagnosis.verdict.step}")
    else:
        echo(f"{names} differ, but no examined step does")
    for sentence in diagnosis.explanation:
        echo(f"- {sentence}")
    echo("noise:")
    for sentence in diagnosis.derivation:
        echo(f"- {sentence}")
