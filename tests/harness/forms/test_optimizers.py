"""What updates hold, and states of other optimizers than AdamW in full width; figures by hand."""

from dataclasses import replace
from typing import Any

import pytest

from harness.backends.registry import entries
from harness.backends.strategy import StrategyKind
from harness.forms.families import collectives, model_states
from harness.forms.layout import Layout, Tensor
from harness.forms.optimizers import MUON, implementation, step_temporary, updated_tensors, why_not
from harness.forms.workload import Workload
from tests.geometries import bloom_workload, small_workload, under

SHAPES = ((10, 4), (6, 4), (8, 4))
"""40, 24 and 32 elements; all of them decay, so they are one group."""


def temporary(backend: str, name: str, **changes: Any) -> int:
    return step_temporary(
        under(backend, small_workload(*SHAPES, optimizer_implementation=name, **changes))
    ).bytes


ROOTS, LOOP = 4 * (40 + 24 + 32), 4 * max(2 * 40, 2 * 24 + 40, 2 * 32 + 24)
"""Of the whole group; of the loop two of a tensor and the last quotient."""


@pytest.mark.parametrize(
    ("backend", "name", "changes", "held"),
    [
        ("ddp", "foreach", {}, ROOTS), ("ddp", "for-loop", {}, LOOP), ("ddp", "fused", {}, 0),
        ("ddp", "foreach", {"precision": "bf16"}, ROOTS / 2),
        # Of flat partitions the loop takes twice of foreach.
        *((stage, "foreach", {}, ROOTS / 2) for stage in ("zero1", "zero2", "zero3")),
        *((stage, "for-loop", {}, ROOTS) for stage in ("zero1", "zero2", "zero3")),
    ],
)  # fmt: skip
def test_an_update_holds(backend: str, name: str, changes: dict[str, Any], held: float) -> None:
    assert temporary(backend, name, **changes) == held


def test_groups_are_updated_one_after_the_other() -> None:
    bloom = under("ddp", bloom_workload(optimizer_implementation="foreach"))
    matrices, rest = (sum(t.numel for t in group) for group in bloom.layout.update_groups())
    assert matrices + rest == 559_214_592
    assert step_temporary(bloom).bytes == 4 * matrices


@pytest.mark.parametrize("backend", ["fsdp", "fsdp1", "zero1", "zero3"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_the_pieces_of_all_ranks_are_the_model(backend: str, ranks: int) -> None:
    pieces = [
        sum(map(sum, updated_tensors(under(backend, small_workload(*SHAPES, world_size=ranks, rank=rank)))))
        for rank in range(ranks)
    ]
    padding = {"fsdp": 0, "fsdp1": 0}.get(backend, 2 * ranks)
    assert 96 <= sum(pieces) <= 96 + padding


def test_torch_chooses_foreach_on_cuda_only() -> None:
    assert implementation(under("ddp", bloom_workload(device="cuda"))) == "foreach"
    assert implementation(under("ddp", bloom_workload(device="cpu"))) == "for-loop"


def test_offloaded_states_are_updated_on_the_host() -> None:
    workload = under("fsdp", bloom_workload(device="cuda", options={"offload": "cpu"}))
    assert implementation(workload) == "for-loop"
    assert step_temporary(workload).host


def test_each_implementation_names_its_source() -> None:
    for name, function in (
        ("for-loop", "_single_tensor_adam"),
        ("foreach", "_multi_tensor_adam"),
        ("fused", "_fused_adam"),
    ):
        found = step_temporary(under("ddp", bloom_workload(optimizer_implementation=name)))
        assert found.implementation == name
        assert found.source.endswith(function)


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


@pytest.mark.parametrize(
    ("family", "shapes", "ranks", "kind", "expected"),
    [
        # Whole tensors one by one; under FSDP2 rows, of which half of the second are below 4096.
        ("single", [(LARGE,), (ODD,), (SMALL,)], 1, {}, eight_bit(LARGE) + 8 * (ODD + SMALL)),
        ("ddp", [(LARGE,), (ODD,), (SMALL,)], 2, {}, eight_bit(LARGE) + 8 * (ODD + SMALL)),
        ("fsdp2", [(2 * LARGE // 32, 32), (LARGE // 32, 32)], 2, {"sharding": "full-shard"},
         eight_bit(LARGE) + 8 * LARGE // 2),
        # A flat partition is quantised or not by the number of ranks: 24,576 aligned to 10, of 5 ranks.
        *(
            ("zero12", [(3 * 4096,), (3 * 4096,)], ranks, {"zero_stage": stage}, expected)
            for stage in (1, 2) for ranks, expected in ((2, eight_bit(3 * 4096)), (5, 8 * 4916))
        ),
        # bitsandbytes shares its tables and fills the last block in part.
        ("ddp", [(LARGE,), (ODD,), (SMALL,)], 2, {"optimizer": "adamw-8bit-bnb"},
         2 * (LARGE + ODD + 4 * (LARGE // 256 + 17) + 1024) + 8 * SMALL),
    ],
)  # fmt: skip
def test_moments_in_8_bits(
    family: str, shapes: list[tuple[int, ...]], ranks: int, kind: dict[str, Any], expected: int
) -> None:
    assert moments(family, shapes, ranks, **kind) == expected


def test_bitsandbytes_counts_steps_outside_of_tensors() -> None:
    layout = Layout(parameters=(Tensor("p", (LARGE,), "float32"),), decaying=frozenset("p"))
    workload = Workload(
        layout=layout, strategy=StrategyKind(family="ddp"), world_size=2, optimizer="adamw-8bit-bnb"
    )
    assert not [t for t in model_states(workload).terms if "step counters" in t.name]


PARAMETERS = (
    Tensor("embed.weight", (32, 8), "float32"),
    Tensor("layers.0.up.weight", (15, 8), "float32"),
    Tensor("layers.0.norm.weight", (8,), "float32"),
)


def of_muon(family: str, ranks: int, sharding: str = "none", **more: object) -> Workload:
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
    states = model_states(of_muon(family, ranks, sharding))
    found = {term.name: term.bytes for term in states.terms if term.kind == "optimizer"}
    assert found == {
        "Muon's momentum": 4 * rows * 8,
        "Adam's moments": 2 * 4 * (256 + 8) // cut,
        "Adam's step counters": 2 * 4,
    }


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_rows_are_gathered_with_padding_in_the_dtype_of_the_products(precision: str, width: int) -> None:
    asked = of_muon("fsdp2", 2, "full-shard", newton_schulz=precision)
    step = [c for c in collectives(asked).collectives if c.phase == "step" and c.op == "all_gather"]
    assert [(c.term, c.payload_bytes, c.calls) for c in step] == [
        (MUON, 15 * 8 * width, 1), ("padding", 8 * width, 0),
    ]  # fmt: skip


def test_whole_matrices_gather_nothing() -> None:
    assert MUON not in {c.term for c in collectives(of_muon("ddp", 2)).collectives}


def test_every_strategy_runs_it_or_says_why_not() -> None:
    runs = {name for name, e in entries().items() if e.strategy and why_not("muon", e.strategy) is None}
    assert {"single", "ddp", "fsdp", "fsdp-hybrid", "accelerate-ddp"} <= runs
    assert not {"zero0", "zero3", "fsdp1", "tp", "fsdp-tp", "pp", "cp", "fsdp-cp", "trainer-ddp"} & runs
