"""Copies of masters are counted where they are not the rounded master."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.rank.probes.weights import (
    CHUNK_ELEMENTS,
    CHUNK_ROWS,
    PROJECTIONS,
    ROW_ELEMENTS,
    Copies,
    content_sum,
    count_copies,
    partial_sketch,
    sketch,
)


def distance(left: list[float], right: list[float]) -> float:
    """Root of the mean squared difference of projections."""
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(left[1:], right[1:], strict=True)) / PROJECTIONS)


def test_first_number_is_the_norm_and_the_others_are_projections() -> None:
    found = sketch("a", torch.tensor([3.0, 4.0]))
    assert len(found) == 1 + PROJECTIONS
    assert found[0] == 5.0
    assert {abs(value) for value in found[1:]} <= {1.0, 7.0}  # +-3 +-4


def test_names_have_signs_of_their_own_whatever_shape_and_dtype() -> None:
    tensor = torch.arange(12.0)
    assert sketch("a", tensor) == sketch("a", tensor.view(3, 4)) == sketch("a", tensor.double())
    assert sketch("a", tensor)[1:] != sketch("b", tensor)[1:]
    assert sketch("a", torch.zeros(0)) == [0.0] * (1 + PROJECTIONS)


@pytest.mark.parametrize("elements", [1, ROW_ELEMENTS - 1, ROW_ELEMENTS, ROW_ELEMENTS + 1])
def test_projections_are_linear_across_rows(elements: int) -> None:
    generator = torch.Generator().manual_seed(elements)
    left, right = (torch.randn(elements, generator=generator, dtype=torch.float64) for _ in range(2))
    whole = sketch("a", left + right)[1:]
    parts = zip(sketch("a", left)[1:], sketch("a", right)[1:], strict=True)
    assert whole == pytest.approx([a + b for a, b in parts])


def test_one_element_that_differs_shows_with_its_size_wherever_it_stands() -> None:
    elements = ROW_ELEMENTS * CHUNK_ROWS + 3  # the last three are a chunk of their own
    zero = torch.zeros(elements)
    for index in (0, ROW_ELEMENTS, elements - 1):
        one = zero.clone()
        one[index] = 0.5
        assert distance(sketch("a", one), sketch("a", zero)) == 0.5


def test_the_distance_of_two_tensors_is_estimated_within_its_standard_error() -> None:
    """Mean square of 8 projections has a relative standard error of at most sqrt(2 / 8)."""
    generator = torch.Generator().manual_seed(0)
    squares = []
    for number in range(100):
        left, right = (torch.randn(3000, generator=generator) for _ in range(2))
        true = float((left.double() - right.double()).norm())
        name = str(number)
        squares.append((distance(sketch(name, left), sketch(name, right)) / true) ** 2)
    assert sum(squares) / 100 == pytest.approx(1, abs=4 * math.sqrt(2 / 8) / 10)


@pytest.mark.parametrize(
    ("elements", "dtype"),
    [
        (7, torch.float32), (ROW_ELEMENTS, torch.float32), (2 * CHUNK_ELEMENTS + 5, torch.float32),
        (1500, torch.complex64),
    ],
)  # fmt: skip
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5])
def test_sums_of_parts_are_those_of_the_whole(elements: int, dtype: torch.dtype, share: float) -> None:
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(1), dtype=dtype)
    cut = int(elements * share) + 1  # odd cuts divide the 64-bit words
    parts = [(tensor[:cut], 0), (tensor[cut:], cut)]
    assert sum(content_sum("a", *part) for part in parts) % 2**64 == content_sum("a", tensor, 0)
    sums = [sum(values) for values in zip(*(partial_sketch("a", *part) for part in parts), strict=True)]
    assert sums == pytest.approx(partial_sketch("a", tensor, 0), rel=1e-9, abs=1e-6)


def test_content_sum_is_the_sum_over_words_of_word_times_odd_number() -> None:
    one = torch.zeros(2 * ROW_ELEMENTS)
    factors = []
    for word in (0, 3, ROW_ELEMENTS // 2):
        one.zero_()
        one.view(torch.int32)[2 * word] = 1
        factors.append(content_sum("a", one, 0))
    assert all(factor % 2 for factor in factors)
    assert len(set(factors)) == 3
    one.zero_()
    one.view(torch.int32)[0], one.view(torch.int32)[7] = 5, 11  # the upper half of word 3
    one.view(torch.int32)[ROW_ELEMENTS] = -1
    words = [5, 11 << 32, 2**32 - 1]
    assert content_sum("a", one, 0) == sum(w * f for w, f in zip(words, factors, strict=True)) % 2**64


def test_one_changed_bit_changes_the_content_sum_and_order_matters() -> None:
    tensor = torch.randn(3 * ROW_ELEMENTS, generator=torch.Generator().manual_seed(2))
    before = content_sum("a", tensor, 0)
    for index in (0, 1, ROW_ELEMENTS + 1, 3 * ROW_ELEMENTS - 1):
        for bit in (0, 22, 30):
            other = tensor.clone()
            other.view(torch.int32)[index] ^= 1 << bit
            assert content_sum("a", other, 0) != before
    assert content_sum("a", tensor.flip(0), 0) != before
    zero, minus_zero = torch.zeros(4), -torch.zeros(4)
    assert content_sum("a", zero, 0) != content_sum("a", minus_zero, 0)


@pytest.mark.filterwarnings("error")
def test_the_imaginary_part_counts() -> None:
    assert sketch("a", torch.tensor([3 + 4j]))[0] == 5.0
    one = torch.randn(1500, generator=torch.Generator().manual_seed(0), dtype=torch.complex64)
    other = one.clone()
    other[7] = complex(float(other[7].real), 9.0)
    assert distance(sketch("a", one), sketch("a", other)) > 1.0
    assert content_sum("a", one, 0) != content_sum("a", other, 0)
    assert content_sum("a", one, 0) == content_sum("a", one.conj().clone().conj(), 0)


def engine(*pairs: tuple[Tensor, Tensor]) -> Any:
    def weights_in_use() -> Iterator[tuple[Tensor, Tensor]]:
        return iter(pairs)

    return SimpleNamespace(weights_in_use=weights_in_use)


def test_a_rounded_copy_is_current_and_a_last_bit_is_not() -> None:
    masters = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    copy = masters.bfloat16()
    assert count_copies(engine((masters, copy))) == Copies(elements=4000, stale=0)
    copy[7] = torch.nextafter(copy[7], torch.tensor(9.0, dtype=torch.bfloat16))
    assert count_copies(engine((masters, copy), (masters, masters.clone()))) == Copies(elements=8000, stale=1)
    assert count_copies(engine()) == Copies(elements=0, stale=0)


def test_what_is_no_number_in_both_is_current() -> None:
    masters = torch.tensor([float("nan"), float("inf"), float("nan")])
    copy = torch.tensor([float("nan"), float("inf"), 1.0]).bfloat16()
    assert count_copies(engine((masters, copy))) == Copies(elements=3, stale=1)


def test_every_chunk_is_compared() -> None:
    masters = torch.zeros(CHUNK_ELEMENTS + 5)
    copy = masters.clone()
    copy[CHUNK_ELEMENTS + 2] = 1.0
    assert count_copies(engine((masters, copy))).stale == 1
