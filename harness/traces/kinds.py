"""What an event of torch's profiler (Kineto) is, by its category and name; names of collectives."""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from importlib.resources import files

from harness.forms.terms import OPERATIONS

STEP, PHASE = "harness::step ", "harness::phase "
"""How the loop names its steps and phases."""
KERNELS = frozenset({"kernel", "concurrent_kernel"})
COPIES = frozenset({"gpu_memcpy", "gpu_memset", "memcpy", "memset"})
DEVICE_ACTIVITIES = KERNELS | COPIES
"""Categories of what runs on a device. A `cuda_sync` and a `gpu_user_annotation` span such events."""
HOST_OPERATORS = frozenset({"cpu_op", "operator", "user_annotation"})
_FILE = tomllib.loads(files(__package__).joinpath("kinds.toml").read_text(encoding="utf-8"))
LAUNCHES = frozenset(_FILE["launches"])
OTHER_ACTIVITIES = frozenset(_FILE["other_activities"])
TRANSPORTS = ("gloo:", "mpi:", "ucc:", "oneccl:")
"""What a transport of the host calls its work on a collective."""
NOT_COMPUTING = ("c10d::", "_c10d_functional::", "autograd::", "torch::", "torch.", "FSDP::")
"""Their own time is waiting, or Python that may wait; what computes inside of them is seen by itself."""

_COMMUNICATES = re.compile(
    r"nccl|rccl|mscclpp|msccl_|oneccl|nvshmem|rocshmem|deep_ep::|multimem_|symmetric_memory::"
    r"|(?:one|two)_?shot_?(?:all_?)?(?:reduce|gather)|(?:all_?reduce|all_?gather|reduce_?scatter)_fusion"
    r"|cross_device_(?:reduce|store)|quick_?reduce|lamport|allreduce_prototype"
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


OPERATORS: dict[str, tuple[str, int]] = {
    name: (operator["collective"], operator["tensor"]) for name, operator in _FILE["operators"].items()
}
"""Of `torch.ops.c10d`: the collective, and the index of the argument that holds the complete tensor."""
INPUT_AT = {name: at for name, operator in _FILE["operators"].items() if (at := operator.get("input"))}
"""Index of the argument with this rank's input, where it tells the group's size or the payload."""
_NO_COLLECTIVE = re.compile(r"wait|coalescing|init|finali|group(?:start|end)|^coalesced$", re.IGNORECASE)


@lru_cache(maxsize=4096)
def collective_of(name: str) -> str | None:
    """The collective that the name of a launch or operator says; None: it says none.

    'nccl:_all_gather_base', 'allreduce_coalesced' and 'c10d::alltoall_base_' are in; names of kernels do not
    tell and must not be given.
    """
    scope, _, bare = name.rpartition(":")
    if bare in OPERATORS and scope.startswith("c10d"):
        return OPERATORS[bare][0]
    if _NO_COLLECTIVE.search(bare):
        return None
    plain = bare.lower().replace("multimem_", "").replace("one_shot_", "").replace("two_shot_", "")
    return next(
        (op for op, word in _FILE["words"].items() if op in OPERATIONS and re.search(word, plain)), None
    )


@lru_cache(maxsize=1024)
def dtype_of(text: str) -> str | None:
    """A dtype by torch's name, from NCCL's arguments ('Float') or shapes ('c10::BFloat16'); None: unknown."""
    bare = text.strip().rpartition("::")[2].lower()
    return bare if bare.startswith("float8") else _FILE["dtypes"].get(bare)


def element_bytes(dtype: str) -> int | None:
    """Bytes of an element of a dtype by torch's name."""
    from harness.forms.model.layout import DTYPE_BYTES

    return 1 if dtype.startswith("float8") else DTYPE_BYTES.get(dtype)
