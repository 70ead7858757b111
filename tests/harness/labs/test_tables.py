"""Tables of hand-outs, filled in from records whose figures are known."""

from harness.labs.definitions import LABS, find_lab
from harness.labs.tables import LabTable, cells, fill
from harness.record import GeometryPart, LayoutPart, Record
from tests.records import make_model, make_record, make_steps


def columns(table: LabTable) -> list[dict[str, str]]:
    return [dict(zip(table.headers, row, strict=True)) for row in table.rows]


def runs() -> list[Record]:
    """The reference and DDP on one rank at 0.5 s a step, FSDP1 on two at 0.25 s."""
    slow = make_steps(seconds=0.5)
    return [
        make_record(label="single", world_size=1, steps=slow),
        make_record(label="fsdp1", world_size=1, steps=slow),
        make_record(label="fsdp1", world_size=2, steps=make_steps(seconds=0.25)),
    ]


def test_speeds_and_factors_follow_from_the_steps() -> None:
    first, _ = fill(find_lab("bloom-fsdp"), runs())
    rows = {row["Setup"]: row for row in columns(first)}
    base, two = rows["Single Node, Single GPU"], rows["Single Node, 2 GPUs"]
    assert (base["Samples/s"], two["Samples/s"]) == ("16.00", "32.00")
    assert (base["Samples/s Scale Factor"], two["Samples/s Scale Factor"]) == ("1.00", "2.00")
    assert (base["Runtime (s)"], two["Runtime (s)"]) == ("2.00", "1.00")
    assert two["Runtime Scale Factor"] == "2.00"
    assert two["Loss"] == f"{(5.5 + 5.25 + 5.0 + 4.75) / 4:.4f}"


def test_the_public_speed_up_of_cinecas_deck_is_the_quotient_of_its_times() -> None:
    """3670 s on one GPU and 1821 s on two."""
    records = [
        make_record(label="fsdp1", world_size=ranks, steps=make_steps(seconds=seconds / 4))
        for ranks, seconds in ((1, 3670), (2, 1821))
    ]
    (table,) = fill(find_lab("llama-finetuning"), records)
    assert [(row["Training time (s)"], row["Speed-up"]) for row in columns(table)] == [
        ("3,670.00", "1.00"),
        ("1,821.00", "2.02"),
    ]


def test_what_was_not_measured_is_not_available_with_the_reason() -> None:
    (table,) = fill(find_lab("bloom-deepspeed"), [make_record(label="zero2", world_size=2)])
    values = {row["Metric"]: row["Stage 2, 2 GPUs"] for row in columns(table)}
    assert values["Average GPU Memory (MiB)"] == values["Exact Match (%)"] == "n/a"
    assert any("not polled" in note for note in table.notes)


def test_a_run_that_failed_is_named_below_every_table() -> None:
    failed = make_record(
        label="fsdp1", world_size=2, steps=[], status="unsupported", reasons=["no such device"]
    )
    for lab in LABS:
        if not lab.needs_runs:
            continue
        last = fill(lab, [*runs()[:2], failed])[0]
        assert any("fsdp1 on 2: unsupported: no such device" in note for note in last.notes), lab.name
        assert last.markdown()


def test_the_efficiency_of_weak_scaling_counts_the_work() -> None:
    """As long a step with half the work of a GPU is an efficiency of one half."""
    shape = GeometryPart(multiplying_parameters=1000, layers=2, attention_width=8)
    known = {
        "model": make_model(geometry=shape),
        "layout": LayoutPart(parameters=[], buffers=[], blocks=[], decaying=[]),
    }
    one, two = (
        make_record(label="fsdp1", world_size=n, steps=make_steps(seconds=0.5)).model_copy(update=known)
        for n in (1, 2)
    )
    (table,) = fill(find_lab("custom-gpt-weak"), [one, two])
    assert [cell.world_size for cell in cells([one, two])] == [1, 2]
    assert [row["GPUs"] for row in columns(table)] == ["1", "2"]
    assert [row["Work of a GPU"] for row in columns(table)] == ["1.00", "0.50"]
    assert [row["Efficiency (%)"] for row in columns(table)] == ["100.0", "50.0"]
    assert any("the other way round" in note for note in table.notes)
