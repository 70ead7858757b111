"""Reading what squeue and sacct print. The lines were printed by Slurm 22.05."""

from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.slurm import client
from tests.harness.slurm.fakes import FakeSlurm

QUEUE = """\
2|COMPLETED|None|0|0|0:00|node1|
4_0|FAILED|NonZeroExitCode|1792|1|1-02:03:04|node[1-2]|
4_1|FAILED|RaisedSignal:9(Killed)|9|0|0:03|node2|
5|PENDING|Resources|0|0|0:00||
"""
ACCOUNTING = """\
7|TIMEOUT|0:0|61|node[1-2]||
7.batch|CANCELLED|0:15|62|node1||14516K
7.0|CANCELLED by 0|0:15|62|node[1-2]|1200|388194K
8_1|CANCELLED by 1000|0:0|3|None assigned||
9|OUT_OF_MEMORY|0:125|12|node3||
"""


def test_queue_says_how_jobs_ended() -> None:
    facts = client.read_queue(QUEUE)
    assert (facts["2"].exit_code, facts["4_0"].exit_code, facts["4_0"].restarts) == (0, 7, 1)
    assert facts["4_0"].elapsed_seconds == 86400 + 2 * 3600 + 3 * 60 + 4
    assert facts["4_1"].exit_code == -9
    assert facts["5"].active
    assert (facts["5"].reason, facts["5"].exit_code, facts["5"].nodes) == ("Resources", None, None)


def test_accounting_says_memory_and_energy_of_steps() -> None:
    facts = client.read_accounting(ACCOUNTING)
    assert facts["7"].state == "TIMEOUT"
    assert facts["7"].max_resident_bytes == 388194 * 1024
    assert (facts["7"].energy_joules, facts["8_1"].state) == (1200, "CANCELLED")
    assert facts["8_1"].nodes is None
    assert facts["9"].exit_code == -125


def test_accounting_completes_what_the_controller_says(slurm: FakeSlurm) -> None:
    slurm.answer("squeue", "7|TIMEOUT|TimeLimit|0|2|1:01|node[1-2]|\n")
    slurm.answer("sacct", ACCOUNTING)
    facts = client.job_facts(["7", "9"])
    assert set(facts) == {"7", "9"}
    assert (facts["7"].restarts, facts["7"].max_resident_bytes) == (2, 388194 * 1024)
    assert facts["9"].state == "OUT_OF_MEMORY"
    # Slurm 22.05 refuses options of newer ones, such as --array.
    fields = "JobID,State,ExitCode,ElapsedRaw,NodeList,ConsumedEnergyRaw,MaxRSS"
    assert slurm.calls("sacct") == [f"--parsable2 --noheader --format={fields} --jobs=7,9"]


def test_a_forgotten_job_is_left_out(slurm: FakeSlurm) -> None:
    slurm.refuse("squeue", "Invalid job id specified")
    slurm.refuse("sacct", "Slurm accounting storage is disabled")
    assert client.job_facts(["7"]) == {}


def test_a_list_with_a_forgotten_job_is_asked_one_by_one(slurm: FakeSlurm) -> None:
    slurm.refuse_jobs({"8": "8|RUNNING|None|0|0|0:05|node1|", "9": "9_1|PENDING|Resources|0|0|0:00||"})
    facts = client.job_facts(["7", "8", "9_0", "9_1"])
    assert {job: known.state for job, known in facts.items()} == {"8": "RUNNING", "9_1": "PENDING"}


@pytest.mark.parametrize(
    ("printed", "job"),
    [("Welcome\n12;cluster\n", "12"), ("12\n", "12"), ("Project charged\n", None), ("", None)],
)
def test_sbatch_answers_in_its_last_line(
    slurm: FakeSlurm, printed: str, job: str | None, tmp_path: Path
) -> None:
    slurm.answer("sbatch", printed)
    if job is not None:
        assert client.submit(tmp_path / "a.sbatch") == job
    else:
        with pytest.raises(HarnessError, match=f"no job number for a.sbatch but '{printed.strip()}'; look"):
            client.submit(tmp_path / "a.sbatch")


def test_no_slurm_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HarnessError, match="'squeue' was not found"):
        client.queued_jobs()


def test_a_refusal_is_passed_on(slurm: FakeSlurm) -> None:
    slurm.refuse("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    with pytest.raises(HarnessError, match="Unable to contact"):
        client.queued_jobs()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "'slurm_load_jobs error: Unable to contact slurm controller (connect failure)'",
            "refused: slurm",
        ),
        (
            "'slurm_load_jobs error: Socket timed out on send/recv operation'",
            "refused: slurm_load_jobs error",
        ),
        # A busy controller may close the connection under squeue, which then ends by SIGPIPE without a word.
        ("nothing; kill -PIPE $$", "ended by signal 13"),
    ],
)
def test_a_controller_that_does_not_answer_has_not_forgotten_its_jobs(
    slurm: FakeSlurm, said: str, told: str
) -> None:
    slurm.refuse("squeue", said)
    with pytest.raises(client.SlurmUnavailable, match=told):
        client.job_facts(["7"])


def test_a_lost_answer_of_sbatch_is_not_tried_again(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.refuse("sbatch", "Batch job submission failed: Socket timed out on send/recv operation")
    with pytest.raises(HarnessError, match="look with squeue") as caught:
        client.submit(tmp_path / "a.sbatch")
    assert not isinstance(caught.value, client.SlurmUnavailable)
