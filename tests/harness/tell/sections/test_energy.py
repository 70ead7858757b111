from harness.job.experiment import Price
from harness.judge.comparison import Comparison
from harness.record import EnergyPart, Record
from harness.tell.document import Paragraph, Section, Table
from harness.tell.sections.time import energy_section
from tests.records import make_ranks, make_record

USD = Price(amount=2.5, currency="USD")


def record(price: Price | None = None, **energy: object) -> Record:
    part = EnergyPart(seconds=2.0, **energy)  # type: ignore[arg-type]
    ranks = [rank.model_copy(update={"energy": part}) for rank in make_ranks(2)]
    made = make_record(label="ddp", ranks=ranks, price_per_gpu_hour=price)
    return made.model_copy(update={"world": made.world.model_copy(update={"device": "cuda"})})


def section(*records: Record) -> Section | None:
    return energy_section(Comparison([*records]))


def parts(*records: Record) -> tuple[Table, str]:
    found = section(*records)
    assert found is not None
    table, text = found.blocks
    assert isinstance(table, Table)
    assert isinstance(text, Paragraph)
    return table, text.text


def test_without_energy_and_price_there_is_no_section() -> None:
    assert section(record(device_unknown="Not Supported")) is None
    assert section(make_record()) is None


def test_columns_without_a_figure_are_left_out_and_reasons_are_told() -> None:
    table, text = parts(record(device_joules=800.0, host_unknown="no RAPL here"))
    assert [column.key for column in table.columns] == [
        "backend", "world_size", "device_watts", "kilowatt_hours_per_billion_tokens",
        "gpu_hours_per_billion_tokens",
    ]  # fmt: skip
    assert table.rows[0][2] == 800.0
    assert "n/a: no RAPL here." in text


def test_a_price_alone_gives_hours_and_cost() -> None:
    table, text = parts(record(USD))
    assert [column.key for column in table.columns][2:] == [
        "gpu_hours_per_billion_tokens", "cost_per_billion_tokens",
    ]  # fmt: skip
    assert table.rows[0][3] == 2.5 * table.rows[0][2]
    assert "at 2.5 USD per hour of one GPU" in text
