"""Exports what a page needs to evaluate an estimate: polynomials, seconds and shares, but no figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from harness.errors import HarnessError
from harness.forms.flops import ModelGeometry, model_flops_per_token
from harness.planning.attention import ATTENTION_BACKWARD, CAUSAL_TILE
from harness.planning.communicating import transfers
from harness.planning.computing import computing_coefficients
from harness.planning.constants import default_constants
from harness.planning.coverage import why_memory_unknown
from harness.planning.device import Device
from harness.planning.estimate.question import Question, candidates
from harness.planning.estimate.traffic import step_traffic
from harness.planning.model import PlannedModel
from harness.planning.overhead import device_overhead
from harness.planning.overlap import overlap_rule, reduction_shares, step_communication
from harness.planning.page.envelope import Position, peak_candidates
from harness.planning.scenario import Scenario
from harness.planning.verdict import TIGHT_SHARE
from harness.planning.work import Work

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
