"""What ZeRO-3 swaps into files, and what that costs in memory."""

import pytest

from harness.forms.families import model_states
from harness.forms.terms import ModelStates
from harness.forms.zero.zero3.swap_files import BUFFER_TERM
from tests.harness.forms.layouts import BLOOM_560M, BLOOM_SMALL
from tests.harness.forms.test_model_states import workload

MILLION = 1_000_000


def held(config: dict, **options: object) -> ModelStates:
    return model_states(workload("zero3", 2, config, options=options))


def buffers(states: ModelStates) -> int:
    return sum(term.bytes for term in states.terms if term.name == BUFFER_TERM)


def test_states_move_from_host_memory_into_files() -> None:
    on_host, swapped = held(BLOOM_560M, offload="optimizer"), held(BLOOM_560M, offload="nvme")
    for kind in ("masters", "optimizer"):
        moved = on_host.kinds()[kind] - swapped.kinds().get(kind, 0)
        in_files = sum(term.bytes for term in swapped.files if term.kind == kind)
        assert moved == pytest.approx(in_files, rel=1e-4)  # files are aligned
        assert in_files > 0.99 * on_host.kinds()[kind]
    assert swapped.kinds()["weights"] == on_host.kinds()["weights"]


def test_as_one_sub_group_the_buffers_are_as_large_as_what_they_free() -> None:
    swapped = held(BLOOM_560M, offload="nvme")
    assert buffers(swapped) >= swapped.file_bytes
    cut = held(BLOOM_560M, offload="nvme", sub_group_size=10 * MILLION)
    assert cut.file_bytes == pytest.approx(swapped.file_bytes, rel=1e-2)
    assert buffers(cut) < 0.6 * buffers(swapped)


def test_nothing_below_one_mebibyte_is_swapped() -> None:
    cut = held(BLOOM_560M, offload="nvme", sub_group_size=1)
    masters = cut.kinds()["masters"]
    assert 0 < masters < 4 * 262_144 * 300, "norms and biases stay, each a sub-group of its own"
    assert held(BLOOM_SMALL, offload="nvme", sub_group_size=1).files == ()


def test_other_offload_swaps_nothing() -> None:
    for where in ("none", "optimizer", "cpu"):
        assert held(BLOOM_560M, offload=where).files == ()
