import pytest

from harness.backends.registry import entries
from harness.theory.communication import ring_sent_bytes, textbook_sent_bytes
from harness.theory.strategies import TEXTBOOK

BLOOM_560M = 559_214_592


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


@pytest.mark.parametrize(
    ("strategy", "weight_bytes", "reduce_bytes", "gigabytes"),
    [
        ("ddp", 4, 4, 3.915),
        ("ddp", 2, 2, 1.957),
        ("full-shard", 2, 2, 2.936),
        ("full-shard", 2, 4, 3.915),
        ("grad-op", 2, 2, 1.957),
        ("grad-op", 4, 4, 3.915),
        ("single", 4, 4, 0.0),
    ],
)
def test_bloom_560m_on_eight_ranks(
    strategy: str, weight_bytes: int, reduce_bytes: int, gigabytes: float
) -> None:
    sent = textbook_sent_bytes(strategy, BLOOM_560M, 8, weight_bytes=weight_bytes, reduce_bytes=reduce_bytes)
    assert sent is not None
    assert round(sent / 1e9, 3) == gigabytes


def hybrid(world_size: int, shard_size: int | None) -> float | None:
    return textbook_sent_bytes(
        "hybrid", 1000, world_size, weight_bytes=2, reduce_bytes=4, shard_size=shard_size
    )


def test_hybrid_adds_an_all_reduce_across_the_replicas() -> None:
    # Within 4 ranks: 3/4 x 1000 x (2 x 2 + 4); across 2 replicas: 2 x 1/2 x 1000/4 x 4.
    assert hybrid(8, 4) == 6000 + 1000


def test_hybrid_over_all_ranks_is_full_shard() -> None:
    assert hybrid(8, 8) == textbook_sent_bytes("full-shard", 1000, 8, weight_bytes=2, reduce_bytes=4)


def test_hybrid_of_single_ranks_is_ddp() -> None:
    assert hybrid(8, 1) == textbook_sent_bytes("ddp", 1000, 8, weight_bytes=2, reduce_bytes=4)


def test_hybrid_of_unknown_size_has_no_closed_form() -> None:
    assert hybrid(8, None) is None


def test_unknown_strategy_has_no_closed_form() -> None:
    assert textbook_sent_bytes("tensor-parallel", 1, 2, weight_bytes=4, reduce_bytes=4) is None


def test_every_built_in_backend_has_a_textbook_strategy() -> None:
    built_in = [entry.name for entry in entries().values() if entry.target.startswith("harness.backends.")]
    assert sorted(built_in) == sorted(TEXTBOOK)
