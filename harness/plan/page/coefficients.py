"""Exports what a page needs to evaluate an estimate: polynomials, seconds and shares, but no figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

from harness.errors import HarnessError
from harness.forms.activations import MONOMIALS, Point, Size
from harness.forms.flops import ModelGeometry, model_flops_per_token
from harness.forms.peaks.course import Ledger, Phase, Unit
from harness.forms.peaks.families import COURSES
from harness.forms.peaks.walk import Walk
from harness.plan.attention import ATTENTION_BACKWARD, CAUSAL_TILE
from harness.plan.communicating import transfers
from harness.plan.computing import computing_coefficients
from harness.plan.constants import default_constants
from harness.plan.coverage import why_memory_unknown
from harness.plan.device import Device
from harness.plan.estimate.question import Question, candidates
from harness.plan.estimate.row import step_traffic
from harness.plan.limits import TIGHT_SHARE
from harness.plan.memory import PHASES, device_overhead
from harness.plan.model import PlannedModel
from harness.plan.profiles import activation_profile
from harness.plan.scenario import Scenario
from harness.plan.speed import overlap_rule, reduction_shares, step_communication
from harness.plan.work import Work

Coefficients = tuple[int, ...]
"""One per entry of MONOMIALS."""
Candidate = tuple[Coefficients, ...]
"""A state of the ledger: the smallest of these polynomials."""
NOTHING = (0,) * len(MONOMIALS)
Position = tuple[int, int]
"""Micro-batch and sequence."""
MOMENT_OF = {phase: name for name, phases in PHASES.items() for phase in phases}


class Polynomial:
    """Bytes of activations, with what `Walk` does to them; of several polynomials the least holds."""

    __slots__ = ("least",)

    def __init__(self, least: Candidate = (NOTHING,)) -> None:
        self.least = least

    def __add__(self, other: Polynomial | int) -> Polynomial:
        least: Candidate = ((other, 0, 0, 0, 0, 0),) if isinstance(other, int) else other.least
        return Polynomial(tuple(_sum(mine, its) for mine in self.least for its in least))

    __radd__ = __add__

    def __mul__(self, factor: int) -> Polynomial:
        return Polynomial(tuple(tuple(factor * value for value in mine) for mine in self.least))

    __rmul__ = __mul__


class SymbolicLedger(Ledger):
    """Keeps every state that can be the fullest for some micro-batch and sequence."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self.candidates: dict[Phase, set[Candidate]] = {}

    def look(self) -> None:
        """Note the present state. Data are as many bytes for each token, whatever else is held."""
        activations = cast("Iterable[Polynomial | int]", self.activations.values())
        data = sum(count for holding, count in self.held.items() if holding.kind == "data")
        assert data % self._tokens == 0
        held = (sum(self.held.values()) - data, 0, 0, data // self._tokens, 0, 0)
        total = Polynomial((held,))
        for size in activations:
            total += size
        self.candidates.setdefault(self.phase, set()).add(total.least)


class SymbolicWalk(Walk):
    """A step whose activations are polynomials."""

    def _bytes(self, size: Size) -> Any:
        return Polynomial((size.coefficients,))

    def _come_to(self, unit: Unit | None, point: Point, below: Any, *, backward: bool) -> None:
        here = below + self._bytes(point.live)
        present = sum(cast("Iterable[Any]", self._ledger.activations.values()), start=Polynomial())
        least = Polynomial(tuple(dict.fromkeys((*here.least, *present.least))))
        self._ledger.activations = cast("dict[Any, int]", {self._below: least})
        self._course.at_module(self._own(unit, point.module), backward=backward)
        self._look(below, point.live)


def peak_candidates(scenario: Scenario, positions: Sequence[Position]) -> list[tuple[str, Candidate]]:
    """Moment and polynomials of every state that decides the peak at one of the positions.

    The profile is that of the scenario's micro-batch: one sample, or several.
    """
    workload = scenario.workload()
    assert workload.sequence_length is not None
    ledger = SymbolicLedger(workload.micro_batch_size * workload.sequence_length)
    course = COURSES[workload.strategy.family](workload, ledger)
    SymbolicWalk(
        course, activation_profile(scenario), micro_batch=workload.micro_batch_size,
        sequence=workload.sequence_length,
    ).run()  # fmt: skip
    found = [(MOMENT_OF[phase], c) for phase, every in ledger.candidates.items() for c in every]
    deciding = {
        max(found, key=lambda entry: (candidate_bytes(entry[1], position), entry)) for position in positions
    }
    return sorted(deciding)


def candidate_bytes(candidate: Candidate, position: Position) -> int:
    """The least of its polynomials at a micro-batch and sequence."""
    b, s = position
    values = (1, b, s, b * s, s * s, b * s * s)
    return min(sum(c * value for c, value in zip(p, values, strict=True)) for p in candidate)


def _sum(first: Coefficients, second: Coefficients) -> Coefficients:
    a0, a1, a2, a3, a4, a5 = first
    b0, b1, b2, b3, b4, b5 = second
    return (a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5)


MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
SHORTEST, LONGEST = 128, 131072


def page_data(asked: Question) -> dict[str, Any]:
    """Everything that the page evaluates, as a JSON document."""
    first = next((c.scenario for c in candidates(asked) if c.scenario is not None), None)
    if first is None:
        raise HarnessError("nothing can be drawn: no strategy supports the given numbers of ranks")
    micro = sorted({*MICRO_BATCHES, first.micro_batch_size})
    sequences = sorted({*_sequences(asked), asked.experiment.data.sequence_length})
    rows: dict[str, dict[str, Any]] = {label: {} for label in asked.labels}
    for candidate in candidates(asked):
        scenario = candidate.scenario
        rows[candidate.label][str(candidate.world_size)] = (
            {"unsupported": candidate.unsupported}
            if scenario is None
            else _row(scenario, [(b, s) for b in micro for s in sequences])
        )
    training, device = asked.experiment.training, asked.device
    return {
        "model": asked.model.name,
        "parameters": asked.model.parameters,
        "precision": training.precision,
        "checkpointing": training.activation_checkpointing,
        "device": None
        if device is None
        else {"name": device.name, "memory_bytes": device.memory_bytes, "watts": device.watts},
        "fabric": asked.fabric.name if asked.fabric else None,
        "ranks_per_node": asked.ranks_per_node,
        "tight_share": TIGHT_SHARE,
        "causal_tile": CAUSAL_TILE,
        "attention_backward": ATTENTION_BACKWARD,
        "sizes": list(asked.world_sizes),
        "micro_batches": micro,
        "sequences": sequences,
        "start": {
            "size": asked.world_sizes[-1],
            "micro_batch": first.micro_batch_size,
            "sequence": asked.experiment.data.sequence_length,
        },
        "rows": rows,
    }


def _sequences(asked: Question) -> Iterator[int]:
    context = asked.model.config.get("max_position_embeddings")
    most = min(LONGEST, context) if isinstance(context, int) else LONGEST
    length = SHORTEST
    while length <= most:
        yield length
        length *= 2


def _row(scenario: Scenario, positions: Sequence[Position]) -> dict[str, Any]:
    traffic = step_traffic(scenario)
    unknown = _why_not_drawn(scenario) or why_memory_unknown(scenario)
    memory = None
    if unknown is None:
        try:
            memory = {
                "one": _peaks(scenario, positions, one=True),
                "more": _peaks(scenario, positions, one=False),
            }
        except HarnessError as error:
            unknown = str(error)
    speed, speed_unknown = _speed(scenario)
    return {
        "steps": scenario.accumulation_steps,
        "memory": memory,
        "memory_unknown": unknown,
        "overhead_bytes": sum(term.bytes for term in device_overhead(scenario) if not term.host),
        "sent_bytes": sum(line.sent_bytes for line in traffic),
        "between_bytes": sum(line.between_bytes for line in traffic),
        "speed": speed,
        "speed_unknown": speed_unknown,
    }


def _why_not_drawn(scenario: Scenario) -> str | None:
    if not scenario.mesh.shares_samples:
        return None
    return "this page has no formula for ranks that share samples; the table of `harness estimate` has it"


def _peaks(scenario: Scenario, positions: Sequence[Position], *, one: bool) -> list[Any]:
    """Candidates for a micro-batch of one sample, whose kernels differ, or of several."""
    fitting = [position for position in positions if (position[0] == 1) == one]
    micro = fitting[0][0]
    found = peak_candidates(replace(scenario, micro_batch_size=micro), fitting)
    return [[moment, candidate] for moment, candidate in found]


def _speed(scenario: Scenario) -> tuple[dict[str, Any] | None, str | None]:
    device = scenario.device
    if device is None:
        return None, "no GPU was named (--gpu)"
    if (unknown := _why_not_drawn(scenario)) is not None:
        return None, unknown
    try:
        return _seconds(Work(scenario), device), None
    except HarnessError as error:
        return None, str(error)


def _seconds(work: Work, device: Device) -> dict[str, Any]:
    constants = work.scenario.constants or default_constants(device)
    found = transfers(work, device, constants)
    rule = overlap_rule(work.workload)
    root, blocks, early = reduction_shares(work)
    return {
        "computing": asdict(computing_coefficients(work, device, constants)),
        "overhead": max(0.0, constants.step_overhead_seconds),
        "communicates": bool(found),
        "communication": sum(transfer.seconds for transfer in found),
        "collectives": asdict(step_communication(work, found)),
        "contention": constants.contention,
        "gathers_ahead": rule.gathers_ahead,
        "reduces_beside": rule.reduces_beside,
        "root": root,
        "blocks": blocks,
        "early": early,
        "flops_per_token": _flops_per_token(work.scenario.model),
        "peak_flops": device.peak_flops.get(work.rate_name),
    }


def _flops_per_token(model: PlannedModel) -> tuple[int, int]:
    """What is constant, and what grows with the sequence."""
    none, one = (
        model_flops_per_token(
            ModelGeometry(
                multiplying_parameters=model.multiplying_parameters, block_parameters=0, layers=model.layers,
                attention_width=model.attention_width, sequence_length=length,
            )
        )
        for length in (0, 1)
    )  # fmt: skip
    return none, one - none
