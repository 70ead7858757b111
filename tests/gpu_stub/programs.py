"""Programs of a process of their own on one device of the stub; their results are printed as JSON by name."""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from harness.backends.optimizer.gradients import global_norm
from harness.rank import accelerator
from harness.rank.data import to_device
from harness.rank.probes.communication import release_finished_collectives

KEPT_BYTES = 2**20


def norm_peak() -> float:
    """The allocator's peak during the norm over the bytes of the gradients."""
    gradients = [
        torch.ones(size, device="cuda", dtype=dtype)
        for size in (3_000_000, 700_000, 333, 1)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    global_norm(gradients, None)
    return (torch.cuda.max_memory_allocated() - before) / before


def norm_error() -> float:
    """Relative, against fp64."""
    generator = torch.Generator("cuda").manual_seed(0)
    gradients = [torch.randn(size, device="cuda", generator=generator) for size in (300_000, 333, 1)]
    exact = float(torch.cat([g.cpu().double() for g in gradients]).norm())
    return abs(global_norm(gradients, None) - exact) / exact


def left_by_matmul_peak() -> list[int]:
    """Bytes reserved after measuring the peak of matrix products: now, and at most from here on."""
    accelerator.SIZES["cuda"] = (1024,)
    accelerator.measured_peaks("cuda", torch.float32)
    return [torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()]


class _Copies(TorchDispatchMode):
    """Whether each copy to another device is from pinned memory and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten._to_copy.default:
            self.seen.append(args[0].is_pinned() and kwargs.get("non_blocking", False))
        return function(*args, **kwargs)


def batch_copies() -> list[bool]:
    """One for each tensor of a batch."""
    copies = _Copies()
    with copies:
        moved = to_device({"tokens": torch.arange(8), "labels": torch.arange(8)}, "cuda")
    assert all(torch.equal(tensor.cpu(), torch.arange(8)) for tensor in moved.values())
    return copies.seen


def kept_of_collectives() -> list[int]:
    """Bytes allocated after a collective that was waited for through its future, and after releasing it."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(KEPT_BYTES // 4, device="cuda")
    dist.all_reduce(tensor, async_op=True).get_future().wait()
    del tensor
    kept = [torch.cuda.memory_allocated()]
    release_finished_collectives()
    return [*kept, torch.cuda.memory_allocated()]


PROGRAMS: dict[str, Callable[[], Any]] = {
    program.__name__: program
    for program in (norm_peak, norm_error, left_by_matmul_peak, batch_copies, kept_of_collectives)
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: PROGRAMS[name]() for name in sys.argv[1:]}))
