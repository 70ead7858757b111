"""Predicted time of a step: computing, communication, and what of it stays exposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.forms.flops import ModelGeometry, gpu_hours, kilowatt_hours, model_flops_per_token
from harness.forms.network import guide_ratio, time_ratio
from harness.forms.terms import PADDING
from harness.planning.adapters import require_all_trained
from harness.planning.communicating import Transfer, transfers
from harness.planning.computing import ComputingTime, computing_time
from harness.planning.constants import TimeConstants, default_constants
from harness.planning.coverage import require_activations, require_course
from harness.planning.device import Device
from harness.planning.overlap import exposed_seconds, overlap_rule
from harness.planning.scenario import Scenario
from harness.planning.time_term import TimeTerm
from harness.planning.work import Work

__all__ = ["SpeedPrediction", "TimeTerm", "predict_speed"]


@dataclass(frozen=True, kw_only=True)
class SpeedPrediction:
    """One optimizer step of the slowest rank."""

    computing: tuple[TimeTerm, ...]
    communication: tuple[TimeTerm, ...]
    exposed_seconds: float
    """What of the communication does not hide behind computing, and what computing loses to the rest."""
    step_seconds: float
    tokens_per_second_per_gpu: float
    model_flops_utilization: float | None
    """Of the device's dense peak for the compute dtype, 0 to 1."""
    joules_per_step: float | None
    """Of all devices at their power limit: an upper bound."""
    guide_ratio: float | None = None
    """What decision guides compute for exposed communication (`harness.forms.network`)."""
    peak_ratio: float | None = None
    """Communication over computing, both at the peaks of data sheets: above 1 some is exposed in any case."""
    remarks: tuple[str, ...] = ()
    """What overlaps, and where the constants come from."""

    @property
    def computing_seconds(self) -> float:
        return sum(term.seconds for term in self.computing)

    @property
    def communication_seconds(self) -> float:
        return sum(term.seconds for term in self.communication)


def predict_speed(scenario: Scenario, constants: TimeConstants | None = None) -> SpeedPrediction | None:
    """Predict a step; None without a device. `constants`: in place of the scenario's.

    step = computing + exposed + c (communication - exposed) + o, with c the contention and o the overhead.
    Raises HarnessError for several nodes without a fabric, and for a job with adapters.
    """
    device = scenario.device
    if device is None:
        return None
    require_course(scenario)
    require_activations(scenario.model, scenario.job)
    require_all_trained(scenario.job, "the speed")
    constants = constants or scenario.constants or default_constants(device)
    found = (predict_work(Work(scenario, rank), device, constants) for rank in scenario.unlike_ranks)
    return max(found, key=lambda speed: speed.step_seconds)


def predict_work(work: Work, device: Device, constants: TimeConstants) -> SpeedPrediction:
    """The same for a step whose closed forms are there already."""
    scenario = work.scenario
    computing, found, exposed = _parts(work, device, constants)
    terms = computing.terms
    if constants.step_overhead_seconds > 0:
        overhead = TimeTerm(
            name="overhead", seconds=constants.step_overhead_seconds, formula="o", source=constants.origin
        )
        terms = (*terms, overhead)
    step = seconds_of_step(work, device, constants)
    tokens = work.tokens_per_gpu
    return SpeedPrediction(
        computing=terms,
        communication=_communication(found, work.collectives[1]),
        exposed_seconds=exposed,
        step_seconds=step,
        tokens_per_second_per_gpu=tokens / step,
        model_flops_utilization=_utilization(work, device, tokens / step),
        joules_per_step=device.watts * step * scenario.world_size if device.watts else None,
        guide_ratio=_guide_ratio(work, device),
        peak_ratio=_peak_ratio(work, device, found),
        remarks=(*((overlap_rule(work.workload).source,) if found else ()), f"constants: {constants.origin}"),
    )


def seconds_of_step(work: Work, device: Device, constants: TimeConstants) -> float:
    """The step alone, for fits that evaluate it often."""
    computing, _, exposed = _parts(work, device, constants)
    return sum(term.seconds for term in computing.terms) + exposed + constants.step_overhead_seconds


def _parts(
    work: Work, device: Device, constants: TimeConstants
) -> tuple[ComputingTime, list[Transfer], float]:
    """Computing, transfers, and the seconds that communication adds to computing."""
    computing = computing_time(work, device, constants)
    found = transfers(work, device, constants)
    if not found:
        return computing, found, 0.0
    ideal = exposed_seconds(work, computing, found, overlap_rule(work.workload))
    hidden = max(0.0, sum(transfer.seconds for transfer in found) - ideal)
    return computing, found, ideal + constants.contention * hidden


def hours_per_billion_tokens(speed: SpeedPrediction, world_size: int) -> float:
    """Wall-clock hours in which all GPUs together train on 1e9 tokens."""
    return gpu_hours(speed.tokens_per_second_per_gpu * world_size, 1)


def gpu_hours_per_billion_tokens(speed: SpeedPrediction) -> float:
    """Hours of one GPU for 1e9 tokens: what is paid for."""
    return gpu_hours(speed.tokens_per_second_per_gpu, 1)


def kilowatt_hours_per_billion_tokens(speed: SpeedPrediction, world_size: int) -> float | None:
    """Energy of the GPUs at their power limit for 1e9 tokens: an upper bound; None: power unknown."""
    if speed.joules_per_step is None:
        return None
    watts = speed.joules_per_step / speed.step_seconds
    return kilowatt_hours(speed.tokens_per_second_per_gpu * world_size, watts)


def _communication(found: Sequence[Transfer], source: str) -> tuple[TimeTerm, ...]:
    """A line per collective; padding joins what it pads."""
    terms = []
    for transfer in found:
        collective = transfer.collective
        where = f"{collective.op}, {transfer.path.name}"
        if collective.term == PADDING:
            where = f"{collective.phase}, {where}"
        terms.append(
            TimeTerm(
                name=f"{collective.term} ({where})",
                seconds=transfer.seconds,
                formula=transfer.formula,
                source=source,
            )
        )
    return tuple(terms)


def _geometry(scenario: Scenario) -> ModelGeometry:
    model = scenario.model
    prefixes = tuple(f"{name}." for name in model.layout.blocks)
    inside = sum(t.numel for t in model.layout.parameters if prefixes and t.name.startswith(prefixes))
    return ModelGeometry(
        multiplying_parameters=model.multiplying_parameters,
        block_parameters=inside,
        layers=model.layers,
        attention_width=model.attention_width,
        sequence_length=scenario.job.data.sequence_length,
    )


def _utilization(work: Work, device: Device, tokens_per_second: float) -> float | None:
    """Model FLOPs per second over the peak; None: the data sheet has no rate for the dtype."""
    peak = device.peak_flops.get(work.rate_name)
    return tokens_per_second * model_flops_per_token(_geometry(work.scenario)) / peak if peak else None


def _guide_ratio(work: Work, device: Device) -> float | None:
    """The ratio of the guides, with the slowest link that the weights or gradients cross."""
    peak = device.peak_flops.get(work.rate_name)
    scenario, workload = work.scenario, work.workload
    ranks = workload.shards if scenario.strategy.facts.has_replicas else scenario.world_size
    if not peak or scenario.world_size == 1 or scenario.mesh.cuts_model:
        return None
    return guide_ratio(
        scenario.strategy,
        ranks=ranks,
        parameters=scenario.model.parameters,
        sequence_length=scenario.job.data.sequence_length,
        micro_batch_size=scenario.micro_batch_size,
        accumulation_steps=scenario.accumulation_steps,
        peak_flops=peak,
        bandwidth=_ring_bandwidth(scenario, device, ranks),
    )


def _ring_bandwidth(scenario: Scenario, device: Device, ranks: int) -> float:
    """Peak of a ring: over nodes all adapters of a node together, but no more than its links."""
    if ranks <= scenario.ranks_per_node or scenario.fabric is None:
        return device.link_bandwidth
    return min(device.link_bandwidth, scenario.fabric.bandwidth_per_gpu * scenario.ranks_per_node)


def _peak_ratio(work: Work, device: Device, found: Sequence[Transfer]) -> float | None:
    peak = device.peak_flops.get(work.rate_name)
    if not peak or not found:
        return None
    # Each transfer over its own path, at the peak of its slowest link.
    at_peak = sum(
        t.collective.sent_bytes(work.workload) / _ring_bandwidth(work.scenario, device, t.path.ranks)
        for t in found
    )
    tokens = round(work.tokens_per_gpu)
    return time_ratio(at_peak, work.scenario.model.multiplying_parameters, tokens, peak, 1.0)
