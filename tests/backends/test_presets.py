import pytest

from harness.backends import registry
from harness.backends.presets import BUCKET_ELEMENTS, PresetChange, preset_changes
from tests.built_in import strategy

OWN = list(registry.BUILT_IN)


def changes_of(backend: str, precision: str, preset: str, parameters: int) -> list[PresetChange]:
    return preset_changes(strategy(backend), precision, preset, parameters)


def settings(backend: str, precision: str = "bf16-mixed", parameters: int = 10**9) -> dict[str, object]:
    changes = changes_of(backend, precision, "like-for-like", parameters)
    return {change.setting: change.value for change in changes}


@pytest.mark.parametrize("backend", OWN)
def test_library_defaults_change_nothing(backend: str) -> None:
    assert changes_of(backend, "bf16-mixed", "library-defaults", 1000) == []


SHARDED = [name for name in OWN if strategy(name).family not in ("single", "ddp", "pipeline", "tensor")]
WITHOUT_REDUCE_DTYPE = [
    name for name in SHARDED if strategy(name).route == "trainer" and strategy(name).zero_stage is None
]
"""TrainingArguments cannot say in which dtype FSDP reduces."""


@pytest.mark.parametrize("backend", sorted(set(SHARDED) - set(WITHOUT_REDUCE_DTYPE)))
def test_sharded_backends_reduce_in_fp32(backend: str) -> None:
    changed = settings(backend)
    assert "float32" in changed.values() or changed["communication_data_type"] == "fp32"


@pytest.mark.parametrize("backend", WITHOUT_REDUCE_DTYPE)
def test_fsdp_through_trainer_reduces_as_it_computes(backend: str) -> None:
    assert settings(backend) == {}


def test_zero3_keeps_nothing_gathered() -> None:
    changed = settings("zero3", "fp32")
    assert {name: value for name, value in changed.items() if name.startswith("stage3")} == {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    }
    assert changed["reduce_bucket_size"] == BUCKET_ELEMENTS


def test_buckets_are_no_larger_than_the_model_and_even() -> None:
    assert settings("zero2", "fp32", 1001)["reduce_bucket_size"] == 1002


def test_a_third_party_is_unknown() -> None:
    assert registry.strategy_of("mine") is None
