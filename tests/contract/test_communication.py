"""What engines communicate where modules do not each run once, as torch counts it, and what they wait for."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from harness.backends import registry
from harness.forms.network import EMULATED
from harness.forms.terms import STATE_KINDS
from harness.judge import quantities
from harness.record import BackendPart, CommunicationPart, Record, WindowsPart
from tests.contract.cases import GLOBAL_BATCH, PROBED_STEP
from tests.contract.irregular import IRREGULAR, REFUSED, CountedStep, Irregular, job_of
from tests.contract.ranks import on_ranks
from tests.records import changed, make_record
from tests.representatives import first

pytestmark = pytest.mark.long(seconds=60)


def as_record(label: str, irregular: Irregular, ranks: Sequence[CountedStep]) -> Record:
    """The record that the harness would write of what each rank counted of a case."""
    name = label.partition(":")[0]
    options = registry.parse(label)[1].model_dump(mode="json") if ":" in label else {}
    record = make_record(
        label=label,
        world_size=len(ranks),
        training={"precision": "fp32", "gradient_clipping": None},
        layout=ranks[0].layout,
        backend=BackendPart(label=label, name=name, options=options, effective=ranks[0].effective),
        comm=[CommunicationPart(rank=rank, **row) for rank, part in enumerate(ranks) for row in part.rows],
        windows=WindowsPart(warmup=PROBED_STEP, probed=1, timed=0),
    )
    steps = [
        replace(step, window="probed" if step.step == PROBED_STEP else "warmup") for step in record.steps
    ]
    world = {
        "accumulation_steps": irregular.accumulation_steps,
        "micro_batch_size": GLOBAL_BATCH // len(ranks) // irregular.accumulation_steps,
    }
    return changed(record, steps=steps, world=world, model=ranks[0].model, job=job_of(irregular))


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
        record = as_record(name, irregular, parts)
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
