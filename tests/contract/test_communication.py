"""What engines communicate is what is expected of them, to the byte; planted defects are named."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from harness.backends import registry
from harness.forms.network import EMULATED
from harness.forms.terms import GRADIENTS, STATE_KINDS
from harness.job.job import Job
from harness.judge import quantities
from harness.judge.comparison import Comparison
from harness.record import BackendPart, CommunicationPart, DimensionPart, Record, WindowsPart
from tests.built_in import EACH_MICRO_STEP, HYBRID, NATIVE
from tests.contract.cases import GLOBAL_BATCH, LENGTH, Case
from tests.contract.deeds import CASES
from tests.contract.irregular import IRREGULAR, REFUSED, job_of
from tests.contract.ranks import on_ranks
from tests.records import changed, make_record
from tests.representatives import first

pytestmark = pytest.mark.long(seconds=60)

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


def as_record(label: str, case: Case, ranks: Sequence[Any], job: Job | None = None) -> Record:
    """The record that the harness would write of what each rank counted of a case."""
    name = label.partition(":")[0]
    options = registry.parse(label)[1].model_dump(mode="json") if ":" in label else {}
    record = make_record(
        label=label,
        world_size=len(ranks),
        training={
            "precision": case.precision,
            "gradient_clipping": case.clipping,
            "activation_checkpointing": case.activation_checkpointing,
        },
        layout=ranks[0].layout,
        backend=BackendPart(label=label, name=name, options=options, effective=ranks[0].effective),
        comm=[CommunicationPart(rank=rank, **row) for rank, part in enumerate(ranks) for row in part.rows],
        windows=WindowsPart(warmup=case.probed_step, probed=1, timed=0),
    )
    steps = [
        replace(step, window="probed" if step.step == case.probed_step else "warmup") for step in record.steps
    ]
    mesh = registry.mesh_of(label, len(ranks))
    dimensions = [DimensionPart(name=dimension, size=size) for dimension, size in mesh.sizes]
    world = {
        "accumulation_steps": case.accumulation_steps,
        "preset": case.preset,
        "micro_batch_size": GLOBAL_BATCH // mesh.data_size // case.accumulation_steps,
        "dimensions": dimensions if mesh.shares_samples else [],
    }
    own = {"data": record.job.data.model_copy(update={"sequence_length": LENGTH})}
    return changed(record, steps=steps, world=world, model=ranks[0].model, job=job or own)


def counted(
    label: str, ranks: int, folder: Path, cases: str = "counted", *, shown: str | None = None
) -> list[tuple[Case, Record]]:
    """Each case with the record of a backend; `shown`: the built-in one that a planted one is taken for."""
    per_rank = on_ranks("count", label, ranks, folder, cases)
    return [
        (case, as_record(shown or label, case, parts))
        for case, parts in zip(CASES[cases], zip(*per_rank, strict=True), strict=True)
    ]


def assert_derived(label: str, ranks: int, folder: Path, cases: str = "counted") -> list[Record]:
    """What is sent has a closed form and is that, to the byte; the records."""
    found = counted(label, ranks, folder, cases)
    for case, record in found:
        pair = quantities.volume_of(record)
        assert pair[1].unknown is None, case
        assert quantities.volume_differences(record) == [], case
    return [record for _, record in found]


@pytest.mark.parametrize("name", first(["zero2"], ["zero1", "zero2"]))
def test_stages_1_and_2_send_what_the_textbook_says_where_gradients_are_reduced_to_their_owners(
    name: str, tmp_path: Path
) -> None:
    for case, record in counted(f"{name}:use_multi_rank_bucket_allreduce=false", 2, tmp_path):
        assert quantities.volume_differences(record) == [], case
        terms = quantities.textbook_differences(record)
        assert terms is not None
        assert GRADIENTS not in {difference.term for difference in terms}, case


@pytest.mark.parametrize("label", first(FEW, PAYLOADS))
def test_payload_is_as_expected_to_the_byte(label: str, tmp_path: Path) -> None:
    for case, record in counted(label, 4 if label.partition(":")[0] in HYBRID else 2, tmp_path):
        assert record.comm
        assert quantities.volume_differences(record) == [], case


@pytest.mark.parametrize("name", ["zero3", "fsdp"])
@pytest.mark.costly
def test_payload_of_recomputation_is_as_expected(name: str, tmp_path: Path) -> None:
    assert_derived(name, 2, tmp_path, "recomputed, two architectures")


def test_payload_while_zero_3_records_its_trace_is_as_expected(tmp_path: Path) -> None:
    assert_derived("zero3", 2, tmp_path, "first steps")


DEFECTS = [
    ("ddp", "Bf16Reduction", 2, ["runs in bfloat16, expected float32"] * 3),
    ("fsdp", "LibraryDefaultReduction", 2, ["float32 in backward moves", "expected float32", None]),
    ("fsdp", "WideReduction", 2, [None, None, "runs in float32, expected bfloat16"]),
    ("fsdp-hybrid", "OtherReplicas", 4, ["runs in ranks 0, 3, expected the replica group"] * 3),
]
"""Two more are traps: T15 volume and T17 volume (tests/traps)."""


@pytest.mark.parametrize(("name", "defect", "ranks", "messages"), first(DEFECTS[1:2], DEFECTS))
def test_a_defect_is_named(name, defect, ranks, messages, tmp_path) -> None:
    found = counted(f"tests.contract.wrong:{defect}", ranks, tmp_path, shown=name)
    for (case, record), message in zip(found, messages, strict=True):
        said = [f.message for f in Comparison([record]).findings if f.id == "communication-differs"]
        assert len(said) == (message is not None), (asdict(case), said)
        assert message is None or message in said[0], said


@pytest.mark.parametrize("name", first(["zero3"], ["ddp", "zero3", "fsdp", "fsdp1"]))
def test_the_counter_agrees_with_the_flight_recorder(name, tmp_path) -> None:
    for counted, recorded in on_ranks("count_twice", name, 2, tmp_path):
        ran: dict[str, int] = {}
        for op, payload in counted.items():
            # The recorder sits inside gloo, below the all-reduce that stands for a reduce-scatter.
            ran_as = EMULATED["gloo"].get(op, op)
            ran[ran_as] = ran.get(ran_as, 0) + payload
        assert ran
        assert ran == recorded


FINDING, STATIC = "ddp:find_unused_parameters=true", "ddp:static_graph=true"
BACKENDS = ("ddp", FINDING, STATIC, "zero1", "zero2", "zero3", "fsdp", "fsdp1")
REFUSED_AS = {FINDING: "find_unused_parameters", STATIC: "static_graph", "fsdp": "Fsdp2"}
GATHERED_AGAIN = {
    # Nothing of the frozen encoder (27,912 with it); the head's 33 elements are padded to 34.
    ("zero3", "frozen encoder"): 17_800,
    # The shared block of 4,480 bytes three times (14,472 if once).
    ("fsdp", "shared block"): 23_432,
}
"""Payload of weights in the backward pass."""
UNKNOWN = {
    ("zero3", "parameters"): "'scales.in' is read outside of the module that owns it",
    ("zero3", "idle expert"): "execution depends on data",
    ("fsdp1", "four passes"): " runs 4 times",
    ("fsdp1", "one unit, four passes"): "the model runs 4 times",
    ("fsdp1", "frozen encoder"): "blocks run without a backward pass",
    ("fsdp1", "frozen encoder, accumulated"): "blocks run without a backward pass",
    **{
        (name, "idle expert"): "execution depends on data"
        for name in BACKENDS if name not in ("zero3", "ddp")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", first([FINDING, "zero3"], BACKENDS))
@pytest.mark.costly
def test_traffic_and_states_follow_what_runs(name: str, tmp_path: Path) -> None:
    per_rank = on_ranks("tests.contract.irregular:count_irregular", name, 2, tmp_path)
    for case in per_rank[0]:
        irregular, parts = IRREGULAR[case], [of_rank[case] for of_rank in per_rank]
        record = as_record(name, Case(irregular.accumulation_steps), parts, job_of(irregular))
        unknown = UNKNOWN.get((name, case))
        found = quantities.why_unknown(record)
        assert (found is None) == (unknown is None), (case, found)
        assert unknown is None or unknown in str(found), (case, found)
        assert quantities.volume_differences(record) == [], case
        for rank, of_rank in enumerate(per_rank):
            states = quantities.expected_states(record, rank)
            if states is not None:
                held = sum(of_rank[case].kinds.get(kind, 0) for kind in STATE_KINDS)
                assert held == states.model_state_bytes, (case, rank)
        wanted = GATHERED_AGAIN.get((name, case))
        if wanted is not None:
            rows = [
                row
                for row in record.comm
                if row.rank == 0 and row.phase == "backward" and row.op == "all_gather"
            ]
            assert sum(row.payload_bytes for row in rows) == wanted
    assert set(per_rank[0]) == set(IRREGULAR) - REFUSED.get(REFUSED_AS.get(name, name.title()), set())


@pytest.mark.parametrize("name", first(["zero1", "accelerate-zero3"], ["zero1", "zero3", "accelerate-zero3"]))
def test_only_library_defaults_time_their_micro_steps(name: str, tmp_path: Path) -> None:
    # Accelerate ends a step of DeepSpeed, and with it the timer, in the last micro-step only.
    micro_steps = 2
    stops = 1 if name.startswith("accelerate") else micro_steps
    for per_preset in on_ranks("device_waits", name, 2, tmp_path):
        (counted, waits), (counted_by_default, waits_by_default) = per_preset
        assert (waits, waits_by_default) == (False, True)
        # Stage 3 waits as it reduces, too, whatever the preset.
        assert counted_by_default - counted == micro_steps + stops
