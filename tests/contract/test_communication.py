"""What engines communicate is what is expected of them, to the byte; planted defects are named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from harness.backends import registry
from harness.forms.network import EMULATED
from harness.forms.terms import GRADIENTS
from harness.judge.comparison import Comparison
from harness.judge.quantities import textbook_differences, volume_differences, volume_of
from harness.record import BackendPart, CommunicationPart, DimensionPart, Record, WindowsPart
from tests.built_in import EACH_MICRO_STEP, HYBRID, NATIVE
from tests.contract.cases import GLOBAL_BATCH, LENGTH
from tests.contract.communication import (
    FIRST_STEPS,
    RECOMPUTED_CASES,
    RECOMPUTED_FEW,
    VOLUME_CASES,
    Counted,
    VolumeCase,
)
from tests.contract.ranks import on_ranks
from tests.records import make_record
from tests.representatives import EXHAUSTIVE, first

pytestmark = pytest.mark.long(seconds=30)

DEFECTS = "tests.contract.wrong"
ZERO3_SETTINGS = (
    "leaf_module=blocks", "stage3_param_persistence_threshold=1000", "stage3_max_live_parameters=1000000000",
    "stage3_max_reuse_distance=1000000000", "stage3_max_reuse_distance=1000000000,leaf_module=blocks",
    "memory_efficient_linear=false",
)  # fmt: skip
FEW = ("ddp", "zero3", "fsdp", "zero3:leaf_module=blocks", "fsdp:sync_each_batch=true")
"""Each library's ways to shard, and an option of either; the clean matrix (tests/traps/test_clean.py) has
every backend, and two hybrids on four ranks."""
PAYLOADS = [
    label
    for label in (
        *NATIVE, *HYBRID, "trainer-ddp", *EACH_MICRO_STEP,
        *(f"zero3:{settings}" for settings in ZERO3_SETTINGS),
    )
    if not label.startswith("fsdp1-no-shard")  # FSDP1 refuses one of the cases under NO_SHARD
]  # fmt: skip


def as_record(name: str, case: VolumeCase, ranks: list[Counted], label: str | None = None) -> Record:
    """The record that the harness would write of a case."""
    record = make_record(
        label=name,
        world_size=len(ranks),
        training={
            "precision": case.precision,
            "gradient_clipping": case.clipping,
            "activation_checkpointing": case.activation_checkpointing,
        },
        layout=ranks[0].layout,
        backend=BackendPart(
            label=label or name, name=name, options=_options(label or name), effective=ranks[0].effective
        ),
        comm=[CommunicationPart(rank=rank, **row) for rank, part in enumerate(ranks) for row in part.rows],
        windows=WindowsPart(warmup=case.probed_step, probed=1, timed=0),
    )
    steps = [
        replace(step, window="probed" if step.step == case.probed_step else "warmup") for step in record.steps
    ]
    mesh = registry.mesh_of(name if DEFECTS in (label or "") else label or name, len(ranks))
    world = record.world.model_copy(
        update={
            "accumulation_steps": case.accumulation_steps,
            "preset": case.preset,
            "micro_batch_size": GLOBAL_BATCH // mesh.data_size // case.accumulation_steps,
            "dimensions": [DimensionPart(name=dimension, size=size) for dimension, size in mesh.sizes]
            if mesh.shares_samples
            else [],
        }
    )
    job = record.job.model_copy(
        update={"data": record.job.data.model_copy(update={"sequence_length": LENGTH})}
    )
    changes = {"steps": steps, "world": world, "model": ranks[0].model, "job": job}
    return record.model_copy(update=changes)


def counted(label: str, ranks: int, folder: Path) -> list[tuple[VolumeCase, Record]]:
    """Each case with the record of a built-in backend."""
    per_rank = on_ranks("volumes", label, ranks, folder)
    name, of_options = label.partition(":")[0], label if ":" in label else None
    return [
        (case, as_record(name, case, list(parts), of_options))
        for case, parts in zip(VOLUME_CASES, zip(*per_rank, strict=True), strict=True)
    ]


def _options(label: str) -> dict[str, Any]:
    return registry.parse(label)[1].model_dump(mode="json") if ":" in label else {}


def as_records(name: str, cases: Sequence[VolumeCase], per_rank: list[list[Counted]]) -> list[Record]:
    """A record per case of what each rank counted of it."""
    return [
        as_record(name, case, list(parts))
        for case, parts in zip(cases, zip(*per_rank, strict=True), strict=True)
    ]


ZERO3_SETTINGS = (
    "leaf_module=blocks", "stage3_param_persistence_threshold=1000", "stage3_max_live_parameters=1000000000",
    "stage3_max_reuse_distance=1000000000", "stage3_max_reuse_distance=1000000000,leaf_module=blocks",
    "memory_efficient_linear=false",
)  # fmt: skip


@pytest.mark.parametrize("name", first(["zero2"], ["zero1", "zero2"]))
def test_stages_1_and_2_send_what_the_textbook_says_where_gradients_are_reduced_to_their_owners(
    name: str, tmp_path: Path
) -> None:
    for case, record in counted(f"{name}:use_multi_rank_bucket_allreduce=false", 2, tmp_path):
        assert volume_differences(record) == [], case
        terms = textbook_differences(record)
        assert terms is not None
        assert GRADIENTS not in {difference.term for difference in terms}, case


@pytest.mark.parametrize("label", first(FEW, PAYLOADS))
def test_payload_is_as_expected_to_the_byte(label: str, tmp_path: Path) -> None:
    for case, record in counted(label, 4 if label.partition(":")[0] in HYBRID else 2, tmp_path):
        assert record.comm
        assert volume_differences(record) == [], case


@pytest.mark.parametrize("name", ["zero3", "fsdp"])
@pytest.mark.costly
def test_payload_of_recomputation_is_as_expected(name, tmp_path) -> None:
    deed = "tests.contract.communication:count_recomputed_few"
    assert_recomputed(name, RECOMPUTED_FEW, on_ranks(deed, name, 2, tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NATIVE)
def test_payload_of_recomputation_is_as_expected_in_every_architecture(name, tmp_path) -> None:
    deed = "tests.contract.communication:count_recomputed"
    assert_recomputed(name, RECOMPUTED_CASES, on_ranks(deed, name, 2, tmp_path))


def assert_recomputed(name: str, cases: Sequence[VolumeCase], per_rank: list[list[Counted]]) -> None:
    for case, record in zip(cases, as_records(name, cases, per_rank), strict=True):
        pair = volume_of(record)
        assert pair is not None
        assert pair[1].unknown is None, case
        assert volume_differences(record) == [], case


def test_payload_while_zero_3_records_its_trace_is_as_expected(tmp_path) -> None:
    per_rank = on_ranks("tests.contract.communication:count_first_steps", "zero3", 2, tmp_path)
    for case, record in zip(FIRST_STEPS, as_records("zero3", FIRST_STEPS, per_rank), strict=True):
        pair = volume_of(record)
        assert pair is not None
        assert pair[1].unknown is None, case
        assert volume_differences(record) == [], case


@pytest.mark.exhaustive  # of hpz: tests/traps/test_clean.py
@pytest.mark.parametrize("label", ["zero3:hpz=2", "fsdp:reshard=2"])
def test_weights_are_gathered_again_within_the_group_that_keeps_a_second_copy(
    label: str, tmp_path: Path
) -> None:
    for case, record in counted(label, 4, tmp_path):
        assert volume_differences(record) == [], case
        assert {row.phase for row in record.comm if row.role == "shard"} <= {"forward", "backward"}
        if case.preset == "like-for-like":
            assert any(row.role == "shard" for row in record.comm)


@pytest.mark.parametrize(
    ("name", "defect", "ranks", "messages"),
    [
        ("ddp", "EveryMicroStep", 2, [None, "synchronised at every micro-step", "synchronised at every"]),
        pytest.param(
            "ddp", "CompressedReduction", 2, ["runs in bfloat16, expected float32"] * 3, marks=EXHAUSTIVE
        ),
        (
            "fsdp",
            "LibraryDefaultReduction",
            2,
            ["all_gather of float32 in backward moves", "expected float32", None],
        ),
        pytest.param(
            "fsdp", "WideReduction", 2, [None, None, "runs in float32, expected bfloat16"], marks=EXHAUSTIVE
        ),
        # The trap "T15 volume" is of its kind.
        pytest.param(
            "fsdp-hybrid", "ReplicasApart", 4, ["never reduces across replicas"] * 3, marks=EXHAUSTIVE
        ),
        pytest.param(
            "fsdp-hybrid",
            "OtherReplicas",
            4,
            ["all_reduce in backward runs in ranks 0, 3, expected the replica group"] * 3,
            marks=EXHAUSTIVE,
        ),
    ],
)
def test_a_defect_is_named(name, defect, ranks, messages, tmp_path) -> None:
    per_rank = on_ranks("volumes", f"{DEFECTS}:{defect}", ranks, tmp_path)
    found = as_records(name, VOLUME_CASES, per_rank)
    for case, record, message in zip(VOLUME_CASES, found, messages, strict=True):
        said = [f.message for f in Comparison([record]).findings if f.id == "communication-differs"]
        assert len(said) == (message is not None), (asdict(case), said)
        assert message is None or message in said[0], said


@pytest.mark.parametrize("name", first(["zero3"], ["ddp", "zero3", "fsdp", "fsdp1"]))
def test_the_counter_agrees_with_the_flight_recorder(name, tmp_path) -> None:
    for counted, recorded in on_ranks("recorder", name, 2, tmp_path):
        ran: dict[str, int] = {}
        for op, payload in counted.items():
            # The recorder sits inside gloo, below the all-reduce that stands for a reduce-scatter.
            ran_as = EMULATED["gloo"].get(op, op)
            ran[ran_as] = ran.get(ran_as, 0) + payload
        assert ran
        assert ran == recorded
