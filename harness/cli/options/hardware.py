"""Networks between nodes as the command line names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options.shared import PATH
from harness.cli.terminal.output import echo
from harness.errors import HarnessError

if TYPE_CHECKING:
    from harness.plan.hardware import Device, Fabric, Hardware, TimeConstants


def named_fabric(known: Hardware, name: str | None) -> Fabric | None:
    """The network of `--fabric`, with a notice where another name than its own was given."""
    if name is None:
        return None
    fabric = known.fabric(name)
    if name.strip().lower() != fabric.name.lower():
        taken = f"taken as {fabric.name}, {fabric.bandwidth_per_gpu / 1e9:g} GB/s per GPU"
        echo(
            f"fabric '{name}' is {taken}; --list-hardware of estimate lists others",
            err=True,
        )
    return fabric


gpus_per_node_option = click.option(
    "--gpus-per-node",
    type=click.IntRange(1),
    help="Default: as the GPU is sold, 8 for most (--list-hardware of estimate).",
)


def calibrate_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--calibrate` and `--save-calibration`."""
    command = click.option(
        "--save-calibration",
        type=PATH,
        metavar="FILE",
        help="Write the calibration as JSON, for --calibrate FILE.",
    )(command)
    return click.option(
        "--calibrate",
        type=PATH,
        multiple=True,
        metavar="RUNS|FILE",
        help="Runs on this GPU, or a saved calibration: their constants replace published ones. Repeat for "
        "more runs; fabric*.json next to them give the network.",
    )(command)


def calibrated_constants(
    calibrate: tuple[Path, ...], save: Path | None, device: Device | None
) -> TimeConstants | None:
    """The constants that the options ask for, with their error as a notice; None without the option.

    Raises HarnessError: no GPU named, another GPU, runs that cannot be used.
    """
    from harness.plan.time.calibration import calibrate as fit
    from harness.plan.time.calibration import (
        check_device,
        measured_cells,
        read_calibration,
        write_calibration,
    )

    if not calibrate:
        if save is not None:
            raise HarnessError("--save-calibration needs --calibrate RUNS; give the runs to calibrate on")
        return None
    if device is None:
        raise HarnessError("--calibrate needs the GPU that the runs were made on; name it with --gpu")
    saved = [path for path in calibrate if path.suffix == ".json"]
    if saved and len(calibrate) > 1:
        raise HarnessError(
            f"--calibrate {saved[0]} is a saved calibration and stands alone; give it, or runs to make one"
        )
    if saved:
        calibration = read_calibration(saved[0])
    else:
        cells = measured_cells(calibrate)
        check_device(cells[0].device.name, device)
        calibration = fit(cells)
    for line in calibration.not_used:
        echo(f"not used to calibrate: {line}", err=True)
    constants = calibration.time_constants(device)
    echo(f"time model {calibration.origin}", err=True)
    if save is not None:
        write_calibration(calibration, save)
    return constants
