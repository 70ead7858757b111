"""The page on links of known speed states an order, and what follows from one, only where runs support it."""

from pathlib import Path

from benchmarks.shaped_links import KNOWN, LINKS, Link, read_links, tell

REPORTS = Path(__file__).resolve().parents[2] / "reports" / "shaped-links"


def test_three_runs_of_five_backends_state_no_order_and_no_crossover() -> None:
    links = {
        name: Link(link.bandwidths, [r for r in link.records if r.repeat < 3])
        for name, link in read_links(REPORTS).items()
    }
    text = tell(links)
    assert text.count("not stated: too few rounds to rank 5 cells: 3 of 6") == 5
    assert "None is stated on unshaped" in text


def test_eight_runs_state_orders_and_what_follows_from_them() -> None:
    links = read_links(REPORTS)
    assert set(links) == set(LINKS)
    known = links[KNOWN].order
    assert known.is_ahead("ddp", "zero2")
    assert known.is_ahead("ddp", "zero3")
    assert not known.is_ahead("fsdp", "fsdp-hybrid")
    assert not known.is_ahead("fsdp-hybrid", "fsdp")
    text = " ".join(tell(links).split())
    assert "| unshaped | measured | ddp < zero2 < " in text
    assert "| 200mbit | measured | fsdp-hybrid | zero2 |" in text
    assert "| 200mbit | measured | fsdp-hybrid | ddp |" in text
    assert "| 200mbit | predicted | fsdp-hybrid | ddp |" not in text
    overtaken = text.split("beyond noise:")[-1]
    assert "| fsdp-hybrid | ddp | " in overtaken
    assert "| fsdp-hybrid | fsdp | " not in overtaken
