"""Simulates one rank: what a run does to set up, then three steps, the last of which is counted.

`python -m harness.rank.simulation.simulated_rank DIRECTORY` answers the requests there, each in a process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers.modeling_utils  # noqa: F401 - once for all requests
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from harness.backends import registry
from harness.backends.base import Backend, Batch, Engine, Unsupported, World
from harness.backends.pipeline.engine import PipelineEngine
from harness.errors import HarnessError
from harness.forms.workload import ORDINARY_STEP
from harness.job.job import Job
from harness.rank.data import DataFacts, tokenizer_of
from harness.rank.live.observer import Observer
from harness.rank.models.model import model_config
from harness.rank.preparation import prepare_engine
from harness.rank.probes.communication import CommunicationCounter
from harness.rank.probes.memory import AllocatorProbe, MemoryProbe, allocator_probe, host_peak_bytes
from harness.rank.process.environment import prepare_process
from harness.rank.shells import Step
from harness.rank.simulation.fake_tensors import (
    HOOK,
    PERFORMED,
    REBUILT,
    SUBSTITUTIONS,
    FakeAllocatorProbe,
    RebuiltOnce,
    all_reduce_from_python,
    fake_tensors,
)
from harness.record import CommunicationPart, MemoryPart
from harness.record.provenance import package_versions
from harness.run_directory.request import (
    RunRequest,
    SimulatedRank,
    SimulationRequest,
    read_requests,
    read_result,
    write_result,
)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Everything that one simulated rank needs to train."""

    request: RunRequest
    engine: Engine
    counter: CommunicationCounter
    memory: MemoryProbe
    observer: Observer
    vocabulary_size: int

    def run(self) -> None:
        """Take steps up to the first ordinary one, and count that."""
        for step in range(ORDINARY_STEP):
            self._step(step, counted=False)
        self.counter.start()
        self.memory.begin()
        self._step(ORDINARY_STEP, counted=True)
        self.memory.end()
        self.counter.stop()

    def _step(self, step: int, *, counted: bool) -> None:
        self.observer.prepare(
            Step(number=step, since_first=ORDINARY_STEP)
        )  # forgets the batches of the step before
        loss_sum = torch.zeros((), dtype=torch.float64)
        accumulation = self.request.accumulation_steps
        for micro_step in range(accumulation):
            last = micro_step == accumulation - 1
            self.counter.begin_micro_step(last=last)
            batch = self._batch()
            self.counter.phase = "forward"
            if counted and last:
                self.memory.before_forward()
            loss = self.engine.forward(batch)
            if counted and last:
                self.memory.record(step, "after_forward")
            self.counter.phase = "backward"
            self.engine.backward(loss * self._weight, last_micro_step=last)
            loss_sum += loss.detach().double()
        if counted:
            self.memory.record(step, "after_backward")
        self.counter.phase = "step"
        self.engine.step(self.request.job.optimizer.learning_rate)
        if counted:
            self.memory.record(step, "after_step")

    @property
    def _weight(self) -> float:
        """Of a sum over tokens, so that gradients are those of a mean."""
        run = self.request
        targets = run.micro_batch_size * (run.job.data.sequence_length - 1) * run.accumulation_steps
        return 1 / targets

    def _batch(self) -> Batch:
        """Tokens at random, as many as a full micro-batch has."""
        shape = (self.request.micro_batch_size, self.request.job.data.sequence_length)
        return {name: torch.randint(self.vocabulary_size, shape) for name in ("tokens", "labels")}


def world_of(request: SimulationRequest) -> World:
    """The place of the simulated rank. It computes on the CPU."""
    run = request.run
    world = World.planned(run.world_size, run.ranks_per_node, "cpu", request.rank)
    return registry.placed(run.backend, world)


def join_fake_group(world: World) -> None:
    """Initialise torch.distributed over the fake backend, and the variables that libraries read."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.ranks_per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    dist.init_process_group("fake", rank=world.rank, world_size=world.world_size, store=FakeStore())


AGREED = "stages do not vote on static shapes: all have them"


@contextmanager
def stages_agree() -> Iterator[None]:
    """A vote passes from stage to stage in the first step; a stage that is not there would have voted 0."""

    def vote(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(item=lambda: 1)  # every stage won it

    with (
        patch.object(PipelineStage, "_warmup_forward_vote", vote),
        patch.object(PipelineStage, "_warmup_backward_result", vote),
    ):
        yield


COMPARE = "assert_ints_same_as_other_ranks"
COMPARING = ("partition_parameters", "partitioned_param_coordinator", "stage3")
"""Modules of `deepspeed.runtime.zero` that compare what ranks recorded, in steps before the counted one."""


@contextmanager
def without_comparing_ranks() -> Iterator[None]:
    """Ranks that are not there recorded the same order of modules and parameters."""
    with ExitStack() as stack:
        for name in COMPARING:
            module = import_module(f"deepspeed.runtime.zero.{name}")
            stack.enter_context(patch.object(module, COMPARE, lambda ints: None))
        yield


@contextmanager
def exchanges_seen() -> Iterator[None]:
    """Ulysses exchanges within an operator of its own, of which tensors without data have the shape alone."""
    layer = import_module("deepspeed.sequence.layer")

    def exchange(tensor: Tensor, group_name: str) -> Tensor:
        result = torch.empty_like(tensor)
        dist.all_to_all_single(result, tensor, group=layer._all_to_all_groups[group_name])
        return result

    with patch.dict(PERFORMED, {torch.ops.deepspeed.dim_zero_all_to_all.default: exchange}):
        yield


GROUPED = "Expected inputs of BF16 type"
"""How torch's grouped_mm, by which transformers computes experts, refuses other dtypes."""


def in_words(error: Exception) -> str:
    """What a library raised, in one line."""
    if GROUPED in str(error):
        return "torch's kernel of experts takes bf16 alone; set training.precision=bf16-mixed"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


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
        found = {"status": "failed", "reason": in_words(error)}
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
    substitutions += _replace_reducer(engine, fake=request.tensors == "fake")
    substitutions += [AGREED] if isinstance(engine, PipelineEngine) else []
    memory = MemoryProbe(probe, engine)
    memory.record(0, "after_setup")
    size = facts.vocabulary_size or 0
    Steps(
        request=run, engine=engine, counter=counter, memory=memory, observer=observer, vocabulary_size=size
    ).run()
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
    all_reduce_from_python(module)
    if not fake:
        return [HOOK]
    module.reducer = RebuiltOnce(module)  # type: ignore[assignment]
    return [HOOK, REBUILT]


def answer_all(directory: Path) -> None:
    """Fork for each request: nothing of one simulation reaches the next."""
    gc.freeze()
    for index, request in enumerate(read_requests(directory)):
        child = os.fork()
        if child == 0:
            try:
                write_result(directory, index, simulate(request))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)  # libraries may break off while they are torn down
        _, status = os.waitpid(child, 0)
        if read_result(directory, index) is None:
            code = os.waitstatus_to_exitcode(status)
            how = f"killed by signal {-code}" if code < 0 else "ended without a result"
            reason = f"the process that simulated was {how}"
            write_result(
                directory, index, SimulatedRank(status="failed", reason=reason, tensors=request.tensors)
            )


if __name__ == "__main__":
    answer_all(Path(sys.argv[1]))
