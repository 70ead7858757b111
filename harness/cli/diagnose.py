"""`harness diagnose`: reads two runs and prints why they differ."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.cli.options.shared import EXIT_STRICT, PATH, common, json_option
from harness.cli.terminal.output import echo
from harness.diagnose import diagnosis as diagnosing
from harness.diagnose.diagnosis import Diagnosis
from harness.diagnose.jobs import JobsDiagnosis, diagnose_jobs
from harness.diagnose.pair import one_job, read_pair
from harness.nested import finite


@click.command()
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@click.option("--strict", is_flag=True, help="Exit with 3 if the runs differ by more than noise.")
@click.option(
    "--rerun", "reruns", is_flag=True,
    help="Of runs of different jobs: run the first again with one setting of the second at a time.",
)  # fmt: skip
@json_option
@common
def diagnose(first: Path, second: Path, strict: bool, reruns: bool, as_json: bool) -> int:
    """Explain why two runs differ, given their folders.

    Of one job: the settings in force that differ, the first step, the tensors and the ratio of the
    difference, or that there is none beyond noise. Reruns both on this machine, and the reference if noise
    was not measured. Of different jobs: the settings that differ and each figure that does, the first one
    first; --rerun finds the setting that makes the difference. Of an observed script only the records are
    compared.
    """
    pair = read_pair(first, second)

    def say(text: str) -> None:
        echo(text, err=True)

    diagnosis: Diagnosis | JobsDiagnosis = (
        diagnosing.diagnose(pair, say) if one_job(*pair) else diagnose_jobs(pair, say, reruns=reruns)
    )
    if as_json:
        runs = {"runs": [run.record.run_id for run in pair]}
        echo(json.dumps(finite(runs | diagnosis.as_json()), indent=1))
    elif isinstance(diagnosis, JobsDiagnosis):
        echo(diagnosis.verdict())
        for sentence in diagnosis.sentences():
            echo(f"- {sentence}")
    else:
        _print(diagnosis)
    return EXIT_STRICT if strict and not diagnosis.clean else 0


def _print(diagnosis: Diagnosis) -> None:
    names = f"{diagnosis.other.name} and {diagnosis.baseline.name}"
    if diagnosis.verdict is None:
        echo(f"{names}: {diagnosis.outcome}")
    elif diagnosis.verdict.parts:
        echo(f"{names} diverge in step {diagnosis.verdict.step}")
    else:
        echo(f"{names} differ, but no examined step does")
    for sentence in diagnosis.explanation:
        echo(f"- {sentence}")
    echo("noise:")
    for sentence in diagnosis.derivation:
        echo(f"- {sentence}")
