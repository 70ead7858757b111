"""Step times over links of other speeds; orders, and what follows, are stated where runs support them."""

from pathlib import Path

import pytest

from benchmarks.links import crossover_bandwidth, seconds_over_link
from benchmarks.shaped_links import KNOWN, LINKS, Link, read_links, tell

REPORTS = Path(__file__).resolve().parents[2] / "reports" / "shaped-links"


def test_three_runs_of_five_backends_state_no_order_and_no_crossover() -> None:
    links = {
        name: Link(link.bandwidths, [r for r in link.records if r.repeat < 3])
        for name, link in read_links(REPORTS).items()
    }
    text = tell(links)
    assert text.count("not ranked: 3 rounds; give --repeats 6") == 5 + 2  # of each link, and in two sentences
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


FAST = 1e9
SMALL_BUT_SLOW, LARGE_BUT_QUICK = (0.2, 4e6), (0.1, 6e6)


def test_bytes_take_as_long_as_the_link_says() -> None:
    assert seconds_over_link(0.1, 5e6, FAST, 25e6) == pytest.approx(0.1 + 0.2 - 0.005)


def test_the_known_link_is_predicted_exactly() -> None:
    assert seconds_over_link(0.1, 5e6, FAST, FAST) == 0.1


def test_at_the_crossover_both_take_equally_long() -> None:
    bandwidth = crossover_bandwidth(SMALL_BUT_SLOW, LARGE_BUT_QUICK, FAST)
    assert bandwidth is not None
    times = [seconds_over_link(*each, FAST, bandwidth) for each in (SMALL_BUT_SLOW, LARGE_BUT_QUICK)]
    assert times[0] == pytest.approx(times[1])
    slower = [seconds_over_link(*each, FAST, bandwidth / 2) for each in (SMALL_BUT_SLOW, LARGE_BUT_QUICK)]
    assert slower[0] < slower[1]


@pytest.mark.parametrize("other", [(0.3, 6e6), (0.2, 5e6), (0.3, 4e6), SMALL_BUT_SLOW])
def test_one_that_is_never_behind_is_never_overtaken(other: tuple[float, float]) -> None:
    assert crossover_bandwidth(SMALL_BUT_SLOW, other, FAST) is None
