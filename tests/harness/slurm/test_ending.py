"""What ended a job, from its script's note and Slurm's state."""

import pytest

from harness.slurm.client import JobFacts
from harness.slurm.ending import ScriptEnd, out_of_memory_notice, verdict

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


def test_the_script_knows_of_its_time_limit_before_slurm_does() -> None:
    found = verdict(None, ScriptEnd(ended="time-limit", exit_code=143))
    assert found is not None
    assert (found.status, found.kind) == ("timeout", "TimeLimit")


def test_a_step_that_failed_by_itself_is_left_to_its_ranks() -> None:
    assert verdict(None, FINISHED) is None
    assert verdict(JobFacts(state="FAILED", exit_code=1), FINISHED) is None
    assert verdict(JobFacts(state="COMPLETED", exit_code=0), ScriptEnd(exit_code=0)) is None


def test_a_script_that_was_killed_is_named() -> None:
    found = verdict(JobFacts(state="FAILED", exit_code=-9), None)
    assert found is not None
    assert (found.kind, "signal 9" in found.cause) == ("ScriptLost", True)


def test_a_forgotten_job_is_left_to_its_ranks() -> None:
    assert verdict(None, None) is None


def test_a_node_failure_names_the_silent_nodes() -> None:
    found = verdict(JobFacts(state="NODE_FAIL"), None, ["node2"])
    assert found is not None
    assert "node2" in found.cause


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
