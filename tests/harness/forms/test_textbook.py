import pytest

from harness.backends import registry
from harness.forms.textbook import textbook_sent_bytes, textbook_states
from harness.job.job import OptimizerSection

BLOOM_560M = 559_214_592


def gigabytes(backend: str, parameters: float, ranks: int, precision: str = "bf16-mixed") -> float:
    return sum(states_of(backend, int(parameters), ranks, precision).values()) / 1e9


def states_of(backend: str, parameters: int, ranks: int, precision: str) -> dict[str, float]:
    strategy = registry.strategy_of(backend)
    assert strategy is not None
    return textbook_states(strategy.stage, parameters, ranks, precision)


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
    states = states_of("ddp", 7 * 10**9, 1, "fp32")
    assert states == {"weights": 28e9, "gradients": 28e9, "masters": 0, "optimizer": 56e9}


@pytest.mark.parametrize(
    ("settings", "moments"), [({}, 2), ({"kind": "sgd"}, 0), ({"kind": "sgd", "momentum": 0.9}, 1)]
)
def test_sgd_keeps_one_momentum_or_nothing(settings: dict, moments: int) -> None:
    assert OptimizerSection.model_validate(settings).moments == moments
    states = textbook_states(0, 10**9, 1, "bf16-mixed", moments=moments)
    assert states == {"weights": 2e9, "gradients": 2e9, "masters": 4e9, "optimizer": moments * 4e9}


def test_seven_billion_parameters_in_half_precision_throughout() -> None:
    states = states_of("ddp", 7 * 10**9, 1, "bf16")
    assert states == {"weights": 14e9, "gradients": 14e9, "masters": 0, "optimizer": 28e9}


def test_seventy_billion_parameters_take_more_than_a_terabyte() -> None:
    assert gigabytes("single", 70e9, 1) == pytest.approx(1120)


@pytest.mark.parametrize(("ranks", "shard"), [(128, 2.1875), (1280, 0.21875)])
def test_llama_70b_over_many_ranks(ranks: int, shard: float) -> None:
    states = states_of("fsdp", 70 * 10**9, ranks, "fp32")
    assert states["weights"] == pytest.approx(shard * 1e9)
    assert states["optimizer"] == pytest.approx(2 * shard * 1e9)


@pytest.mark.parametrize("backend", ["zero1", "zero2", "zero3"])
def test_fp32_formulas_of_the_strategies(backend: str) -> None:
    per_parameter = {"zero1": 8 + 8 / 4, "zero2": 4 + 12 / 4, "zero3": 16 / 4}[backend]
    assert gigabytes(backend, 1e9, 4, "fp32") == pytest.approx(per_parameter)


def test_a_third_party_has_no_textbook() -> None:
    assert registry.strategy_of("mine") is None


@pytest.mark.parametrize(
    ("sharding", "weight_bytes", "reduce_bytes", "gigabytes"),
    [
        ("none", 4, 4, 3.915),
        ("none", 2, 2, 1.957),
        ("full-shard", 2, 2, 2.936),
        ("full-shard", 2, 4, 3.915),
        ("grad-op", 2, 2, 1.957),
        ("grad-op", 4, 4, 3.915),
        ("single", 4, 4, 0.0),
    ],
)
def test_bloom_560m_on_eight_ranks(
    sharding: str, weight_bytes: int, reduce_bytes: int, gigabytes: float
) -> None:
    sent = textbook_sent_bytes(sharding, BLOOM_560M, 8, weight_bytes=weight_bytes, reduce_bytes=reduce_bytes)
    assert sent is not None
    assert round(sent / 1e9, 3) == gigabytes


def hybrid(world_size: int, shard_size: int | None) -> float | None:
    return textbook_sent_bytes(
        "hybrid", 1000, world_size, weight_bytes=2, reduce_bytes=4, shard_size=shard_size
    )


def test_hybrid_adds_an_all_reduce_across_the_replicas() -> None:
    # Within 4 ranks: 3/4 x 1000 x (2 x 2 + 4); across 2 replicas: 2 x 1/2 x 1000/4 x 4.
    assert hybrid(8, 4) == 6000 + 1000


def test_a_second_copy_is_gathered_within_its_group_in_the_backward_pass() -> None:
    # 7/8 x 1000 x (2 + 4) over all ranks, 1/2 x 1000 x 2 within 2.
    sent = textbook_sent_bytes("full-shard", 1000, 8, weight_bytes=2, reduce_bytes=4, second_copy_ranks=2)
    assert sent == 5250 + 1000


def test_hybrid_over_all_ranks_is_full_shard() -> None:
    assert hybrid(8, 8) == textbook_sent_bytes("full-shard", 1000, 8, weight_bytes=2, reduce_bytes=4)


def test_hybrid_of_single_ranks_is_ddp() -> None:
    assert hybrid(8, 1) == textbook_sent_bytes("none", 1000, 8, weight_bytes=2, reduce_bytes=4)


def test_hybrid_of_unknown_size_has_no_closed_form() -> None:
    assert hybrid(8, None) is None


def test_unknown_strategy_has_no_closed_form() -> None:
    assert textbook_sent_bytes("tensor-parallel", 1, 2, weight_bytes=4, reduce_bytes=4) is None


def test_every_built_in_backend_has_a_textbook_strategy() -> None:
    for entry in registry.BUILT_IN.values():
        assert entry.strategy is not None
        if entry.strategy.facts.cuts_layers:
            continue  # activations cross, which the number of parameters does not tell
        sent = textbook_sent_bytes(
            entry.strategy.sharding, 1000, 4, weight_bytes=4, reduce_bytes=4, shard_size=2
        )
        assert sent is not None
        assert 0 <= entry.strategy.stage <= 3
