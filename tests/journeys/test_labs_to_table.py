"""A lab at the tiny scale, the hand-out's table from its records, and the same records in a report."""

import json

import pytest

from tests.journeys.journey import Journey

pytestmark = [pytest.mark.exhaustive, pytest.mark.long(seconds=50)]
LAB = ("bloom-fsdp", "--scale", "tiny")
FEW = ("--backends", "fsdp", "--nproc", "2")


def test_a_lab_fills_in_the_table_of_its_hand_out(journey: Journey) -> None:
    assert "bloom-fsdp" in journey.harness("labs", "list").stdout
    ran = journey.harness("labs", "run", *LAB, *FEW)
    folder = "runs/labs/bloom-fsdp.as-intended.tiny"
    labels = {record.backend.label for record in journey.records(folder)}
    assert "fsdp" in labels
    document = json.loads(journey.harness("labs", "table", *LAB, "--json").stdout)
    assert document
    told = journey.harness("labs", "table", *LAB, "--markdown").stdout
    rows = [line for line in told.splitlines() if line.startswith("|")]
    assert len(rows) >= 3
    assert any(character.isdigit() for character in "".join(rows[2:]))
    assert journey.harness("labs", "table", *LAB).stdout.strip() in ran.stdout
    assert "fsdp" in journey.harness("list", "--runs", folder).stdout
    journey.harness("report", folder, "-o", "report.md")
    assert "records unchanged" in journey.harness("verify", "report.md").stdout
