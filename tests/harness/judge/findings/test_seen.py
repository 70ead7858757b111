"""What the harness saw of a run by itself, where one figure decides."""

from typing import Any

import pytest

from harness.job.job import Job
from harness.record import ObservedPart
from tests.harness.judge.findings.told import told
from tests.records import JOB, make_record

IN_PARTS = "fsdp on 2 ranks: no optimizer keeps the complete momentum of 14 matrices"
WIDE = "fsdp on 2 ranks: 1,444,352 bytes of optimizer states are in full width"


@pytest.mark.parametrize(
    ("kind", "optimizer", "seen", "begin"),
    [
        ("muon-on-parts", "adamw", {"matrices_in_parts": 14}, IN_PARTS),
        ("muon-on-parts", "adamw", {"matrices_in_parts": 0}, None),
        ("muon-on-parts", "adamw", {"matrices_in_parts": None}, None),
        ("low-bit-states-wide", "adamw-8bit", {"wide_optimizer_bytes": 1_444_352}, WIDE),
        ("low-bit-states-wide", "adamw-8bit", {"wide_optimizer_bytes": 0}, None),
        ("low-bit-states-wide", "adamw-8bit", {"wide_optimizer_bytes": None}, None),
        ("low-bit-states-wide", "adamw", {"wide_optimizer_bytes": 4096}, None),
    ],
)
def test_one_figure_decides(kind: str, optimizer: str, seen: dict[str, Any], begin: str | None) -> None:
    job = Job.model_validate(JOB | {"optimizer": JOB["optimizer"] | {"kind": optimizer}})
    records = [make_record(label=one, job=job, observed=ObservedPart(**seen)) for one in ("single", "fsdp")]
    messages = [finding.message for finding in told(records, kind) if finding.backends == ("fsdp",)]
    assert [message.startswith(begin or "none") for message in messages] == ([True] if begin else [])
