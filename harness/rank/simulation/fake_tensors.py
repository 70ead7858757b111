"""Tensors without data under the adapters' code: what libraries do with data is done otherwise, by name."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from harness.backends.optimizer import gradients
from harness.backends.optimizer.gradients import local_shard
from harness.errors import HarnessError
from harness.rank.models.losses import unpacked_samples
from harness.rank.probes.memory import AllocatorProbe

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
