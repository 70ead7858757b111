"""`harness run` and `observe`: their records, exit codes, and what a person can get wrong, in one line."""

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner, Result

from harness.api import load
from harness.cli import harness as command
from harness.cli.output import View
from harness.cli.run import _present
from harness.errors import HarnessError
from harness.record import ErrorPart, Record, provenance
from harness.record.store import Store
from tests.patience import SECONDS
from tests.records import published
from tests.representatives import first

from .command_line import HARNESS, SHORT, environment, harness, harness_process, records, refused, succeeds

pytestmark = pytest.mark.long(seconds=65)


def test_run_prints_its_record(tmp_path: Path) -> None:
    command = ["run", "--backend", "ddp", "--nproc", "2", *SHORT, "--set", "measure.traced_steps=1", "--json"]
    done = succeeds(*command, cwd=tmp_path)
    printed = Record.model_validate_json(done.stdout)
    assert [printed] == records(tmp_path / "runs")
    assert printed.status == "ok"
    assert [step.window for step in printed.steps] == ["warmup", "probed", "traced", "timed"]
    assert len(printed.ranks) == 2
    assert printed.command[:2] == ["harness", "run"]
    assert (printed.measure.warmup_steps, printed.measure.cooldown_steps) == (1, 3)


def test_every_evaluation_is_timed(tmp_path: Path) -> None:
    evaluation = ["--set", "evaluation.every_steps=2", "--set", "evaluation.samples=5"]
    done = succeeds("run", "--backend", "ddp", "--nproc", "2", *SHORT, *evaluation, "--json", cwd=tmp_path)
    found = Record.model_validate_json(done.stdout).eval
    assert [(part.step, part.samples) for part in found] == [(2, 5), (4, 5)]
    assert all(part.seconds is not None and part.seconds > 0 for part in found)


@pytest.mark.parametrize("offline", first(["0"], ["0", "1"]))
@pytest.mark.costly
def test_model_of_the_hub_without_network(tmp_path: Path, offline: str) -> None:
    line = refused(
        tmp_path, "run", "--backend", "ddp", "--set", "model.name=somebody/some-model",
        HF_HUB_OFFLINE=offline, HF_HOME=str(tmp_path / "hub"), HF_ENDPOINT="http://127.0.0.1:9",
    )  # fmt: skip
    assert "model.name 'somebody/some-model' cannot be loaded" in line


run = importlib.import_module("harness.cli.run")


def rank(rank: int, local_rank: int, text: Path, folder: Path) -> Result:
    """`harness run` as this rank of four on two nodes, up to where the ranks meet."""
    variables = {
        "RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9",
    }  # fmt: skip
    data = ["--set", "data.source=text", "--set", f"data.path={text}", "--set", "runtime.device=cpu"]
    words = ["run", "--backend", "ddp", "--runs", str(folder / "runs"), *data]
    return CliRunner().invoke(command, words, env=variables)


@pytest.mark.parametrize(("number", "local_rank", "count"), [(0, 0, 1), (1, 1, 0), (2, 0, 1), (3, 1, 0)])
def test_the_first_rank_of_a_node_alone_reads_them(
    number: int, local_rank: int, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A few words. " * 50)
    read: list[Path] = []
    monkeypatch.setattr(provenance, "content_digest", lambda path: read.append(path) or "sha256:0")
    monkeypatch.setattr(run, "refuse_as_rank", lambda *_, **__: None)
    met: list[int] = []

    def meet(own_rank: int, *_: object) -> NoReturn:
        met.append(own_rank)
        raise HarnessError("no rank is met here")

    monkeypatch.setattr(run, "supervise", meet)
    result = rank(number, local_rank, text, tmp_path)
    assert met == [number], result.output
    assert read == [text] * count


@pytest.mark.parametrize(
    ("variable", "allowed"),
    [("RANK=x", "0 to 1"), ("RANK=", "0 to 1"), ("RANK=5", "0 to 1"), ("RANK=-1", "0 to 1"),
     ("WORLD_SIZE=two", "1 to 1048576"), ("WORLD_SIZE=0", "1 to 1048576"), ("LOCAL_RANK=x", "0 to 1"),
     ("LOCAL_WORLD_SIZE=0", "1 to 2"), ("MASTER_PORT=http", "1 to 65535"), ("MASTER_PORT=0", "1 to 65535")],
)  # fmt: skip
def test_a_variable_that_no_launcher_gives_is_refused_and_leaves_no_folder(
    tmp_path: Path, variable: str, allowed: str
) -> None:
    name, _, value = variable.partition("=")
    given = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "9"}
    line = refused(tmp_path, "run", "--backend", "ddp", **given | {name: value})
    assert f"{name} was given '{value}'; launchers give a whole number from {allowed}:" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("local_rank", [0, 1])
def test_every_rank_refuses_a_missing_file_before_it_forks(
    local_rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "supervise", lambda *_: pytest.fail("forked"))
    result = rank(local_rank, local_rank, tmp_path / "missing.txt", tmp_path)
    assert result.exit_code == 1
    assert ("missing.txt" in result.output) == (local_rank == 0)  # others are silent


WINDOWS = (
    "--set", "measure.warmup_steps=1", "--set", "measure.probed_steps=1", "--set", "measure.cooldown_steps=1",
)  # fmt: skip
TRAIN = """
import os, signal, sys, time
import torch

{before}
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(16, 1)
if "RANK" in os.environ:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    if step == 6:
        {at_6}
    model(torch.randn(4, 16)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
{after}
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SECRETS = ("pla1nted-TOKEN", "pla1nted-KEY", "pla1nted-ADDRESS", "pla1nted-RAISED", "pla1nted-CONFIG")


def script(folder: Path, *, before: str = "", at_6: str = "pass", after: str = "") -> Path:
    path = folder / "train.py"
    path.write_text(TRAIN.format(before=before, at_6=at_6, after=after))
    return path


def observed(folder: Path, *command: str | Path) -> tuple[subprocess.CompletedProcess[str], Record]:
    words = ("observe", "--label", "first", *WINDOWS, "--", *command)
    done = harness_process(*words, cwd=folder, OMP_NUM_THREADS="1")
    (record,) = records(folder / "runs")
    return done, record


def files_with(folder: Path, text: str) -> list[str]:
    """Files and folders that hold a text or are named so."""
    found = [path for path in folder.rglob("*") if text in path.name]
    return [path.name for path in [*found, *folder.rglob("*")] if path.is_file() and text in path.read_text()]


@pytest.mark.costly
def test_under_torchrun_the_failing_rank_has_its_own_exit_code(tmp_path: Path) -> None:
    train = script(tmp_path, at_6="if os.environ['RANK'] == '1': os._exit(3)")
    done, record = observed(tmp_path, *TORCHRUN, train)
    assert done.returncode == 1  # torchrun's own
    assert (record.error.rank, record.error.exit_code, record.error.step) == (1, 3, 6)
    assert "harness: run failed: rank 1: the rank ended with exit code 3" in done.stderr
    assert len(record.steps) == 6


def test_no_file_of_a_run_has_a_secret_and_the_exit_code_is_the_scripts(tmp_path: Path) -> None:
    train = script(
        tmp_path,
        before="sys.excepthook = lambda *_: os._exit(9)",
        at_6="raise RuntimeError('401 for Authorization: Bearer ' + 'pla1nted-' + 'RAISED')",
    )
    done, record = observed(
        tmp_path, sys.executable, train, "--hub-token", "pla1nted-TOKEN", "--api-key=pla1nted-KEY",
        "http://me:pla1nted-ADDRESS@host/data", "-p", "pla1nted-CONFIG", "\udcff",
    )  # fmt: skip
    assert done.returncode == 9
    assert (record.error.kind, record.error.exit_code) == ("RuntimeError", 9)
    assert record.observation.command[1:] == [
        str(train), "--hub-token", "***", "--api-key=***", "http://***@host/data", "-p", "***", "\\udcff",
    ]  # fmt: skip
    assert {path.name for path in (tmp_path / "runs" / record.run_id).glob("*.json*")} == {
        "observe.json", "rank-00000.jsonl", "record.json",
    }  # fmt: skip
    for secret in SECRETS:
        assert files_with(tmp_path / "runs", secret) == []
    for words in (("list",), ("show", "latest"), ("report", "runs", "-o", "-")):
        assert "(first)" in harness_process(*words, cwd=tmp_path).stdout
    (row,) = load(tmp_path / "runs").to_frame().to_dict("records")
    assert row["backend"] == "observed-single (first)"


def test_findings_of_an_observed_script_are_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = next(one for one in published("bloom-560m") if one.backend.name == "ddp")
    _present(record, Store(tmp_path), False, View())
    assert "\nfinding busy-machine: ddp on 2 ranks: " in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_script_that_closes_its_descriptors_succeeds_and_keeps_its_files(tmp_path: Path) -> None:
    train = script(
        tmp_path,
        at_6="os.closerange(3, 1000); own = [open(f'own-{n}', 'w') for n in range(9)]",
        after="sys.stdout.flush(); os._exit(0)",
    )
    done, record = observed(tmp_path, sys.executable, train)
    assert (done.returncode, record.status, record.error) == (0, "ok", None)
    assert done.stderr.count("harness observe:") == 0
    assert len(record.steps) == 8
    assert [path.stat().st_size for path in tmp_path.glob("own-*")] == [0] * 9
    assert record.observed is not None  # which a rank says last


@pytest.mark.parametrize("whole_group", first([True], [True, False]))
@pytest.mark.costly
def test_an_interrupted_script_gives_130_and_keeps_its_steps(tmp_path: Path, whole_group: bool) -> None:
    train = script(tmp_path, at_6="print('waits', flush=True); time.sleep(600)")
    words = [*HARNESS, "observe", *WINDOWS, "--", sys.executable, str(train)]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A shell that runs the tests in the background ignores the signal, and children inherit that.
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "waits\n"
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    (record,) = records(tmp_path / "runs")
    assert (record.error.kind, len(record.steps)) == ("Interrupted", 6)
    assert "harness: run failed: interrupted by the user after 6 steps" in said


@pytest.mark.exhaustive
def test_of_ranks_that_torchrun_restarted_the_last_attempt_is_recorded(tmp_path: Path) -> None:
    train = script(tmp_path, at_6="if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(3)")
    # One rank: gloo of torch 2.13 connects restarted ranks to the ports of those that are gone.
    done, record = observed(tmp_path, *TORCHRUN[:-1], "1", "--max-restarts", "1", train)
    assert (done.returncode, record.status, len(record.steps)) == (0, "ok", 8), record.error
    assert "torchrun restarted the ranks; restart 1 is recorded" in record.observation.notes


@pytest.mark.exhaustive
def test_ranks_that_outlive_a_killed_launcher_are_named(tmp_path: Path) -> None:
    train = script(
        tmp_path,
        before="from glob import glob",
        at_6="(os.kill(os.getppid(), signal.SIGKILL) if os.environ['RANK'] == '0' else None); "
        "any(glob('runs/*/record.json') or time.sleep(0.1) for _ in range(3000))",
    )
    done, record = observed(tmp_path, *TORCHRUN, train)
    assert done.returncode == 137
    assert record.error.kind == "LauncherLost"
    assert record.error.message == (
        "the command was killed by SIGKILL after 6 steps, but ranks 0, 1 still run"
    )


def test_a_command_that_trains_nothing_keeps_its_exit_code(tmp_path: Path) -> None:
    for code, shown in ((7, 7), (0, 1)):
        done = harness_process(
            "observe", "--", sys.executable, "-c", f"raise SystemExit({code})", cwd=tmp_path
        )
        assert done.returncode == shown
        assert done.stderr.startswith("harness: no process of ")
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("label", [" ", "a\nb"])
def test_a_label_is_a_name_of_one_line(label: str, tmp_path: Path) -> None:
    done = harness_process("observe", "--label", label, "--", "none.py", cwd=tmp_path)
    assert (done.returncode, "give a name of one line" in done.stderr) == (1, True)


MODEL = """
import datetime, time
import torch
import torch.distributed as dist
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.passes = nn.Linear(4, 1), 0

    def forward(self, x):
        self.passes += self.training
        if self.passes == 3 and dist.is_initialized():
            CALL
        return self.layer(x)

def rows():
    return [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(64)]

def loss():
    return lambda model, batch: (model(batch["x"]) - batch["labels"]).square().mean()
"""
OWN = ("task=custom", "model.factory=own.py:Model", "data.factory=own.py:rows", "loss.factory=own.py:loss")


def error_of(tmp_path: Path, call: str) -> ErrorPart:
    """Why a run of two ranks failed that call this in the third forward pass."""
    (tmp_path / "own.py").write_text(MODEL.replace("CALL", call))
    settings = (*OWN, "loss.reduction=mean", "loss.targets=samples")
    words = [word for setting in settings for word in ("--set", setting)]
    assert harness("run", "--backend", "ddp", "--nproc", "2", *SHORT[4:], *words, cwd=tmp_path).returncode
    (record,) = records(tmp_path / "runs")
    assert record.error is not None
    return record.error


def test_ranks_that_gloo_ends_for_another_size_are_told_with_both_sizes(tmp_path: Path) -> None:
    """Two ranks: neither is blamed, though gloo ends rank 1 and rank 0 only loses its peer."""
    error = error_of(tmp_path, "dist.all_reduce(torch.ones(3 if dist.get_rank() else 3000))")
    assert (error.kind, error.rank, error.step, error.phase) == ("CollectiveMismatch", None, 2, "forward")
    call, place = (
        "in gloo all_reduce number 13 of group 0, default_pg",
        f"at {tmp_path.name}/own.py:15 forward",
    )
    assert (
        f"rank 0, 1 differ in size: rank 0 {call} (3000 Float) {place}; rank 1 {call} (3 Float) {place}; "
        "rank 1 received 3000 bytes where it waited for 4" in error.message
    )


ABSENT = """dist.barrier()
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2))
            time.sleep(600) if dist.get_rank() else dist.all_reduce(torch.ones(3))"""


def test_gloo_s_own_timeout_names_who_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.launch.launcher.GRACE_SECONDS", 1.0)
    error = error_of(tmp_path, ABSENT)
    waits = "gloo all_reduce number 14 of group 0, default_pg (3 Float)"
    assert (error.kind, error.rank, error.exit_code, error.step) == ("RuntimeError", 1, None, 2)
    assert error.message.startswith(
        "rank 1 is in no collective, while others wait in one (step 2, forward); "
        f"rank 0 waits in {waits}; rank 0: "
    )
    assert error.message.endswith("Timed out waiting 2000ms for recv operation to complete")
    assert [rank.collective for rank in error.ranks] == [waits, None]
    assert 'own.py", line 17 in forward' in error.ranks[1].stack
