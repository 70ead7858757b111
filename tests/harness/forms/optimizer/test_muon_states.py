"""States and traffic of Muon and AdamW together; figures by hand."""

import pytest

from harness.backends.registry import entries
from harness.backends.strategy import StrategyKind
from harness.forms.families import collectives, model_states
from harness.forms.layout import Layout, Tensor
from harness.forms.optimizers import MUON, why_not
from harness.forms.workload import Workload

PARAMETERS = (
    Tensor("embed.weight", (32, 8), "float32"),
    Tensor("layers.0.up.weight", (15, 8), "float32"),
    Tensor("layers.0.norm.weight", (8,), "float32"),
)


def workload(family: str, ranks: int, sharding: str = "none", **more: object) -> Workload:
    layout = Layout(
        parameters=PARAMETERS,
        decaying=frozenset(p.name for p in PARAMETERS if len(p.shape) == 2),
        blocks=("layers.0",),
    )
    strategy = StrategyKind(family=family, sharding=sharding)
    return Workload(layout=layout, strategy=strategy, world_size=ranks, optimizer="muon", **more)


@pytest.mark.parametrize(
    ("family", "sharding", "ranks", "rows"),
    [("single", "single", 1, 15), ("ddp", "none", 2, 15), ("fsdp2", "full-shard", 2, 8)],
)
def test_one_momentum_of_each_matrix_of_a_block(family: str, sharding: str, ranks: int, rows: int) -> None:
    cut = 2 if family == "fsdp2" else 1
    states = model_states(workload(family, ranks, sharding))
    found = {term.name: term.bytes for term in states.terms if term.kind == "optimizer"}
    assert found == {
        "Muon's momentum": 4 * rows * 8,
        "Adam's moments": 2 * 4 * (256 + 8) // cut,
        "Adam's step counters": 2 * 4,
    }


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_rows_are_gathered_with_padding_in_the_dtype_of_the_products(precision: str, width: int) -> None:
    asked = workload("fsdp2", 2, "full-shard", newton_schulz=precision)
    step = [c for c in collectives(asked).collectives if c.phase == "step" and c.op == "all_gather"]
    assert [(c.term, c.payload_bytes, c.calls) for c in step] == [
        (MUON, 15 * 8 * width, 1), ("padding", 8 * width, 0),
    ]  # fmt: skip


def test_whole_matrices_gather_nothing() -> None:
    assert MUON not in {c.term for c in collectives(workload("ddp", 2)).collectives}


def test_every_strategy_runs_it_or_says_why_not() -> None:
    runs = {name for name, e in entries().items() if e.strategy and why_not("muon", e.strategy) is None}
    assert {"single", "ddp", "fsdp", "fsdp-hybrid", "accelerate-ddp"} <= runs
    assert not {"zero0", "zero3", "fsdp1", "tp", "fsdp-tp", "pp", "cp", "fsdp-cp", "trainer-ddp"} & runs
