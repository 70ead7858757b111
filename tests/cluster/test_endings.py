"""Runs that are killed in every way that a cluster knows end in the right record, and the others finish."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harness.record import Record
from harness.record.store import read_record
from tests.cluster import matrices
from tests.cluster.slurm import SlurmCluster
from tests.events import steps_taken
from tests.representatives import EXHAUSTIVE

pytestmark = [pytest.mark.usefixtures("quiet_cluster"), pytest.mark.long(seconds=240)]
SURVIVORS = ("single", "fsdp1-no-shard")
FOLDER = "a b'c\"d$(touch PWNED)"
NAME = "x y'z\"$(touch PWNED) `touch PWNED` ; touch PWNED #"
SOON_STUCK = ("--set", "runtime.stuck_after_seconds=5")
"""Only where a rank is stopped: nodes that share a few cores may stand still for so long by themselves."""
STEPS = 200
"""Over the slow link more than a minute, far longer than it takes to kill a run; without it a few seconds."""


def reach_the_time_limit(matrix: matrices.RenderedMatrix, backend: str) -> None:
    # Slurm counts limits in minutes, its ends of jobs in seconds. The notice comes 30 s before.
    job = matrix.job(backend)
    matrix.cluster.command("scontrol", "update", f"JobId={job}", "EndTime=now+35", cwd=matrix.folder)


def cancel(matrix: matrices.RenderedMatrix, backend: str) -> None:
    run = matrix.request(backend).run_id
    matrix.cluster.harness("slurm", "cancel", "jobs", run, cwd=matrix.folder)


def kill_one_rank(matrix: matrices.RenderedMatrix, backend: str) -> None:
    send_to_rank_1(matrix, backend, signal.SIGKILL)


def stop_one_rank(matrix: matrices.RenderedMatrix, backend: str) -> None:
    send_to_rank_1(matrix, backend, signal.SIGSTOP)


def send_to_rank_1(matrix: matrices.RenderedMatrix, backend: str, number: signal.Signals) -> None:
    """To the process that trains: the child of its monitor."""
    directory = str(matrix.directory(backend))
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "harness.launch" in words and directory in words and "torch.distributed.run" not in words:
            monitored = process.children()
            if monitored and process.environ().get("RANK") == "1":
                monitored[0].send_signal(number)
                return
    raise AssertionError(f"no process of rank 1 in {directory}")


def kill_the_job_script(matrix: matrices.RenderedMatrix, backend: str) -> None:
    job = matrix.job(backend)
    script = f"job{int(job):05d}/slurm_script"
    (shell,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        # Another cluster on this machine may have a job of the same number.
        if any(
            script in word and str(matrix.cluster.folder) in word for word in process.info["cmdline"] or []
        )
    ]
    shell.send_signal(signal.SIGKILL)


def power_off_a_node(matrix: matrices.RenderedMatrix, backend: str) -> None:
    """The last of the run's nodes."""
    matrix.cluster.nodes.power_off(matrices.nodes_of(matrix, backend)[1])


Kills = dict[str, tuple[Callable[[matrices.RenderedMatrix, str], None], tuple[str, str]]]
KILLED: Kills = {
    "ddp": (cancel, ("failed", "Cancelled")),
    "fsdp-grad-op": (kill_one_rank, ("failed", "Exit")),
    "fsdp1-grad-op": (power_off_a_node, ("failed", "NodeFailure")),
}
"""How the run of a backend is ended, and what its record then says; in the order in which they run."""
KILLED_TOO: Kills = {
    "fsdp": (reach_the_time_limit, ("timeout", "TimeLimit")),
    "fsdp1": (kill_the_job_script, ("failed", "ScriptLost")),
    "zero1": (stop_one_rank, ("timeout", "Stuck")),
}
"""Where every way is tried."""


@pytest.fixture(scope="module")
def killed(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> matrices.RenderedMatrix:
    return kill(cluster, tmp_path_factory.mktemp("killed") / FOLDER, KILLED)


@pytest.fixture(scope="module")
def killed_too(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> matrices.RenderedMatrix:
    return kill(cluster, tmp_path_factory.mktemp("killed-too") / FOLDER, KILLED_TOO, *SOON_STUCK)


def kill(cluster: SlurmCluster, folder: Path, killed: Kills, *options: str) -> matrices.RenderedMatrix:
    """A matrix whose runs are killed one after the other as they train, but for two; with hostile names."""
    matrix = matrices.render(
        cluster, folder, *cells(killed), *options, "--job-name", NAME, steps=STEPS,
        site=f"exclusive: true\noptions: {{comment: {json.dumps(NAME)}}}\n"
        f"environment: {{HOSTILE: {json.dumps(NAME)}}}\n",
    )  # fmt: skip
    cluster.nodes.shape(matrices.SLOW_LINK)
    matrix.harness("submit")
    try:
        for backend, (end, _) in killed.items():
            matrix.wait_for_steps(backend)
            end(matrix, backend)
        cluster.nodes.shape(None)
        matrix.wait_until_over(240)
        matrix.harness("collect")
    finally:
        cluster.nodes.shape(None)
        cluster.command("scancel", "--user=root", cwd=folder)
        cluster.power_on_all()
    return matrix


def cells(killed: Kills) -> list[str]:
    backends = [*killed, *SURVIVORS[1:]]
    return ["--backends", ",".join(backends), "--nodes", "2", "--nproc", "1"]


def recorded(matrix: matrices.RenderedMatrix, killed: Kills) -> dict[str, Record]:
    """By backend; each run says how it ended, and measured on both nodes."""
    found = {backend: read_record(matrix.directory(backend) / "record.json") for backend in killed}
    assert {backend: matrices.reason(record) for backend, record in found.items()} == {
        backend: said for backend, (_, said) in killed.items()
    }
    assert all(len(matrices.trained_on(record)) == 2 for record in found.values())
    return found


def test_the_record_says_which_rank_or_node_was_lost(killed: matrices.RenderedMatrix) -> None:
    by_backend = recorded(killed, KILLED)
    rank, node = by_backend["fsdp-grad-op"].error, by_backend["fsdp1-grad-op"].error
    assert node is not None
    assert rank.rank == 1
    assert "SIGKILL" in rank.message
    assert by_backend["fsdp1-grad-op"].ranks[1].host in node.message


@EXHAUSTIVE
def test_a_rank_that_stands_still_is_found_with_where_the_others_wait(
    killed_too: matrices.RenderedMatrix,
) -> None:
    error = recorded(killed_too, KILLED_TOO)["zero1"].error
    assert error.rank == 1
    assert "rank 1 is stopped by SIGSTOP" in error.message
    assert error.ranks[0].stack
    assert "SIGSTOP" in error.ranks[1].note


def test_a_run_that_is_told_to_end_writes_its_measurements_first(killed: matrices.RenderedMatrix) -> None:
    cancelled = recorded(killed, KILLED)["ddp"]
    assert cancelled.environment.slurm.state == "CANCELLED"
    wrote_its_measurements(cancelled)


@EXHAUSTIVE
def test_a_run_at_its_time_limit_writes_its_measurements_first(killed_too: matrices.RenderedMatrix) -> None:
    wrote_its_measurements(recorded(killed_too, KILLED_TOO)["fsdp"])


def wrote_its_measurements(record: Record) -> None:
    assert record.comm
    assert any(rank.memory for rank in record.ranks)


def test_hostile_names_stay_names(killed: matrices.RenderedMatrix) -> None:
    shown = killed.cluster.command(
        "squeue", "--noheader", "--states=all", f"--jobs={killed.job('ddp')}", "--Format=Name:|",
        cwd=killed.folder,
    )  # fmt: skip
    assert shown.stdout.strip() == f"{NAME}-ddp-2x1-{killed.directory('ddp').name[-6:]}|"
    assert not list(killed.folder.parent.rglob("PWNED"))


def test_the_others_finish_and_only_what_is_missing_runs_again(killed: matrices.RenderedMatrix) -> None:
    finished = {killed.directory(backend) / "record.json" for backend in SURVIVORS}
    before = {path: path.read_bytes() for path in finished}
    assert {json.loads(text)["status"] for text in before.values()} == {"ok"}
    again = killed.rendered_again(*cells(KILLED))
    assert {run["backend"] for run in again.runs()} == set(KILLED)
    again.harness("submit", "--wait", timeout=600)
    assert {path: path.read_bytes() for path in before} == before
    done = [record.backend.label for record in killed.records() if record.status == "ok"]
    assert sorted(done) == sorted([*SURVIVORS, *KILLED])


@EXHAUSTIVE
def test_preempted(cluster: SlurmCluster, tmp_path: Path) -> None:
    matrix = matrices.started(cluster, tmp_path)
    matrix.wait_for_steps("ddp")
    cluster.preempt(tmp_path)
    record = matrices.collected(matrix)
    assert matrices.reason(record) == ("failed", "Preempted")
    assert record.comm


@EXHAUSTIVE
def test_out_of_memory(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Slurm watches what the job holds (jobacct_gather, OverMemoryKill); there are no cgroups here."""
    record = matrices.collected_anyhow(matrices.started(cluster, tmp_path, site="memory_per_node: 300M\n"))
    assert matrices.reason(record) == ("oom", "OutOfMemory")


ELEMENTS = ("--backends", "ddp,fsdp", "--nodes", "2", "--nproc", "1", "--array")


@EXHAUSTIVE
def test_a_time_limit_of_one_element_ends_that_one_alone(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The notice before the limit, which the script of the element asks for, reaches no other element."""
    matrix = matrices.render(cluster, tmp_path, *ELEMENTS, steps=matrices.ENDLESS).without("single")
    cluster.nodes.shape(matrices.SLOW_LINK)
    matrix.harness("submit")
    for backend in ("ddp", "fsdp"):
        matrix.wait_for_steps(backend)
    ended, other = matrix.job("ddp"), matrix.job("fsdp")
    assert ended.partition("_")[0] == other.partition("_")[0]
    # Slurm counts limits in minutes, its ends of jobs in seconds. The notice comes 30 s before.
    cluster.command("scontrol", "update", f"JobId={ended}", "EndTime=now+35", cwd=tmp_path)
    cluster.wait_for_jobs([ended], tmp_path, 120)
    taken = steps_taken(matrix.directory("fsdp") / "rank-00000.jsonl")
    matrix.wait_for_steps("fsdp", taken + 4)
    cluster.harness("slurm", "cancel", "jobs", matrix.request("fsdp").run_id, cwd=tmp_path)
    matrix.wait_until_over()
    matrix.harness("collect")
    records = {b: read_record(matrix.directory(b) / "record.json") for b in ("ddp", "fsdp")}
    assert {b: matrices.reason(record) for b, record in records.items()} == {
        "ddp": ("timeout", "TimeLimit"), "fsdp": ("failed", "Cancelled"),
    }  # fmt: skip
    assert all(len(matrices.trained_on(record)) == 2 for record in records.values())
