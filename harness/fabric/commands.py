"""What `harness fabric` does; printing through click, like the rest of the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import click
import psutil

from harness.atomic_write import write_atomically
from harness.backends.explain import choices
from harness.errors import HarnessError
from harness.fabric.gate import parse_rate, parse_size, shortfall
from harness.fabric.result import FABRIC_NAME, OPERATIONS, FabricResult, read_fabric, whole_elements
from harness.launch.external import external_rank, started_as_rank
from harness.launch.local import resolve_device
from harness.store import try_writing
from harness.worker.monitor import die_with

EXIT_GATE = 3
COLLECTIVE_TIMEOUT_SECONDS = 600.0
NO_GPU = "--device cuda: PyTorch sees no GPU here; give --device cpu, or make one visible"
DEFAULT_LARGEST = {"cuda": "4GB", "cpu": "64MB"}
"""gloo moves about 1 GB/s: larger tensors tell no more and take minutes."""


def fabric(
    *,
    nproc: int | None,
    device: str,
    max_size: str | None,
    operations: str | None,
    repeats: int,
    warmup: int,
    seconds_per_row: float,
    require_busbw: str | None,
    output: Path | None,
    plot: Path | None,
    as_json: bool,
    silent: bool,
) -> int:
    """`harness fabric`."""
    asked, device = device, resolve_device(device)
    wanted = split_operations(operations)
    largest = parse_size(max_size or DEFAULT_LARGEST[device])
    required = parse_rate(require_busbw) if require_busbw else None
    if not started_as_rank() or external_rank() == 0:
        check_outputs(output, plot)
    if started_as_rank():
        result = _measure(device, largest, wanted, repeats, warmup, seconds_per_row)
        code = 0
        if external_rank() == 0:
            if output is not None:
                write_result(result, output)
            if not silent:
                code = present(result, largest, required, plot, as_json)
        from harness.worker.environment import leave

        leave(code)
    if asked == "cuda" and resolve_device("auto") != "cuda":
        raise HarnessError(NO_GPU)
    # Not sys.argv: torchrun takes --nproc for an abbreviation of its own, wherever it stands.
    arguments = [
        "--device", device, "--max-size", str(largest), "--operations", ",".join(wanted), "--repeats",
        str(repeats), "--warmup", str(warmup), "--seconds-per-row", str(seconds_per_row),
    ]  # fmt: skip
    result = _start_ranks(nproc or _default_ranks(device), arguments)
    if output is not None:
        write_result(result, output)
    return present(result, largest, required, plot, as_json)


def split_operations(text: str | None) -> list[str]:
    """Operations of a comma-separated list; all without one. Raises HarnessError for an unknown one."""
    if text is None:
        return list(OPERATIONS)
    names = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    for name in names:
        if name not in OPERATIONS:
            raise HarnessError(f"operation '{name}' is unknown. Available: {choices(name, OPERATIONS)}")
    return names or list(OPERATIONS)


def check_outputs(output: Path | None, plot: Path | None) -> None:
    """Raise HarnessError for a file that could not be written after minutes of measuring."""
    if plot is not None:
        from harness.fabric.picture import picture_format

        picture_format(plot)
        _check_writable(plot, "--plot")
    if output is not None:
        _check_writable(_result_file(output), "--output")


def _check_writable(path: Path, option: str) -> None:
    try:
        try_writing(path)
    except OSError as error:
        raise HarnessError(
            f"{option} was given '{path}', which cannot be written: {error.strerror}"
        ) from error


def _result_file(output: Path) -> Path:
    return output / FABRIC_NAME if output.is_dir() else output


def write_result(result: FabricResult, output: Path) -> None:
    """Write the document; into a folder under its own name."""
    path = _result_file(output)
    try:
        write_atomically(path, result.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise HarnessError(f"fabric result '{path}' cannot be written: {error.strerror}") from error


def present(
    result: FabricResult, asked_bytes: int, required: float | None, plot: Path | None, as_json: bool
) -> int:
    """Show a result, and whether it ends before the size asked for; 3 if it misses the required bytes/s."""
    from harness.fabric.table import fabric_table

    click.echo(fabric_table(result), err=as_json)
    largest = max(row.size_bytes for row in result.rows)
    if largest < 4 * whole_elements(asked_bytes, result.world_size):
        click.echo(f"memory is short for {asked_bytes:,} bytes: measured up to {largest:,}", err=True)
    if as_json:
        rows = [
            row.model_dump()
            | {
                "algorithm_bytes_per_second": row.algorithm_bandwidth,
                "bus_bytes_per_second": row.bus_bandwidth,
            }
            for row in result.rows
        ]
        click.echo(json.dumps(result.model_dump() | {"rows": rows, "summary": result.summary()}, indent=1))
    if plot is not None:
        from harness.fabric.picture import write_picture

        write_picture(result, plot)
        click.echo(f"picture: {plot}", err=True)
    missed = shortfall(result, required) if required is not None else None
    if missed is not None:
        click.echo(f"harness: {missed}", err=True)
        return EXIT_GATE
    return 0


def check(path: Path, require_busbw: str) -> int:
    """Judge a result that was written before: 3 if it misses the required rate."""
    missed = shortfall(read_fabric(path), parse_rate(require_busbw))
    if missed is None:
        return 0
    click.echo(f"harness: {missed}", err=True)
    return EXIT_GATE


def _measure(
    device: str, largest: int, operations: Sequence[str], repeats: int, warmup: int, seconds_per_row: float
) -> FabricResult:
    import torch
    import torch.distributed as dist

    from harness.backends.base import World
    from harness.worker.environment import join_process_group
    from harness.worker.fabric import FabricTest

    world = World(
        rank=external_rank(),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])),
        device=device,
    )
    if device == "cuda":
        if not torch.cuda.is_available():
            raise HarnessError(NO_GPU)
        torch.cuda.set_device(world.local_rank)
    join_process_group(world, COLLECTIVE_TIMEOUT_SECONDS)
    test = FabricTest(device, repeats=repeats, warmup=warmup, seconds_per_row=seconds_per_row)
    result = test.run(largest, operations)
    dist.barrier()
    return result


def _start_ranks(nproc: int, arguments: Sequence[str]) -> FabricResult:
    """Run this command under torchrun on this machine."""
    with tempfile.TemporaryDirectory(prefix="harness-fabric-") as scratch:
        answer = Path(scratch) / FABRIC_NAME
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", "-m",
            "harness", "fabric", *arguments, "--output", str(answer), "--silent",
        ]  # fmt: skip
        variables = dict(os.environ)
        variables.setdefault("OMP_NUM_THREADS", "1")
        if sys.platform == "linux":
            variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
        code, output = _run_to_its_end(command, variables)
        if not answer.exists():
            said = next((x for x in reversed(output.splitlines()) if "Error" in x), "")
            raise HarnessError(f"the ranks of the self-test failed with exit code {code}: {said}")
        return read_fabric(answer)


def _run_to_its_end(command: Sequence[str], variables: dict[str, str]) -> tuple[int, str]:
    """Exit code of torchrun and what it said on standard error; leaves no rank behind, however this ends."""
    # torchrun ends its ranks when it is told to end, also by the kernel where this process is killed.
    told_to_end = partial(die_with, os.getpid(), signal.SIGTERM) if sys.platform == "linux" else None
    torchrun = subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=told_to_end,
    )
    try:
        _, output = torchrun.communicate()
    finally:
        _end_family(torchrun)
    return torchrun.returncode, output


def _end_family(torchrun: subprocess.Popen[str]) -> None:
    """End torchrun and its ranks, each of which has a session of its own."""
    if torchrun.poll() is not None:
        return
    torchrun.send_signal(signal.SIGSTOP)  # it starts no other
    ranks = psutil.Process(torchrun.pid).children(recursive=True)
    torchrun.kill()
    torchrun.wait()
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.kill()


def _default_ranks(device: str) -> int:
    from harness.provenance import gpu_count

    return gpu_count() if device == "cuda" else 2
