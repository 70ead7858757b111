from harness.record import Record
from harness.tell.short.verdict import costs_sentence, many_ranks_sentence
from tests.harness.tell.short.records import stage_of
from tests.records import make_communication, make_ranks, make_record, published


def of(label: str, peak: int, states: int = 16_000) -> Record:
    """A run whose ranks peak at `peak` bytes and hold `states` bytes."""
    ranks = [
        rank.model_copy(
            update={"memory": [part.model_copy(update={"peak_bytes": peak}) for part in rank.memory]}
        )
        for rank in make_ranks(2, states)
    ]
    return make_record(label=label, ranks=ranks)


def costs(*records: Record, with_traffic: bool = False) -> str:
    return costs_sentence(stage_of(make_record(), *records), with_traffic=with_traffic)


def on_gpu(record: Record) -> Record:
    return record.model_copy(update={"world": record.world.model_copy(update={"device": "cuda"})})


def test_of_cpu_ranks_the_model_states_decide_and_the_peak_is_told_after_them() -> None:
    text = costs(
        of("ddp", 8_000_000, 16_000_000), of("fsdp", 2_000_000, 4_000_000), of("zero3", 1_000_000, 8_000_000)
    )
    assert text == (
        "fsdp holds least on 2 ranks: 4.00 MB of model states per rank, 25 % of ddp's 16.0 MB; "
        "its peak here was 2.00 MB, 25 % of ddp's."
    )


def test_of_gpus_the_peak_decides() -> None:
    text = costs_sentence(
        stage_of(*map(on_gpu, (make_record(), of("ddp", 8_000_000), of("zero3", 1_000_000)))),
        with_traffic=False,
    )
    assert text == ("zero3 holds least on 2 ranks: 1.00 MB per rank at its peak, 12 % of ddp's 8.00 MB.")


def test_of_cells_that_hold_alike_the_one_that_sends_less_is_named() -> None:
    sends = make_communication(2, payload_bytes=6_000_000)
    ddp = of("ddp", 8_000_000, 16_000_000).model_copy(
        update={"comm": make_communication(2, payload_bytes=4_000_000)}
    )
    fsdp = of("fsdp", 2_000_000, 4_000_000).model_copy(update={"comm": sends})
    grad_op = of("fsdp-grad-op", 3_000_000, 4_000_001).model_copy(update={"comm": ddp.comm})
    assert costs(ddp, fsdp, grad_op, with_traffic=True).startswith(
        "fsdp-grad-op and fsdp hold least on 2 ranks: 4.00 MB"
    )
    assert costs(ddp, fsdp, grad_op, with_traffic=True).endswith(
        "; of these fsdp-grad-op sends least, 4.00 MB per step, as much as ddp; its peak here was 3.00 MB, "
        "38 % of ddp's."
    )
    assert "; it sends 6.00 MB per step, 1.5 x ddp's 4.00 MB; its peak" in costs(ddp, fsdp, with_traffic=True)


def test_who_needs_least_on_many_ranks_is_said_where_it_is_another() -> None:
    text = many_ranks_sentence(stage_of(*published("bloom-560m")))
    assert text.startswith("On 64 ranks, by calculation, zero3 needs least: 1,134 MB ")
    assert many_ranks_sentence(stage_of(*published("default"))) == ""


def test_cells_that_are_all_alike_have_no_least() -> None:
    text = costs(of("ddp", 2_000_000), of("fsdp", 2_000_000))
    assert text == "Every configuration holds 0.016 MB of model states per rank on 2 ranks."


def test_what_was_not_measured_is_said() -> None:
    assert costs(make_record(label="ddp", ranks=[])) == "Memory was not measured."
