from harness.judge.comparison import Comparison
from harness.tell.document import Folded, Items, Table
from harness.tell.sections.parity import levels_section
from tests.records import LOSSES, make_record, make_steps, make_weights


def shifted(label: str, loss: float, **changes: object):  # type: ignore[no-untyped-def]
    steps = make_steps([value + loss for value in LOSSES])
    return make_record(label=label, steps=steps, final_weights=make_weights("c" * 64), **changes)


def section(*records):  # type: ignore[no-untyped-def]
    found = levels_section(Comparison(records))
    assert found is not None
    return found


def test_limits_stand_beside_what_was_seen_and_the_factor() -> None:
    split = shifted("single:micro_batch_size=4", 1e-5)
    found = section(make_record(), split, shifted("ddp", 5e-5))
    (table,) = (block for block in found.blocks if isinstance(block, Table))
    assert table.texts()[0] == ["tight", "loss", "1.0e-05", "10", "1.0e-04", "measurement"]
    assert [line[1] for line in table.texts()] == ["loss", "gradient norm", "distance moved", "final weights"]
    source = [block for block in found.blocks if isinstance(block, Items)][1]
    assert source.items == ["tight: measured by single:micro_batch_size=4; lower bound: fp32 rounding."]


def test_a_floor_that_was_not_measured_is_said() -> None:
    found = section(make_record(), make_record(label="ddp"))
    source = [block for block in found.blocks if isinstance(block, Items)][1]
    assert "tight: not measured" in str(source.items[0])
    assert "100 roundings of fp32" in str(source.items[0])


def test_a_low_precision_has_two_levels_with_their_factors() -> None:
    training = {"precision": "bf16-mixed"}
    cast = shifted("single:precision=cast", 1e-3, training=training)
    found = section(make_record(training=training), cast, shifted("ddp", 2e-3, training=training))
    (table,) = (block for block in found.blocks if isinstance(block, Table))
    assert [line[:4] for line in table.texts()[::4]] == [
        ["tight", "loss", "n/a", "100"],
        ["band", "loss", "1.0e-03", "3"],
    ]


def test_every_run_has_its_distances_and_why_it_is_unjudged() -> None:
    found = section(make_record(), shifted("ddp", 5e-5), make_record(label="fsdp", status="failed"))
    (folded, *_) = (block for block in found.blocks if isinstance(block, Folded))
    (table,) = folded.blocks
    assert isinstance(table, Table)
    lines = table.texts()
    assert lines[1][:5] == ["ddp", "2", "1", "tight", "5.0e-05"]
    assert lines[2][-1] == "the run ended as failed"


def test_repeats_that_lie_equally_far_are_one_line_with_their_number() -> None:
    found = section(
        make_record(),
        *(shifted("ddp", 5e-5, repeat=repeat) for repeat in range(2)),
        shifted("ddp", 6e-5, repeat=2),
    )
    (folded, *_) = (block for block in found.blocks if isinstance(block, Folded))
    (table,) = folded.blocks
    assert isinstance(table, Table)
    assert [line[:5] for line in table.texts()[1:]] == [
        ["ddp", "2", "2", "tight", "5.0e-05"],
        ["ddp", "2", "1", "tight", "6.0e-05"],
    ]


def test_runs_of_two_jobs_are_not_added_up() -> None:
    jobs = [
        make_record(label=label, job_id=job * 12, repeat=repeat)
        for job in "ab"
        for label, repeat in (("single", 0), ("ddp", 0), ("ddp", 1))
    ]
    (folded, *_) = (block for block in section(*jobs).blocks if isinstance(block, Folded))
    (table,) = folded.blocks
    assert isinstance(table, Table)
    lines = {(line[0][0], line[1]): line[3] for line in table.texts()}
    assert lines == {("a", "single"): "1", ("b", "single"): "1", ("a", "ddp"): "2", ("b", "ddp"): "2"}


def test_repeats_without_losses_are_not_called_equal() -> None:
    lost = [make_record(label="ddp", repeat=n, steps=make_steps([None] * len(LOSSES))) for n in range(2)]
    last = section(make_record(), *lost).blocks[-1]
    assert isinstance(last, Folded)
    (items,) = last.blocks
    assert isinstance(items, Items)
    assert items.items == ["ddp on 2: no loss to compare in one of the runs"]


def test_repeats_that_agree_bit_for_bit_are_counted() -> None:
    again = make_record(label="ddp", repeat=1, steps=make_steps([loss + 1e-6 for loss in LOSSES]))
    same = [make_record(label="fsdp", repeat=repeat) for repeat in range(2)]
    last = section(make_record(), make_record(label="ddp"), again, *same).blocks[-1]
    assert isinstance(last, Folded)
    (items,) = last.blocks
    assert isinstance(items, Items)
    assert items.items == [
        "ddp on 2: 1.0e-06 nats per token",
        "1 other cell with repeats: losses equal bit for bit",
    ]


def test_the_spread_of_repeats_is_told() -> None:
    again = make_record(label="ddp", repeat=1, steps=make_steps([loss + 1e-6 for loss in LOSSES]))
    found = section(make_record(), make_record(label="ddp"), again)
    last = found.blocks[-1]
    assert isinstance(last, Folded)
    assert "repeats of one backend" in last.title
    (items,) = last.blocks
    assert isinstance(items, Items)
    assert items.items == ["ddp on 2: 1.0e-06 nats per token"]


def test_no_reference_no_levels() -> None:
    assert levels_section(Comparison([make_record(label="ddp")])) is None
