"""What the stub itself counted, read from CUDA_STUB_LOG."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from harness.record import Record
from tests.gpu_stub.ranks import COUNTING, MEMORY, NOT_COUNTING

COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send", "recv",
)  # fmt: skip
BARRIER_BYTES = 4
"""ProcessGroupNCCL makes an all-reduce of one fp32 element of it."""
POINT_TO_POINT = {"gather": ("send", "recv"), "scatter": ("recv", "send")}
"""What ProcessGroupNCCL makes of them, a call for each piece: on ranks other than 0; on rank 0, the root."""
Bytes: TypeAlias = Counter[tuple[str, int]]
"""By collective and size of its group."""


@dataclass(frozen=True)
class Call:
    """A call of the runtime or of NCCL; bytes are those of the complete tensor."""

    name: str
    group_size: int
    bytes: int


def calls(folder: Path, rank: int) -> Iterator[Call]:
    """All of a rank, in their order."""
    for line in (folder / f"rank-{rank}.tsv").read_text().splitlines():
        _, name, group_size, size = line.split("\t")
        yield Call(name, int(group_size), int(size))


def counted_collectives(folder: Path, rank: int) -> Bytes:
    """Of those that the harness should have counted."""
    found: Bytes = Counter()
    counting = False
    for call in calls(folder, rank):
        if call.name in (COUNTING, NOT_COUNTING):
            counting = call.name == COUNTING
        elif counting and call.name in COLLECTIVES and not _stays_here(call.name, call.group_size):
            found[call.name, call.group_size] += call.bytes
    return found


def _stays_here(name: str, group_size: int) -> bool:
    """Whether torch may copy by itself what a rank alone would scatter to itself; no byte leaves the rank."""
    return name == "reduce_scatter" and group_size == 1


def told_collectives(record: Record, rank: int) -> Bytes:
    """The same as the record says."""
    found: Bytes = Counter()
    for part in record.comm:
        size = part.group_size
        if part.rank != rank or _stays_here(part.op, size):
            continue
        if part.op == "barrier":
            found["all_reduce", size] += BARRIER_BYTES * part.calls
        elif part.op in POINT_TO_POINT:
            is_root = rank == 0
            pieces = size - 1 if is_root else 1
            found[POINT_TO_POINT[part.op][is_root], size] += part.payload_bytes // size * pieces
        else:
            found[part.op, size] += part.payload_bytes
    return found


def noted_memory(folder: Path, rank: int) -> list[tuple[int, int]]:
    """Peak and allocated bytes of torch's statistics at every moment at which the harness read memory."""
    notes = (call.name.removeprefix(f"{MEMORY}: ") for call in calls(folder, rank) if MEMORY in call.name)
    return [(int(peak), int(allocated)) for peak, allocated in map(str.split, notes)]


def told_memory(record: Record, rank: int) -> list[tuple[int | None, int | None]]:
    """The same as the record says."""
    (part,) = (part for part in record.ranks if part.rank == rank)
    return [(row.peak_bytes, row.allocated_bytes) for row in part.memory]


def largest_held_bytes(folder: Path, rank: int) -> int:
    """Most device memory that the rank's allocator held at once."""
    held = most = 0
    for call in calls(folder, rank):
        held += {"allocate": call.bytes, "free": -call.bytes}.get(call.name, 0)
        most = max(most, held)
    return most
