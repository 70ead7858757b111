"""Compare, run and load: each takes what its command takes, as Python values."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from harness.api.command import answer, assignments
from harness.api.results import Results
from harness.record import Record
from harness.record.record_files import RECORD_NAME
from harness.record.run_id import run_folder
from harness.record.store import read_runs

AnyPath = str | PathLike[str]


def compare(
    config: AnyPath | None = None,
    *,
    backends: Sequence[str] | None = None,
    nproc: int | Sequence[int] | None = None,
    repeats: int | None = None,
    precision: float | None = None,
    max_minutes: float | None = None,
    settings: Mapping[str, Any] | None = None,
    runs: AnyPath = "runs",
    fresh: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> Results:
    """Run the missing cells of backends x numbers of ranks x repeats, and compare them all.

    `config`: YAML file, or '@default'; `precision`, `max_minutes`: add rounds until each speed is in order
    and known so well (0.03: within 3 %), but start none after so long; `settings`: values by dotted name,
    such as {'training.steps': 40}; `runs`: folder of the records; `fresh`: run every cell, even one with a
    record; `force`: start what is predicted not to fit; `quiet`: no progress on standard error. A cell that
    failed has its record, too. Raises HarnessError where the command would exit with an error.
    """
    words = ["compare", *_common(config, settings, runs, force=force)]
    words += _option("--backends", None if backends is None else ",".join(backends))
    sizes = [nproc] if isinstance(nproc, int) else nproc
    words += _option("--nproc", None if sizes is None else ",".join(map(str, sizes)))
    words += _option("--repeats", repeats)
    words += _option("--precision", None if precision is None else f"{100 * precision:.12g}%")
    words += _option("--max-minutes", max_minutes)
    document = answer([*words, "--fresh"] if fresh else words, quiet=quiet)
    return _read(*map(Path, document["records"]))


def run(
    backend: str,
    config: AnyPath | None = None,
    *,
    nproc: int | None = None,
    settings: Mapping[str, Any] | None = None,
    runs: AnyPath = "runs",
    force: bool = False,
    quiet: bool = False,
) -> Results:
    """Run one job under one backend, such as 'zero3:offload=cpu'; `record` of the result is its record.

    The other arguments are those of `compare`. Raises HarnessError if the run failed.
    """
    words = ["run", "--backend", backend, *_common(config, settings, runs, force=force)]
    document = answer([*words, *_option("--nproc", nproc)], quiet=quiet)
    return load(run_folder(Path(runs), document["run_id"]) / RECORD_NAME)


def load(*paths: AnyPath) -> Results:
    """Records from files, run folders, folders of runs, reports' folders or archives (runs.tar.xz).

    Warns of records that cannot be read, and of several jobs. Raises HarnessError if there is no record.
    """
    results = _read(*paths)
    if line := several_jobs(results.records):
        warnings.warn(line, stacklevel=2)
    return results


def several_jobs(records: Sequence[Record]) -> str | None:
    """One line that names the jobs of these records; None: there is only one."""
    by_job: dict[str, list[Record]] = {}
    for record in records:
        by_job.setdefault(record.job_id, []).append(record)
    if len(by_job) < 2:
        return None
    named = []
    for job_id, of_job in by_job.items():
        labels = ", ".join(dict.fromkeys(record.backend.label for record in of_job))
        named.append(f"{job_id} ({len(of_job)} of {labels})")
    return (
        f"these records are of {len(by_job)} jobs, and runs are compared within their own job only: "
        f"{'; '.join(named)}. Give the run folders of one job, or keep each job in a folder of its own"
    )


def _read(*paths: AnyPath) -> Results:
    found, problems = read_runs(map(Path, paths or ("runs",)))
    for problem in problems:
        warnings.warn(f"skipped: {problem}", stacklevel=3)
    return Results(found)


def _common(
    config: AnyPath | None, settings: Mapping[str, Any] | None, runs: AnyPath, *, force: bool
) -> list[str]:
    words = [*_option("--config", config), *assignments(settings), "--runs", str(runs), "--json"]
    return [*words, "--force"] if force else words


def _option(name: str, value: object) -> list[str]:
    return [] if value is None else [name, str(value)]
