"""What a self-test of the network measured: a document of its own, and how it is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from harness.bounds import MOST_DOCUMENT_BYTES
from harness.errors import HarnessError
from harness.files import read_plain, write_atomically
from harness.forms.flops import is_stub
from harness.record.environment import FabricPart

FABRIC_SCHEMA: Literal[1] = 1
FABRIC_NAME = "fabric.json"
# Bus bandwidth over algorithm bandwidth, as nccl-tests' doc/PERFORMANCE.md has it, by passes of (n-1)/n.
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "point_to_point")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FabricRow(_Part):
    """One operation at one size."""

    op: str
    ranks: Annotated[list[int], Field(min_length=1)]
    """Who took part."""
    size_bytes: int
    """The complete tensor: what each rank holds after an all-gather and before a reduce-scatter."""
    repeats: int
    """Operations of each of the timed batches."""
    seconds: list[PositiveFloat]
    """Of one operation, per batch; each the slowest rank's. Point to point: one way. Empty on a CUDA stub."""

    @property
    def best_seconds(self) -> float | None:
        """The fastest batch: others may have had a neighbour. None: not timed."""
        return min(self.seconds, default=None)

    @property
    def algorithm_bandwidth(self) -> float | None:
        """Bytes of the tensor per second. None: not timed."""
        best = self.best_seconds
        return None if best is None else self.size_bytes / best

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes per second that each link of a ring carries, comparable between operations and ranks.

        None: not timed.
        """
        rate = self.algorithm_bandwidth
        return None if rate is None else rate * bus_factor(self.op, len(self.ranks))


class FabricResult(_Part):
    """All that one self-test measured."""

    schema_version: Literal[1] = FABRIC_SCHEMA
    created_at: str
    transport: str
    device: str
    device_name: str | None = None
    """Of rank 0's GPU; None on the CPU, and in older results."""
    hosts: list[str]
    """Of each rank."""
    interface: str | None
    """The network interface that was asked for."""
    rows: list[FabricRow]

    @model_validator(mode="after")
    def _timed_on_devices_alone(self) -> FabricResult:
        """Nothing that a CUDA stub does has a speed; everything else was timed."""
        if any(bool(row.seconds) == self.on_stub for row in self.rows):
            raise ValueError(f"durations on {self.device_name or self.device}")
        return self

    @property
    def on_stub(self) -> bool:
        """Whether no GPU took part: the collectives ran, and say nothing of speed."""
        return is_stub(self.device_name or "")

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    def of_all(self, op: str) -> list[FabricRow]:
        """Rows of an operation over all ranks, smallest first."""
        rows = [row for row in self.rows if row.op == op and len(row.ranks) == self.world_size]
        return sorted(rows, key=lambda row: row.size_bytes)

    def bus_bandwidth(self, op: str = "all_reduce") -> float | None:
        """All ranks at the largest size, bytes per second; None if it was not measured."""
        rows = self.of_all(op)
        return rows[-1].bus_bandwidth if rows else None

    def latency_seconds(self, op: str = "all_reduce") -> float | None:
        """All ranks at the smallest size; None if it was not measured."""
        rows = self.of_all(op)
        return rows[0].best_seconds if rows else None

    def summary(self) -> FabricPart:
        """What a record keeps of it."""
        rows = self.of_all("all_reduce")
        return FabricPart(
            created_at=self.created_at,
            transport=self.transport,
            interface=self.interface,
            world_size=self.world_size,
            nodes=len(set(self.hosts)),
            all_reduce_bytes=rows[-1].size_bytes if rows else None,
            all_reduce_bus_bytes_per_second=self.bus_bandwidth(),
            all_reduce_latency_seconds=self.latency_seconds(),
        )


def bus_factor(op: str, ranks: int) -> float:
    """Bus over algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md): 1 for what has no passes."""
    return PASSES[op] * (ranks - 1) / ranks if op in PASSES else 1.0


def sizes_to_test(largest_bytes: int, smallest_bytes: int = 1024) -> list[int]:
    """Powers of four times the smallest size, and the largest."""
    sizes = []
    size = smallest_bytes
    while size < largest_bytes:
        sizes.append(size)
        size *= 4
    return [*sizes, largest_bytes]


def whole_elements(size_bytes: int, ranks: int) -> int:
    """Elements of 4 bytes that ranks can share evenly, no more than the size but one each."""
    return max(1, size_bytes // (4 * ranks)) * ranks


def pairs_to_test(hosts: Sequence[str], every: int = 8) -> list[tuple[int, int]]:
    """All pairs of few ranks; of many, neighbours on the first node and the first ranks of all nodes."""
    count = len(hosts)
    if count <= every:
        return [(a, b) for a in range(count) for b in range(a + 1, count)]
    first = [hosts.index(host) for host in dict.fromkeys(hosts)]
    across = [(a, b) for index, a in enumerate(first) for b in first[index + 1 :]]
    same_node = [(0, 1)] if hosts[0] == hosts[1] else []
    return same_node + across


def read_fabric(path: Path) -> FabricResult:
    """Read a result. Raises HarnessError if it is none."""
    try:
        return FabricResult.model_validate_json(read_plain(path, MOST_DOCUMENT_BYTES))
    except OSError as error:
        raise HarnessError(f"fabric result {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise HarnessError(f"{path} is no result of `harness fabric` that this version reads") from error


def result_file(output: Path) -> Path:
    """The file of a result: in a folder under its own name."""
    return output / FABRIC_NAME if output.is_dir() else output


def write_result(result: FabricResult, output: Path) -> None:
    """Write the document. Raises HarnessError."""
    path = result_file(output)
    try:
        write_atomically(path, result.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise HarnessError(f"fabric result '{path}' cannot be written: {error.strerror}") from error
