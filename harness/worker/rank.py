"""One rank of one run, from its request to its last event."""

from __future__ import annotations

import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import ValidationError

from harness.backends import registry
from harness.backends.base import Engine, Unsupported, World
from harness.backends.explain import explain
from harness.backends.precision import compute_dtype
from harness.batch import BatchLayout
from harness.errors import HarnessError
from harness.record import ObservedPart
from harness.run_directory.events import (
    DoneEvent,
    FailureEvent,
    FinalEvent,
    SetupEvent,
    StoppedEvent,
    UnsupportedEvent,
)
from harness.run_directory.out_of_memory import is_out_of_memory
from harness.run_directory.outcome import EVENTS_LOST
from harness.run_directory.rank_state import PositionWriter
from harness.run_directory.request import RunRequest, checkpoint_folder, rank_file, weights_folder
from harness.safe_text import described, encodable
from harness.spec.pairs import why_refused
from harness.worker.accelerator import describe_accelerator
from harness.worker.answers import answer_questions
from harness.worker.checkpoint import CheckpointProbe
from harness.worker.dataset import Samples
from harness.worker.device_watch import watch_device
from harness.worker.environment import (
    device_name,
    join_process_group,
    prepare_process,
    world_of,
)
from harness.worker.events import EventWriter
from harness.worker.failure_words import failure_message
from harness.worker.host_peak import HostPeak
from harness.worker.initial_weights import digest_initial_weights
from harness.worker.instruments import Instruments
from harness.worker.loop import Loop, describe_data
from harness.worker.matmul_peak import measured_peaks
from harness.worker.model import model_config
from harness.worker.own_forms import own_forms
from harness.worker.phases import phase_timer
from harness.worker.preparation import prepare_engine
from harness.worker.resume import begin_training
from harness.worker.samples import Sampler, load_samples
from harness.worker.signals import SignalThread
from harness.worker.weights import digest_weights


def run_rank(run_directory: Path, on_termination: Callable[[], None] | None = None) -> int:
    """Run this rank's part and write its events; return the exit code.

    0 also when the backend is unsupported; 1 when it failed or ran out of memory. The events say which.
    `on_termination` is called when the rank is asked to terminate while it trains, after it wrote its
    measurements.
    """
    request = RunRequest.read(run_directory)
    world = registry.placed(request.backend, world_of(request))
    try:
        telling = _Telling(
            started=time.perf_counter(),
            events=EventWriter(rank_file(run_directory, world.rank)),
            position=PositionWriter(run_directory, world.rank),
            signals=SignalThread(),
            on_termination=on_termination,
        )
    except OSError as error:
        sys.stderr.write(f"events cannot be written: {error}\n")
        return EVENTS_LOST
    telling.signals.on_state_asked(run_directory, world.rank)
    try:
        prepare_process(request, world)
        _train(request, run_directory, world, telling)
    except Unsupported as reason:
        telling.events.write(UnsupportedEvent(reasons=[described(reason)]))
    except HarnessError as error:
        return _fail(telling, run_directory, error, "failed")
    except BaseException as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError):
            with suppress(Exception):  # of an exception that cannot be shown
                traceback.print_exc()
        return _fail(telling, run_directory, error, "oom" if is_out_of_memory(error) else "failed")
    return 0


@dataclass(frozen=True, kw_only=True)
class _Telling:
    """Through what this rank tells how far it is."""

    started: float
    events: EventWriter
    position: PositionWriter
    signals: SignalThread
    on_termination: Callable[[], None] | None


def _train(request: RunRequest, run_directory: Path, world: World, telling: _Telling) -> None:
    events, position, weights = telling.events, telling.position, weights_folder(run_directory)
    backend = registry.create(request.backend)
    refused = why_refused(request.backend, world.world_size, request.job)
    if reasons := [*registry.unmet_requirements(backend, world), *filter(None, [refused])]:
        events.write(UnsupportedEvent(reasons=reasons))
        return
    instruments = Instruments.install(request, run_directory, world)
    counter, observer = instruments.counter, instruments.observer
    position.enter("rendezvous")
    with counter.counting("setup"):
        collectives = join_process_group(world, request.limits.collective_seconds)
    peaks, not_setup = _matmul_peaks(request)
    position.enter("load data")
    sampler = Sampler(samples := load_samples(request.job), request.job)
    position.enter("setup")
    with counter.counting("setup"), HostPeak() as of_engine:
        facts, example = samples.facts, samples.batch([0, 0])
        engine, built = prepare_engine(request, world, backend, facts, observer, weights, example)
    loop = _loop(request, run_directory, world, samples, sampler, engine, instruments, telling)
    begin_training(loop, request.resume)
    initial, host_memory = digest_initial_weights(request, engine, counter, of_engine)
    forms = own_forms(backend, request, world, loop, built, collectives)
    dist.barrier()
    shutil.rmtree(weights, ignore_errors=True)
    with _explaining(request.backend):
        ready = SetupEvent(
            setup_seconds=time.perf_counter() - telling.started - not_setup,
            effective=engine.effective(),
            native_config=engine.native_config(),
            versions={name: _version(name) for name in backend.packages},
            initial_weights=initial,
            collectives=collectives,
            claim=registry.claimed_strategy(backend),
            own_forms=forms,
            host=socket.gethostname(),
            device_name=device_name(world),
            accelerator=describe_accelerator(world.device),
            model=built.model,
            layout=built.layout,
            data=describe_data(samples, sampler),
            steps=loop.steps,
            host_memory=host_memory,
            matmul_flops_per_second=peaks,
        )
        events.write(ready)
        telling.signals.on_termination(lambda: _write_before_ending(instruments, telling))
        instruments.before_training(request)
        loop.run()
    _finish(engine, instruments, loop, telling, digests=request.measure.weight_digests)


def _finish(
    engine: Engine, instruments: Instruments, loop: Loop, telling: _Telling, *, digests: bool
) -> None:
    telling.position.begin_step(None)
    telling.position.enter("measurements")
    _write_final(engine, instruments, loop, telling.events, digests=digests)
    dist.barrier()
    telling.position.enter("close")
    engine.close()
    telling.events.write(DoneEvent())
    telling.events.close()


def _write_final(
    engine: Engine, instruments: Instruments, loop: Loop, events: EventWriter, *, digests: bool
) -> None:
    instruments.write(events)
    observer = instruments.observer
    final = FinalEvent(
        weights=digest_weights(engine) if digests else None,
        observed=ObservedPart(**observer.report()),
        probe_loss=observer.probe_loss(engine, loop.probe_batch()),
        answers=answer_questions(loop),
    )
    events.write(final)


def _write_before_ending(instruments: Instruments, telling: _Telling) -> None:
    # A step that was counted in part would pass for a complete one.
    if instruments.probes.memory and not instruments.probes.within_probed_step:
        instruments.write(telling.events)
    telling.events.write(StoppedEvent(at=time.time()))
    if telling.on_termination is not None:
        telling.on_termination()


def _loop(
    request: RunRequest,
    run_directory: Path,
    world: World,
    samples: Samples,
    sampler: Sampler,
    engine: Engine,
    instruments: Instruments,
    telling: _Telling,
) -> Loop:
    watch_device(world, engine, run_directory)
    instruments.tracer.every_thread = engine.own_thread
    checkpoint = CheckpointProbe(
        folder=checkpoint_folder(run_directory),
        request=request,
        world=world,
        events=telling.events,
        write_model_config=_config_writer(model_config(request.job, samples.facts)),
    )
    return Loop(
        job=request.job,
        layout=BatchLayout(
            global_batch_size=request.job.training.global_batch_size or 0,
            micro_batch_size=request.micro_batch_size,
            accumulation_steps=request.accumulation_steps,
        ),
        measure=request.measure,
        world=world,
        samples=samples,
        sampler=sampler,
        engine=engine,
        probes=instruments.probes,
        timer=phase_timer(world.device),
        tracer=instruments.tracer,
        observer=instruments.observer,
        events=telling.events,
        position=telling.position,
        checkpoint=checkpoint if request.measure.saves_checkpoint else None,
        first_step=request.resume.saved.step if request.resume else 0,
        examine_steps=request.examine_steps,
    )


def _config_writer(config: Any) -> Callable[[Path], None]:
    return config.save_pretrained if config is not None else lambda _: None  # type: ignore[no-any-return]


def _fail(
    telling: _Telling, run_directory: Path, error: BaseException, status: Literal["oom", "failed"]
) -> int:
    """Write why this rank ends; its exit code."""
    telling.signals.note_collectives()
    failure = FailureEvent(
        status=status,
        error_kind=encodable(type(error).__name__),
        message=failure_message(error, run_directory),
        at=time.time(),
        step=telling.position.position.step,
        phase=telling.position.position.phase,
    )
    try:
        telling.events.write(failure)
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
        raise HarnessError(f"backend '{label}' breaks its contract: {explain(error, SetupEvent)}") from error


def _matmul_peaks(request: RunRequest) -> tuple[dict[str, float], float]:
    """What matrix products alone reach, all ranks at once, where that was asked for; seconds that it took."""
    if not request.measure.matmul_peak:
        return {}, 0.0
    began = time.perf_counter()
    dist.barrier()
    peaks = measured_peaks(request.device, compute_dtype(request.job.training.held_precision))
    return peaks, time.perf_counter() - began


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
