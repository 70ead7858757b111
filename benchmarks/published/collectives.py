"""Published times of nccl-tests next to what the time model predicts of the same collective."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tabulate import tabulate

from harness.job.job import Job
from harness.plan.hardware import default_constants, load_hardware
from harness.plan.models import load_model
from harness.plan.scenario import Scenario
from harness.plan.step_time import nccl_seconds, path_of

MEASURED = Path(__file__).with_name("nccl_tests.csv")
SMALL, MIDDLE = 2**20, 2**25
"""Bytes up to which a message is of that size."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A collective over all GPUs of some nodes."""

    source: str
    gpu: str
    nodes: int
    gpus_per_node: int
    network: str | None
    operation: str
    bytes: int
    microseconds: float
    note: str = ""

    @property
    def error(self) -> float:
        """Predicted over published time, less one."""
        return predicted_microseconds(self) / self.microseconds - 1

    @property
    def kind(self) -> str:
        """Size and reach."""
        size = "to 1 MiB" if self.bytes <= SMALL else "from 256 MiB" if self.bytes > MIDDLE else "32 MiB"
        return f"{size}, {'within a node' if self.nodes == 1 else 'between nodes'}"


def read_measured(path: Path = MEASURED) -> list[Measured]:
    """All rows; a network within a node is none."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Measured(
                source=row["source"], gpu=row["gpu"], nodes=int(row["nodes"]),
                gpus_per_node=int(row["gpus_per_node"]),
                network=row["network"].partition(" ")[0] if int(row["nodes"]) > 1 else None,
                operation=row["operation"], bytes=int(row["bytes"]), microseconds=float(row["microseconds"]),
                note=row["note"],
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def predicted_microseconds(one: Measured) -> float:
    """One call over all ranks."""
    hardware, ranks = load_hardware(None), one.nodes * one.gpus_per_node
    device = hardware.device(one.gpu)
    scenario = Scenario.of(
        "ddp", load_model("gpt2"), Job(), world_size=ranks, ranks_per_node=one.gpus_per_node,
        preset="library-defaults", micro_batch_size=1, accumulation_steps=1, device=device,
        fabric=hardware.fabric(one.network) if one.network else None,
    )  # fmt: skip
    assert scenario is not None
    constants = default_constants(device)
    path = path_of(range(ranks), scenario, device, constants)
    return 1e6 * sum(nccl_seconds(one.operation, one.bytes, 1, path, constants))


def median_error(measured: Iterable[Measured]) -> float:
    """Without sign."""
    return median(abs(one.error) for one in measured)


def table(measured: Iterable[Measured]) -> str:
    """Errors by size and reach, from the least size on."""
    groups: dict[str, list[float]] = {}
    for one in sorted(measured, key=lambda one: (one.bytes, one.nodes)):
        for name in (one.kind, "all"):
            groups.setdefault(name, []).append(one.error)
    groups["all"] = groups.pop("all")
    rows = [
        [name, len(errors), f"{median(map(abs, errors)):.0%}", f"{min(errors):+.0%}", f"{max(errors):+.0%}"]
        for name, errors in groups.items()
    ]
    return tabulate(rows, ["messages", "times", "median error", "least", "most"], tablefmt="github") + "\n"
