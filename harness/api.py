"""Compare, run, load and estimate: each takes what its command takes, as Python values.

A command runs in a process of its own. Ranks need a launcher that owns its process: signals, environment
variables, a fork server. A notebook's process stays as it was, and a record names the command line that
repeats it.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from os import PathLike
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn, get_args

from harness.backends.refusals import available
from harness.errors import HarnessError
from harness.import_path import module_command, safe_environment
from harness.job.config import load_experiment
from harness.judge.comparison import Comparison
from harness.judge.facts import METRICS, facts
from harness.judge.rows import JudgedRun
from harness.nested import grouped
from harness.plan.answer import Answer, option_words
from harness.record import Record
from harness.record.store import RECORD_NAME, read_runs, run_folder

if TYPE_CHECKING:
    from pandas import DataFrame

    from harness.judge.findings.finding import Finding

Kind = Literal["runs", "steps", "evaluations", "facts", "findings"]
FINDING = ("id", "backends", "message", "values")


def frame(comparison: Comparison, kind: Kind) -> DataFrame:
    """One table of a comparison. Raises HarnessError for a kind that does not exist."""
    from pandas import DataFrame

    match kind:
        case "runs":
            rows = comparison.rows
            table = DataFrame([{**row.figures, "same_job": row.is_comparable} for row in rows])
            table = table.rename(columns={"world_size": "ranks"})
            return table.astype({metric.key: "float64" for metric in METRICS if metric.key in table})
        case "steps":
            found = [_run(row) | asdict(step) for row in comparison.rows for step in row.record.steps]
        case "evaluations":
            found = [_run(row) | done.model_dump() for row in comparison.rows for done in row.record.eval]
        case "facts":
            found = [_run(row) | vars(fact) for row in comparison.rows for fact in facts(row.record)]
        case "findings":
            return DataFrame([one.as_json() for one in comparison.findings], columns=list(FINDING))
        case _:
            raise HarnessError(f"table '{kind}' is unknown. {available(str(kind), get_args(Kind))}")
    return DataFrame(found)


def _run(row: JudgedRun) -> dict[str, Any]:
    """What tells the runs of a comparison apart."""
    record = row.record
    return {
        "run_id": record.run_id,
        "backend": row.label,
        "ranks": record.world.world_size,
        "repeat": record.repeat,
    }


class Plot(str):
    """The text of an SVG, which a notebook shows; write it to a file as it is."""

    def _repr_svg_(self) -> str:
        return str(self)


class Results:
    """Runs compared with each other. A terminal shows its table, a notebook the same as HTML."""

    def __init__(self, runs: Sequence[tuple[Path, Record]]) -> None:
        self.runs = list(runs)
        """Each record with its file."""

    @property
    def records(self) -> list[Record]:
        """Every record, those of the repeated reference included."""
        return [record for _, record in self.runs]

    @property
    def record(self) -> Record:
        """The record where there is one only. Raises HarnessError."""
        if len(self.runs) != 1:
            raise HarnessError(f"there are {len(self.runs)} records, not one; use `records`")
        return self.runs[0][1]

    @cached_property
    def comparison(self) -> Comparison:
        """The runs judged by their reference (`harness.judge.comparison`)."""
        return Comparison(self.records)

    @property
    def findings(self) -> list[Finding]:
        """What a reader of the comparison must know; `harness explain ID` has cause and fix."""
        return self.comparison.findings

    def to_frame(self, kind: Kind = "runs") -> DataFrame:
        """A table for pandas, in bytes and seconds; None where nothing was measured.

        'runs': a line per run with the figures of `compare --json`; 'steps': a line per run and optimizer
        step; 'evaluations': a line per run and evaluation; 'facts': a line per value of a rank, step, kind of
        memory or collective, measured, expected or predicted; 'findings': a line per finding.
        """

        return frame(self.comparison, kind)

    def as_json(self) -> dict[str, Any]:
        """The document of `compare --json`."""
        return self.comparison.as_json()

    def report(self, path: str | PathLike[str], *, over: str = "") -> Path:
        """Write a report as .md, .html, .csv or .json, as the extension says; over: as --over."""
        from harness.tell.report import write_report

        return write_report(self.runs, Path(path), over=over)

    def plot(self, name: str, *, over: str = "") -> Plot:
        """A picture of the report, such as 'loss', 'memory', 'communication', 'throughput' or 'time'.

        `over`: as of `report`. Raises HarnessError for one that these runs do not have.
        """
        from harness.tell.before_after import over_time
        from harness.tell.first_page import short_document
        from harness.tell.pictures.drawing import draw
        from harness.tell.report import details_document

        if over:
            pages = [over_time({f"{record.run_id}/record.json": record for record in self.records}, over)]
        else:
            details = details_document(self.comparison)
            pages = [short_document(self.comparison, "all", details), details]
        pictures = {picture.key: picture for page in pages for picture in page.pictures()}
        if name not in pictures:
            raise HarnessError(f"picture '{name}': these runs have none. {available(name, pictures)}")
        return Plot(draw(pictures[name], heading=pages[0].heading).decode())

    def __str__(self) -> str:
        from harness.tell.terminal import terminal_text

        return terminal_text(self.comparison)

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        from harness.tell.formats import markdown_text
        from harness.tell.tables import not_comparable_table, results_table
        from harness.tell.terminal import finding_lines
        from harness.tell.writers.text import table_markdown

        tables = [results_table(self.comparison.comparable), not_comparable_table(self.comparison)]
        found = [f"- {markdown_text(line)}" for line in finding_lines(self.comparison, wide=True)]
        return "\n\n".join([*(table_markdown(one) for one in tables if one), "\n".join(found)])


class Estimate:
    """Rows of an estimate, one per backend and number of ranks; where the batch is open, the best of each."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = list(answers)

    def as_json(self) -> dict[str, Any]:
        """The document of `harness estimate --json`: per rank, in bytes and seconds."""
        from harness.plan.document import document

        return document(self.answers)

    def to_frame(self) -> DataFrame:
        """Its rows as a table for pandas; None where no closed form answers."""
        from pandas import DataFrame

        return DataFrame(self.as_json()["rows"])

    def __str__(self) -> str:
        from harness.plan.text import answer_lines

        return "\n".join(answer_lines(self.answers, whole=True))

    __repr__ = __str__


def estimate(
    model: str | None = None,
    *,
    config: str | PathLike[str] | None = None,
    backends: Sequence[str] = ("all",),
    world_size: int | Sequence[int] = 8,
    gpus_per_node: int | None = None,
    gpu: str | None = None,
    fabric: str | None = None,
    hardware: str | PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Estimate:
    """Predict memory, communication, speed and cost of a job by strategy, in this process, without GPUs.

    `model`: a name of the catalogue ('llama-3.1-8b'), a folder with config.json, or None for the job's;
    `gpu`, `fabric`: names such as 'H100-80' and 'NDR400';
    `gpus_per_node`: None for as the GPU is sold; `hardware`: a YAML file with more of them;
    `settings`: values by dotted name. Raises HarnessError.
    """
    from harness.plan.answer import answers
    from harness.plan.hardware import load_hardware, ranks_per_node
    from harness.plan.prediction import Predictors
    from harness.plan.profiles import Tracer
    from harness.plan.question import asked_of
    from harness.shipped import resolve

    known = load_hardware(None if hardware is None else Path(hardware))
    file = None if config is None else resolve(Path(config), "configs")
    device = None if gpu is None else known.device(gpu)
    given = assignments(settings)[1::2]
    asked = asked_of(
        load_experiment(file, given),
        model,
        assignments=given,
        backends=backends,
        world_sizes=[world_size] if isinstance(world_size, int) else world_size,
        ranks_per_node=ranks_per_node(device, gpus_per_node),
        device=device,
        fabric=None if fabric is None else known.fabric(fabric),
    )
    with Tracer() as trace:
        return Estimate(answers(asked, by=Predictors.traced_by(trace)))


INTERRUPTED = 130
PATIENCE_SECONDS = 60.0
"""After an interrupt, until the ranks have ended and the record is written."""
PREFIX = "harness: "


def answer(words: Sequence[str], *, quiet: bool) -> Any:
    """The JSON document that `harness WORDS` prints; its standard error goes to ours as it comes.

    `quiet`: keep the progress back. Raises HarnessError with the command's one line, and KeyboardInterrupt.
    """
    process = subprocess.Popen(
        [*module_command("harness"), *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace",
        env=safe_environment(),
    )  # fmt: skip
    said: list[str] = []
    with process, _passed_on(process.stderr, said, shows=not quiet), _interrupts_passed_on(process):
        assert process.stdout is not None
        printed = process.stdout.read()
    if process.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if process.returncode != 0:
        own = [line.removeprefix(PREFIX) for line in said if line.startswith(PREFIX)]
        raise HarnessError((own or said or [f"the command ended with exit code {process.returncode}"])[-1])
    return json.loads(printed)


def assignments(settings: Mapping[str, Any] | None) -> list[str]:
    """The words that set each dotted setting to its value: JSON is YAML."""
    return [
        word
        for name, value in (settings or {}).items()
        for word in ("--set", f"{name}={json.dumps(value, default=str)}")
    ]


@contextlib.contextmanager
def _passed_on(stream: IO[str] | None, said: list[str], *, shows: bool) -> Iterator[None]:
    """Collect the lines of a stream and show them meanwhile."""
    assert stream is not None
    ours = sys.stderr

    def follow() -> None:
        for line in stream:
            said.append(line.rstrip("\n"))
            if shows and not line.startswith(PREFIX):  # an error is raised, not shown
                ours.write(line)

    thread = Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextlib.contextmanager
def _interrupts_passed_on(process: subprocess.Popen[str]) -> Iterator[None]:
    """A kernel's interrupt may reach this process alone; the command then ends its ranks, too."""
    try:
        yield
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_SECONDS)
        raise


AnyPath = str | PathLike[str]


def compare(
    config: AnyPath | None = None,
    *,
    script: Sequence[str] | Mapping[str, str] | None = None,
    reference: str | None = None,
    backends: Sequence[str] | None = None,
    nproc: int | Sequence[int] | None = None,
    repeats: int | None = None,
    within: float | None = None,
    max_minutes: float | None = None,
    model: str | None = None,
    settings: Mapping[str, Any] | None = None,
    runs: AnyPath = "runs",
    fresh: bool = False,
    force: bool = False,
    quiet: bool = False,
    **gone: NoReturn,
) -> Results:
    """Run the missing cells of backends x numbers of ranks x repeats, and compare them all.

    `config`: YAML file, or '@default'; `script`: words of a training script of your own, run unchanged under
    each backend, or whole commands by the name of their row; `reference`: a command that trains the same as
    `script` in one process; `within`, `max_minutes`: add rounds until each
    speed is in order and known so well (0.03: within 3 %), but start none after so long; `model`: of the
    catalogue or a folder, with random weights, in place of the job's; `settings`: values by dotted name, such
    as {'training.steps': 40}; `runs`: folder of the records; `fresh`: run every cell, even one with a
    record; `force`: start what is predicted not to fit; `quiet`: no progress on standard error. A cell that
    failed has its record, too. Raises HarnessError where the command would exit with an error.
    """
    if "precision" in gone:
        raise TypeError("compare() has no precision: give within=0.03, or training.precision in settings")
    if gone:
        raise TypeError(f"compare() got an unexpected keyword argument '{next(iter(gone))}'")
    sizes = [nproc] if isinstance(nproc, int) else nproc
    words = ["compare", *_common(config, model, settings, runs, force=force)]
    words += option_words({
        "--reference": reference, "--backends": None if backends is None else ",".join(backends),
        "--nproc": None if sizes is None else ",".join(map(str, sizes)), "--repeats": repeats,
        "--within": None if within is None else f"{100 * within:.12g}%", "--max-minutes": max_minutes,
    })  # fmt: skip
    words += ["--fresh"] if fresh else []
    if isinstance(script, Mapping):
        words += [word for name, command in script.items() for word in ("--script", f"{name}={command}")]
    elif script:
        words += ["--", *script]
    document = answer(words, quiet=quiet)
    return _read(*map(Path, document["records"]))


def run(
    backend: str,
    config: AnyPath | None = None,
    *,
    nproc: int | None = None,
    model: str | None = None,
    settings: Mapping[str, Any] | None = None,
    runs: AnyPath = "runs",
    force: bool = False,
    quiet: bool = False,
) -> Results:
    """Run one job under one backend, such as 'zero3:offload=cpu'; `record` of the result is its record.

    The other arguments are those of `compare`. Raises HarnessError if the run failed.
    """
    words = ["run", "--backend", backend, *_common(config, model, settings, runs, force=force)]
    document = answer([*words, *option_words({"--nproc": nproc})], quiet=quiet)
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
    by_job = grouped((record.job_id, record) for record in records)
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
    config: AnyPath | None,
    model: str | None,
    settings: Mapping[str, Any] | None,
    runs: AnyPath,
    *,
    force: bool,
) -> list[str]:
    job = [*option_words({"--config": config, "--model": model}), *assignments(settings)]
    return [*job, "--runs", str(runs), "--json", *(["--force"] if force else [])]
