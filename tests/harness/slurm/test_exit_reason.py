"""What ended a job, from its script's note and Slurm's state."""

import pytest

from harness.fabric.result import FabricResult, FabricRow
from harness.slurm.client import JobFacts
from harness.slurm.submission import ScriptEnd, out_of_memory_notice, verdict

FINISHED = ScriptEnd(exit_code=1)


@pytest.mark.parametrize(
    ("state", "status", "kind"),
    [
        ("TIMEOUT", "timeout", "TimeLimit"),
        ("DEADLINE", "timeout", "TimeLimit"),
        ("OUT_OF_MEMORY", "oom", "OutOfMemory"),
        ("NODE_FAIL", "failed", "NodeFailure"),
        ("PREEMPTED", "failed", "Preempted"),
        ("CANCELLED", "failed", "Cancelled"),
    ],
)
@pytest.mark.parametrize("end", [None, FINISHED, ScriptEnd(ended="terminated", exit_code=143)])
def test_slurm_has_the_last_word(state: str, status: str, kind: str, end: ScriptEnd | None) -> None:
    found = verdict(JobFacts(state=state), end)
    assert found is not None
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
    assert found is not None
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
    assert found is not None
    assert (found.status, found.kind) == ("oom", "OutOfMemory")


@pytest.mark.parametrize("line", ["srun: error: node1: task 0: Killed", "a rank speaks of an oom-kill event"])
def test_other_output_tells_nothing_of_memory(line: str) -> None:
    assert out_of_memory_notice(line) is None


def fabric(seconds: float) -> FabricResult:
    row = FabricRow(op="all_reduce", ranks=[0, 1], size_bytes=10**9, repeats=1, seconds=[seconds])
    return FabricResult(
        created_at="now", transport="nccl", device="cuda", hosts=["a", "b"], interface=None, rows=[row]
    )


def test_a_slow_network_is_told_with_both_rates_and_the_usual_causes() -> None:
    end = ScriptEnd(ended="slow-fabric", exit_code=0, require_busbw="5GB/s")
    found = verdict(None, end, fabric=fabric(0.5))
    assert found is not None
    assert (found.status, found.kind) == ("failed", "SlowFabric")
    assert "2 GB/s is below the required 5 GB/s" in found.cause
    assert "Usual causes: the wrong network interface" in found.cause


def test_a_self_test_that_failed_says_nothing_of_the_networks_speed() -> None:
    found = verdict(None, ScriptEnd(ended="fabric-failed", exit_code=1, require_busbw="5GB/s"))
    assert found is not None
    assert (found.status, found.kind) == ("failed", "FabricFailed")
    assert "exit code 1" in found.cause
    assert "slower" not in found.cause
