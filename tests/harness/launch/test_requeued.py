"""Which records a job that Slurm started again may take over."""

import pytest

from harness.launch.owner import made_in_job, requeued_job
from tests.records import ENVIRONMENT, make_record


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "7"),
    ],
)
def test_only_a_job_that_was_started_again_is_requeued(
    variables: dict[str, str], job: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert requeued_job() == job


def test_records_of_other_jobs_are_not_taken_over() -> None:
    records = [
        make_record(run_id=name, environment=ENVIRONMENT | {"variables": variables})
        for name, variables in (
            ("own", {"SLURM_JOB_ID": "7"}), ("another", {"SLURM_JOB_ID": "8"}), ("none", {})
        )
    ]  # fmt: skip
    assert [record.run_id for record in made_in_job(records, "7")] == ["own"]
