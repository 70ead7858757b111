import pytest

from harness.backends.registry import BUILT_IN
from harness.forms.network import (
    gradient_sharded_ratio,
    guide_ratio,
    parameter_sharded_ratio,
    replicated_ratio,
    time_ratio,
)


def test_replicated_gradients() -> None:
    # (8 - 1) x 7e9 x 312e12 / (2 x 300e9 x 8192 x 8)
    assert replicated_ratio(8, 7_000_000_000, 8192, 312e12, 300e9) == pytest.approx(388_793_945.3)


def test_sharded_gradients_take_half() -> None:
    arguments = (8, 7_000_000_000, 8192, 312e12, 300e9)
    assert gradient_sharded_ratio(*arguments) == replicated_ratio(*arguments) / 2


def test_sharded_parameters_depend_on_tokens_alone() -> None:
    # 511 x 989e12 / (2 x 4096 x 2 x 50e9)
    assert parameter_sharded_ratio(512, 4096, 2, 989e12, 50e9) == pytest.approx(616.9, rel=1e-3)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("ddp", "replicated"), ("zero1", "replicated"), ("zero2", "gradients"), ("zero3", "parameters"),
     ("fsdp", "parameters"), ("fsdp-grad-op", "gradients"), ("fsdp1-no-shard", "replicated")],
)  # fmt: skip
def test_each_strategy_has_the_ratio_of_its_stage(backend: str, expected: str) -> None:
    strategy = BUILT_IN[backend].strategy
    assert strategy is not None
    found = guide_ratio(
        strategy, ranks=8, parameters=10**9, sequence_length=2048, micro_batch_size=2, accumulation_steps=4,
        peak_flops=312e12, bandwidth=300e9,
    )  # fmt: skip
    tokens = 4 * 2 * 2048
    assert (
        found
        == {
            "replicated": replicated_ratio(8, 10**9, tokens, 312e12, 300e9),
            "gradients": gradient_sharded_ratio(8, 10**9, tokens, 312e12, 300e9),
            "parameters": parameter_sharded_ratio(8, 2048, 2, 312e12, 300e9),
        }[expected]
    )


def test_parameters_cancel_in_the_ratio_of_times() -> None:
    ranks, tokens = 8, 8192
    found = [
        time_ratio(2 * 2 * count * (ranks - 1) / ranks, count, tokens, 312e12, 300e9)
        for count in (10**9, 7 * 10**10)
    ]
    assert found == pytest.approx([2 * 7 * 312e12 / (3 * 8 * 300e9 * 8192)] * 2)
