"""What a simulated rank communicated and held, each figure next to that of the closed form."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.errors import HarnessError
from harness.forms.families import FAMILIES, collectives, model_states
from harness.forms.network import NodeTraffic, node_traffic
from harness.forms.terms import STATE_KINDS, STEP_PHASES, Volume, ring_sent_bytes
from harness.forms.workload import Role, Workload
from harness.planning.job import planned_model, scenario_of
from harness.planning.memory import MemoryPrediction, MomentName, predict_memory
from harness.planning.scenario import Scenario
from harness.planning.simulation.request import Simulated
from harness.run_directory.simulation import SimulatedRank

RING = "ring"
"""In place of a transport: bytes as a ring sends them, and no copies of them, as gloo makes."""
PEAKS: dict[str, tuple[str, ...]] = {
    "forward/backward": ("after_forward", "after_backward"),
    "optimizer step": ("after_step",),
}
"""Moment of a prediction -> readings of the simulation that its peak is the highest of. Gradients are reduced
while the backward pass runs, so one reading has both."""


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """Collectives of one kind in a step."""

    phase: str
    op: str
    dtype: str
    role: Role
    group_size: int
    calls: int
    payload_bytes: int
    sent_bytes: float
    """What this rank sends on a ring."""
    node_sent_bytes: float
    """What leaves its node: of all ranks there, each in its own group of this role."""
    expected_calls: int | None
    """None: the closed form leaves them open, or there is none."""
    expected_payload_bytes: int | None
    """None: there is no closed form."""


@dataclass(frozen=True, kw_only=True)
class BytesRow:
    """One figure in bytes."""

    name: str
    bytes: int
    expected_bytes: int | None
    """None: there is no closed form."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRow:
    """One backend in one world."""

    asked: Simulated
    result: SimulatedRank
    collectives: tuple[CollectiveRow, ...] = ()
    states: tuple[BytesRow, ...] = ()
    peaks: tuple[BytesRow, ...] = ()

    @property
    def peak_bytes(self) -> int | None:
        """The highest of the step."""
        return max((row.bytes for row in self.peaks), default=None)


def compare_with_closed_forms(asked: Simulated, result: SimulatedRank) -> SimulatedRow:
    """Lay the figures of a simulated rank next to the closed forms of its family."""
    if result.status != "ok":
        return SimulatedRow(asked=asked, result=result)
    scenario = _scenario(asked, result)
    workload = scenario.workload(asked.request.rank) if scenario else None
    known = workload is not None and workload.strategy.family in FAMILIES
    return SimulatedRow(
        asked=asked,
        result=result,
        collectives=tuple(_collective_rows(asked, result, workload if known else None)),
        states=tuple(_state_rows(result, workload if known else None)),
        peaks=tuple(_peak_rows(result, _prediction(scenario, asked.request.rank) if scenario else None)),
    )


def simulated_peaks(result: SimulatedRank) -> dict[str, int]:
    """Peak bytes since the reading before, by reading: after_forward, after_backward, after_step."""
    readings = {part.moment: part.peak_bytes for part in result.memory if part.moment != "after_setup"}
    return {moment: peak for moment, peak in readings.items() if peak is not None}


def _scenario(asked: Simulated, result: SimulatedRank) -> Scenario | None:
    """What closed forms take: the job on the CPU, without a transport that copies what it moves.

    None for a third party's backend.
    """
    assert result.model is not None
    assert result.layout is not None
    facts = {
        "model": result.model.model_dump(),
        "layout": result.layout.model_dump(),
        "configuration": result.configuration,
    }
    model = planned_model(facts, asked.cell.job)
    scenario = scenario_of(asked.cell, model, "cpu")
    return replace(scenario, transport=RING) if scenario else None


def _prediction(scenario: Scenario, rank: int) -> MemoryPrediction | None:
    try:
        return predict_memory(scenario, rank=rank)
    except HarnessError:
        return None


def _collective_rows(
    asked: Simulated, result: SimulatedRank, workload: Workload | None
) -> list[CollectiveRow]:
    counted: dict[tuple[str, str, str, Role], tuple[int, int, list[int]]] = {}
    for part in result.communication:
        key = (part.phase, part.op, part.dtype, part.role)
        calls, payload, _ = counted.get(key, (0, 0, []))
        counted[key] = (calls + part.calls, payload + part.payload_bytes, part.group_ranks)
    expected = _expected(collectives(workload)) if workload is not None else None
    keys = [*counted, *(key for key in expected or () if key not in counted)]
    rows = []
    for key in sorted(keys, key=lambda key: (STEP_PHASES.index(key[0]), *key[1:])):
        calls, payload, ranks = counted.get(key, (0, 0, []))
        phase, op, dtype, role = key
        known_calls, known_payload = (
            (expected or {}).get(key, (0, 0)) if expected is not None else (None, None)
        )
        size = len(ranks) or (workload.group_size(role) if workload else 1)
        rows.append(
            CollectiveRow(
                phase=phase, op=op, dtype=dtype, role=role, group_size=size, calls=calls,
                payload_bytes=payload, sent_bytes=ring_sent_bytes(op, payload, size),
                node_sent_bytes=_leaving_node(asked, op, payload, role, ranks),
                expected_calls=known_calls, expected_payload_bytes=known_payload,
            )
        )  # fmt: skip
    return rows


def _expected(volume: Volume) -> dict[tuple[str, str, str, Role], tuple[int | None, int]]:
    """Calls and payload by key of the steps."""
    sums: dict[tuple[str, str, str, Role], tuple[int | None, int]] = {}
    for part in volume.collectives:
        if part.phase in STEP_PHASES:
            key = (part.phase, part.op, part.dtype, part.role)
            calls, payload = sums.get(key, (0, 0))
            both = None if calls is None or part.calls is None else calls + part.calls
            sums[key] = (both, payload + part.payload_bytes)
    return sums


def _leaving_node(asked: Simulated, op: str, payload: int, role: Role, ranks: list[int]) -> float:
    """Bytes that the ranks of the simulated rank's node send to others, each in its group of this role.

    Shard groups are rows of ranks in a row, replica groups columns; all do what the simulated one did.
    """
    if len(ranks) < 2:
        return 0.0
    run = asked.request.run
    node = asked.request.rank // run.ranks_per_node
    hosts = {rank: str(rank // run.ranks_per_node) for rank in range(run.world_size)}
    total = NodeTraffic()
    for rank in range(node * run.ranks_per_node, (node + 1) * run.ranks_per_node):
        total += node_traffic(
            RING, op, payload, _group_of(rank, role, len(ranks), run.world_size), rank, hosts
        )
    return total.between


def _group_of(rank: int, role: Role, size: int, world_size: int) -> range:
    if role == "replica":
        stride = world_size // size
        return range(rank % stride, world_size, stride)
    first = rank - rank % size
    return range(first, first + size)


def _state_rows(result: SimulatedRank, workload: Workload | None) -> list[BytesRow]:
    after = next((p for p in reversed(result.memory) if p.moment == "after_backward"), None)
    if after is None or after.kinds is None:
        return []
    held = {**after.kinds}
    for kind, size in (after.outside_kinds or {}).items():
        held[kind] = held.get(kind, 0) + size
    expected = model_states(workload).kinds() if workload is not None else None
    return [
        BytesRow(
            name=kind,
            bytes=held.get(kind, 0),
            expected_bytes=expected.get(kind, 0) if expected is not None else None,
        )
        for kind in STATE_KINDS
        if held.get(kind) or (expected or {}).get(kind)
    ]


def _peak_rows(result: SimulatedRank, prediction: MemoryPrediction | None) -> list[BytesRow]:
    peaks = simulated_peaks(result)
    predicted = {m.name: m.device_bytes for m in prediction.moments} if prediction else {}
    names: dict[str, tuple[MomentName, ...]] = {
        "forward/backward": ("forward/backward", "gradient reduction"),
        "optimizer step": ("optimizer step",),
    }
    return [
        BytesRow(
            name=name,
            bytes=max(peaks[reading] for reading in readings),
            expected_bytes=max((predicted[n] for n in names[name] if n in predicted), default=None),
        )
        for name, readings in PEAKS.items()
        if all(reading in peaks for reading in readings)
    ]
