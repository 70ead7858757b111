"""What a self-test of the network measured: a document of its own, and how it is read; and its ranks, which
are started on this machine and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import psutil
from pydantic import Field, PositiveFloat, ValidationError, model_validator

from harness.bounds import MOST_DOCUMENT_BYTES
from harness.errors import HarnessError
from harness.files import Stored, read_plain, refusing, scratch_folder, write_atomically
from harness.forms.textbook import is_stub
from harness.import_path import module_command, safe_environment
from harness.judge.wording import counted
from harness.launch.ending import die_with
from harness.launch.launcher import require_libraries
from harness.record.measured import FabricPart
from harness.tell.formats import NOT_AVAILABLE, fitted, gigabytes, number

FABRIC_SCHEMA: Literal[1] = 1
FABRIC_NAME = "fabric.json"
# Bus bandwidth over algorithm bandwidth, as nccl-tests' doc/PERFORMANCE.md has it, by passes of (n-1)/n.
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "point_to_point")


class FabricRow(Stored):
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


class FabricResult(Stored):
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

    def latency_seconds(self) -> float | None:
        """An all-reduce of all ranks at the smallest size; None if it was not measured."""
        rows = self.of_all("all_reduce")
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
    try:
        return FabricResult.model_validate_json(read_plain(path, MOST_DOCUMENT_BYTES))
    except OSError as error:
        raise HarnessError(f"fabric result {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise HarnessError(f"{path} is not a result of `harness fabric` that this version reads") from error


def result_file(output: Path) -> Path:
    """The file of a result: in a folder under its own name."""
    return output / FABRIC_NAME if output.is_dir() else output


def write_result(result: FabricResult, output: Path) -> None:
    path = result_file(output)
    with refusing(f"fabric result '{path}' cannot be written"):
        write_atomically(path, result.model_dump_json(indent=1) + "\n")


DECIMAL = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([KMGTkmgt]?)(i?)(B|[Bb]its?|bytes?|b)?(/s|ps)?\s*")


def parse_rate(text: str) -> float:
    """Bytes per second of '5GB/s', '400Gbps', '200 Mbit/s' or '1GiB/s': B is a byte, b a bit.

    Raises HarnessError for anything else, such as 'gb/s', which people write for both.
    """
    match = PATTERN.fullmatch(text)
    if match is None or match[5] is None or match[4] is None:
        raise HarnessError(
            f"'{text}' is not a rate; write 5GB/s, 1GiB/s (bytes), 400Gbps or 200Mbit/s (bits)"
        )
    if match[4] == "b" and match[2].islower():
        given = text.strip()
        prefix = f"{match[1]}{match[2].upper()}"
        raise HarnessError(
            f"'{given}' may mean bits or bytes; write {prefix}B/s for bytes or {prefix}bit/s for bits"
        )
    value = float(match[1]) * (BINARY if match[3] else DECIMAL)[match[2].upper()]
    return value / 8 if match[4].lower().startswith("bit") or match[4] == "b" else value


def parse_size(text: str) -> int:
    """Bytes of '4GB' or '64MiB', both in powers of 1024 as in nccl-tests. Raises HarnessError."""
    match = PATTERN.fullmatch(text)
    if match is None or match[5] is not None or (match[4] or "B") not in ("B", "b"):
        raise HarnessError(f"'{text}' is not a size; write 64MB or 4GB")
    size = int(float(match[1]) * BINARY[match[2].upper()])
    if size < 1024:
        raise HarnessError(f"size '{text}' is below the smallest that is tested, 1KB")
    return size


def shortfall(result: FabricResult, required: float) -> str | None:
    """Why the all-reduce of the whole group misses a bus bandwidth in bytes/s; None if it does not."""
    measured = result.bus_bandwidth()
    if result.on_stub:
        return f"the bus bandwidth of a {result.device_name} is not measured: no network takes part"
    if measured is None:
        return "the bus bandwidth of all_reduce was not measured: it needs two ranks and the operation"
    if measured >= required:
        return None
    nodes = len(set(result.hosts))
    return (
        f"bus bandwidth {measured / 1e9:.3g} GB/s is below the required {required / 1e9:.3g} GB/s "
        f"({result.transport}, {counted(nodes, 'node')}); {judged_batch(result)}. "
        f"Usual causes: {'; '.join(usual_causes(result))}"
    )


def judged_batch(result: FabricResult) -> str:
    """Which batch of all-reduces a required bus bandwidth is compared with, and the slowest one's."""
    row = result.of_all("all_reduce")[-1]
    slowest = row.size_bytes / max(row.seconds) * bus_factor(row.op, len(row.ranks)) / 1e9
    return (
        f"judged: the fastest of {len(row.seconds)} batches of {row.repeats} all_reduce, "
        f"{row.size_bytes:,} bytes each; the slowest: {slowest:.3g} GB/s"
    )


def usual_causes(result: FabricResult) -> Iterator[str]:
    """What to look at first, for this transport and number of nodes."""
    several_nodes = len(set(result.hosts)) > 1
    if result.transport == "gloo":
        yield "gloo copies through TCP and the CPU: on GPUs use NCCL"
    if several_nodes:
        named = f"'{result.interface}'" if result.interface else "none, so the first that resolves"
        yield (
            f"the wrong network interface (asked for: {named}; set `interface` of the site, or "
            "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME)"
        )
    if result.transport == "nccl":
        if several_nodes:
            yield (
                "NCCL fell back to sockets (NCCL_DEBUG=INFO shows NET/Socket where NET/IB is expected; "
                "NCCL_IB_DISABLE, NCCL_IB_HCA, no GPUDirect RDMA)"
            )
        yield "GPUs without NVLink or peer access (`nvidia-smi topo -m`; NCCL_P2P_DISABLE)"
    yield "another job on the same nodes or links"
    yield "too small a largest size: the bandwidth had not levelled off"


HEADERS = ("operation", "ranks", "bytes", "repeats", "time us (best..worst)", "algbw GB/s", "busbw GB/s")


def fabric_table(result: FabricResult) -> str:
    """One line per operation, group and size; GB is 1e9 bytes."""
    body = [
        [
            row.op,
            f"{row.ranks[0]}-{row.ranks[1]}" if row.op == "point_to_point" else f"all {len(row.ranks)}",
            f"{row.size_bytes:,}",
            str(row.repeats * len(row.seconds)),
            f"{number(min(row.seconds) * 1e6)} ({number(max(row.seconds) * 1e6)})"
            if row.seconds
            else NOT_AVAILABLE,
            gigabytes(row.algorithm_bandwidth),
            gigabytes(row.bus_bandwidth),
        ]
        for row in result.rows
    ]
    nodes, device = len(set(result.hosts)), result.device_name
    head = (
        f"{result.transport} on {result.world_size} ranks{f' ({device})' if device else ''}, "
        f"{counted(nodes, 'node')}, "
        f"interface {result.interface or 'not chosen'}"
    )
    return f"{head}\n{fitted(body, HEADERS, alignments=dict.fromkeys(HEADERS[1:], 'right'))}"


def start_ranks(nproc: int, arguments: Sequence[str]) -> FabricResult:
    """Run `harness fabric` with these arguments under torchrun here; leaves no rank, however this ends."""
    require_libraries("ranks", ("torch",))
    with scratch_folder("fabric") as scratch:
        answer = Path(scratch) / FABRIC_NAME
        command = [
            *module_command("torch.distributed.run"), "--standalone", f"--nproc-per-node={nproc}", "-m",
            "harness", "fabric", *arguments, "--output", str(answer),
        ]  # fmt: skip
        variables = safe_environment() | {"TMPDIR": scratch}
        variables.setdefault("OMP_NUM_THREADS", "1")
        if sys.platform == "linux":
            variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # torchrun ends its ranks on SIGTERM, which the kernel sends if this process is killed.
        follow_parent = partial(die_with, os.getpid(), signal.SIGTERM) if sys.platform == "linux" else None
        torchrun = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, process_group=0, preexec_fn=follow_parent,
        )  # fmt: skip
        try:
            _, output = torchrun.communicate()
        finally:
            if torchrun.poll() is None:
                torchrun.send_signal(signal.SIGSTOP)  # it starts no other
                for rank in psutil.Process(torchrun.pid).children(recursive=True):  # of sessions of their own
                    with suppress(psutil.NoSuchProcess):
                        rank.kill()
                torchrun.kill()
                torchrun.wait()
        if not answer.exists():
            message = next((x for x in reversed(output.splitlines()) if "Error" in x), "")
            code = torchrun.returncode
            raise HarnessError(f"the ranks of the self-test failed with exit code {code}: {message}")
        return read_fabric(answer)
