import math

import pytest
import torch

from harness.worker.sketch import CHUNK_ROWS, PROJECTIONS, ROW_ELEMENTS, sketch


def distance(left: list[float], right: list[float]) -> float:
    """Root of the mean squared difference of projections."""
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(left[1:], right[1:], strict=True)) / PROJECTIONS)


def test_first_number_is_the_norm_and_the_others_are_projections() -> None:
    found = sketch("a", torch.tensor([3.0, 4.0]))
    assert len(found) == 1 + PROJECTIONS
    assert found[0] == 5.0
    assert {abs(value) for value in found[1:]} <= {1.0, 7.0}  # +-3 +-4


def test_equal_tensors_have_equal_sketches_and_other_names_have_other_signs() -> None:
    tensor = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert sketch("a", tensor) == sketch("a", tensor.clone())
    assert sketch("a", tensor)[1:] != sketch("b", tensor)[1:]


def test_shape_and_dtype_do_not_matter() -> None:
    tensor = torch.arange(12.0)
    assert sketch("a", tensor) == sketch("a", tensor.view(3, 4)) == sketch("a", tensor.double())


@pytest.mark.parametrize("factor", [2.0, 0.25, -1.0])
def test_a_multiple_has_the_multiple_of_each_projection(factor: float) -> None:
    tensor = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, other = sketch("a", tensor), sketch("a", factor * tensor)
    assert other[1:] == pytest.approx([factor * value for value in one[1:]])


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


def test_an_empty_tensor_is_a_zero() -> None:
    assert sketch("a", torch.zeros(0)) == [0.0] * (1 + PROJECTIONS)
