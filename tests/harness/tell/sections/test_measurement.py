"""What was asked for stands in the report, so that it can be asked for again."""

from pathlib import Path

import pytest

from harness.job.config import load_experiment
from harness.judge.comparison import Comparison
from harness.launch.cells import plan
from harness.tell.document import Code, Folded, Table
from harness.tell.sections.job import measurement_section, reproduce_section
from tests.records import make_record, published_comparison


@pytest.fixture(scope="module")
def default() -> Comparison:
    return published_comparison("default")


def test_configurations_of_a_report_ask_for_the_same_job(default: Comparison, tmp_path: Path) -> None:
    folded = [block for block in reproduce_section(default).blocks if isinstance(block, Folded)]
    assert folded
    assert len(folded) == 1
    (code,) = folded[0].blocks
    assert isinstance(code, Code)
    path = tmp_path / "job.yaml"
    path.write_text(code.text)
    experiment = load_experiment(path, [])
    others = [row for row in default.rows if row.record.backend.label != "single"]
    assert sorted(experiment.compare.backends) == sorted({row.record.backend.label for row in others})
    assert experiment.compare.world_sizes == [2]
    assert experiment.compare.repeats == 7
    assert experiment.runtime.threads_per_rank == others[0].record.world.threads_per_rank
    cells = plan(experiment, ["ddp"], [2], 1, "cpu")
    assert {cell.job_id for cell in cells} == {row.record.job_id for row in default.rows}
    (record,) = [
        row.record for row in default.rows if row.record.backend.label == "ddp" and row.record.repeat == 0
    ]
    assert cells[-1].measure == record.measure


def test_accumulation_is_part_of_the_configuration(tmp_path: Path) -> None:
    record = make_record(label="ddp")
    world = record.world.model_copy(update={"micro_batch_size": 1, "accumulation_steps": 4})
    cut = record.model_copy(update={"world": world})
    (folded,) = [
        b for b in reproduce_section(Comparison([make_record(), cut])).blocks if isinstance(b, Folded)
    ]
    assert "accumulation_steps: 4" in str(folded)


def test_commit_and_install_line_stand_before_the_commands(default: Comparison) -> None:
    first, commands, *_ = reproduce_section(default).blocks
    git = default.rows[0].record.environment.git
    assert git is not None
    assert git.commit in str(first)
    assert isinstance(commands, Code)
    assert commands.text.startswith("pip install -c constraints.txt -e '.[train]'\nharness ")


def test_each_layout_stands_once_with_its_backends() -> None:
    records = [
        make_record(),
        make_record(label="ddp"),
        make_record(label="fsdp"),
        make_record(label="fsdp", repeat=1),
    ]
    table, shared, *_ = measurement_section(Comparison(records)).blocks
    assert isinstance(table, Table)
    lines = [dict(zip((c.key for c in table.columns), line, strict=True)) for line in table.values()]
    assert [(line["world_size"], line["backends"]) for line in lines] == [(1, "single"), (2, "ddp and fsdp")]
    assert lines[0]["micro_batch_size"] == 8
    assert "timed_steps" not in lines[0]
    assert "The same in all cells that trained: nodes 1," in str(shared)
    assert "timed 2." in str(shared)
