"""One rank of one run, from its request to its last event."""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.backends import registry
from harness.backends.base import Backend, Engine, LossScale, SetupContext, Unsupported, World
from harness.backends.precision import compute_dtype
from harness.batch import BatchLayout
from harness.errors import HarnessError
from harness.run_directory.request import RunRequest, checkpoint_folder, rank_file
from harness.worker.checkpoint import CheckpointProbe
from harness.worker.environment import device_name, join_process_group, prepare_process, world_of
from harness.worker.events import EventWriter
from harness.worker.instruments import Instruments
from harness.worker.loop import Loop, describe_data
from harness.worker.matmul_peak import measured_peaks
from harness.worker.model import (
    build_model,
    describe_layout,
    describe_model,
    model_config,
)
from harness.worker.observer import Observer
from harness.worker.optimizer import decaying_names
from harness.worker.own_forms import own_forms
from harness.worker.phases import phase_timer
from harness.worker.samples import Sampler, Samples, load_samples
from harness.worker.termination import tell_before_ending
from harness.worker.weights import digest_weights

COLLECTIVE_TIMEOUT_SECONDS = 600.0


def run_rank(run_directory: Path, on_termination: Callable[[], None] | None = None) -> int:
    """Run this rank's part and write its events; return the exit code.

    0 also when the backend is unsupported; 1 when it failed or ran out of memory. The events say which.
    `on_termination` is called when the rank is asked to terminate while it trains, after it wrote its
    measurements.
    """
    started = time.perf_counter()
    request = RunRequest.read(run_directory)
    world = world_of(request)
    events = EventWriter(rank_file(run_directory, world.rank))
    try:
        _train(request, run_directory, world, events, started, on_termination)
    except Unsupported as reason:
        events.write("unsupported", reasons=[str(reason)])
    except (torch.OutOfMemoryError, MemoryError) as error:
        _fail(events, error, "oom")
        return 1
    except HarnessError as error:
        _fail(events, error, "failed")
        return 1
    except BaseException as error:
        traceback.print_exc()
        out_of_memory = "can't allocate memory" in str(error)
        _fail(events, error, "oom" if out_of_memory else "failed")
        return 1
    return 0


def _train(
    request: RunRequest,
    run_directory: Path,
    world: World,
    events: EventWriter,
    started: float,
    on_termination: Callable[[], None] | None,
) -> None:
    prepare_process(request, world)
    backend = registry.create(request.backend)
    if reasons := backend.unmet_requirements(world):
        events.write("unsupported", reasons=reasons)
        return
    instruments = Instruments.install(request, run_directory, world)
    counter, observer = instruments.counter, instruments.observer
    with counter.counting("setup"):
        collectives = join_process_group(world, COLLECTIVE_TIMEOUT_SECONDS)
    samples = load_samples(request.job)
    sampler = Sampler(samples, request.job)
    built: dict[str, Any] = {}
    with counter.counting("setup"):
        engine = _prepare(request, world, backend, samples.vocabulary_size, built, observer)
    engine.train(True)
    instruments.probes.attach(engine, sampler.held_tensors)
    with counter.counting("digest"):
        initial = digest_weights(engine) if request.measure.weight_digests else None
    loop = _loop(request, run_directory, world, samples, sampler, engine, instruments, events)
    claims = _claims(backend, request, world, loop, built, collectives)
    dist.barrier()
    events.write(
        "setup",
        setup_seconds=time.perf_counter() - started,
        effective=asdict(engine.effective()),
        native_config=engine.native_config(),
        versions={name: _version(name) for name in backend.packages},
        initial_weights=initial,
        collectives=collectives,
        **claims,
        host=socket.gethostname(),
        device_name=device_name(world),
        **built,
        data=describe_data(samples, sampler),
        steps=loop.steps,
        matmul_flops_per_second=_matmul_peaks(request),
    )
    tell_before_ending(lambda: _write_before_ending(instruments, events, on_termination))
    loop.run()
    instruments.write(events)
    _write_final(engine, observer, loop, events, digests=request.measure.weight_digests)
    dist.barrier()


def _write_final(
    engine: Engine, observer: Observer, loop: Loop, events: EventWriter, *, digests: bool
) -> None:
    events.write(
        "final",
        weights=digest_weights(engine) if digests else None,
        observed=observer.report(),
        probe_loss=observer.probe_loss(engine, loop.probe_batch()),
    )
    events.write("done")
    events.close()


def _write_before_ending(
    instruments: Instruments, events: EventWriter, on_termination: Callable[[], None] | None
) -> None:
    # A step that was counted in part would pass for a complete one.
    if instruments.probes.memory and not instruments.probes.within_probed_step:
        instruments.write(events)
    events.write("stopped", at=time.time())
    if on_termination is not None:
        on_termination()


def _loop(
    request: RunRequest,
    run_directory: Path,
    world: World,
    samples: Samples,
    sampler: Sampler,
    engine: Engine,
    instruments: Instruments,
    events: EventWriter,
) -> Loop:
    measure = request.measure
    checkpoint = CheckpointProbe(
        folder=checkpoint_folder(run_directory), keep=measure.keep_checkpoint, world=world
    )
    return Loop(
        job=request.job,
        layout=BatchLayout(
            global_batch_size=request.job.training.global_batch_size or 0,
            micro_batch_size=request.micro_batch_size,
            accumulation_steps=request.accumulation_steps,
        ),
        measure=measure,
        world=world,
        samples=samples,
        sampler=sampler,
        engine=engine,
        probes=instruments.probes,
        timer=phase_timer(world.device),
        tracer=instruments.tracer,
        observer=instruments.observer,
        events=events,
        checkpoint=checkpoint if measure.checkpoint else None,
        examine_steps=request.examine_steps,
    )


def _prepare(
    request: RunRequest,
    world: World,
    backend: Backend,
    vocabulary_size: int,
    built: dict[str, Any],
    observer: Observer,
) -> Engine:
    """Prepare the engine; `built` receives what the record says of the bare model."""
    job = request.job
    config = model_config(job, vocabulary_size)
    decaying: list[frozenset[str]] = []

    def build() -> torch.nn.Module:
        model = build_model(job, config)
        decaying.append(decaying_names(model, job.optimizer))
        built["model"] = describe_model(model)
        built["layout"] = describe_layout(model, decaying[-1])
        observer.built(model)
        return model

    context = SetupContext(
        world=world,
        precision=job.training.precision,
        gradient_clipping=job.training.gradient_clipping,
        micro_batch_size=request.micro_batch_size,
        accumulation_steps=request.accumulation_steps,
        preset=request.preset,  # type: ignore[arg-type]
        compute_loss=observer.compute_loss,
        loss_scale=LossScale(
            initial=job.training.initial_loss_scale,
            growth_interval=job.training.loss_scale_growth_interval,
        ),
    )
    return backend.prepare(
        build, lambda named: observer.build_optimizer(named, job.optimizer, decaying[-1]), context
    )


def _fail(events: EventWriter, error: BaseException, status: str) -> None:
    events.write(
        "failure",
        status=status,
        error_kind=type(error).__name__,
        message=str(error) or repr(error),
        at=time.time(),
    )


def _claims(
    backend: Backend, request: RunRequest, world: World, loop: Loop, built: dict[str, Any], transport: str
) -> dict[str, Any]:
    """The strategy that a third party's backend claims, and its own closed forms, which rank 0 writes."""
    claim = registry.claimed_strategy(backend)
    forms = own_forms(backend, request, world, loop, built, transport) if world.rank == 0 else None
    return {"claim": asdict(claim) if claim else None, "own_forms": asdict(forms) if forms else None}


def _matmul_peaks(request: RunRequest) -> dict[str, float]:
    """What matrix products alone reach, where that was asked for."""
    if not request.measure.matmul_peak:
        return {}
    return measured_peaks(request.device, compute_dtype(request.job.training.precision))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
