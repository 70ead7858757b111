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
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
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
from harness.backends.base import Engine, Unsupported, World
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
from harness.rank.simulation import fake_tensors
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


def take_steps(
    run: RunRequest, engine: Engine, counter: CommunicationCounter, memory: MemoryProbe, observer: Observer,
    vocabulary_size: int,
) -> None:  # fmt: skip
    """Take steps up to the first ordinary one, and count that."""
    # Tokens at random, as many as a full micro-batch has.
    shape = (run.micro_batch_size, run.job.data.sequence_length)
    # Of a sum over tokens, so that gradients are those of a mean.
    weight = 1 / (shape[0] * (shape[1] - 1) * run.accumulation_steps)
    for step in range(ORDINARY_STEP + 1):
        counted = step == ORDINARY_STEP
        if counted:
            counter.start()
            memory.begin()
        # Forgets the batches of the step before.
        observer.prepare(Step(number=step, since_first=ORDINARY_STEP))
        loss_sum = torch.zeros((), dtype=torch.float64)
        for micro_step in range(run.accumulation_steps):
            last = micro_step == run.accumulation_steps - 1
            counter.begin_micro_step(last=last)
            batch = {name: torch.randint(vocabulary_size, shape) for name in ("tokens", "labels")}
            counter.phase = "forward"
            if counted and last:
                memory.before_forward()
            loss = engine.forward(batch)
            if counted and last:
                memory.record(step, "after_forward")
            counter.phase = "backward"
            engine.backward(loss * weight, last_micro_step=last)
            loss_sum += loss.detach().double()
        if counted:
            memory.record(step, "after_backward")
        counter.phase = "step"
        engine.step(run.job.optimizer.learning_rate)
        if counted:
            memory.record(step, "after_step")
            memory.end()
            counter.stop()
        del batch, loss, loss_sum


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


VOTES = ("_warmup_forward_vote", "_warmup_backward_result")
"""A vote passes from stage to stage in the first step; a stage that is not there would have voted 0."""
COMPARE = "assert_ints_same_as_other_ranks"
COMPARING = ("partition_parameters", "partitioned_param_coordinator", "stage3")
"""Modules of `deepspeed.runtime.zero` that compare what ranks recorded, in steps before the counted one:
ranks that are not there recorded the same order of modules and parameters."""


@contextmanager
def without_other_ranks(packages: Collection[str]) -> Iterator[None]:
    """What libraries ask of other ranks is answered here."""
    won = SimpleNamespace(item=lambda: 1)
    patches: list[Any] = [patch.object(PipelineStage, name, lambda *_, **__: won) for name in VOTES]
    if "deepspeed" in packages:
        modules = [import_module(f"deepspeed.runtime.zero.{name}") for name in COMPARING]
        patches += [patch.object(module, COMPARE, lambda ints: None) for module in modules]
        layer = import_module("deepspeed.sequence.layer")

        def exchange(tensor: Tensor, group_name: str) -> Tensor:
            """Of Ulysses, whose own operator has the shape alone of tensors without data."""
            result = torch.empty_like(tensor)
            dist.all_to_all_single(result, tensor, group=layer._all_to_all_groups[group_name])
            return result

        patches.append(
            patch.dict(fake_tensors.PERFORMED, {torch.ops.deepspeed.dim_zero_all_to_all.default: exchange})
        )
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
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
    # There are no other ranks that could share files of weights.
    run = request.run.model_copy(update={"loading": "full"})
    # The rank computes on the CPU.
    planned = World.planned(run.world_size, run.ranks_per_node, "cpu", request.rank)
    world, backend = registry.placed(run.backend, planned), registry.create(run.backend)
    if reasons := registry.unmet_requirements(backend, world):
        raise Unsupported("; ".join(reasons))
    prepare_process(run, world)
    join_fake_group(world)
    fake = fake_tensors.FakeAllocatorProbe() if request.tensors == "fake" else None
    with without_other_ranks(backend.packages), fake_tensors.fake_tensors(fake) if fake else nullcontext():
        observer, counter = Observer(), CommunicationCounter(world.mesh)
        probe: AllocatorProbe = fake or allocator_probe("cpu")
        facts = _facts(run.job)
        config = model_config(run.job, facts)
        assert config is not None
        engine, built = prepare_engine(run, world, backend, facts, observer, Path())
        engine.train(True)
        substitutions = list(fake_tensors.SUBSTITUTIONS) if fake else []
        module = getattr(engine, "module", None)
        if isinstance(module, DistributedDataParallel):
            fake_tensors.all_reduce_from_python(module)
            substitutions.append(fake_tensors.HOOK)
            if fake:
                module.reducer = fake_tensors.RebuiltOnce(module)  # type: ignore[assignment]
                substitutions.append(fake_tensors.REBUILT)
        substitutions += [AGREED] if isinstance(engine, PipelineEngine) else []
        memory = MemoryProbe(probe, engine)
        memory.record(0, "after_setup")
        take_steps(run, engine, counter, memory, observer, facts.vocabulary_size or 0)
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
