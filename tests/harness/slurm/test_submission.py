"""Submission within a limit, attempts, and records for every run whose job is over."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from harness.cli import harness
from harness.errors import HarnessError
from harness.fabric.result import FabricResult, FabricRow
from harness.job.experiment import CompareSection, Experiment
from harness.record import SlurmPart
from harness.record.store import read_record
from harness.run_directory.request import RunRequest, rank_exit, rank_file
from harness.slurm.client import JobFacts, SlurmUnavailable
from harness.slurm.matrix import (
    MATRIX_NAME,
    Matrix,
    PlannedRun,
    Site,
    load_site,
    plan_nodes,
    render_matrix,
    write_matrix,
)
from harness.slurm.submission import (
    ScriptEnd,
    alone,
    begin,
    collect,
    finish,
    look,
    memory_bytes,
    out_of_memory_notice,
    ranges,
    site_limits,
    submit_runs,
    unfit_software,
    unsubmitted,
    verdict,
)
from tests.harness.slurm.fakes import FakeSlurm
from tests.harness.slurm.test_matrix import SITES
from tests.records import make_effective

DATA = dict.fromkeys(
    ("samples", "training_samples", "evaluation_samples", "target_tokens", "vocabulary_size"), 8
)
QUIET: Callable[[str, int], None] = lambda job, runs: None  # noqa: E731
STEP = {
    "step": 0, "window": "timed", "loss_sum": 80.0, "gradient_norm": 1.0, "learning_rate": 0.1, "tokens": 8,
    "target_tokens": 8, "global_target_tokens": 16, "samples": 1, "sample_hashes": "0" * 16, "seconds": 0.1,
    "data_seconds": 0.0, "phase_seconds": {"forward": 0.1, "backward": 0.1, "step": 0.1},
}  # fmt: skip


def call(command: str, *arguments: object) -> Result:
    return CliRunner().invoke(harness, ["slurm", command, *map(str, arguments)])


def a_matrix(tmp_path: Path, *, arrays: bool = False, limit: int = 100) -> tuple[Path, Matrix]:
    site = Site(name="test", max_queued_jobs=limit)
    experiment = Experiment(compare=CompareSection(noise_runs=False))
    cells = plan_nodes(experiment, site, ["ddp", "fsdp"], [2], 1, 1)
    return written(tmp_path, cells, experiment, site, arrays=arrays)


def written(
    tmp_path: Path, cells: list[RunRequest], experiment: Experiment, site: Site, *, arrays: bool = False
) -> tuple[Path, Matrix]:
    matrix, scripts = render_matrix(
        cells, experiment, site, folder=tmp_path / "jobs", runs_folder=tmp_path / "runs", job_name="h",
        arrays=arrays, command=["harness"],
    )  # fmt: skip
    write_matrix(tmp_path / "jobs", matrix, scripts)
    return tmp_path / "jobs", matrix


def say(matrix: Matrix, run: PlannedRun, rank: int, kind: str, **values: Any) -> None:
    with rank_file(matrix.run_directory(run), rank).open("a") as file:
        own = {"rank": rank} if kind == "setup" else {}
        file.write(json.dumps({"kind": kind, **own, **values}) + "\n")


def train(matrix: Matrix, run: PlannedRun, *, steps: int = 2, host: str = "node{rank}") -> None:
    """Leave behind what ranks write: a set-up and some steps."""
    for rank in range(run.request.world_size):
        say(
            matrix, run, rank, "setup", host=host.format(rank=rank + 1), device_name="cpu", setup_seconds=1.0,
            effective=asdict(make_effective()), native_config={}, versions={}, initial_weights=None,
            collectives="gloo", data=DATA, steps=2,
        )  # fmt: skip
        for step in range(steps):
            say(matrix, run, rank, "step", **(STEP | {"step": step}))


def submitted(tmp_path: Path, slurm: FakeSlurm) -> tuple[Path, Matrix, PlannedRun]:
    folder, matrix = a_matrix(tmp_path)
    submit_runs(folder, matrix, unsubmitted(folder, matrix), QUIET)
    return folder, matrix, matrix.runs[1]


def test_submission_stops_at_the_limit_and_goes_on_later(tmp_path: Path, slurm: FakeSlurm) -> None:
    folder, matrix = a_matrix(tmp_path, limit=2)
    slurm.answer("squeue", "90|\n")
    assert submit_runs(folder, matrix, unsubmitted(folder, matrix), QUIET) == 1
    assert submit_runs(folder, matrix, unsubmitted(folder, matrix), QUIET) == 1
    slurm.answer("squeue", "90|\n1|\n2|\n")
    assert submit_runs(folder, matrix, unsubmitted(folder, matrix), QUIET) == 0
    assert len(slurm.calls("sbatch")) == 2
    assert [run.request.run_id for run in unsubmitted(folder, matrix)] == [matrix.runs[2].request.run_id]


def test_a_folder_that_cannot_note_jobs_gets_none(tmp_path: Path, slurm: FakeSlurm) -> None:
    folder, matrix = a_matrix(tmp_path)
    (folder / f".jobs.json.{os.getpid()}").mkdir()
    with pytest.raises(HarnessError, match=r"jobs\.json cannot be written: Is a directory$"):
        submit_runs(folder, matrix, matrix.runs, QUIET)
    assert slurm.calls("sbatch") == []


def test_a_second_submission_at_once_is_refused(tmp_path: Path, slurm: FakeSlurm) -> None:
    folder, _ = a_matrix(tmp_path)
    with alone(folder):
        refused = call("submit", folder, "--json")
        assert refused.exit_code == 1
        assert "another `harness slurm submit` is submitting its runs" in refused.stderr
        assert slurm.calls("sbatch") == []
    assert call("submit", folder, "--json").exit_code == 0
    assert len(slurm.calls("sbatch")) == 3


def test_an_array_is_submitted_in_parts(tmp_path: Path, slurm: FakeSlurm) -> None:
    folder, matrix = a_matrix(tmp_path, arrays=True, limit=2)
    submit_runs(folder, matrix, unsubmitted(folder, matrix), QUIET)
    submit_runs(folder, matrix, unsubmitted(folder, matrix), QUIET)
    assert slurm.calls("sbatch") == [
        "--parsable --array=0 array-1x1.sbatch",
        "--parsable --array=0 array-2x1.sbatch",
        "--parsable --array=1 array-2x1.sbatch",
    ]
    assert [state.job for state in look(folder, matrix)] == ["1_0", "2_0", "3_1"]


def test_a_refused_job_keeps_what_was_submitted(tmp_path: Path, slurm: FakeSlurm) -> None:
    folder, matrix = a_matrix(tmp_path)
    submit_runs(folder, matrix, matrix.runs[:1], QUIET)
    slurm.refuse("sbatch", "Batch job submission failed: Invalid account or account/partition combination")
    with pytest.raises(HarnessError, match="Invalid account") as refused:
        submit_runs(folder, matrix, unsubmitted(folder, matrix), QUIET)
    assert refused.value.__notes__ == [
        "give --partition and --account to `harness slurm render`, or in the site file"
    ]
    assert len(unsubmitted(folder, matrix)) == 2


def test_a_job_that_began_unnoted_is_not_submitted_twice(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, matrix, run = submitted(tmp_path, slurm)
    (folder / "jobs.json").unlink()
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "2")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "5")
    begin(matrix.run_directory(run))
    assert run not in unsubmitted(folder, matrix)
    assert look(folder, matrix)[1].job == "2_5"


def test_ranges_are_written_as_sbatch_reads_them() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_a_job_that_lives_or_of_which_the_controller_says_nothing_gets_no_record(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    folder, matrix, run = submitted(tmp_path, slurm)
    train(matrix, run)
    slurm.answer("squeue", "2|RUNNING|None|0|0|0:05|node[1-2]|\n")
    collect(folder, matrix)
    assert not (matrix.run_directory(run) / "record.json").exists()
    slurm.refuse("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    with pytest.raises(SlurmUnavailable):
        collect(folder, matrix)
    assert not (matrix.run_directory(run) / "record.json").exists()


@pytest.mark.parametrize(
    ("line", "status", "kind"),
    [
        ("2|TIMEOUT|TimeLimit|0|0|1:00|node[1-2]|", "timeout", "TimeLimit"),
        ("2|NODE_FAIL|NodeDown|0|0|1:00|node[1-2]|", "failed", "NodeFailure"),
        ("2|OUT_OF_MEMORY|OutOfMemory|0|0|1:00|node[1-2]|", "oom", "OutOfMemory"),
        ("2|CANCELLED|None|0|0|1:00|node[1-2]|", "failed", "Cancelled"),
        ("2|PREEMPTED|None|0|0|1:00|node[1-2]|", "failed", "Preempted"),
        ("2|FAILED|RaisedSignal:9(Killed)|9|0|1:00|node[1-2]|", "failed", "ScriptLost"),
    ],
)
def test_a_job_that_was_ended_has_a_record_with_its_steps(
    line: str, status: str, kind: str, tmp_path: Path, slurm: FakeSlurm
) -> None:
    folder, matrix, run = submitted(tmp_path, slurm)
    train(matrix, run, steps=2)
    slurm.answer("squeue", line + "\n")
    slurm.answer("scontrol", "node1\nnode2\n")
    state = collect(folder, matrix)[1]
    record = read_record(matrix.run_directory(run) / "record.json")
    assert (record, record.status, record.error.kind) == (state.record, status, kind)
    assert "after 2 steps" in record.error.message
    assert [step.loss for step in record.steps] == [10.0, 10.0]
    slurm_part = record.environment.slurm
    assert (slurm_part.job, slurm_part.nodes, slurm_part.elapsed_seconds) == ("2", "node1,node2", 60)


def test_waiting_outlasts_a_silent_controller(tmp_path: Path, slurm: FakeSlurm) -> None:
    folder, matrix, _ = submitted(tmp_path, slurm)
    ended = "".join(f"{n}|CANCELLED|None|0|0|0:00||\n" for n in (1, 2, 3))
    slurm.refuse_once("squeue", "Unable to contact slurm controller", ended)
    done = call("submit", folder, "--wait")
    assert done.exit_code == 0
    assert "asking again in 0.5 s" in done.stderr
    assert len(list((tmp_path / "runs").glob("*/record.json"))) == len(matrix.runs)


def test_a_killed_rank_is_named_though_others_complain(tmp_path: Path, slurm: FakeSlurm) -> None:
    _, matrix, run = submitted(tmp_path, slurm)
    directory = matrix.run_directory(run)
    train(matrix, run)
    say(matrix, run, 0, "failure", status="failed", error_kind="RuntimeError", message="peer gone", at=1.0)
    rank_exit(directory, 0).write_text(json.dumps({"exit_code": 1, "at": 2.0}))
    rank_exit(directory, 1).write_text(json.dumps({"exit_code": -9, "at": 1.1}))
    record = finish(directory, ScriptEnd(exit_code=1))
    assert record.error.rank == 1
    assert "SIGKILL" in record.error.message


def test_finish_writes_the_record_and_collect_adds_what_slurm_knows(tmp_path: Path, slurm: FakeSlurm) -> None:
    folder, matrix, run = submitted(tmp_path, slurm)
    directory = matrix.run_directory(run)
    train(matrix, run)
    for rank in range(2):
        say(matrix, run, rank, "done")
    begun = finish(directory, ScriptEnd(exit_code=0))
    assert begun.status == "ok"
    assert begun.environment.slurm.state is None
    slurm.answer("squeue", "2|COMPLETED|None|0|0|0:07|node[1-2]|\n")
    slurm.answer("scontrol", "node1\nnode2\n")
    collected = call("collect", folder)
    assert (collected.exit_code, collected.stdout.count("recorded  COMPLETED  ok")) == (0, 1)
    record = read_record(directory / "record.json")
    assert record.environment.slurm.state == "COMPLETED"
    assert record.environment.slurm.elapsed_seconds == 7
    slurm.refuse("squeue", "Invalid job id specified")
    assert collect(folder, matrix)[1].record == record


def test_a_requeued_run_starts_clean_and_says_so(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, matrix, run = submitted(tmp_path, slurm)
    directory = matrix.run_directory(run)
    monkeypatch.setenv("SLURM_JOB_ID", "2")
    begin(directory)
    train(matrix, run, steps=5)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    begin(directory)
    train(matrix, run, steps=1)
    for rank in range(2):
        say(matrix, run, rank, "done")
    record = finish(directory, ScriptEnd(exit_code=0))
    assert len(record.steps) == 1
    assert record.environment.slurm.model_copy(update={"nodes": None, "partition": None}) == SlurmPart(
        job="2", restarts=1, attempts=2, step_exit_code=0
    )
    assert len(list((directory / "attempt-0").glob("rank-*.jsonl"))) == 2


def test_a_folder_that_nodes_do_not_share_is_said(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="all nodes share"):
        begin(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "slurm.json", "slurm-end.json", "node-00000.json", "fabric.json", "rank-00000.exit.json",
        "launcher.log",
    ],
)  # fmt: skip
@pytest.mark.parametrize("text", ["{", "[]", '{"job": 5}', None])
def test_broken_side_files_count_as_absent(
    name: str, text: str | None, tmp_path: Path, slurm: FakeSlurm
) -> None:
    folder, matrix, run = submitted(tmp_path, slurm)
    directory = matrix.run_directory(run)
    train(matrix, run)
    path = rank_exit(directory, 0) if name.startswith("rank-") else directory / name
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
    slurm.answer("squeue", "2|CANCELLED|None|0|0|1:00||\n")
    state = collect(folder, matrix)[1]
    assert state.problem is None
    assert state.record.error.kind == "Cancelled"


def test_broken_lines_are_skipped_and_counted_and_steps_stay_aligned(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    folder, matrix, run = submitted(tmp_path, slurm)
    train(matrix, run, steps=4)
    path = rank_file(matrix.run_directory(run), 1)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = b"\0\0\xff\n[]\n"
    path.write_bytes(b"".join(lines))
    slurm.answer("squeue", "2|CANCELLED|None|0|0|1:00||\n")
    record = collect(folder, matrix)[1].record
    assert record.environment.broken_event_lines == 2
    assert [step.step for step in record.steps] == [0, 1]
    assert [len(rank.step_seconds) for rank in record.ranks] == [4, 2]


def test_a_folder_that_gives_no_record_is_named_and_the_others_go_on(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    folder, matrix, run = submitted(tmp_path, slurm)
    first = matrix.run_directory(matrix.runs[0])
    (first / "request.json").unlink()
    first.rmdir()
    first.write_text("a file")
    rank_file(matrix.run_directory(run), 0).mkdir()
    slurm.answer("squeue", "".join(f"{n}|CANCELLED|None|0|0|1:00||\n" for n in (1, 2, 3)))
    done = call("submit", folder, "--wait")
    assert done.exit_code == 0
    told = [line for line in done.stderr.splitlines() if line.startswith("harness: ")]
    assert told[0] == f"harness: run folder '{first}' cannot be written: File exists"
    assert told[1].startswith(
        f"harness: run folder '{matrix.run_directory(run)}' gives no record: IsADirectoryError"
    )
    assert [state.phase for state in collect(folder, matrix)] == ["unreadable", "unreadable", "recorded"]
    assert call("status", folder).exit_code == 0


@pytest.mark.parametrize("text", ["{", "{}", '["x"]'])
def test_unreadable_notes_of_jobs_stop_submission_alone(text: str, tmp_path: Path, slurm: FakeSlurm) -> None:
    folder, matrix, _ = submitted(tmp_path, slurm)
    (folder / "jobs.json").write_text(text)
    done = call("status", folder)
    assert done.exit_code == 0
    assert "jobs.json, which notes the jobs that were submitted, cannot be read" in done.stderr
    with pytest.raises(HarnessError, match="none is submitted"):
        unsubmitted(folder, matrix)


def test_a_script_that_failed_before_its_step_is_told_in_its_own_words(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    folder, matrix, _ = submitted(tmp_path, slurm)
    (folder / "2.log").write_text("Lmod: unknown module cuda/99\n")
    slurm.answer("squeue", "2|FAILED|NonZeroExitCode|256|0|0:01|node1|\n")
    record = collect(folder, matrix)[1].record
    assert (record.error.kind, record.error.log_tail) == ("ScriptLost", "Lmod: unknown module cuda/99")


GPUS = Site(name="test", gpus_per_node=4, gpu="A100-40")
JOB = {
    "model": {"name": "bloom-7b1", "weights": "random"},
    "data": {"sequence_length": 512, "tokenizer": "bytes"},
    "training": {"precision": "bf16-mixed", "global_batch_size": 16},
    "compare": {"noise_runs": False, "question": "memory"},
    "runtime": {"device": "cuda"},
}


def a_large_matrix(tmp_path: Path) -> tuple[Path, Matrix]:
    """DDP of 7 billion parameters, which no A100 holds, and ZeRO-3 over 16 ranks, which does."""
    experiment = Experiment.model_validate(JOB)
    cells = plan_nodes(experiment, GPUS, ["ddp", "zero3"], [4], 4, 1)
    return written(tmp_path, [cell for cell in cells if cell.world_size > 1], experiment, GPUS)


def test_what_cannot_fit_is_recorded_and_the_rest_submitted_and_all_with_force(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    folder, matrix = a_large_matrix(tmp_path)
    done = call("submit", folder)
    assert done.exit_code == 0, done.output
    assert "predicted memory: ddp on 16 ranks: cannot fit: " in done.output
    assert "predicted memory: zero3 on 16 ranks: fits: " in done.output
    of_zero3 = matrix.model_copy(update={"runs": matrix.runs[1:]}).most_asked
    assert f"to submit: 1 run, {of_zero3}" in done.output
    assert len(slurm.calls("sbatch")) == 1
    refused, submitted = matrix.runs
    record = read_record(matrix.run_directory(refused) / "record.json")
    assert record.status == "unsupported"
    assert record.reasons[0].endswith("of 42.4 GB per rank; --force starts it anyway")
    assert record.prediction.peak_bytes > 16 * 7_069_016_064
    assert "prediction" in (matrix.run_directory(submitted) / "request.json").read_text()
    assert unsubmitted(folder, matrix) == []
    done = call("submit", folder, "--force")
    assert done.exit_code == 0, done.output
    assert len(slurm.calls("sbatch")) == 2


def test_a_site_says_what_it_has() -> None:
    limits = site_limits(GPUS.model_copy(update={"memory_per_node": "120G"}))
    assert (limits.device_bytes, limits.host_bytes) == (limits.device.memory_bytes, 120 * 2**30)
    assert site_limits(Site(name="cpu")).device_bytes is None
    with pytest.raises((HarnessError, ValueError), match="gpu needs gpus_per_node"):
        Site(name="cpu", gpu="A100-40")


@pytest.mark.parametrize(
    ("text", "count"),
    [(None, None), ("0", None), ("512", 512 * 2**20), ("2T", 2 * 2**40), ("64k", 64 * 2**10)],
)
def test_memory_is_read_as_sbatch_reads_it(text: str | None, count: int | None) -> None:
    assert memory_bytes(text) == count


def torch_in(folder: Path, cuda: str) -> str:
    """A virtual environment with torch's wheel for that CUDA."""
    package = folder / "lib" / "python3.11" / "site-packages" / "torch"
    package.mkdir(parents=True)
    package.joinpath("version.py").write_text(f"__version__ = '2.13.0'\ncuda = '{cuda}'\nhip = None\n")
    return str(folder)


def test_a_wheel_without_kernels_for_the_sites_gpus_is_refused(tmp_path: Path) -> None:
    site = Site(name="old", gpus_per_node=4, gpu="V100-32", virtual_environment=torch_in(tmp_path, "13.0"))
    assert unfit_software(site) == (
        "site 'old' has V100-32: torch 2.13.0 (CUDA 13.0) has no kernels for sm_70; install torch's wheel "
        "for CUDA 12.6 (https://download.pytorch.org/whl/cu126)"
    )
    assert unfit_software(site.model_copy(update={"gpu": "A100-40"})) is None
    assert unfit_software(site.model_copy(update={"virtual_environment": None})) is None


@pytest.mark.parametrize("path", sorted(SITES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_wheel_that_pip_installs_has_kernels_for_the_gpus_of_example_sites(
    path: Path, tmp_path: Path
) -> None:
    """PyPI's wheels of the pinned torch are built for CUDA 13."""
    site = load_site(path).model_copy(update={"virtual_environment": torch_in(tmp_path, "13.0")})
    assert unfit_software(site) is None


def test_submit_refuses_a_wheel_without_kernels(tmp_path: Path, slurm: FakeSlurm) -> None:
    environment = torch_in(tmp_path / "venv", "13.0")
    folder, matrix = a_large_matrix(tmp_path)
    site = matrix.site.model_copy(update={"virtual_environment": environment, "gpu": "V100-32"})
    (folder / MATRIX_NAME).write_text(matrix.model_copy(update={"site": site}).model_dump_json())
    done = call("submit", folder)
    assert done.exit_code == 1
    assert "has no kernels for sm_70" in done.output
    assert len(slurm.calls("sbatch")) == 0


FINISHED = ScriptEnd(exit_code=1)


@pytest.mark.parametrize(
    ("state", "status", "kind"),
    [
        ("TIMEOUT", "timeout", "TimeLimit"), ("DEADLINE", "timeout", "TimeLimit"),
        ("OUT_OF_MEMORY", "oom", "OutOfMemory"), ("NODE_FAIL", "failed", "NodeFailure"),
        ("PREEMPTED", "failed", "Preempted"), ("CANCELLED", "failed", "Cancelled"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", [None, FINISHED, ScriptEnd(ended="terminated", exit_code=143)])
def test_slurm_has_the_last_word(state: str, status: str, kind: str, end: ScriptEnd | None) -> None:
    found = verdict(JobFacts(state=state), end)
    assert (found.status, found.kind) == (status, kind)


def test_what_failed_by_itself_or_is_forgotten_is_left_to_the_ranks() -> None:
    assert verdict(None, None) is None
    assert verdict(None, FINISHED) is None
    assert verdict(JobFacts(state="FAILED", exit_code=1), FINISHED) is None
    assert verdict(JobFacts(state="COMPLETED", exit_code=0), ScriptEnd(exit_code=0)) is None


@pytest.mark.parametrize(
    ("facts", "end", "silent", "status", "kind", "cause"),
    [
        (None, ScriptEnd(ended="time-limit", exit_code=143), [], "timeout", "TimeLimit", "time limit"),
        (JobFacts(state="FAILED", exit_code=-9), None, [], "failed", "ScriptLost", "signal 9"),
        (JobFacts(state="NODE_FAIL"), None, ["node2"], "failed", "NodeFailure", "node2"),
    ],
    ids=["known before Slurm does", "script killed", "silent nodes"],
)
def test_what_script_and_slurm_know_names_the_cause(
    facts: JobFacts | None, end: ScriptEnd | None, silent: list[str], status: str, kind: str, cause: str
) -> None:
    found = verdict(facts, end, silent)
    assert (found.status, found.kind, cause in found.cause) == (status, kind, True)


WATCHED = "slurmstepd-node1: error: StepId=1.0 exceeded memory limit (413884416 > 314572800), being killed"
CGROUP = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed."
)
TASK = "srun: error: node1: task 0: Out Of Memory"


@pytest.mark.parametrize("line", [WATCHED, CGROUP, TASK])
def test_a_step_out_of_memory_is_read_from_its_output(line: str) -> None:
    """Seen on Slurm 22.05 (the first line), and as Slurm's sources write them."""
    notice = out_of_memory_notice(f"[W1121] client socket\n{line}\nsrun: error: node1: task 0: Killed\n")
    assert notice is not None
    assert notice == line.partition("error: ")[2]
    found = verdict(JobFacts(state="FAILED", exit_code=137), ScriptEnd(exit_code=137), [], notice)
    assert (found.status, found.kind) == ("oom", "OutOfMemory")
    for other in ("srun: error: node1: task 0: Killed", "a rank speaks of an oom-kill event"):
        assert out_of_memory_notice(other) is None


def fabric(seconds: float) -> FabricResult:
    row = FabricRow(op="all_reduce", ranks=[0, 1], size_bytes=10**9, repeats=1, seconds=[seconds])
    return FabricResult(
        created_at="now", transport="nccl", device="cuda", hosts=["a", "b"], interface=None, rows=[row]
    )


def test_a_slow_network_is_told_with_both_rates_and_the_usual_causes() -> None:
    end = ScriptEnd(ended="slow-fabric", exit_code=0, require_busbw="5GB/s")
    found = verdict(None, end, fabric=fabric(0.5))
    assert (found.status, found.kind) == ("failed", "SlowFabric")
    assert "2 GB/s is below the required 5 GB/s" in found.cause
    assert "Usual causes: the wrong network interface" in found.cause


def test_a_self_test_that_failed_says_nothing_of_the_networks_speed() -> None:
    found = verdict(None, ScriptEnd(ended="fabric-failed", exit_code=1, require_busbw="5GB/s"))
    assert (found.status, found.kind) == ("failed", "FabricFailed")
    assert "exit code 1" in found.cause
    assert "slower" not in found.cause
