"""The page on links of known speed states an order, and what follows from one, only where runs support it."""

from pathlib import Path

from benchmarks.shaped_links import KNOWN, LINKS, Link, read_links, tell
from harness.record import Record

REPORTS = Path(__file__).resolve().parents[2] / "reports" / "shaped-links"


def repeated(records: list[Record], times: int) -> list[Record]:
    return [record for record in records for _ in range(times)]


def test_three_runs_of_five_backends_state_no_order_and_no_crossover() -> None:
    text = tell(read_links(REPORTS))
    assert text.count("not stated: too few rounds to rank 5 cells: 3 of 6") == 5
    assert "None is stated on unshaped" in text


def test_enough_runs_state_the_orders_whose_runs_do_not_overlap() -> None:
    """Runs are copied: that makes them no evidence, but enough in number."""
    links = {
        name: Link(link.bandwidths, repeated(link.records, 3)) for name, link in read_links(REPORTS).items()
    }
    assert set(links) == set(LINKS)
    known = links[KNOWN].order
    assert not known.is_ahead("zero2", "ddp")
    assert not known.is_ahead("ddp", "zero2")
    assert known.is_ahead("ddp", "zero3")
    text = tell(links)
    assert "| unshaped | measured  | zero2 ~ ddp < " in text
    assert "| 200mbit  | measured  | fsdp-hybrid  | zero2       |" in text
    assert "| 200mbit  | measured  | fsdp-hybrid  | ddp         |" not in text
    overtaken = text.split("beyond noise:")[-1]
    assert "| fsdp-hybrid | ddp " in overtaken
    assert "| ddp         | zero2" not in overtaken
