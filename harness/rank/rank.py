"""One rank of one run, from its request to its last event."""

from __future__ import annotations

import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn

from harness.backends import registry
from harness.backends.base import Backend, Batch, Engine, LossScale, SetupContext, Unsupported, World
from harness.backends.checkpoints.torch_pieces import moments_checksum
from harness.backends.libraries.facts import installed_version
from harness.backends.model.precision import compute_dtype
from harness.backends.model_source import AskedLoading
from harness.backends.refusals import explain_refusal
from harness.backends.registry import strategy_of
from harness.errors import HarnessError
from harness.forms.optimizers import why_not
from harness.forms.terms import OwnForms
from harness.job.job import OptimizerSection, UpdateGroup
from harness.job.pairs import why_refused
from harness.rank.accelerator import describe_accelerator, measured_peaks, placement
from harness.rank.answers import answer_questions
from harness.rank.checkpoint import LOADING_PHASE, CheckpointProbe, if_supported, load
from harness.rank.data import DataFacts, Sampler, Samples, load_samples
from harness.rank.failure_words import failure_message, note_parameters
from harness.rank.initial_weights import JobModelSource, why_whole
from harness.rank.instruments import Instruments, RankContext
from harness.rank.live.observer import Observer
from harness.rank.loop import Loop, describe_data, training_steps
from harness.rank.models.changes import narrow_products, while_compiling
from harness.rank.models.description import BATCHES, Built, find_module_uses, split_dependence
from harness.rank.models.losses import divide_sequence, loss_function, returns_loss, targets_of
from harness.rank.models.model import model_config
from harness.rank.models.optimizer import frozen_names, try_own, update_groups
from harness.rank.probes.communication import CommunicationCounter
from harness.rank.probes.device_watch import watch_device
from harness.rank.probes.memory import HostPeak
from harness.rank.probes.weights import combined, digest_share, digest_weights, moment_sums
from harness.rank.process import environment
from harness.rank.process.start import SignalThread, Turns
from harness.record import ObservedPart, SetupMemoryPart, WeightsPart
from harness.record.run import weights_differ
from harness.record.workload import NOT_CLAIMED, of_job
from harness.run_directory.assemble import EVENTS_LOST
from harness.run_directory.events import (
    DoneEvent,
    EventWriter,
    FailureEvent,
    FinalEvent,
    SetupEvent,
    StoppedEvent,
    UnsupportedEvent,
    is_out_of_memory,
    tell_through,
)
from harness.run_directory.rank_state import PositionWriter
from harness.run_directory.request import Resume, RunRequest, rank_file, require_steps_left, weights_folder
from harness.safe_text import described, encodable


def prepare_engine(
    request: RunRequest,
    world: World,
    backend: Backend,
    facts: DataFacts,
    observer: Observer,
    weights_folder: Path,
    example: Batch | None = None,
    first_batches: tuple[Callable[[Sequence[int]], Batch], Sequence[Sequence[int]]] | None = None,
) -> tuple[Engine, Built]:
    """The engine, and what the record says of the bare model that it was given.

    weights_folder: for files of initial weights, shared by the ranks of a machine. example: two samples.
    first_batches: of the reference, what makes a batch of samples, and those of its first steps.
    """
    built = Built()
    job = request.job
    config = model_config(job, facts)
    updated: list[tuple[UpdateGroup, ...]] = []

    def note(model: nn.Module) -> None:
        note_parameters(model)
        updated.append(update_groups(model, job.optimizer))
        traced = find_module_uses(job, model, config, example)
        built.describe(model, updated[-1], traced, whole)
        if first_batches is not None:
            built.split = split_dependence(job, model, *first_batches)
        whole_loss = loss_function(job, model)
        loss = divide_sequence(job, model, world, whole_loss)
        # The reference widens products to measure what fp8 changes.
        if job.training.precision == "fp8" and getattr(backend.options, "precision", None) != "fp32":
            narrow_products(model)
        in_one_piece = loss is whole_loss and job.model.compile == "none" and world.mesh.model_parts == 1
        beside = partial(targets_of, job=job) if in_one_piece and returns_loss(job, model) else None
        observer.built(model, loss, frozen_names(model), targets_of_model_loss=beside)

    whole = why_whole(job, request.loading)
    loading: AskedLoading = "full" if whole else request.loading
    source = JobModelSource(job, config, world, loading=loading, folder=weights_folder, on_built=note)
    optimizer, built.update_of_part = _optimizer(request, backend)
    context = SetupContext(
        world=world,
        precision=job.training.held_precision,
        gradient_clipping=job.training.gradient_clipping,
        micro_batch_size=request.micro_batch_size,
        accumulation_steps=request.accumulation_steps,
        preset=request.preset,  # type: ignore[arg-type]
        compute_loss=observer.compute_loss,
        loss_scale=LossScale(
            initial=job.training.initial_loss_scale, growth_interval=job.training.loss_scale_growth_interval
        ),
        optimizer=optimizer.kind,
        compile=job.model.compile,
    )
    engine = backend.prepare(
        source, lambda named: observer.build_optimizer(named, optimizer, updated[-1]), context
    )
    return engine, built


def _optimizer(request: RunRequest, backend: Backend) -> tuple[OptimizerSection, float | None]:
    """The optimizer that runs, and what `OwnUpdate.of_part` says of the user's own.

    Raises Unsupported where the strategy cannot have it.
    """
    optimizer = request.job.optimizer
    strategy = strategy_of(request.backend)
    precision = request.job.training.precision
    if strategy is not None and (reason := why_not(optimizer.kind, strategy, precision)) is not None:
        raise Unsupported(reason)
    own = try_own(optimizer)
    if own is not None and (reason := own.why_not(strategy)) is not None:
        raise Unsupported(reason)
    at_full_width = getattr(backend.options, "states", None) == "fp32"
    of_part = own.of_part if own is not None else None
    return optimizer.at_full_width() if at_full_width else optimizer, of_part


def begin_training(loop: Loop, resume: Resume | None) -> None:
    """Bring the engine into the state in which its first step begins; a collective where it resumes.

    From here on its memory is read.
    """
    loop.engine.train(True)
    if resume is not None:
        loop.rank.position.enter("load checkpoint")
        _load(loop, resume)
        loop.rank.position.enter("setup")
    loop.instruments.probes.attach(loop.engine, loop.sampler.held_tensors)


def _load(loop: Loop, resume: Resume) -> None:
    """Raises Unsupported where the backend cannot read the format, and HarnessError if no step is left, or if
    the moments, the step count or the loss scale are not what was saved.
    """
    saved, engine, probes = resume.saved, loop.engine, loop.instruments.probes
    require_steps_left(saved, loop.steps)
    if saved.format == "native" and saved.native_format != engine.native_format():
        raise Unsupported(
            f"the checkpoint of run {saved.run_id} is native to {saved.native_format}, which "
            f"{engine.native_format()} does not read; save it with measure.checkpoint=neutral"
        )
    load(engine, resume.folder, saved.format, saved.step, loop.rank, probes)
    if saved.moments_checksum is not None and moments_checksum(engine) != saved.moments_checksum:
        raise HarnessError(
            f"the moments of Adam after loading are not those that run {saved.run_id} saved: the checkpoint "
            "is damaged, or this backend keeps its moments in another dtype"
        )
    progress = if_supported(engine.progress)
    for name in ("updates", "loss_scale") if progress is not None else ():
        found, expected = getattr(progress, name), getattr(saved, name)
        if expected is not None and found != expected:
            raise HarnessError(
                f"after loading the checkpoint of run {saved.run_id} the optimizer's "
                f"{name.replace('_', ' ')}: {found}, saved were {expected}; the training would not continue "
                "from the same state"
            )
    with probes.counting(LOADING_PHASE):
        engine.rehearse(loop.probe_batch())


def digest_initial_weights(
    request: RunRequest, engine: Engine, counter: CommunicationCounter, of_engine: HostPeak
) -> tuple[WeightsPart | None, SetupMemoryPart | None]:
    """Each None where it was not asked for or cannot be measured; a collective.

    of_engine: watched the engine being prepared. Raises HarnessError if the master weights are not those that
    were saved, where both have a digest.
    """
    weights = None
    with HostPeak() as of_digest:
        if request.measure.weight_digests:
            with counter.counting("digest"):
                share = digest_share(engine)
            weights = combined(share, engine)
    if request.resume is not None and weights is not None:
        saved = request.resume.saved
        if weights_differ(saved.weights_digest, weights.digest):
            raise HarnessError(
                f"the weights after loading have the digest {weights.digest[:12]}, those that run "
                f"{saved.run_id} saved {str(saved.weights_digest)[:12]}: the checkpoint is damaged, or this "
                "backend keeps its master weights in another dtype"
            )
    if of_engine.before_bytes is None:
        return weights, None
    return weights, SetupMemoryPart(
        before_bytes=of_engine.before_bytes,
        engine_peak_bytes=of_engine.peak_bytes or 0,
        engine_bytes=of_engine.after_bytes or 0,
        digest_peak_bytes=of_digest.peak_bytes or 0,
    )


def own_forms(backend: Backend, loop: Loop, built: Built, transport: str) -> OwnForms | None:
    """Model states of every rank and the collectives of the run, from rank 0.

    None on other ranks, and where the backend brings no closed forms.
    `built` has the layout and the description of the bare model.
    """
    request, world = loop.rank.request, loop.rank.world
    forms = backend.closed_form() if world.rank == 0 else None
    if forms is None:
        return None
    assert built.model is not None
    assert built.layout is not None
    workload = of_job(
        request.job,
        layout=built.layout,
        architecture=built.model.architecture,
        strategy=registry.claimed_strategy(backend) or NOT_CLAIMED,
        world_size=world.world_size,
        mesh=world.mesh,
        shard_size=loop.engine.effective().details.get("shard_size"),
        ranks_per_node=world.ranks_per_node,
        preset=request.preset,
        micro_batch_size=request.micro_batch_size,
        accumulation_steps=request.accumulation_steps,
        device=world.device,
        transport=transport,
        options=backend.options.model_dump(mode="json"),
        steps=tuple(s for s in range(loop.first_step, loop.steps) if loop.window(s) == "probed"),
        evaluation_every=request.job.evaluation.every_steps,
    )
    ranks = (replace(workload, rank=rank) for rank in range(world.world_size))
    return OwnForms(
        states=tuple(forms.model_states(of_rank) for of_rank in ranks),
        volume=forms.collectives(workload),
        steps=workload.steps,
    )


def run_rank(
    run_directory: Path, on_termination: Callable[[], None] | None = None, turns: Turns | None = None
) -> int:
    """Run this rank's part and write its events; return the exit code.

    0 also when the backend is unsupported; 1 when it failed or ran out of memory. The events say which.
    `on_termination` is called when the rank is asked to terminate while it trains, after it wrote its
    measurements. `turns`: those in which it takes its timed steps.
    """
    request = RunRequest.read(run_directory)
    world = environment.world_of(request.device, request.ranks_per_node)
    try:
        rank = RankContext(
            request=request,
            run_directory=run_directory,
            world=world,
            started=time.perf_counter(),
            events=EventWriter(rank_file(run_directory, world.rank)),
            position=PositionWriter(run_directory, world.rank),
            signals=SignalThread(),
            on_termination=on_termination,
            turns=turns,
        )
    except OSError as error:
        sys.stderr.write(f"events cannot be written: {error}\n")
        return EVENTS_LOST
    rank.signals.on_state_asked(run_directory, world.rank)
    tell_through(rank.position.hear)
    try:
        rank = replace(rank, world=registry.placed(request.backend, world))
        environment.prepare_process(request, rank.world)
        _train(rank)
    except Unsupported as reason:
        rank.events.write(UnsupportedEvent(reasons=[described(reason)]))
    except HarnessError as error:
        return _fail(rank, error, "failed")
    except BaseException as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError):
            with suppress(Exception):  # of an exception that cannot be shown
                traceback.print_exc()
        return _fail(rank, error, "oom" if is_out_of_memory(error) else "failed")
    return 0


def _train(rank: RankContext) -> None:
    request, world, events, position = rank.request, rank.world, rank.events, rank.position
    weights = weights_folder(rank.run_directory)
    backend = registry.create(request.backend)
    refused = why_refused(request.backend, world.world_size, request.job)
    if reasons := [*registry.unmet_requirements(backend, world), *filter(None, [refused])]:
        events.write(UnsupportedEvent(reasons=reasons))
        return
    instruments = Instruments.install(rank)
    counter, observer = instruments.counter, instruments.observer
    position.enter("rendezvous")
    with counter.counting("setup"):
        collectives = environment.join_process_group(world, request.limits.collective_seconds)
    peaks, not_setup = _matmul_peaks(request)
    position.enter("load data")
    sampler = Sampler(samples := load_samples(request.job), request.job)
    position.enter("setup")
    with counter.counting("setup"), HostPeak() as of_engine:
        facts, example = samples.facts, samples.batch([0, 0])
        first = None
        if request.backend == registry.REFERENCE:
            steps = range(min(BATCHES, training_steps(request.job, sampler)))
            first = samples.batch, [sampler.step_ids(step) for step in steps]
        engine, built = prepare_engine(request, world, backend, facts, observer, weights, example, first)
    while_compiling(lambda: position.within("compile"))
    loop = _loop(rank, samples, sampler, engine, instruments)
    begin_training(loop, request.resume)
    initial, host_memory = digest_initial_weights(request, engine, counter, of_engine)
    forms = own_forms(backend, loop, built, collectives)
    dist.barrier()
    shutil.rmtree(weights, ignore_errors=True)
    with _explaining(request.backend):
        ready = SetupEvent(
            rank=world.rank,
            setup_seconds=time.perf_counter() - rank.started - not_setup,
            effective=engine.effective(),
            native_config=engine.native_config(),
            versions={name: installed_version(name) or "unknown" for name in backend.packages},
            initial_weights=initial,
            collectives=collectives,
            claim=registry.claimed_strategy(backend),
            own_forms=forms,
            host=socket.gethostname(),
            device_name=environment.device_name(world),
            placement=placement(world.device),
            accelerator=describe_accelerator(world.device),
            **vars(built),
            data=describe_data(samples, sampler),
            steps=loop.steps,
            setup_memory=host_memory,
            matmul_flops_per_second=peaks,
            random_state=environment.random_state(world.device),
        )
        events.write(ready)
        rank.signals.on_termination(lambda: _write_before_ending(instruments, rank))
        if rank.turns is not None:
            rank.turns.before_first = lambda: instruments.write(rank)
        instruments.before_training(request)
        loop.run()
    _finish(loop)


def _finish(loop: Loop) -> None:
    rank, engine, observer = loop.rank, loop.engine, loop.instruments.observer
    digests = rank.request.measure.weight_digests
    rank.position.begin_step(None)
    rank.position.enter("measurements")
    loop.instruments.write(rank)
    weights = digest_weights(engine) if digests else None
    moments = moment_sums(engine) if digests and observer.audits else None
    probe_loss = observer.probe_loss(engine, loop.probe_batch())
    progress = if_supported(engine.progress) if loop.job.training.precision == "fp16-mixed" else None
    in_force = engine.effective()
    final = FinalEvent(
        weights=weights,
        observed=ObservedPart(**observer.report()),
        probe_loss=probe_loss,
        loss_scale=progress.loss_scale if progress else None,
        answers=answer_questions(loop, most) if (most := loop.job.evaluation.answer_tokens) else None,
        in_force={name: getattr(in_force, name) for name in UNCHANGED},
        moment_sums=moments,
        **observer.audited(),
    )
    rank.events.write(final)
    dist.barrier()
    rank.position.enter("close")
    engine.close()
    rank.events.write(DoneEvent())
    rank.events.close()


UNCHANGED = ("gradient_clipping", "optimizer")
"""Fields of `Effective` that a training leaves as they are, and that decide what is trained."""


def _write_before_ending(instruments: Instruments, rank: RankContext) -> None:
    # A step that was counted in part would pass for a complete one.
    if instruments.probes.memory and not instruments.probes.within_probed_step:
        instruments.write(rank)
    rank.events.write(StoppedEvent(at=time.time()))
    if rank.on_termination is not None:
        rank.on_termination()


def _loop(
    rank: RankContext, samples: Samples, sampler: Sampler, engine: Engine, instruments: Instruments
) -> Loop:
    watch_device(rank.world, engine, rank.run_directory)
    instruments.tracer.every_thread = engine.own_thread
    checkpoint = CheckpointProbe(rank=rank, config=model_config(rank.request.job, samples.facts))
    return Loop(
        rank=rank,
        samples=samples,
        sampler=sampler,
        engine=engine,
        instruments=instruments,
        checkpoint=checkpoint if rank.request.measure.saves_checkpoint else None,
    )


def _fail(rank: RankContext, error: BaseException, status: Literal["oom", "failed"]) -> int:
    rank.signals.note_collectives(error)
    failure = FailureEvent(
        status=status,
        error_kind=encodable(type(error).__name__),
        message=failure_message(error, rank.run_directory, rank.request.backend),
        at=time.time(),
        step=rank.position.position.step,
        phase=rank.position.position.phase,
    )
    try:
        rank.events.write(failure)
    except OSError as full:
        with suppress(OSError):
            sys.stderr.write(f"events cannot be written ({full}); this one is lost: {failure.message}\n")
        return EVENTS_LOST
    return 1


@contextmanager
def _explaining(label: str) -> Iterator[None]:
    """Raise HarnessError for what a backend says of itself in types that the contract does not have."""
    try:
        yield
    except ValidationError as error:
        raise HarnessError(
            f"backend '{label}' breaks its contract: {explain_refusal(error, SetupEvent)}"
        ) from error


def _matmul_peaks(request: RunRequest) -> tuple[dict[str, float], float]:
    """What matrix products alone reach, all ranks at once, where that was asked for; seconds that it took."""
    if not request.measure.matmul_peak:
        return {}, 0.0
    began = time.perf_counter()
    dist.barrier()
    peaks = measured_peaks(request.device, compute_dtype(request.job.training.held_precision))
    return peaks, time.perf_counter() - began
