"""One strategy on one number of ranks: what it needs, sends and reaches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from harness.backends import registry
from harness.backends.base import World
from harness.errors import HarnessError, JobError
from harness.forms import pipeline
from harness.forms.fsdp import units as fsdp
from harness.forms.model.layout import DTYPE_BYTES
from harness.forms.network import EMULATED, transport_sent_bytes
from harness.forms.terms import Collective, ModelStates, ring_formula
from harness.forms.textbook import gathers_updated, textbook_sent_bytes, textbook_states
from harness.forms.workload import Role, Workload
from harness.forms.zero import zero0
from harness.job.batch import BatchLayout, cell_layout, job_layout, with_global_batch
from harness.judge.wording import ranks
from harness.plan.accumulation import reduced_each_time, reducing_each
from harness.plan.alternatives import Alternative, alternatives, bases
from harness.plan.architectures import mixture_of_experts
from harness.plan.estimate.question import EstimateRequest
from harness.plan.prediction import Prediction, Predictors, predict, tried
from harness.plan.scenario import Scenario, why_not_planned
from harness.plan.time.computing import Work
from harness.plan.time.speed import hours_per_billion_tokens, kilowatt_hours_per_billion_tokens
from harness.plan.trust import Trust, trust_in


@dataclass(frozen=True, kw_only=True)
class TrafficLine:
    """Calls of one kind that have one cause, in one step of one rank."""

    term: str
    phase: str
    op: str
    dtype: str
    role: Role
    group_size: int
    calls: int | None
    """None: it depends on the order in which gradients become ready. 0: part of the calls of another line."""
    payload_bytes: int
    sent_bytes: float
    between_bytes: float
    """Of `sent_bytes`, to other nodes; on average over the ranks of a node."""
    formula: str
    source: str


def step_traffic(scenario: Scenario) -> list[TrafficLine]:
    """Every collective of an ordinary step; empty on one rank.

    A ring in the order of the ranks sends everything to the next rank (`harness.forms.network`): the last
    rank of a node that the ring leaves sends it all to another node, the others send it within theirs.
    """
    if scenario.world_size == 1:
        return []
    work = Work(scenario)
    workload = work.workload
    found, source = work.collectives
    shares = {role: crossing_share(workload, role) for role in {c.role for c in found}}
    return [_line(c, workload, scenario.transport, shares[c.role], source) for c in found]


def _line(
    collective: Collective, workload: Workload, transport: str, share: float, source: str
) -> TrafficLine:
    size = workload.group_size(collective.role)
    sent = transport_sent_bytes(transport, collective.op, collective.payload_bytes, size)
    runs = EMULATED.get(transport, {}).get(collective.op, collective.op)
    return TrafficLine(
        term=collective.term,
        phase=collective.phase,
        op=collective.op,
        dtype=collective.dtype,
        role=collective.role,
        group_size=size,
        calls=collective.calls,
        payload_bytes=collective.payload_bytes,
        sent_bytes=sent,
        between_bytes=sent * share,
        formula=ring_formula(runs, collective.payload_bytes, size),
        source=source,
    )


def communication_dtypes(workload: Workload) -> tuple[str, str]:
    """Dtypes in which weights are gathered and gradients reduced, as the closed forms have them.

    DDP and a bare replica reduce in the dtype of the weights that train.
    """
    if workload.strategy.family in ("single", "ddp", "pipeline"):
        return workload.master_dtype, workload.master_dtype
    library = fsdp if workload.strategy.zero_stage is None else zero0
    return workload.compute_dtype, library.reduce_dtype(workload)


def crossing_share(workload: Workload, role: Role) -> float:
    """Ranks whose next rank in the ring of a group is on another node, over all ranks."""
    world, shards = workload.world_size, workload.group_size("shard")
    per_node = workload.ranks_per_node or world
    if per_node >= world:
        return 0.0
    if workload.mesh is not None and workload.mesh.shares_samples:
        rings = workload.mesh.groups(role)
        hops = (hop for ring in rings for hop in zip(ring, ring[1:] + ring[:1], strict=True))
        return sum(rank // per_node != after // per_node for rank, after in hops) / world
    crossing = sum(rank // per_node != _next(rank, role, world, shards) // per_node for rank in range(world))
    return crossing / world


def _next(rank: int, role: Role, world: int, shards: int) -> int:
    if role == "shard":
        first = rank - rank % shards
        return first + (rank - first + 1) % shards
    return (rank + (shards if role == "replica" else 1)) % world


@dataclass(frozen=True, kw_only=True)
class EstimateRow(Prediction):
    """A strategy on a number of ranks, with what its collectives send."""

    label: str
    world_size: int
    unsupported: str | None = None
    traffic: tuple[TrafficLine, ...] = ()
    traffic_unknown: str | None = None
    reduced_each_time: str | None = None
    """What it takes otherwise, where gradients that add up unsharded are what does not fit."""

    @property
    def states(self) -> ModelStates | None:
        return None if self.scenario is None else self.scenario.states

    @property
    def sent_bytes(self) -> float | None:
        """None: not known."""
        return None if self.traffic_unknown else sum(line.sent_bytes for line in self.traffic)

    @property
    def between_bytes(self) -> float | None:
        """None: not known."""
        return None if self.traffic_unknown else sum(line.between_bytes for line in self.traffic)

    @property
    def hours_per_billion_tokens(self) -> float | None:
        return None if self.speed is None else hours_per_billion_tokens(self.speed, self.world_size)

    @property
    def kilowatt_hours_per_billion_tokens(self) -> float | None:
        if self.speed is None:
            return None
        return kilowatt_hours_per_billion_tokens(self.speed, self.world_size)

    @property
    def textbook_state_bytes(self) -> float | None:
        """Model states as the ZeRO paper counts them (`harness.forms.textbook`)."""
        if self.scenario is None or self.scenario.mesh.shares_samples or self.scenario.states.unknown:
            return None
        scenario, workload = self.scenario, self.scenario.workload()
        return sum(
            textbook_states(
                scenario.strategy.stage,
                workload.layout.parameter_count,
                _parts(scenario),
                scenario.job.training.held_precision,
                trained=workload.layout.trained_count,
                moments=scenario.job.optimizer.moments,
            ).values()
        )

    @property
    def textbook_sent_bytes(self) -> float | None:
        """Ring bytes per step as the ZeRO and FSDP papers count them, in the dtypes of this strategy."""
        if self.scenario is None or self.scenario.mesh.shares_samples:
            return None
        workload = self.scenario.workload()
        weights, reduced = communication_dtypes(workload)
        return textbook_sent_bytes(
            workload.strategy.sharding,
            workload.layout.parameter_count,
            workload.world_size,
            weight_bytes=DTYPE_BYTES[weights],
            reduce_bytes=DTYPE_BYTES[reduced],
            shard_size=workload.shards,
            trained=workload.layout.trained_count,
            after_update=gathers_updated(workload.strategy),
            second_copy_ranks=workload.second_copy_ranks,
        )

    @property
    def bubble(self) -> float | None:
        """Share of the passes that ranks of a pipeline wait by its schedule; None: it is none."""
        if self.scenario is None or not self.scenario.strategy.facts.cuts_layers:
            return None
        return pipeline.bubble_of(self.scenario.workload())

    def most_bytes(self, kind: str) -> int | None:
        """The most of a kind at any of the three moments."""
        if self.memory is None:
            return None
        return max(
            sum(term.bytes for term in moment.terms if term.kind == kind and not term.host)
            for moment in self.memory.moments
        )


def _parts(scenario: Scenario) -> int:
    """Ranks over which the states of one copy of the model are divided."""
    if scenario.mesh.model_parts > 1:
        return scenario.mesh.model_parts
    return scenario.shard_size or scenario.world_size


def candidates(asked: EstimateRequest) -> Iterator[EstimateRow]:
    """The rows before anything is predicted, by world size and then by backend."""
    for world_size in asked.world_sizes:
        for label in _labels(asked, world_size):
            yield _planned(asked, label, world_size)


MOST_STAGES = 16
"""Of a pipeline that nobody described."""


def _labels(asked: EstimateRequest, world_size: int) -> list[str]:
    """Those to predict; of every strategy also one process, and a pipeline of no more stages than blocks."""
    if not asked.names_all:
        return list(asked.labels)
    most = min(MOST_STAGES, len(asked.model.layout.blocks))
    stages = max(n for n in range(1, most + 1) if world_size % n == 0)
    staged = {"pp": f"pp:stages={stages}"} if 1 < stages < world_size else {}
    alone = [registry.REFERENCE] if world_size == 1 else []
    return list(dict.fromkeys([*alone, *(staged.get(label, label) for label in asked.labels)]))


def _planned(asked: EstimateRequest, label: str, world_size: int) -> EstimateRow:
    per_node = min(asked.ranks_per_node, world_size)
    training, job = asked.experiment.training, asked.experiment.job()
    layout: BatchLayout | None = None
    misfit = None
    try:
        layout = cell_layout(label, world_size, job_layout([label], world_size, training), training)
    except JobError as error:
        misfit = str(error)
    world = World.planned(world_size, per_node, asked.torch_device)
    reason = why_not_planned(label, job, world, layout.micro_batch_size if layout else None, asked.model)
    reason = reason or misfit
    if layout is None or reason is not None:
        return EstimateRow(label=label, world_size=world_size, unsupported=reason)
    scenario = Scenario.of(
        label,
        asked.model,
        with_global_batch(job, layout),
        world_size=world_size,
        ranks_per_node=per_node,
        preset=asked.experiment.runtime.preset,
        micro_batch_size=layout.micro_batch_size,
        accumulation_steps=layout.accumulation_steps,
        torch_device=asked.torch_device,
        device=asked.device,
        fabric=asked.fabric,
        constants=asked.constants,
    )
    return EstimateRow(label=label, world_size=world_size, scenario=scenario)


def estimate(asked: EstimateRequest, by: Predictors | None = None) -> list[EstimateRow]:
    """Every row of a question. A row that cannot be predicted says why.

    Raises HarnessError if no strategy can run the job on any of the numbers of ranks.
    """
    rows = list(candidates(asked))
    if all(row.scenario is None for row in rows):
        first, more = rows[0], len(rows) - 1
        raise HarnessError(
            f"{first.label} cannot run on {ranks(first.world_size)}: {first.unsupported}"
            + (f"; nor can any of the {more} others that were asked for" if more else "")
        )
    by = by or Predictors()
    by.prepare(row.scenario for row in rows if row.scenario)
    return [found for row in rows for found in _predicted_variants(asked, row, by)]


def _predicted_variants(asked: EstimateRequest, row: EstimateRow, by: Predictors) -> Iterator[EstimateRow]:
    """A row; and, if every strategy was asked for, the same one that reduces in every micro-step, where whole
    gradients that add up leave no room."""
    predicted = _predicted(row, by)
    each = reducing_each(row.label) if asked.names_all and _accumulates_too_much(predicted) else None
    if each is None:
        yield predicted
        return
    yield replace(predicted, reduced_each_time=None)
    yield _predicted(_planned(asked, each, row.world_size), by)


def _accumulates_too_much(row: EstimateRow) -> bool:
    several = row.scenario is not None and row.scenario.accumulation_steps > 1
    return several and row.verdict is not None and not row.verdict.leaves_room


def trust_of(rows: Sequence[Prediction], answer: Prediction | None = None) -> Trust | None:
    """How wrong such predictions have been; None: of no row is more than states and traffic predicted.

    `answer`: what is said to fit in place of all rows.
    """
    rows = rows if answer is None else [answer]
    known = [row for row in rows if row.scenario and (row.memory or row.near_bounds or row.speed)]
    if not known:
        return None
    share = max((row.speed.host_share for row in known if row.speed), default=None)
    return trust_in(
        *(row.scenario for row in known if row.scenario), speed=share is not None, host_share=share,
        update_share=known[0].speed.host_update_share if known[0].speed else None,
        bounded=not any(row.memory for row in known),
    )  # fmt: skip


def _predicted(row: EstimateRow, by: Predictors) -> EstimateRow:
    scenario = row.scenario
    if scenario is None:
        return row
    traffic, traffic_unknown = tried(lambda: tuple(step_traffic(scenario)))
    row = replace(row, traffic=traffic or (), traffic_unknown=traffic_unknown, **vars(predict(scenario, by)))
    decides = row.verdict is not None and not row.verdict.is_roomy
    return replace(row, reduced_each_time=reduced_each_time(scenario, by) if decides else None)


def alternatives_of_rows(
    rows: Sequence[EstimateRow], by: Predictors | None = None
) -> dict[int, list[Alternative]]:
    """By number of ranks of an estimate; empty where something fits, or no GPU was named."""
    by_size: dict[int, list[EstimateRow]] = {}
    for row in rows:
        by_size.setdefault(row.world_size, []).append(row)
    found = {}
    for size, of_size in sorted(by_size.items()):
        scenarios = [row.scenario for row in of_size if row.scenario and (row.memory or _is_mixture(row))]
        fits = any(row.verdict.is_roomy if row.verdict else row.states_leave_room for row in of_size)
        if scenarios and not fits and scenarios[0].device is not None:
            found[size] = alternatives(bases(scenarios), by=by)
    return found


def _is_mixture(row: EstimateRow) -> bool:
    return row.scenario is not None and mixture_of_experts(row.scenario.model.config)
