"""Which weights ZeRO-3 swaps into files, and what that costs in memory."""

import pytest

from harness.forms.families import model_states
from harness.forms.host_link import host_link_bytes
from harness.forms.terms import ModelStates
from harness.forms.workload import Workload
from harness.forms.zero.zero3.swap_files import ALIGNMENT_BYTES, LEAST_BYTES, READ_TERM, UPDATED_TERM
from tests.harness.forms.layouts import BLOOM_560M, BLOOM_SMALL
from tests.harness.forms.test_model_states import workload

RANKS = 2


def asked(config: dict, precision: str = "fp32", **options: object) -> Workload:
    return workload("zero3", RANKS, config, precision=precision, options=options)


def held(config: dict, precision: str = "fp32", **options: object) -> ModelStates:
    return model_states(asked(config, precision, **options))


def term(states: ModelStates, name: str) -> int:
    return sum(term.bytes for term in states.terms if term.name == name)


def in_files(states: ModelStates, kind: str) -> int:
    return sum(term.bytes for term in states.files if term.kind == kind)


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16-mixed", 2)])
def test_pieces_of_a_mebibyte_lie_in_files_and_the_others_in_memory(precision: str, width: int) -> None:
    optimizer, both = (held(BLOOM_560M, precision, offload=where) for where in ("nvme", "nvme-all"))
    pieces = [-(-p.numel // RANKS) * width for p in asked(BLOOM_560M).layout.trained]
    small = sum(piece for piece in pieces if piece < LEAST_BYTES)
    assert 0 < both.kinds()["weights"] == small < optimizer.kinds()["weights"] == sum(pieces)
    aligned = sum(-(-p // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for p in pieces if p >= LEAST_BYTES)
    assert in_files(both, "weights") == aligned
    assert in_files(optimizer, "weights") == 0
    for kind in ("masters", "optimizer", "gradients"):
        assert in_files(both, kind) == in_files(optimizer, kind)


def test_buffers_are_as_many_and_as_large_as_asked() -> None:
    largest = max(p.numel for p in asked(BLOOM_560M).layout.trained) // RANKS * 4
    assert term(held(BLOOM_560M, offload="nvme-all"), READ_TERM) == 5 * largest
    given = held(BLOOM_560M, offload="nvme-all", buffer_count=3, buffer_size=200_000_001)
    assert term(given, READ_TERM) == 3 * 800_000_000 + 3 * ALIGNMENT_BYTES
    assert term(held(BLOOM_560M, offload="nvme"), READ_TERM) == 0


def test_updated_weights_take_a_buffer_of_whole_weights() -> None:
    """DeepSpeed asks for the elements of parameters where it means those of a rank's pieces."""
    swapped = held(BLOOM_560M, offload="nvme-all", sub_group_size=1)
    assert term(swapped, UPDATED_TERM) == max(p.numel for p in asked(BLOOM_560M).layout.trained) * 4


def test_small_weights_leave_nothing_in_files() -> None:
    small = held(BLOOM_SMALL, offload="nvme-all", sub_group_size=1)
    assert small.files == ()
    assert term(small, READ_TERM) == 5 * ALIGNMENT_BYTES


def test_weights_from_files_cross_the_link_as_those_of_host_memory_do() -> None:
    on_host, swapped = (asked(BLOOM_560M, offload=where) for where in ("cpu", "nvme-all"))
    plain, files = (host_link_bytes(job, model_states(job)) for job in (on_host, swapped))
    pieces = len(on_host.layout.trained)
    # Files hold aligned pieces of two moments; each element moves as 4 bytes down, and 8 to be widened.
    assert plain <= files <= plain + pieces * ALIGNMENT_BYTES / 4 * 12
