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
from harness.request import RunRequest, checkpoint_folder, rank_file, snapshot_file, trace_file
from harness.worker.checkpoint import CheckpointProbe
from harness.worker.communication import CommunicationCounter
from harness.worker.environment import device_name, join_process_group, prepare_process, world_of
from harness.worker.events import EventWriter
from harness.worker.loop import Loop, describe_data
from harness.worker.matmul_peak import measured_peaks
from harness.worker.memory import NoAllocatorProbe, allocator_probe, host_peak_bytes
from harness.worker.model import (
    build_model,
    describe_layout,
    describe_model,
    model_config,
)
from harness.worker.observer import Observer
from harness.worker.optimizer import decaying_names
from harness.worker.phases import phase_timer
from harness.worker.probes import Probes
from harness.worker.samples import Sampler, load_samples
from harness.worker.snapshot import Snapshot
from harness.worker.termination import tell_before_ending
from harness.worker.tracer import Tracer
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
    reasons = backend.unmet_requirements(world)
    if reasons:
        events.write("unsupported", reasons=reasons)
        return
    allocator = allocator_probe(world.device) if request.measure.counted_steps else NoAllocatorProbe()
    counter = CommunicationCounter()
    with counter.counting("setup"):
        collectives = join_process_group(world, COLLECTIVE_TIMEOUT_SECONDS)
    job = request.job
    layout = BatchLayout(
        global_batch_size=job.training.global_batch_size or 0,
        micro_batch_size=request.micro_batch_size,
        accumulation_steps=request.accumulation_steps,
    )
    samples = load_samples(job)
    sampler = Sampler(samples, job)
    trace = trace_file(run_directory, world.rank) if request.measure.trace else None
    tracer = Tracer(world.device, trace)
    snapshot = Snapshot(snapshot_file(run_directory, world.rank)) if request.measure.memory_snapshot else None
    observer = Observer()
    probes = Probes(
        allocator, counter, tracer, observer, counted_steps=request.measure.counted_steps, snapshot=snapshot
    )
    built: dict[str, Any] = {}
    with counter.counting("setup"):
        engine = _prepare(request, world, backend, samples.vocabulary_size, built, observer)
    engine.train(True)
    probes.attach(engine, sampler.held_tensors)
    with counter.counting("digest"):
        initial = digest_weights(engine) if request.measure.weight_digests else None
    measure = request.measure
    checkpoint = CheckpointProbe(
        folder=checkpoint_folder(run_directory), keep=measure.keep_checkpoint, world=world
    )
    loop = Loop(
        job=job,
        layout=layout,
        measure=measure,
        world=world,
        samples=samples,
        sampler=sampler,
        engine=engine,
        probes=probes,
        timer=phase_timer(world.device),
        tracer=tracer,
        observer=observer,
        events=events,
        checkpoint=checkpoint if measure.checkpoint else None,
        examine_steps=request.examine_steps,
    )
    dist.barrier()
    setup_seconds = time.perf_counter() - started
    peaks = (
        measured_peaks(world.device, compute_dtype(job.training.precision))
        if request.measure.matmul_peak
        else {}
    )
    events.write(
        "setup",
        effective=asdict(engine.effective()),
        native_config=engine.native_config(),
        versions={name: _version(name) for name in backend.packages},
        initial_weights=initial,
        collectives=collectives,
        host=socket.gethostname(),
        device_name=device_name(world),
        **built,
        data=describe_data(samples, sampler),
        steps=loop.steps,
        matmul_flops_per_second=peaks,
        setup_seconds=setup_seconds,
    )

    def measured() -> None:
        events.write(
            "measured",
            memory=probes.memory,
            communication=counter.rows(),
            early_reduced_bytes=counter.early_reduced_bytes,
            overlap=tracer.rows,
            probe_seconds=probes.seconds_per_step() | _tracer_seconds(tracer),
            timed_probes=sorted(probes.timed_probes),
            reserved_bytes=allocator.reserved_peak_bytes(),
            host_peak_bytes=host_peak_bytes(),
        )

    def stopped() -> None:
        # A step that was counted in part would pass for a complete one.
        if probes.memory and not probes.within_counted_step:
            measured()
        events.write("stopped", at=time.time())
        if on_termination is not None:
            on_termination()

    tell_before_ending(stopped)
    loop.run()
    measured()
    events.write(
        "final",
        weights=digest_weights(engine) if request.measure.weight_digests else None,
        observed=observer.report(),
        probe_loss=observer.probe_loss(engine, loop.probe_batch()),
    )
    events.write("done")
    events.close()
    dist.barrier()


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


def _tracer_seconds(tracer: Tracer) -> dict[str, float]:
    return {"tracer": tracer.seconds / len(tracer.rows)} if tracer.rows else {}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
