"""Simulated ranks: what is asked of them, their figures next to closed forms, as text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from harness.errors import HarnessError
from harness.forms.families import CLOSED_FORMS, collectives, model_states
from harness.forms.network import NodeTraffic, node_traffic
from harness.forms.terms import STATE_KINDS, STEP_PHASES, ring_sent_bytes
from harness.forms.workload import Role, Workload
from harness.job.batch import job_layout
from harness.job.experiment import Experiment
from harness.job.job import ModelSection
from harness.launch.cells import begin_run, make_cell
from harness.launch.launcher import LocalLauncher, require_libraries
from harness.plan.prediction import MomentName, Predictors, predict, predict_memory
from harness.plan.scenario import Scenario, planned_model, scenario_of
from harness.run_directory.request import SimulatedRank, SimulationRequest, Tensors
from harness.tell.formats import NOT_AVAILABLE, fitted, megabytes


def with_model(experiment: Experiment, config: Mapping[str, Any]) -> Experiment:
    """The job for another model, given as values of its Hugging Face configuration."""
    given = experiment.model
    section = ModelSection(config=dict(config), attention=given.attention, dropout=given.dropout)
    return experiment.model_copy(update={"model": section})


def plan_simulation(
    experiment: Experiment,
    label: str,
    world_size: int,
    *,
    ranks_per_node: int,
    rank: int = 0,
    tensors: Tensors = "fake",
) -> SimulationRequest:
    """What is asked of one rank of a backend in a world.

    Without a batch in the job the micro-batch is one sample. Raises HarnessError for a world that nodes or
    the batch do not divide.
    """
    per_node = min(ranks_per_node, world_size)
    if world_size % per_node:
        raise HarnessError(
            f"{world_size} ranks do not fill nodes of {per_node}; give a --world-size that "
            "--gpus-per-node divides"
        )
    if not 0 <= rank < world_size:
        raise HarnessError(f"rank {rank} is not in a world of {world_size}; give 0 to {world_size - 1}")
    training = experiment.training
    if training.global_batch_size is None and training.micro_batch_size is None:
        training = training.model_copy(update={"micro_batch_size": 1})
        experiment = experiment.model_copy(update={"training": training})
    layout = job_layout([label], world_size, training)
    cell = make_cell(
        experiment, label, world_size, layout, 0, "cpu", nodes=world_size // per_node, ranks_per_node=per_node
    )
    return SimulationRequest(run=begin_run(cell, []), rank=rank, tensors=tensors)


RING = "ring"
"""In place of a transport: bytes as a ring sends them, and no copies of them, as gloo makes."""
PEAKS: dict[str, tuple[tuple[str, ...], tuple[MomentName, ...]]] = {
    "forward/backward": (("after_forward", "after_backward"), ("forward/backward", "gradient reduction")),
    "optimizer step": (("after_step",), ("optimizer step",)),
}
"""Readings of the simulation, and the moments of a prediction that they are the highest of. Gradients are
reduced while the backward pass runs, so one reading has both."""


@dataclass(frozen=True, kw_only=True)
class SimulatedCollective:
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

    asked: SimulationRequest
    result: SimulatedRank
    collectives: tuple[SimulatedCollective, ...] = ()
    states: tuple[BytesRow, ...] = ()
    peaks: tuple[BytesRow, ...] = ()

    @property
    def peak_bytes(self) -> int | None:
        """The highest of the step."""
        return max((row.bytes for row in self.peaks), default=None)


def compare_with_closed_forms(asked: SimulationRequest, result: SimulatedRank) -> SimulatedRow:
    """Lay the figures of a simulated rank next to the closed forms of its family."""
    if result.status != "ok":
        return SimulatedRow(asked=asked, result=result)
    scenario = _scenario(asked, result)
    workload = scenario.workload(asked.rank) if scenario else None
    if workload is not None and workload.strategy.family not in CLOSED_FORMS:
        workload = None
    of_rank = Predictors(memory=partial(predict_memory, rank=asked.rank))
    prediction = predict(scenario, of_rank, timed=False).memory if scenario else None
    peaks = simulated_peaks(result)
    predicted = {m.name: m.device_bytes for m in prediction.moments} if prediction else {}
    return SimulatedRow(
        asked=asked,
        result=result,
        collectives=tuple(_collective_rows(asked, result, workload)),
        states=tuple(_state_rows(result, workload)),
        peaks=tuple(
            BytesRow(
                name=name,
                bytes=max(peaks[reading] for reading in readings),
                expected_bytes=max((predicted[n] for n in moments if n in predicted), default=None),
            )
            for name, (readings, moments) in PEAKS.items()
            if all(reading in peaks for reading in readings)
        ),
    )


def simulated_peaks(result: SimulatedRank) -> dict[str, int]:
    """Peak bytes since the reading before, by reading: after_forward, after_backward, after_step."""
    readings = {part.moment: part.peak_bytes for part in result.memory if part.moment != "after_setup"}
    return {moment: peak for moment, peak in readings.items() if peak is not None}


def _scenario(asked: SimulationRequest, result: SimulatedRank) -> Scenario | None:
    """What closed forms take: the job on the CPU, without a transport that copies what it moves.

    None for a third party's backend.
    """
    assert result.model is not None
    assert result.layout is not None
    facts = {
        "model": result.model.model_dump(),
        "layout": result.layout,
        "configuration": result.configuration,
    }
    model = planned_model(facts, asked.run.job)
    scenario = scenario_of(asked.run, model)
    return replace(scenario, transport=RING) if scenario else None


def _collective_rows(
    asked: SimulationRequest, result: SimulatedRank, workload: Workload | None
) -> Iterator[SimulatedCollective]:
    counted: dict[tuple[str, str, str, Role], tuple[int, int, list[int]]] = {}
    for part in result.communication:
        key = (part.phase, part.op, part.dtype, part.role)
        calls, payload, _ = counted.get(key, (0, 0, []))
        counted[key] = (calls + part.calls, payload + part.payload_bytes, part.group_ranks)
    expected: dict[tuple[str, str, str, Role], tuple[int | None, int]] = {}
    for one in collectives(workload).collectives if workload is not None else ():
        if one.phase in STEP_PHASES:
            key = (one.phase, one.op, one.dtype, one.role)
            known_calls, known_payload = expected.get(key, (0, 0))
            both = None if known_calls is None or one.calls is None else known_calls + one.calls
            expected[key] = (both, known_payload + one.payload_bytes)
    for key in sorted({*counted, *expected}, key=lambda key: (STEP_PHASES.index(key[0]), *key[1:])):
        calls, payload, ranks = counted.get(key, (0, 0, []))
        phase, op, dtype, role = key
        forms = expected.get(key, (0, 0)) if workload is not None else (None, None)
        size = len(ranks) or (workload.group_size(role) if workload else 1)
        yield SimulatedCollective(
            phase=phase, op=op, dtype=dtype, role=role, group_size=size, calls=calls,
            payload_bytes=payload, sent_bytes=ring_sent_bytes(op, payload, size),
            node_sent_bytes=_leaving_node(asked, op, payload, role, ranks),
            expected_calls=forms[0], expected_payload_bytes=forms[1],
        )  # fmt: skip


def _leaving_node(asked: SimulationRequest, op: str, payload: int, role: Role, ranks: list[int]) -> float:
    """Bytes that the ranks of the simulated rank's node send to others, each in its group of this role.

    Shard groups are rows of ranks in a row, replica groups columns; all do what the simulated one did.
    """
    if len(ranks) < 2:
        return 0.0
    run = asked.run
    node = asked.rank // run.ranks_per_node
    hosts = {rank: str(rank // run.ranks_per_node) for rank in range(run.world_size)}
    total, size = NodeTraffic(), len(ranks)
    stride = run.world_size // size
    for rank in range(node * run.ranks_per_node, (node + 1) * run.ranks_per_node):
        first = rank - rank % size
        row = range(first, first + size)
        group = range(rank % stride, run.world_size, stride) if role == "replica" else row
        total += node_traffic(RING, op, payload, group, rank, hosts)
    return total.between


def _state_rows(result: SimulatedRank, workload: Workload | None) -> list[BytesRow]:
    after = next((p for p in reversed(result.memory) if p.moment == "after_backward"), None)
    if after is None or after.kinds is None:
        return []
    held = after.all_kinds()
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


SIMULATOR = "harness.rank.simulation"


def run_simulations(requests: Iterable[SimulationRequest]) -> Iterator[SimulatedRank]:
    """Answers in order, each as soon as it is there. Raises HarnessError if the job itself is refused."""
    require_libraries("simulations")
    launcher = LocalLauncher("cpu", [SIMULATOR])
    for one in requests:
        try:
            text = launcher.ask(f"{SIMULATOR}:simulate_text", one.model_dump_json(), "the simulation")
        except HarnessError as error:  # the others go on
            yield SimulatedRank(status="failed", reason=str(error), tensors=one.tensors)
            continue
        result = SimulatedRank.model_validate_json(text)
        if result.status == "refused":
            raise HarnessError(result.reason or "the job is refused")
        yield result


COLLECTIVES = (
    "phase", "collective", "dtype", "group", "ranks", "calls", "closed form", "payload MB", "closed form",
    "difference B", "sent MB", "leaves node MB",
)  # fmt: skip
MEMORY = ("memory", "simulated MB", "closed form", "difference B")
WHAT = {
    "fake": "tensors without data, of the shapes that torch's CPU kernels return",
    "real": "tensors with data and torch's CPU kernels",
}


def row_lines(row: SimulatedRow) -> list[str]:
    """One backend in one world: tables, then what was simulated and what was not."""
    run = row.asked.run
    title = (
        f"{run.backend}, rank {row.asked.rank} of {run.world_size} "
        f"({run.world_size // run.ranks_per_node} nodes of {run.ranks_per_node})"
    )
    result = row.result
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    if result.status != "ok":
        return [f"{title}: unsupported: {result.reason}" + (f" ({versions})" if versions else "")]
    assert result.model is not None
    memory = [*((p.name, p) for p in row.states), *((f"peak: {p.name}", p) for p in row.peaks)]
    return [
        f"{title}: {result.model.architecture}, {result.model.parameters:,} parameters, micro-batch "
        f"{run.micro_batch_size}, accumulation {run.accumulation_steps}",
        "",
        _table(COLLECTIVES, [_collective(part) for part in row.collectives]),
        "",
        _table(MEMORY, [[name, *_bytes(part.bytes, part.expected_bytes)] for name, part in memory]),
        "",
        f"simulated: the adapter's own code ({versions}) with {WHAT[result.tensors]}, in "
        f"{result.seconds:.1f} s and {result.host_peak_bytes / 1e9:.1f} GB of this machine's memory",
        "not simulated: time, the transport's buffers, the data set, a GPU's kernels and allocator",
        *(f"done otherwise: {text}" for text in result.substitutions),
    ]


def as_json(rows: Sequence[SimulatedRow], model: str) -> dict[str, Any]:
    """The document of `harness simulate --json`; all per rank, in bytes, of one step."""
    found = []
    for row in rows:
        run, result = row.asked.run, row.result
        of_run = ("backend", "world_size", "ranks_per_node", "micro_batch_size", "accumulation_steps")
        of_result = ("status", "reason", "tensors", "versions", "substitutions", "seconds")
        found.append(
            {name: getattr(run, name) for name in of_run}
            | {name: getattr(result, name) for name in of_result}
            | {
                "rank": row.asked.rank,
                "parameters": result.model.parameters if result.model else None,
                "collectives": [asdict(part) for part in row.collectives],
                "states": [asdict(part) for part in row.states],
                "peaks": [asdict(part) for part in row.peaks],
                "peak_bytes": row.peak_bytes,
                "moments": [part.model_dump(mode="json", exclude_none=True) for part in result.memory],
            }
        )
    return {"model": model, "rows": found}


def _collective(row: SimulatedCollective) -> list[str]:
    expected = NOT_AVAILABLE if row.expected_calls is None else str(row.expected_calls)
    named = row.phase, row.op, row.dtype, row.role, str(row.group_size), str(row.calls), expected
    sent = map(megabytes, (row.sent_bytes, row.node_sent_bytes))
    return [*named, *_bytes(row.payload_bytes, row.expected_payload_bytes), *sent]


def _bytes(simulated: int, expected: int | None) -> list[str]:
    """Simulated, by the closed form, and the difference."""
    more = (
        NOT_AVAILABLE if expected is None else f"{simulated - expected:+,}" if simulated != expected else "0"
    )
    return [megabytes(simulated), megabytes(expected), more]


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    left = 4 if len(headers) > len(MEMORY) else 1
    return fitted(rows, headers, alignments=dict.fromkeys(headers[left:], "right")) if rows else "none"
