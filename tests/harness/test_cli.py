"""The command line as a person meets it: real processes, real runs of a tiny job."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from harness.record import Record
from harness.store import read_record
from tests.harness.compare.test_rows import ROW_KEYS

HARNESS = [sys.executable, "-m", "harness"]
SMALL_MODEL = (
    "model.config={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 2}"
)
SMALL = ["--set", SMALL_MODEL, "--set", "data.sequence_length=32"]
SHORT = [
    *SMALL, "--set", "training.steps=4", "--set", "measure.warmup_steps=1", "--set",
    "measure.counted_steps=1",
]  # fmt: skip
LONG = [*SMALL, "--set", "training.steps=1000000"]


def environment(**changes: str) -> dict[str, str]:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    return kept | {"HF_HUB_OFFLINE": "1"} | changes


def harness(
    *arguments: str | Path, cwd: Path, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HARNESS, *map(str, arguments)], cwd=cwd, env=environment(**(variables or {})),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def records(runs: Path) -> list[Record]:
    """The records of a folder; every run folder must have a whole one."""
    return [read_record(folder / "record.json") for folder in sorted(runs.glob("*")) if folder.is_dir()]


@dataclass
class Comparison:
    folder: Path
    runs: Path
    arguments: list[str]
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """One comparison of a tiny job, shared: compare --json --report."""
    folder = tmp_path_factory.mktemp("comparison")
    arguments = ["compare", "--backends", "ddp,zero1", "--nproc", "2", *SHORT]
    done = harness(*arguments, "--json", "--report", "report.md", cwd=folder)
    return Comparison(folder, folder / "runs", arguments, done)


def test_compare_succeeds(comparison: Comparison) -> None:
    assert comparison.done.returncode == 0, comparison.done.stderr
    assert [r.status for r in records(comparison.runs)] == ["ok"] * 4


def test_compare_prints_one_document_and_nothing_else(comparison: Comparison) -> None:
    document = json.loads(comparison.done.stdout)
    assert set(document) == {"job_id", "job_ids", "rows", "noise", "repeat_spreads", "findings"}
    assert [(r["backend"], r["world_size"]) for r in document["rows"]] == [
        ("single", 1), ("ddp", 2), ("zero1", 2)
    ]  # fmt: skip
    assert all(set(row) == ROW_KEYS for row in document["rows"])


def test_compared_backends_train_as_the_reference_does(comparison: Comparison) -> None:
    document = json.loads(comparison.done.stdout)
    assert {row["parity"] for row in document["rows"]} <= {"exact", "tight"}
    assert document["findings"] == []


def test_compared_backends_measure_speed_memory_and_communication(comparison: Comparison) -> None:
    rows = {row["backend"]: row for row in json.loads(comparison.done.stdout)["rows"]}
    for row in rows.values():
        assert row["tokens_per_second"] > 0
        assert row["model_state_bytes"] > 0
    assert rows["single"]["sent_bytes_per_step"] == 0
    assert rows["ddp"]["sent_bytes_per_step"] >= rows["ddp"]["textbook_sent_bytes_per_step"] > 0
    assert rows["zero1"]["model_state_bytes"] < rows["ddp"]["model_state_bytes"]


def test_compare_shows_the_table_to_the_person_who_waits(comparison: Comparison) -> None:
    assert "[4/4] zero1 on 2 ranks: ok" in comparison.done.stderr
    assert re.search(r"^backend +ranks +status", comparison.done.stderr, flags=re.MULTILINE)


def test_compare_writes_the_report_it_was_asked_for(comparison: Comparison) -> None:
    text = (comparison.folder / "report.md").read_text()
    assert "| zero1" in text
    assert (comparison.folder / "report.loss.svg").exists()


def test_second_compare_runs_nothing(comparison: Comparison) -> None:
    before = sorted(comparison.runs.iterdir())
    done = harness(*comparison.arguments, "--json", cwd=comparison.folder)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 cells have a record" in done.stderr
    assert sorted(comparison.runs.iterdir()) == before
    assert json.loads(done.stdout) == json.loads(comparison.done.stdout)


def test_compare_without_json_prints_the_table(comparison: Comparison) -> None:
    done = harness(*comparison.arguments, cwd=comparison.folder)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:]] == [
        ["single", "1"], ["ddp", "2"], ["zero1", "2"]
    ]  # fmt: skip


def test_compare_runs_only_what_is_missing(comparison: Comparison) -> None:
    before = set(comparison.runs.iterdir())
    done = harness(
        "compare", "--backends", "ddp,accelerate-ddp,zero1", *comparison.arguments[3:], "--json",
        cwd=comparison.folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    new = set(comparison.runs.iterdir()) - before
    assert [read_record(folder / "record.json").backend.name for folder in new] == ["accelerate-ddp"]


def test_fresh_runs_every_cell_again(comparison: Comparison) -> None:
    before = set(comparison.runs.iterdir())
    arguments = ["compare", "--backends", "ddp", *comparison.arguments[3:]]
    done = harness(*arguments, "--fresh", "--strict", "--json", cwd=comparison.folder)
    assert done.returncode == 0, done.stderr
    new = set(comparison.runs.iterdir()) - before
    assert sorted(read_record(f / "record.json").backend.name for f in new) == ["ddp", "single", "single"]


def test_runs_of_one_cell_give_the_same_losses(comparison: Comparison) -> None:
    losses: dict[str, set[tuple[float | None, ...]]] = {}
    for record in records(comparison.runs):
        losses.setdefault(record.cell, set()).add(tuple(step.loss for step in record.steps))
    assert {len(found) for found in losses.values()} == {1}


def test_report_of_a_folder_of_runs(comparison: Comparison, tmp_path: Path) -> None:
    done = harness("report", comparison.runs, "-o", tmp_path / "out" / "report.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "## Results" in (tmp_path / "out" / "report.md").read_text()


def test_run_prints_its_record(tmp_path: Path) -> None:
    done = harness("run", "--backend", "ddp", "--nproc", "2", *SHORT, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = Record.model_validate_json(done.stdout)
    assert [printed] == records(tmp_path / "runs")
    assert printed.status == "ok"
    assert [step.window for step in printed.steps] == ["warmup", "counted", "traced", "timed"]
    assert len(printed.ranks) == 2
    assert printed.command[:2] == ["harness", "run"]


def test_backends_are_listed_as_one_document(tmp_path: Path) -> None:
    done = harness("backends", "--json", cwd=tmp_path)
    listed = {backend["name"]: backend for backend in json.loads(done.stdout)["backends"]}
    assert {"single", "ddp", "zero3", "fsdp"} <= set(listed)
    assert "offload" in listed["zero3"]["options"]


@pytest.mark.parametrize("target", ["no_such_module:Mine", "json:dumps"])
def test_a_broken_third_party_does_not_hide_the_others(tmp_path: Path, target: str) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[harness.backends]\nbroken = {target}\n")
    done = harness("backends", cwd=tmp_path, variables={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "zero3" in done.stdout
    assert "broken" in done.stdout + done.stderr


# What a person can get wrong. Each is one line, exit code 1, and nothing half done.


def refused(folder: Path, *arguments: str | Path, **variables: str) -> str:
    done = harness(*arguments, cwd=folder, variables=variables)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("harness: ")
    assert "Traceback" not in done.stderr
    assert "unexpected" not in lines[0]
    assert done.stdout == ""
    assert done.returncode == 1
    records(folder / "runs")  # raises on half a run
    return lines[0]


def test_unknown_backend(tmp_path: Path) -> None:
    line = refused(tmp_path, "run", "--backend", "zerro3")
    assert "backend 'zerro3' is unknown" in line
    assert "Did you mean 'zero3'?" in line


def test_unknown_backend_of_compare(tmp_path: Path) -> None:
    assert "Did you mean 'ddp'?" in refused(tmp_path, "compare", "--backends", "zero1,dpd")


def test_unknown_option(tmp_path: Path) -> None:
    assert "Did you mean 'offload'?" in refused(tmp_path, "run", "--backend", "zero3:ofload=cpu")


def test_option_that_is_no_yaml(tmp_path: Path) -> None:
    assert "offload" in refused(tmp_path, "run", "--backend", "zero3:offload=[x")


def test_unknown_key(tmp_path: Path) -> None:
    line = refused(tmp_path, "run", "--backend", "ddp", "--set", "training.step=3")
    assert "Did you mean 'steps'?" in line


def test_missing_configuration(tmp_path: Path) -> None:
    assert "none.yaml cannot be read" in refused(tmp_path, "run", "--backend", "ddp", "--config", "none.yaml")


def test_impossible_batch(tmp_path: Path) -> None:
    line = refused(
        tmp_path, "run", "--backend", "ddp", "--nproc", "3", "--set", "training.global_batch_size=8"
    )
    assert "leaves no whole micro_batch_size" in line


def test_impossible_batch_of_one_world_size_of_compare(tmp_path: Path) -> None:
    assert "on 3 ranks" in refused(tmp_path, "compare", "--backends", "ddp", "--nproc", "2,3")


def test_several_ranks_of_the_reference(tmp_path: Path) -> None:
    assert "'single' is one process" in refused(tmp_path, "run", "--backend", "single", "--nproc", "2")


def test_missing_data(tmp_path: Path) -> None:
    line = refused(
        tmp_path, "run", "--backend", "ddp", "--set", "data.source=text", "--set", "data.path=none.txt"
    )
    assert "data.path 'none.txt' cannot be read: No such file" in line


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_empty_data(tmp_path: Path, source: str) -> None:
    (tmp_path / "empty").touch()
    line = refused(
        tmp_path, "run", "--backend", "ddp", "--set", f"data.source={source}", "--set", "data.path=empty"
    )
    assert "gives no sample" in line


def test_samples_longer_than_the_context(tmp_path: Path) -> None:
    line = refused(tmp_path, "run", "--backend", "ddp", "--set", "data.sequence_length=1024")
    assert "longer than the model's context of 512" in line


@pytest.mark.parametrize("backend", ["fsdp-hybrid", "fsdp1-hybrid"])
def test_shard_size_that_does_not_divide(tmp_path: Path, backend: str) -> None:
    line = refused(tmp_path, "run", "--backend", f"{backend}:shard_size=3", "--nproc", "2", *SHORT)
    assert "shard_size" in line


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("bert", "is not a causal language model"), ("lama", "unknown to transformers")],
)
def test_model_that_cannot_be_trained(tmp_path: Path, model_type: str, why: str) -> None:
    line = refused(tmp_path, "run", "--backend", "ddp", "--set", f"model.config={{model_type: {model_type}}}")
    assert why in line


@pytest.mark.parametrize("offline", ["0", "1"])
def test_model_of_the_hub_without_network(tmp_path: Path, offline: str) -> None:
    line = refused(
        tmp_path, "run", "--backend", "ddp", "--set", "model.name=somebody/some-model",
        HF_HUB_OFFLINE=offline, HF_HOME=str(tmp_path / "hub"), HF_ENDPOINT="http://127.0.0.1:9",
    )  # fmt: skip
    assert "model.name 'somebody/some-model' cannot be loaded" in line


@pytest.mark.parametrize("command", ["run", "compare"])
def test_runs_folder_below_a_file(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    what = ["--backend", "ddp"] if command == "run" else ["--backends", "ddp"]
    line = refused(tmp_path, command, *what, "--runs", "file/runs")
    assert "runs folder 'file/runs' cannot be written" in line


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refused(tmp_path, "run", "--backend", "ddp", "--port", port)
    assert f"--port {port} cannot be used" in line


def test_report_of_nothing(tmp_path: Path) -> None:
    assert "holds no record" in refused(tmp_path, "report", "none", "-o", "report.md")


def test_report_of_what_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("{}")
    assert "schema version" in refused(tmp_path, "report", "record.json", "-o", "report.md")


def test_report_that_cannot_be_written(comparison: Comparison, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written" in refused(tmp_path, "report", comparison.runs, "-o", "file/report.md")


def test_report_of_compare_that_cannot_be_written(comparison: Comparison, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    report = tmp_path / "file" / "report.md"
    done = harness(*comparison.arguments, "--report", report, cwd=comparison.folder)
    assert done.returncode == 1
    assert f"harness: report '{report}' cannot be written" in done.stderr
    assert "unexpected" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["run", "--backend", "ddp", "--nproc", "0"], ["run"], ["run", "--backend", "ddp", "--port", "70000"],
     ["report", "-o", "x.md"], ["nonsense"]],
    ids=" ".join,
)  # fmt: skip
def test_usage_error_exits_with_two(tmp_path: Path, arguments: list[str]) -> None:
    done = harness(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "Usage:" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("sizes", ["0", "two", "2,,4", "2,-1"])
def test_compare_refuses_what_is_no_number_of_ranks(tmp_path: Path, sizes: str) -> None:
    assert f"--nproc was given '{sizes}'" in refused(
        tmp_path, "compare", "--backends", "ddp", "--nproc", sizes
    )


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = harness("run", "--backend", "zerro3", "--debug", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "backend 'zerro3' is unknown" in done.stderr


# Runs that end before their time.


@dataclass
class Running:
    process: subprocess.Popen[str]
    runs: Path
    children: list[psutil.Process] = field(default_factory=list)

    def folder(self) -> Path:
        (folder,) = self.runs.iterdir()
        return folder

    def steps(self) -> int:
        found = list(self.runs.glob("*/rank-00000.jsonl"))
        return found[0].read_text().count('"kind": "step"') if found else 0

    def family(self) -> list[psutil.Process]:
        if self.process.poll() is not None:
            return []
        return psutil.Process(self.process.pid).children(recursive=True)

    def finish(self) -> tuple[Record, str]:
        _, stderr = self.process.communicate(timeout=60)
        return read_record(self.folder() / "record.json"), stderr


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `harness run` of a job that never ends by itself, and wait until it has taken steps."""
    started: list[Running] = []

    def begin(*arguments: str) -> Running:
        process = subprocess.Popen(
            [*HARNESS, "run", "--backend", "ddp", "--nproc", "2", *LONG, *arguments],
            cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # A shell that runs the tests in the background ignores the signal, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        running = Running(process, tmp_path / "runs")
        started.append(running)
        deadline = time.monotonic() + 60
        while running.steps() < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        running.children = running.family()
        return running

    yield begin
    for running in started:
        # What survives its parent would hold the pipes open and the machine busy.
        for process in [*running.children, running.process]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                process.kill()
        running.process.communicate()


def gone(family: list[psutil.Process]) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family if p.is_running()):
            return True
        time.sleep(0.05)
    return False


def pid_of_rank(running: Running, rank: int) -> int:
    """The process whose output goes to the rank's log."""
    log = running.folder() / f"rank-{rank:05d}.log"
    (found,) = [p.pid for p in running.family() if os.readlink(f"/proc/{p.pid}/fd/1") == str(log)]
    return found


def test_interrupt_stops_all_ranks_and_keeps_what_was_done(start: Start) -> None:
    running = start()
    family = running.family()
    assert len(family) >= 3
    running.process.send_signal(signal.SIGINT)
    record, stderr = running.finish()
    assert gone(family)
    assert record.status == "failed"
    assert record.error is not None
    assert record.error.kind == "Interrupted"
    assert len(record.steps) >= 3
    assert all(step.loss is not None for step in record.steps)
    assert running.process.returncode != 0
    assert "Traceback" not in stderr


def test_termination_leaves_no_process(start: Start) -> None:
    running = start()
    family = running.family()
    running.process.terminate()
    running.process.wait(timeout=30)
    assert gone(family)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the rank through /proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_is_named(start: Start, rank: int) -> None:
    running = start()
    family = running.family()
    os.kill(pid_of_rank(running, rank), signal.SIGKILL)
    record, stderr = running.finish()
    assert gone(family)
    assert record.status == "failed"
    assert record.error is not None
    assert record.error.rank == rank, record.error
    assert "SIGKILL" in record.error.message
    assert len(record.steps) >= 2
    assert stderr.splitlines()[-1].startswith("harness: run failed:")
    assert "Traceback" not in stderr


def test_timeout_stops_the_run(start: Start) -> None:
    running = start("--set", "runtime.timeout_seconds=8")
    family = running.family()
    record, stderr = running.finish()
    assert gone(family)
    assert record.status == "timeout"
    assert record.error is not None
    assert "runtime.timeout_seconds" in record.error.message
    assert len(record.steps) >= 1
    assert running.process.returncode == 1
    assert stderr.splitlines()[-1].startswith("harness: run timeout:")
