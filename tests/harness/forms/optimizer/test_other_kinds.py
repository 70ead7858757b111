"""Moments in 8 bits, tensor by tensor that a rank updates; figures by hand."""

from dataclasses import replace

import pytest

from harness.backends.strategy import StrategyKind
from harness.forms.families import model_states
from harness.forms.layout import Layout, Tensor
from harness.forms.workload import Workload

LARGE, ODD, SMALL = 4096 + 256, 4097, 64


def moments(
    family: str, shapes: list[tuple[int, ...]], ranks: int, optimizer: str = "adamw-8bit", **kind: object
) -> int:
    """Bytes of a rank's optimizer states, step counters left out."""
    parameters = tuple(Tensor(f"p{i}", shape, "float32") for i, shape in enumerate(shapes))
    layout = Layout(parameters=parameters, decaying=frozenset(p.name for p in parameters))
    workload = Workload(
        layout=layout, strategy=StrategyKind(family=family, **kind), world_size=ranks, optimizer=optimizer
    )
    found = model_states(workload).terms
    plain = model_states(replace(workload, optimizer="adamw")).terms
    assert [t for t in found if t.kind != "optimizer"] == [t for t in plain if t.kind != "optimizer"]
    return sum(t.bytes for t in found if t.kind == "optimizer" and "step counters" not in t.name)


def eight_bit(elements: int) -> int:
    return 2 * (elements + 4 * (elements // 256) + 1024)


@pytest.mark.parametrize("family", ["single", "ddp"])
def test_whole_tensors_one_by_one(family: str) -> None:
    found = moments(family, [(LARGE,), (ODD,), (SMALL,)], 1 if family == "single" else 2)
    assert found == eight_bit(LARGE) + 8 * (ODD + SMALL)


def test_rows_under_fsdp2() -> None:
    shapes = [(2 * LARGE // 32, 32), (LARGE // 32, 32)]
    found = moments("fsdp2", shapes, 2, sharding="full-shard")
    assert found == eight_bit(LARGE) + 8 * LARGE // 2  # half of the second is below 4096


@pytest.mark.parametrize("stage", [1, 2])
def test_a_flat_partition_is_quantised_or_not_by_the_number_of_ranks(stage: int) -> None:
    shapes = [(3 * 4096,), (3 * 4096,)]
    assert moments("zero12", shapes, 2, zero_stage=stage) == eight_bit(3 * 4096)
    assert moments("zero12", shapes, 5, zero_stage=stage) == 8 * 4916  # 24,576 aligned to 10, of 5 ranks


def test_bitsandbytes_shares_its_tables_and_fills_the_last_block_in_part() -> None:
    found = moments("ddp", [(LARGE,), (ODD,), (SMALL,)], 2, "adamw-8bit-bnb")
    assert found == 2 * (LARGE + ODD + 4 * (LARGE // 256 + 17) + 1024) + 8 * SMALL


def test_bitsandbytes_counts_steps_outside_of_tensors() -> None:
    parameters = (Tensor("p", (LARGE,), "float32"),)
    layout = Layout(parameters=parameters, decaying=frozenset("p"))
    workload = Workload(
        layout=layout, strategy=StrategyKind(family="ddp"), world_size=2, optimizer="adamw-8bit-bnb"
    )
    assert not [t for t in model_states(workload).terms if "step counters" in t.name]
