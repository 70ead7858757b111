"""Simulates one rank: what a run does to set up, then three steps, the last of which is counted."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from harness.backends import registry
from harness.backends.base import Backend, Engine, Unsupported, World
from harness.errors import HarnessError
from harness.provenance import package_versions
from harness.record import CommunicationPart, MemoryPart
from harness.run_directory.simulation import SimulatedRank, SimulationRequest
from harness.spec import Job
from harness.worker.communication import CommunicationCounter
from harness.worker.dataset import DataFacts
from harness.worker.environment import prepare_process
from harness.worker.memory import AllocatorProbe, allocator_probe, host_peak_bytes
from harness.worker.memory_probe import MemoryProbe
from harness.worker.model import model_config
from harness.worker.observer import Observer
from harness.worker.preparation import prepare_engine
from harness.worker.simulation import ddp
from harness.worker.simulation.deepspeed import exchanges_seen, without_comparing_ranks
from harness.worker.simulation.fake_tensors import SUBSTITUTIONS, fake_tensors
from harness.worker.simulation.pipeline import stages_agree, what_stages_skip
from harness.worker.simulation.steps import Steps
from harness.worker.simulation.storages import FakeAllocatorProbe
from harness.worker.simulation.world import join_fake_group, world_of
from harness.worker.tokens import tokenizer_of


def simulate(request: SimulationRequest) -> SimulatedRank:
    """Run the adapter's code as one rank of the world. What a library raises becomes part of the answer."""
    begin = time.perf_counter()
    try:
        found = _simulate(request)
    except Unsupported as reason:
        found = {"status": "unsupported", "reason": str(reason)}
    except HarnessError as error:
        found = {"status": "refused", "reason": str(error)}
    except Exception as error:
        message = " ".join(str(error).split())
        found = {"status": "failed", "reason": f"{type(error).__name__}: {message}"}
    packages = registry.parse(request.run.backend)[0].packages
    installed = package_versions(packages)
    return SimulatedRank(
        tensors=request.tensors,
        versions={name: installed[name] for name in packages if name in installed},
        seconds=time.perf_counter() - begin,
        host_peak_bytes=host_peak_bytes(),
        **found,
    )


def _simulate(request: SimulationRequest) -> dict[str, Any]:
    world = world_of(request)
    backend = registry.create(request.run.backend)
    if reasons := registry.unmet_requirements(backend, world):
        raise Unsupported("; ".join(reasons))
    prepare_process(request.run, world)
    join_fake_group(world)
    with ExitStack() as stack:
        if "deepspeed" in backend.packages:
            stack.enter_context(without_comparing_ranks())
            stack.enter_context(exchanges_seen())
        stack.enter_context(stages_agree())
        probe: AllocatorProbe
        if request.tensors == "fake":
            probe = FakeAllocatorProbe()
            stack.enter_context(fake_tensors(probe))
        else:
            probe = allocator_probe("cpu")
        return _run(request, world, backend, probe)


def _run(request: SimulationRequest, world: World, backend: Backend, probe: AllocatorProbe) -> dict[str, Any]:
    # There are no other ranks that could share files of weights.
    run = request.run.model_copy(update={"loading": "full"})
    observer, counter = Observer(), CommunicationCounter(world.mesh)
    facts = _facts(run.job)
    config = model_config(run.job, facts)
    assert config is not None
    engine, built = prepare_engine(run, world, backend, facts, observer, Path())
    engine.train(True)
    substitutions = list(SUBSTITUTIONS) if request.tensors == "fake" else []
    substitutions += _replace_reducer(engine, fake=request.tensors == "fake") + what_stages_skip(engine)
    memory = MemoryProbe(probe, engine)
    memory.record(0, "after_setup")
    steps = Steps(
        request=run,
        engine=engine,
        counter=counter,
        memory=memory,
        observer=observer,
        vocabulary_size=facts.vocabulary_size or 0,
    )
    steps.run()
    return {
        "status": "ok",
        "substitutions": substitutions,
        "effective": engine.effective(),
        "model": built.model,
        "layout": built.layout,
        "configuration": json.loads(config.to_json_string(use_diff=False)),
        "communication": [CommunicationPart(rank=world.rank, **row) for row in counter.rows()],
        "memory": [MemoryPart(**row) for row in memory.rows],
    }


def _facts(job: Job) -> DataFacts:
    """Raises HarnessError for jobs whose batches are not of tokens alone."""
    if job.task != "causal-lm" or job.model.factory or job.data.factory or job.loss.factory:
        raise HarnessError(
            "simulation makes up batches of task causal-lm only; run the job with the world size that this "
            "machine has"
        )
    return DataFacts(vocabulary_size=tokenizer_of(job).vocabulary_size)


def _replace_reducer(engine: Engine, *, fake: bool) -> list[str]:
    """Let a DDP model reduce here; what was done otherwise than in a run."""
    module = getattr(engine, "module", None)
    if not isinstance(module, DistributedDataParallel):
        return []
    ddp.all_reduce_from_python(module)
    if not fake:
        return [ddp.HOOK]
    module.reducer = ddp.RebuiltOnce(module)  # type: ignore[assignment]
    return [ddp.HOOK, ddp.REBUILT]
