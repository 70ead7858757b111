"""Simulates one rank: what a run does to set up, then three steps, the last of which is counted.

Tensors may be without data: what libraries do with data is then done otherwise, by name.
"""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, overload
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import _flat_param, _runtime_utils
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from harness.backends import registry
from harness.backends.base import Engine, Unsupported, World
from harness.backends.optimizer import gradients
from harness.backends.optimizer.gradients import local_shard
from harness.backends.pipeline.engine import PipelineEngine
from harness.errors import HarnessError
from harness.forms.workload import ORDINARY_STEP
from harness.job.job import Job
from harness.rank.data import DataFacts, tokenizer_of
from harness.rank.live.observer import Observer
from harness.rank.models.losses import unpacked_samples
from harness.rank.models.model import model_config
from harness.rank.probes.communication import CommunicationCounter
from harness.rank.probes.memory import AllocatorProbe, MemoryProbe, allocator_probe, host_peak_bytes
from harness.rank.process.environment import prepare_process
from harness.rank.rank import prepare_engine
from harness.rank.step_hooks import Step
from harness.record import CommunicationPart, MemoryPart
from harness.record.provenance import package_versions
from harness.run_directory.request import RunRequest, SimulatedRank, SimulationRequest

HOOK = "DDP reduces its buckets from a hook in Python: the fake group has no result for the one in C++"
REBUILT = (
    "DDP's buckets are arranged in the order in which gradients arrived by a copy of its rule: its own reads "
    "and broadcasts the order from memory that fake tensors do not have"
)


def all_reduce_from_python(ddp: DistributedDataParallel) -> None:
    """Reduce each bucket in place, as the default hook does; its division changes no size."""

    def hook(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        dist.all_reduce(buffer, group=ddp.process_group)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    # Not `register_comm_hook`, which refuses annotations that are text.
    dist._register_comm_hook(ddp.reducer, None, hook)  # type: ignore[attr-defined]


class RebuiltOnce:
    """Stands for a reducer; rearranges its buckets before the second step, as `Reducer::rebuild_buckets`."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._reducer: Any = ddp.reducer
        self._arrived: list[int] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived.append(index))
            for index, parameter in enumerate(ddp._build_params_for_reducer()[0])
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        if not self._hooks or len(set(self._arrived)) < len(self._hooks):
            return False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._reducer = None  # with its hooks and buckets
        _build_reducer(self._ddp, order=list(dict.fromkeys(self._arrived)))
        all_reduce_from_python(self._ddp)
        self._reducer, self._ddp.reducer = self._ddp.reducer, self  # type: ignore[assignment]
        return True


def _build_reducer(ddp: DistributedDataParallel, order: list[int]) -> None:
    """Give DDP a reducer whose buckets follow `order`, cut by DDP's own function and limits."""
    parameters, sparse = ddp._build_params_for_reducer()
    _, limits = ddp._bucket_config.compute_bucket_size_limits(
        static_graph=ddp.static_graph, find_unused_parameters=ddp.find_unused_parameters
    )
    config = ddp._bucket_config
    limits = limits or [config.first_bucket_bytes_cap, config.bucket_bytes_cap]  # as `rebuild_buckets`
    assign: Callable[..., Any] = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    arranged = [parameters[index] for index in order]
    positions, sizes = assign(arranged, limits, [sparse[index] for index in order])
    buckets = [[order[position] for position in bucket] for bucket in positions]

    def assigned(*_: Any) -> tuple[Any, Any]:
        return list(reversed(buckets)), list(reversed(sizes))  # the caller turns them round

    with patch.object(dist, assign.__name__, assigned):
        names = ddp._build_debug_param_to_name_mapping(parameters)
        ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)


FEW = 64
"""Up to so many pieces are cut as torch does."""


class Chunks(Sequence[Tensor]):
    """What `torch.chunk` gives; with `padded` empty ones follow, up to the number asked for."""

    def __init__(self, tensor: Tensor, count: int, dim: int = 0, *, padded: bool = False) -> None:
        self.whole = tensor
        self._dim = dim
        self._step = max(1, -(-tensor.size(dim) // count))
        self._filled = max(1, -(-tensor.size(dim) // self._step))
        self._count = count if padded else self._filled

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        position = index % self._count
        if position >= self._filled:
            return self.whole.new_empty(0)
        begin = position * self._step
        length = min(self._step, self.whole.size(self._dim) - begin)
        return self.whole.narrow(self._dim, begin, length)


@contextmanager
def cut_when_asked_for() -> Iterator[None]:
    """FSDP 1 and 2 cut a parameter into a piece per rank to take one; thousands take minutes."""
    original: Callable[..., Any] = torch.Tensor.chunk
    gather: Callable[..., Any] = dist.all_gather

    def chunk(tensor: Tensor, chunks: int, dim: int = 0) -> Sequence[Tensor]:
        return original(tensor, chunks, dim) if chunks <= FEW else Chunks(tensor, chunks, dim)

    def all_gather(tensor_list: Sequence[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor_list, Chunks):
            return dist.all_gather_into_tensor(tensor_list.whole, tensor, *args, **kwargs)
        return gather(tensor_list, tensor, *args, **kwargs)

    def with_empty(tensor: Tensor, num_chunks: int, dim: int) -> Sequence[Tensor]:
        return Chunks(tensor, num_chunks, dim, padded=True)

    with (
        patch.object(torch.Tensor, "chunk", chunk),
        patch.object(torch, "chunk", chunk),
        patch.object(_fsdp_param, "_chunk_with_empty", with_empty),
        # `_get_reduce_scatter_tensors` makes a list of the pieces, and looks at the first.
        patch.object(_runtime_utils, "list", _ListOf, create=True),
        # On the CPU `_all_gather_flat_param` gathers into a list of all pieces of one tensor.
        patch.object(_flat_param, "list", _ListOf, create=True),
        patch.object(dist, "all_gather", all_gather),
    ):
        yield


class _KeepingChunks(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, list)

    def __call__(cls, values: Any = ()) -> Any:
        return values if isinstance(values, Chunks) else list(values)


class _ListOf(metaclass=_KeepingChunks):
    """Stands for `list`, and leaves pieces uncut."""


def _group(named: Any) -> dist.ProcessGroup:
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(named) if isinstance(named, str) else named


def _into(result: Tensor, collective: Callable[..., Any], *given: Any, group: Any) -> Tensor:
    collective(result, *given, group=_group(group))
    return result


def _rows(tensor: Tensor, rows: int) -> Tensor:
    return tensor.new_empty((rows, *tensor.shape[1:]))


_OPERATORS = torch.ops._c10d_functional
PERFORMED: dict[Any, Callable[..., Tensor]] = {
    _OPERATORS.all_reduce.default: lambda tensor, _, group: _into(
        tensor.clone(), dist.all_reduce, group=group
    ),
    _OPERATORS.all_gather_into_tensor.default: lambda tensor, size, group: _into(
        _rows(tensor, tensor.shape[0] * size), dist.all_gather_into_tensor, tensor, group=group
    ),
    _OPERATORS.reduce_scatter_tensor.default: lambda tensor, _, size, group: _into(
        _rows(tensor, tensor.shape[0] // size), dist.reduce_scatter_tensor, tensor, group=group
    ),
    _OPERATORS.all_to_all_single.default: lambda tensor, taken, given, group: _into(
        _rows(tensor, sum(taken)), dist.all_to_all_single, tensor, taken, given, group=group
    ),
}
"""Operator -> the same by the collectives that its kernel calls (torch 2.13, `c10d/Functional.cpp`)."""


PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
NUMBERED_CPU = torch.device("cpu", 0)


class FakeAllocatorProbe(AllocatorProbe):
    """Every storage from the operator that made it until its last tensor is gone."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._allocated = 0
        self._peak = 0

    def allocated_bytes(self) -> int:
        return self._allocated

    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._allocated

    def limit(self, limit_bytes: int) -> None:
        raise HarnessError("tensors without data have no limit; remove runtime.memory_limit")

    def serves(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._sizes

    def identity(self, storage: torch.UntypedStorage) -> int:
        return storage._cdata

    def note(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that an operator returned, at the size that it has now."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            self._watches[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._resize(key, size)

    def note_resized(self, storage: torch.UntypedStorage) -> None:
        """Correct the size of a storage that is counted."""
        if storage._cdata in self._sizes:
            self._resize(storage._cdata, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        self._allocated += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._peak = max(self._peak, self._allocated)

    def _forget(self, key: int) -> None:
        self._allocated -= self._sizes.pop(key)
        del self._watches[key]


class CountingMode(TorchDispatchMode):
    """Notes the storages that operators return; a value that a program asks for and that is not there is 0.

    So a gradient norm is not clipped, and no overflow skips an update.
    """

    def __init__(self, probe: FakeAllocatorProbe) -> None:
        super().__init__()
        self._probe = probe

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(kind in PLAIN for kind in types):
            return NotImplemented  # such as DTensor: comes back with its local tensors
        if func in PERFORMED:
            with self:
                return PERFORMED[func](*args)
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == NUMBERED_CPU:
            kwargs["device"] = torch.device("cpu")  # which fake tensors take for another device
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 0.0 if args[0].dtype.is_floating_point else 0
        for tensor in tree_iter(result):
            if isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
                self._probe.note(tensor.untyped_storage())
        return result


@contextmanager
def resizes_noted(probe: FakeAllocatorProbe) -> Iterator[None]:
    """FSDP frees gathered weights by resizing their storage, which is no operator."""
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        probe.note_resized(storage)
        return result

    with patch.object(torch.UntypedStorage, "resize_", resize_and_note):
        yield


SUBSTITUTIONS = [
    "values that a program reads from a tensor are 0: no gradient is clipped, no update skipped",
    "buffers that a kernel allocates for itself are not seen",
]


@contextmanager
def fake_tensors(probe: FakeAllocatorProbe) -> Iterator[None]:
    """Every tensor made inside has no data; `probe` counts them."""
    with ExitStack() as stack:
        for one in (
            patch.object(DeviceMesh, "__init__", _with_data(DeviceMesh.__init__)),
            patch.object(nn.Module, "_apply", _convert),
            # A batch is one sequence a row, which transformers 5.23 would read from the positions.
            unpacked_samples(),
            # The norm of a large tensor would be added up from hundreds of thousands of pieces.
            patch.object(gradients, "DOT_ELEMENTS", sys.maxsize),
            # FSDP1 compares addresses of data.
            patch.object(_flat_param, "_data_ptr_allocated", lambda t: t.untyped_storage().nbytes() > 0),
            patch.object(_flat_param, "_same_storage", _same_storage),
            # What DDP does while it is built that reads data: comparing shapes, and sending weights.
            patch.object(ddp_module, "_verify_param_shape_across_processes", lambda *_, **__: None),
            patch.object(ddp_module, "_sync_module_states", lambda *_, **__: None),
            cut_when_asked_for(),
            resizes_noted(probe),
            FakeTensorMode(allow_non_fake_inputs=True),
            CountingMode(probe),
        ):
            stack.enter_context(one)
        yield


def _with_data(make: Callable[..., None]) -> Callable[..., None]:
    """A mesh reads its coordinates from a tensor while it is made: of all ranks by `init_device_mesh`, and in
    rows by FSDP2 where it reshards within groups."""

    def make_with_data(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            ranks = kwargs.get("_rank_map")
            if isinstance(ranks, FakeTensor):
                kwargs["_rank_map"] = _all_ranks(ranks)
            args = tuple(_all_ranks(given) if isinstance(given, FakeTensor) else given for given in args)
            make(mesh, *args, **kwargs)

    return make_with_data


def _all_ranks(like: Tensor) -> Tensor:
    return torch.arange(like.numel(), dtype=like.dtype).view(like.shape)


def _convert(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`Module.to` would swap tensors, which torch 2.13 refuses for fake ones that something watches."""
    for owner in module.modules() if recurse else [module]:
        for parameter in owner._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    parameter.data = fn(parameter)
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = fn(buffer)
    return module


def _same_storage(first: Tensor, second: Tensor) -> bool:
    return local_shard(first).untyped_storage()._cdata == local_shard(second).untyped_storage()._cdata


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
            """Ulysses' all-to-all, whose own operator has the shape alone of tensors without data."""
            result = torch.empty_like(tensor)
            dist.all_to_all_single(result, tensor, group=layer._all_to_all_groups[group_name])
            return result

        patches.append(patch.dict(PERFORMED, {torch.ops.deepspeed.dim_zero_all_to_all.default: exchange}))
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


def simulate_text(request: str) -> str:
    """The same as JSON, which another process may ask for."""
    return simulate(SimulationRequest.model_validate_json(request)).model_dump_json()


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
    fake = FakeAllocatorProbe() if request.tensors == "fake" else None
    with without_other_ranks(backend.packages), fake_tensors(fake) if fake else nullcontext():
        observer, counter = Observer(), CommunicationCounter(world.mesh)
        probe: AllocatorProbe = fake or allocator_probe("cpu")
        facts = _facts(run.job)
        config = model_config(run.job, facts)
        assert config is not None
        engine, built = prepare_engine(run, world, backend, facts, observer, Path())
        engine.train(True)
        substitutions = list(SUBSTITUTIONS) if fake else []
        module = getattr(engine, "module", None)
        if isinstance(module, DistributedDataParallel):
            all_reduce_from_python(module)
            substitutions.append(HOOK)
            if fake:
                module.reducer = RebuiltOnce(module)  # type: ignore[assignment]
                substitutions.append(REBUILT)
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
