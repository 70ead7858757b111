"""Turns what ranks left behind into a record, whether they finished or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from harness.backends import registry
from harness.backends.mesh import Mesh
from harness.provenance import package_versions
from harness.record import (
    AnswersPart,
    ArtifactKind,
    ArtifactPart,
    BackendPart,
    DimensionPart,
    ErrorPart,
    ObservedPart,
    RankPart,
    Record,
    Status,
    StepPart,
    WindowsPart,
    WorldPart,
)
from harness.run_directory.events import SetupEvent, StepEvent
from harness.run_directory.nodes import environment_of
from harness.run_directory.outcome import Outcome
from harness.run_directory.rank_events import RankEvents, read_events
from harness.run_directory.request import RunRequest, checkpoint_folder, snapshot_file, trace_file
from harness.run_directory.status import status_of
from harness.run_directory.sums import Events, evaluations_of, steps_of
from harness.safe_text import described, encodable

PHASES = ("forward", "backward", "step")
WAITING = "waiting"
Value = TypeVar("Value", int, str)


def assemble(run_directory: Path, request: RunRequest, outcome: Outcome) -> Record:
    """Build the record of a run from its ranks' events and the way its processes ended."""
    events, broken = read_events(run_directory, request.world_size)
    steps = steps_of(events, _mesh(request))
    status, error = status_of(run_directory, events, steps, outcome)
    return _record(run_directory, request, events, steps, status, error, broken)


def record_of_fault(run_directory: Path, request: RunRequest, error: BaseException) -> Record:
    """The record of a run of which nothing else can be said than that starting or reading it raised this."""
    events = {rank: RankEvents() for rank in range(request.world_size)}
    part = ErrorPart(kind=encodable(type(error).__name__), message=described(error))
    return _record(run_directory, request, events, [], "failed", part, 0)


def _record(
    run_directory: Path,
    request: RunRequest,
    events: Events,
    steps: list[StepPart],
    status: Status,
    error: ErrorPart | None,
    broken: int,
) -> Record:
    setup, final = events[0].setup, events[0].final
    windows: list[str] = [step.window for step in steps]
    return Record(
        run_id=request.run_id,
        created_at=request.created_at,
        status=status,
        error=error,
        reasons=list(dict.fromkeys(r for of_rank in events.values() for r in of_rank.reasons)),
        command=request.command,
        job=request.job,
        job_id=request.job_id,
        resumed=request.resume.saved.resumed() if request.resume else None,
        cell=request.cell,
        repeat=request.repeat,
        measure=request.measure,
        question=request.question,
        price_per_gpu_hour=request.price_per_gpu_hour,
        backend=_backend(request, setup),
        world=_world(request, setup),
        environment=environment_of(run_directory, request, setup, broken),
        layout=setup.layout if setup else None,
        model=setup.model if setup else None,
        data=setup.data if setup else None,
        initial_weights=setup.initial_weights if setup else None,
        final_weights=final.weights if final else None,
        observed=_observed(events, _mesh(request)),
        steps=steps,
        ranks=[part for rank in events if (part := rank_part(rank, events[rank])) is not None],
        comm=[
            row for of_rank in events.values() if of_rank.measured for row in of_rank.measured.communication
        ],
        eval=evaluations_of(events, _mesh(request)),
        answers=_answers(events, _mesh(request)),
        windows=WindowsPart(**{name: windows.count(name) for name in WindowsPart.model_fields}),
        skipped_steps=sum(step.gradient_norm is None for step in steps)
        if request.job.training.precision == "fp16-mixed"
        else 0,
        prediction=request.prediction,
        artifacts=_artifacts(run_directory, request),
    )


def assemble_refused(run_directory: Path, request: RunRequest, reason: str) -> Record:
    """Build the record of a run whose ranks were not started."""
    events = {rank: RankEvents() for rank in range(request.world_size)}
    events[0].reasons.append(reason)
    return _record(run_directory, request, events, [], "unsupported", None, 0)


def _backend(request: RunRequest, setup: SetupEvent | None) -> BackendPart:
    entry, options = registry.parse(request.backend)
    return BackendPart(
        label=request.backend,
        name=entry.name,
        options=options.model_dump(mode="json"),
        effective=setup.effective if setup else None,
        native_config=setup.native_config if setup else None,
        versions=(setup.versions if setup else None) or package_versions(),
        claim=setup.claim if setup else None,
        own_forms=setup.own_forms if setup else None,
        given=request.given,
    )


def _world(request: RunRequest, setup: SetupEvent | None) -> WorldPart:
    return WorldPart(
        nodes=request.world_size // request.ranks_per_node,
        ranks_per_node=request.ranks_per_node,
        world_size=request.world_size,
        device=request.device,
        collectives=setup.collectives if setup else ("nccl" if request.device == "cuda" else "gloo"),
        threads_per_rank=request.threads_per_rank,
        micro_batch_size=request.micro_batch_size,
        accumulation_steps=request.accumulation_steps,
        preset=request.preset,
        memory_limit_bytes=request.memory_limit_bytes,
        dimensions=_dimensions(request),
    )


def _observed(events: Events, mesh: Mesh) -> ObservedPart | None:
    """As rank 0 saw it; of a pipeline's ranks each trains parameters of its own."""
    seen = [of_rank.final.observed for of_rank in events.values() if of_rank.final is not None]
    first = events[0].final
    if first is None:
        return None
    if mesh.size("pipeline") == 1:
        return first.observed
    left_out = set.intersection(*(set(part.parameters_left_out) for part in seen))
    return first.observed.model_copy(update={"parameters_left_out": sorted(left_out)})


def _mesh(request: RunRequest) -> Mesh:
    return registry.mesh_of(request.backend, request.world_size)


def _dimensions(request: RunRequest) -> list[DimensionPart]:
    mesh = _mesh(request)
    return [DimensionPart(name=name, size=size) for name, size in mesh.sizes] if mesh.shares_samples else []


def _artifacts(run_directory: Path, request: RunRequest) -> list[ArtifactPart]:
    """What ranks left next to their events: traces, snapshots of CUDA memory, a checkpoint."""
    found: list[tuple[ArtifactKind, int | None, Path]] = []
    for rank in range(request.world_size):
        found.append(("trace", rank, trace_file(run_directory, rank)))
        found.append(("memory snapshot", rank, snapshot_file(run_directory, rank)))
    if request.measure.keep_checkpoint:
        found.append(("checkpoint", None, checkpoint_folder(run_directory)))
    return [ArtifactPart(kind=kind, rank=rank, path=path.name) for kind, rank, path in found if path.exists()]


def rank_part(rank: int, events: RankEvents) -> RankPart | None:
    """What one rank measured; None: it never was ready to train."""
    setup, measured, final, steps = events.setup, events.measured, events.final, events.steps
    if setup is None:
        return None
    return RankPart(
        rank=rank,
        host=setup.host,
        device_name=setup.device_name,
        setup_seconds=setup.setup_seconds,
        setup_memory=setup.host_memory,
        step_seconds=[row.seconds for row in steps],
        data_seconds=[row.data_seconds for row in steps],
        phase_seconds=_phase_seconds(steps),
        sample_hashes=_known([row.sample_hashes for row in steps]),
        samples=_known([row.samples for row in steps]),
        target_tokens=_known([row.target_tokens for row in steps]),
        loss_sums=[row.loss_sum for row in steps],
        gradient_norms=[row.gradient_norm for row in steps],
        batch_digests=[row.batch_digests for row in steps if row.batch_digests is not None],
        batch_hash_sums=[row.batch_hash_sum for row in steps],
        computed_loss_sums=[row.computed_loss_sum for row in steps],
        early_reduced_bytes=measured.early_reduced_bytes if measured else None,
        initial_digest=setup.initial_weights.digest if setup.initial_weights else None,
        final_digest=final.weights.digest if final and final.weights else None,
        probe_loss=final.probe_loss if final else None,
        memory=measured.memory if measured else [],
        checkpoints=[event.part for event in events.checkpoints],
        overlap=measured.overlap if measured else [],
        overlap_missing=measured.overlap_missing if measured else None,
        probe_seconds=measured.probe_seconds if measured else {},
        timed_probes=measured.timed_probes if measured else [],
        matmul_flops_per_second=setup.matmul_flops_per_second,
        reserved_bytes=measured.reserved_bytes if measured else None,
        num_alloc_retries=measured.num_alloc_retries if measured else None,
        host_peak_bytes=measured.host_peak_bytes if measured else None,
        processors=measured.processors if measured else None,
        energy=measured.energy if measured else None,
    )


def _phase_seconds(steps: Sequence[StepEvent]) -> dict[str, list[float]]:
    """Per step; 'waiting' where the engine runs a pipeline."""
    waits = any(WAITING in row.phase_seconds for row in steps)
    phases = (*PHASES, WAITING) if waits else PHASES
    return {phase: [row.phase_seconds.get(phase, 0.0) for row in steps] for phase in phases}


def _known(values: list[Value | None]) -> list[Value]:
    """One value per step; empty where a step has none."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _answers(events: Events, mesh: Mesh) -> AnswersPart | None:
    """Those of every data rank; None where one of them gave none."""
    counted = [of_rank for rank, of_rank in events.items() if mesh.counts_samples(rank)]
    parts = [of_rank.final.answers if of_rank.final else None for of_rank in counted]
    known = [part for part in parts if part is not None]
    given = sorted((answer for part in known for answer in part.given), key=lambda answer: answer.sample)
    if len(known) < len(parts) or not given:
        return None
    return AnswersPart(
        exact_match=100 * sum(answer.exact_match for answer in given) / len(given),
        f1=100 * sum(answer.f1 for answer in given) / len(given),
        seconds=max(part.seconds for part in known),
        given=given,
    )
