"""Measures what gloo sends: in collectives, in a step of each backend, in a whole run.

`python -m tests.wire.measured FUNCTION ARGUMENTS` (JSON) prints what a function below returns, in a network
namespace whose loopback interface carries the bytes of this job only.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Self

from harness.backends.base import World
from tests.forkserver import on_ranks
from tests.harness.cli.command_line import succeeds

HEADER_BYTES = 66
"""Of every TCP packet over IPv4 on the loopback interface: Ethernet 14, IP 20, TCP 20 and its time stamp
option 12. The kernel counts them, and acknowledgements without data, which are nothing else."""


@dataclass(frozen=True)
class Traffic:
    """What the loopback interface received since it came up; on it that is what was sent."""

    bytes: int
    packets: int
    retransmissions: int
    """TCP segments that were sent again."""

    @property
    def payload_bytes(self) -> int:
        """Without the header of each packet."""
        return self.bytes - HEADER_BYTES * self.packets

    def __sub__(self, other: Self) -> Self:
        return type(self)(
            self.bytes - other.bytes,
            self.packets - other.packets,
            self.retransmissions - other.retransmissions,
        )


def traffic() -> Traffic:
    """Read the kernel's counters of `lo` in this process's namespace."""
    interfaces = dict(
        line.strip().split(":", 1)
        for line in Path("/proc/self/net/dev").read_text().splitlines()
        if ":" in line
    )
    received = interfaces["lo"].split()
    lines = Path("/proc/self/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return Traffic(
        int(received[0]), int(received[1]), int(dict(zip(names, values, strict=True))["RetransSegs"])
    )


def payload_of_calls(call: Callable[[], object], times: int) -> list[int]:
    """Bytes on `lo` in each of `times` calls that every rank of the default group makes.

    Read between barriers. A call in which some segment was sent twice is made again, up to ten times as many.
    """
    import torch
    import torch.distributed as dist

    clean: list[int] = []
    for _ in range(10 * times):
        dist.barrier()
        before = traffic()
        dist.barrier()
        call()
        dist.barrier()
        moved = traffic() - before
        dist.barrier()
        if not moved.retransmissions:
            clean.append(moved.payload_bytes)
        # Ranks may read the counters apart; the first one's word goes for all.
        enough = torch.tensor(len(clean) >= times)
        dist.broadcast(enough, 0)
        if enough:
            break
    return clean


PAYLOAD_BYTES = 4 * 2**20
BLOCKS = 12


def collectives(world: World) -> dict[str, float | None]:
    """Time-ordered: every rank runs the same collectives; the counters are read between barriers."""
    import torch
    import torch.distributed as dist

    whole = torch.ones(PAYLOAD_BYTES // 4)
    part = torch.ones(PAYLOAD_BYTES // 4 // world.world_size)
    parts = list(torch.ones(PAYLOAD_BYTES // 4).chunk(world.world_size))
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all_gather (list)": lambda: dist.all_gather(parts, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    found = {}
    for name, call in calls.items():
        call()
        factors = [moved / world.world_size / PAYLOAD_BYTES for moved in payload_of_calls(call, BLOCKS)]
        found[name] = median(factors) if factors else None
    return found


def factors(world_size: int) -> dict[str, float | None]:
    """Bytes per payload byte and rank, by collective."""
    with TemporaryDirectory() as folder:
        return on_ranks(collectives, world_size, Path(folder), 120)[0]  # type: ignore[no-any-return]


WARMUP_STEPS = 3
"""After two forward passes ZeRO-3 knows its trace."""
MEASURED_STEPS = 8


def strategies(precision: str, labels: list[str], world: World) -> dict[str, dict[str, Any]]:
    """All backends one after the other on one process group; the counters are read between barriers."""
    from harness.backends import registry

    return {label: measure_backend(registry.create(label), world, precision) for label in labels}


def measure_backend(backend: Any, world: Any, precision: str) -> dict[str, Any]:
    """Bytes per rank of one step, derived from counted collectives and measured."""
    from harness.rank.probes.communication import CommunicationCounter
    from tests.contract.cases import Case, global_batches, prepare, take_step

    case = Case(1, precision, family="wide")
    engine, _, _ = prepare(backend, world, case)
    batch = next(global_batches())
    for _ in range(WARMUP_STEPS):
        take_step(engine, batch, world, case)
    measured = payload_of_calls(lambda: take_step(engine, batch, world, case), MEASURED_STEPS)
    counter = CommunicationCounter()
    take_step(engine, batch, world, case, counter)
    engine.close()
    per_rank = [moved / world.world_size for moved in measured]
    return {"derived": derived_bytes(counter.rows()), "measured": per_rank}


def derived_bytes(rows: list[dict[str, Any]]) -> float:
    """What the table of transports makes of counted collectives."""
    from harness.forms.network import transport_sent_bytes

    return sum(
        transport_sent_bytes("gloo", row["op"], row["payload_bytes"], row["group_size"]) for row in rows
    )


def steps(world_size: int, precision: str, labels: list[str]) -> dict[str, dict[str, Any]]:
    """Of each backend the derived bytes, and those of the steps in which no segment was sent twice."""
    work = partial(strategies, precision, labels)
    with TemporaryDirectory() as folder:
        found = on_ranks(work, world_size, Path(folder), 280, CONTRACT_FOLDER=folder)
    return found[0]  # type: ignore[no-any-return]


MODEL = "{hidden_size: 256, intermediate_size: 512, num_hidden_layers: 4, max_position_embeddings: 16}"


def settings(steps: int, probed: int) -> list[str]:
    """A small batch on a model whose weights are much more than what the ranks say to each other."""
    return [
        f"training.steps={steps}", f"measure.probed_steps={probed}",
        f"measure.warmup_steps={WARMUP_STEPS}", "measure.weight_digests=false", f"model.config={MODEL}",
        "training.micro_batch_size=1", "data.sequence_length=16", "runtime.threads_per_rank=1",
    ]  # fmt: skip


def moved_by(folder: Path, backend: str, ranks: int, probed: int) -> Traffic:
    """What a run with so many probed steps sends, from its first word to its last."""
    command = ["run", "--backend", backend, "--nproc", str(ranks), "--runs", "runs"]
    for setting in settings(WARMUP_STEPS + probed, probed):
        command += ["--set", setting]
    folder.mkdir()
    before = traffic()
    succeeds(*command, cwd=folder)
    return traffic() - before


def moved_by_probed_steps(folder: str, backend: str, ranks: int, probed: int) -> dict[str, int]:
    """The fields of the traffic of a run with probed steps, less that of one without."""
    without = moved_by(Path(folder) / "without", backend, ranks, 0)
    return vars(moved_by(Path(folder) / "with", backend, ranks, probed) - without)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))))  # noqa: T201
