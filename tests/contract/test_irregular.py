"""Traffic and states of models whose modules do not each run once are as expected, to the byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.backends import registry
from harness.forms.terms import STATE_KINDS
from harness.judge.quantities import expected_states, volume_differences, why_unknown
from harness.record import BackendPart, CommunicationPart, Record, WindowsPart
from tests.contract.irregular import CASES, GLOBAL_BATCH, PROBED_STEP, REFUSED, CountedStep, job_of
from tests.contract.ranks import on_ranks
from tests.records import make_record
from tests.representatives import first

pytestmark = pytest.mark.long(seconds=30)

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


def record_of(name: str, case: str, ranks: list[CountedStep]) -> Record:
    entry, options = registry.parse(name)
    record = make_record(
        label=name,
        world_size=len(ranks),
        layout=ranks[0].layout,
        backend=BackendPart(
            label=name, name=entry.name, options=options.model_dump(), effective=ranks[0].effective
        ),
        comm=[CommunicationPart(rank=rank, **row) for rank, part in enumerate(ranks) for row in part.rows],
        windows=WindowsPart(warmup=PROBED_STEP, probed=1, timed=0),
    )
    steps = [
        replace(step, window="probed" if step.step == PROBED_STEP else "warmup") for step in record.steps
    ]
    accumulation = CASES[case].accumulation_steps
    world = record.world.model_copy(
        update={
            "accumulation_steps": accumulation,
            "preset": "like-for-like",
            "micro_batch_size": GLOBAL_BATCH // len(ranks) // accumulation,
        }
    )
    job = job_of(CASES[case])
    return record.model_copy(update={"steps": steps, "world": world, "model": ranks[0].model, "job": job})


@pytest.mark.parametrize("name", first([FINDING, "zero3"], BACKENDS))
@pytest.mark.costly
def test_traffic_and_states_follow_what_runs(name: str, tmp_path: Path) -> None:
    per_rank = on_ranks("tests.contract.irregular:count_irregular", name, 2, tmp_path)
    for case in per_rank[0]:
        record = record_of(name, case, [of_rank[case] for of_rank in per_rank])
        unknown = UNKNOWN.get((name, case))
        found = why_unknown(record)
        assert (found is None) == (unknown is None), (case, found)
        assert unknown is None or unknown in str(found), (case, found)
        assert volume_differences(record) == [], case
        for rank, of_rank in enumerate(per_rank):
            states = expected_states(record, rank)
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
    assert set(per_rank[0]) == set(CASES) - REFUSED.get(REFUSED_AS.get(name, name.title()), set())
