"""What an event of torch's profiler (Kineto) is, by its category and name."""

from __future__ import annotations

import re
from functools import lru_cache

STEP, PHASE = "harness::step ", "harness::phase "
"""How the loop names its steps and phases."""
KERNELS = frozenset({"kernel", "concurrent_kernel"})
COPIES = frozenset({"gpu_memcpy", "gpu_memset", "memcpy", "memset"})
DEVICE_ACTIVITIES = KERNELS | COPIES
"""Categories of what runs on a device. A `cuda_sync` and a `gpu_user_annotation` span such events."""
HOST_OPERATORS = frozenset({"cpu_op", "operator", "user_annotation"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "runtime", "privateuse1_runtime"})
TRANSPORTS = ("gloo:", "mpi:", "ucc:", "oneccl:")
"""What a transport of the host calls its work on a collective."""
NOT_COMPUTING = ("c10d::", "_c10d_functional::", "autograd::", "torch::", "torch.", "FSDP::")
"""Their own time is waiting, or Python that may wait; what computes inside of them is seen by itself."""

_COMMUNICATES = re.compile(
    r"nccl|rccl|mscclpp|msccl_|oneccl|nvshmem|rocshmem|deep_ep::|multimem_|symmetric_memory::"
    r"|(?:one|two)_?shot_?(?:all_?)?(?:reduce|gather)|(?:all_?reduce|all_?gather|reduce_?scatter)_fusion"
    r"|cross_device_reduce|quick_?reduce|lamport|allreduce_prototype"
    r"|(?:^|[\s:])(?:barrier_kernel|put_signal_kernel|wait_signal_kernel|all_to_all_v\w*)(?:$|[<(])",
    re.IGNORECASE,
)
"""Kernels of NCCL and RCCL; of torch's symmetric memory (CUDASymmetricMemoryOps.cu), NVSHMEM and DeepEP; and
all-reduces of their own in vLLM, SGLang, TensorRT-LLM and AITER."""
_BETWEEN_DEVICES = re.compile(r"\bPtoP\b|PeerToPeer", re.IGNORECASE)
"""A copy from one device to another: how copy engines do collectives."""


@lru_cache(maxsize=100_000)
def is_communication(category: str, name: str) -> bool:
    """Whether an event of a device moves data between ranks, or waits for them."""
    if category in KERNELS:
        return _COMMUNICATES.search(name) is not None
    return category in COPIES and _BETWEEN_DEVICES.search(name) is not None


def is_computing(category: str, name: str) -> bool:
    """Whether an event of a device is a kernel that does not communicate."""
    return category in KERNELS and not is_communication(category, name)


@lru_cache(maxsize=100_000)
def operator_computes(name: str) -> bool:
    """Whether a host operator of this name computes: 'aten::mm' and other 'library::operator' do."""
    return "::" in name and not name.startswith((*NOT_COMPUTING, STEP, PHASE))


def is_transport(name: str) -> bool:
    """Whether a host event is a transport's own work on a collective."""
    return name.startswith(TRANSPORTS)


_PROFILER_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)")


@lru_cache(maxsize=10_000)
def step_number(name: str) -> int | None:
    """The step that an annotation spans: 'ProfilerStep#3' of torch, 'harness::step 3' of the harness."""
    if name.startswith(STEP):
        number = name.removeprefix(STEP)
        return int(number) if number.isdecimal() else None
    found = _PROFILER_STEP.fullmatch(name)
    return int(found[1]) if found else None
