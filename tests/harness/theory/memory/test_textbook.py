import pytest

from harness.theory.memory.textbook import textbook_states

BLOOM_560M = 559_214_592


def gigabytes(backend: str, parameters: float, ranks: int, precision: str = "bf16-mixed") -> float:
    states = textbook_states(backend, int(parameters), ranks, precision)
    assert states is not None
    return sum(states.values()) / 1e9


@pytest.mark.parametrize(
    ("backend", "published"), [("ddp", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9), ("fsdp", 1.9)]
)
def test_figure_1_of_the_zero_paper(backend: str, published: float) -> None:
    assert gigabytes(backend, 7.5e9, 64) == pytest.approx(published, abs=0.05)


@pytest.mark.parametrize(
    ("ranks", "expected"), [(2, (5.59, 5.03, 4.47)), (4, (3.91, 3.08, 2.24)), (8, (3.08, 2.10, 1.12))]
)
def test_bloom_560m(ranks: int, expected: tuple[float, float, float]) -> None:
    sizes = [gigabytes(name, BLOOM_560M, ranks) for name in ("zero1", "zero2", "zero3")]
    assert sizes == pytest.approx(expected, abs=0.005)
    assert gigabytes("ddp", BLOOM_560M, ranks) == pytest.approx(8.95, abs=0.005)


def test_seven_billion_parameters_in_fp32() -> None:
    states = textbook_states("ddp", 7 * 10**9, 1, "fp32")
    assert states == {"weights": 28e9, "gradients": 28e9, "masters": 0, "optimizer": 56e9}


def test_seven_billion_parameters_in_half_precision_throughout() -> None:
    states = textbook_states("ddp", 7 * 10**9, 1, "bf16")
    assert states == {"weights": 14e9, "gradients": 14e9, "masters": 0, "optimizer": 28e9}


def test_seventy_billion_parameters_take_more_than_a_terabyte() -> None:
    assert gigabytes("single", 70e9, 1) == pytest.approx(1120)


@pytest.mark.parametrize(("ranks", "shard"), [(128, 2.1875), (1280, 0.21875)])
def test_llama_70b_over_many_ranks(ranks: int, shard: float) -> None:
    states = textbook_states("fsdp", 70 * 10**9, ranks, "fp32")
    assert states is not None
    assert states["weights"] == pytest.approx(shard * 1e9)
    assert states["optimizer"] == pytest.approx(2 * shard * 1e9)


@pytest.mark.parametrize("backend", ["zero1", "zero2", "zero3"])
def test_fp32_formulas_of_the_strategies(backend: str) -> None:
    per_parameter = {"zero1": 8 + 8 / 4, "zero2": 4 + 12 / 4, "zero3": 16 / 4}[backend]
    assert gigabytes(backend, 1e9, 4, "fp32") == pytest.approx(per_parameter)


def test_a_third_party_has_no_textbook() -> None:
    assert textbook_states("mine", 10, 2, "fp32") is None
