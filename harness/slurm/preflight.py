"""Whether the runs of a matrix will have the memory that they need, judged before they are submitted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from harness.errors import HarnessError
from harness.gpus.found import Wheel, read_wheel, unfit_wheel
from harness.launch.cells import is_refused
from harness.plan.hardware import load_hardware
from harness.plan.limits import Limits
from harness.plan.preflight import Forecast, forecast, of_requests
from harness.record.record_files import RECORD_NAME
from harness.record.store import read_record, write_record
from harness.run_directory.assemble import assemble_refused
from harness.slurm.matrix import Matrix, PlannedRun
from harness.slurm.site import Site
from harness.slurm.submission import prepare_run

UNIT_BYTES = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
"""Of sbatch's --mem, which counts in MiB without a unit."""


def site_limits(site: Site, gpu: str | None = None) -> Limits:
    """Memory of a site's nodes and GPUs, as far as its file says.

    `gpu` goes before the site's. Raises HarnessError for a GPU that no table knows.
    """
    name = gpu or site.gpu
    device = load_hardware().device(name) if name is not None and site.device == "cuda" else None
    return Limits(
        device_bytes=device.memory_bytes if device else None,
        device=device,
        host_bytes=memory_bytes(site.memory_per_node),
    )


def unfit_software(site: Site, gpu: str | None = None) -> str | None:
    """Why the torch of a site's virtual environment cannot compute on the site's GPUs.

    None: it can, or the environment or the GPU is not known here. Raises HarnessError for a GPU that no table
    knows.
    """
    device, wheel = site_limits(site, gpu).device, site_wheel(site)
    if device is None or device.capability is None or wheel is None:
        return None
    unfit = unfit_wheel(wheel, device.capability)
    return f"site '{site.name}' has {device.name}: {unfit}" if unfit else None


def site_wheel(site: Site) -> Wheel | None:
    """The torch that the ranks import; None: the site names no environment that can be seen from here."""
    if site.virtual_environment is None or site.container:
        return None
    folders = Path(site.virtual_environment).glob("lib/python3*/site-packages/torch/version.py")
    return next(map(read_wheel, sorted(folders)), None)


def memory_bytes(text: str | None) -> int | None:
    """Bytes of a value of --mem; None for 0, which is all of a node."""
    if text is None:
        return None
    unit = text[-1].upper() if text[-1].isalpha() else ""
    return int(text.removesuffix(text[-1]) if unit else text) * UNIT_BYTES[unit] or None


def foresee_runs(runs: Sequence[PlannedRun], limits: Limits, *, force: bool) -> Forecast:
    """Predict runs that are about to be submitted, by their run ids."""
    return forecast(of_requests([run.request for run in runs], limits), limits, force=force)


def with_prediction(run: PlannedRun, foreseen: Forecast) -> PlannedRun:
    """The run with its prediction in the request, which the record takes over."""
    part = foreseen.parts.get(run.request.run_id)
    request = run.request.model_copy(update={"prediction": part})
    return run.model_copy(update={"request": request})


def record_refused(matrix: Matrix, runs: Sequence[PlannedRun], foreseen: Forecast) -> list[PlannedRun]:
    """Write the records of runs that cannot fit; return the others, with their predictions."""
    others = []
    for run in runs:
        run = with_prediction(run, foreseen)
        refusal = foreseen.refusal(run.request.run_id)
        if refusal is None:
            others.append(run)
            continue
        prepare_run(matrix, run)
        directory = matrix.run_directory(run)
        write_record(directory, assemble_refused(directory, run.request, refusal))
    return others


def forget_refused(matrix: Matrix) -> None:
    """Remove the records of runs that were refused, so that they can be submitted."""
    for run in matrix.runs:
        path = matrix.run_directory(run) / RECORD_NAME
        with suppress(HarnessError):  # no record
            if is_refused(read_record(path)):
                path.unlink()
