import re

import pytest

from harness.forms.terms import OPERATIONS, ring_formula, ring_sent_bytes


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("all_to_all", 0.875),
        ("broadcast", 0.875), ("reduce", 0.875), ("gather", 0.875), ("scatter", 0.875), ("send", 1),
        ("recv", 0),
    ],
)  # fmt: skip
def test_ring_factors_of_eight_ranks(op: str, factor: float) -> None:
    assert ring_sent_bytes(op, 8000, 8) == 8000 * factor


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_alone_nothing_is_sent(op: str) -> None:
    assert ring_sent_bytes(op, 8000, 1) == 0


def test_all_reduce_sends_what_reduce_scatter_and_all_gather_send() -> None:
    parts = ring_sent_bytes("reduce_scatter", 999, 3) + ring_sent_bytes("all_gather", 999, 3)
    assert ring_sent_bytes("all_reduce", 999, 3) == parts


def test_collective_without_a_factor_is_not_guessed() -> None:
    with pytest.raises(KeyError):
        ring_sent_bytes("all_hands", 1, 2)


@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_the_formula_evaluates_to_the_bytes(op: str) -> None:
    terms = re.findall(r"[\d,]+|\bx\b|[/()-]", ring_formula(op, 8000, 8))
    expression = "".join(terms).replace(",", "").replace("x", "*")
    assert eval(expression) == pytest.approx(ring_sent_bytes(op, 8000, 8))
