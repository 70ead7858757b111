"""A checkpoint saved in a real run: its memory, its collectives, and what becomes of its files."""

from pathlib import Path

import pytest

from harness.judge.comparison import Comparison
from harness.record.store import read_runs
from harness.tell.document import Folded, Table
from harness.tell.sections.amounts import communication_section, memory_section
from tests.memory.conftest import LLAMA, SAVING, Outcome, compare


@pytest.mark.parametrize("name", SAVING)
def test_every_rank_records_memory_and_collectives_of_saving(outcome: Outcome, name: str) -> None:
    for part in outcome.records[name].ranks:
        (saving,) = (m for m in part.memory if m.moment == "during_checkpoint")
        after = [m for m in part.memory if m.moment == "after_step"][-1]
        assert saving.step == 4
        assert saving.kinds["optimizer"] == after.kinds["optimizer"]
        named = sum(saving.kinds.values()) - saving.kinds["other"]
        assert (saving.peak_bytes or 0) >= (saving.allocated_bytes or 0) >= named
    calls = [row for row in outcome.records[name].comm if row.phase == "checkpoint" and row.calls]
    assert {row.rank for row in calls} == {0, 1}


def test_a_full_state_costs_fsdp1_a_gathering_of_every_unit(outcome: Outcome) -> None:
    """`get_state_dict` of torch 2.13 gathers FSDP1's optimizer states; FSDP2 saves its shards as they are."""
    gathered = {
        name: sum(
            row.payload_bytes
            for row in outcome.records[name].comm
            if (row.rank, row.phase, row.op, row.dtype) == (0, "checkpoint", "all_gather", "float32")
        )
        for name in ("fsdp", "fsdp1")
    }
    assert gathered["fsdp"] == 0
    assert gathered["fsdp1"] >= 8 * outcome.parameters("fsdp1")


def test_the_report_shows_it(outcome: Outcome) -> None:
    comparison = Comparison(list(outcome.records.values()))
    section = memory_section(comparison)
    (folded,) = (block for block in section.blocks if isinstance(block, Folded))
    (moments,) = folded.blocks
    assert isinstance(moments, Table)
    assert {line[0] for line in moments.rows if "checkpoint" in line} == {"single", *SAVING}
    collectives = communication_section(comparison)
    (table,) = (block for block in collectives.blocks if isinstance(block, Table))
    assert {line[0] for line in table.rows if "checkpoint" in line} >= set(SAVING)


def test_its_files_are_deleted_unless_they_are_to_be_kept(outcome: Outcome, tmp_path: Path) -> None:
    assert list(outcome.folder.glob("runs/*/checkpoint")) == []
    kept = [part.kind for record in outcome.records.values() for part in record.artifacts]
    assert "checkpoint" not in kept
    settings = ("measure.checkpoint=true", "measure.keep_checkpoint=true")
    compare(tmp_path, "single", 1, f"model.config={LLAMA}", *settings)
    ((at, record),), _ = read_runs([tmp_path / "runs"])
    assert [(part.kind, part.path) for part in record.artifacts] == [("checkpoint", "checkpoint")]
    assert (at.parent / "checkpoint" / ".metadata").exists()
