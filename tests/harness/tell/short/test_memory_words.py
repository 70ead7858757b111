from harness.record import Record
from harness.tell.short.verdict import memory_sentence
from tests.harness.tell.short.records import stage_of
from tests.records import make_ranks, make_record


def of(label: str, peak: int, states: int = 16_000) -> Record:
    """A run whose ranks peak at `peak` bytes and hold `states` bytes."""
    ranks = [
        rank.model_copy(
            update={"memory": [part.model_copy(update={"peak_bytes": peak}) for part in rank.memory]}
        )
        for rank in make_ranks(2, states)
    ]
    return make_record(label=label, ranks=ranks)


def memory(*records: Record) -> str:
    return memory_sentence(stage_of(make_record(), *records))


def test_the_cells_that_need_least_and_most_are_named_relative_to_ddp() -> None:
    text = memory(of("ddp", 8_000_000), of("fsdp", 2_000_000, 8_000), of("zero3", 9_000_000))
    assert text.startswith("Least memory on 2 ranks: fsdp peaks at 2.00 MB per rank, 25 % of ddp's 8.00 MB")
    assert "; most: zero3 at 9.00 MB; " in text
    assert "model states are smallest under fsdp, 0.008 MB" in text


def test_ddp_as_the_largest_is_named_once() -> None:
    text = memory(of("ddp", 8_000_000), of("fsdp", 2_000_000))
    assert "25 % of ddp's 8.00 MB" in text
    assert "most:" not in text


def test_cells_that_read_alike_are_named_together() -> None:
    text = memory(of("ddp", 8_000_000), of("fsdp", 2_000_000), of("fsdp1", 2_000_001))
    assert "fsdp and fsdp1 peak at 2.00 MB" in text


def test_cells_that_are_all_alike_have_no_least() -> None:
    text = memory(of("ddp", 2_000_000), of("fsdp", 2_000_000))
    assert text == "Every cell peaks at 2.00 MB per rank on 2 ranks; model states are 0.016 MB."


def test_what_was_not_measured_is_said() -> None:
    assert memory(make_record(label="ddp", ranks=[])) == "Peak memory was not measured."
