from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.document import Code, Folded
from harness.tell.sections.job import job_section
from tests.records import make_record


def cut(label: str, micro_batch_size: int, accumulation_steps: int) -> Record:
    record = make_record(label=label)
    world = {"micro_batch_size": micro_batch_size, "accumulation_steps": accumulation_steps}
    return record.model_copy(update={"world": record.world.model_copy(update=world)})


def settings(*records: Record) -> str:
    (folded,) = [block for block in job_section(Comparison(records)).blocks if isinstance(block, Folded)]
    (code,) = folded.blocks
    assert isinstance(code, Code)
    return code.text


def test_every_setting_shows_the_accumulation_that_ran() -> None:
    text = settings(cut("single", 8, 1), cut("ddp", 1, 4), cut("zero3", 1, 4))
    assert "accumulation_steps: 4" in text
    assert "micro_batch_size: 1\n" in text


def test_a_cut_that_differs_between_cells_is_no_setting_of_the_job() -> None:
    text = settings(cut("ddp", 1, 4), cut("zero3", 4, 1))
    assert "accumulation_steps" not in text
    assert "micro_batch_size" not in text
