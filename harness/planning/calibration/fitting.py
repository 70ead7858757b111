"""Fits constants of the time model to measured steps: least squares of logarithms.

Each constant has a prior: the published value, or what self-tests and traces of the same place say. One
that the cells say nothing about stays there, so that few cells suffice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import numpy.typing as npt

from harness.errors import HarnessError
from harness.planning.calibration.document import Calibration, CellFit
from harness.planning.calibration.measured import MeasuredCell
from harness.planning.constants import TimeConstants, default_constants
from harness.planning.overlap import overlap_rule
from harness.planning.speed import seconds_of_step

LEAST_CELLS = 3
NOISE = 0.08
"""Standard deviation of a cell's median step, relative: on shared machines repetitions differ by so much."""
TOLERANCE = 1e-5
"""Relative change at which a search ends: far below the noise."""
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What is known of a constant before the cells are looked at."""

    name: str
    value: float
    deviation: float
    """Of its natural logarithm."""


def calibrate(found: Sequence[MeasuredCell]) -> Calibration:
    """Fit to all cells, and to all but each one for the error.

    Raises HarnessError for fewer than three cells, or cells of several devices or transports.
    """
    cells, not_used = comparable(found)
    if len(cells) < LEAST_CELLS:
        raise HarnessError(
            f"--calibrate: {len(cells)} usable cells are too few to fit constants; "
            f"give at least {LEAST_CELLS}, such as a comparison of ddp, zero3 and fsdp"
            + "".join(f"; not used: {line}" for line in not_used[:1])
        )
    for what, values in (
        ("devices", {cell.device.name for cell in cells}),
        ("transports", {cell.scenario.transport for cell in cells}),
    ):
        if len(values) > 1:
            raise HarnessError(
                f"--calibrate: the runs are of several {what} ({', '.join(sorted(values))}); give runs of one"
            )
    base, priors = starting_point(cells)
    fitted = _fit(cells, base, priors)
    left_out = [
        _left_out(cells, index, base, priors, start=fitted) if len(cells) > LEAST_CELLS else None
        for index in range(len(cells))
    ]
    fits = [
        CellFit(
            cell=cell.name,
            group=cell.group,
            measured_seconds=cell.seconds,
            spread=cell.spread,
            fitted_seconds=_seconds(cell, fitted),
            left_out_seconds=without,
        )
        for cell, without in zip(cells, left_out, strict=True)
    ]
    loads = [load for cell in cells for load in cell.load_averages]
    names = [prior.name for prior in priors] + list(_FIXED if cells[0].scenario.torch_device == "cpu" else ())
    return Calibration(
        device=cells[0].device.name,
        transport=cells[0].scenario.transport,
        constants={name: getattr(fitted, name) for name in names},
        cells=fits,
        not_used=not_used,
        load_averages=(min(loads), max(loads)) if loads else None,
    )


def comparable(cells: Sequence[MeasuredCell]) -> tuple[list[MeasuredCell], list[str]]:
    """Cells that one set of constants can describe, and why others cannot be among them.

    Ranks on CPUs share processors, so that a rank of another world is another device: the most frequent
    world size stays.
    """
    sizes = Counter(cell.scenario.world_size for cell in cells)
    most = max(sizes, key=lambda size: (sizes[size], size), default=0)
    used, not_used = [], []
    for cell in cells:
        scenario = cell.scenario
        if scenario.torch_device == "cpu" and scenario.world_size != most:
            not_used.append(f"{cell.name}: ranks share processors otherwise than on {most} ranks")
        elif scenario.nodes > 1 and scenario.fabric is None:
            not_used.append(f"{cell.name}: no self-test of its network (fabric-*.json) lies next to the runs")
        else:
            used.append(cell)
    return used, not_used


_FIXED = {
    "sustained_share": 1.0,
    "attention_share": 1.0,
    "link_step_seconds": 0.0,
    "kernel_seconds": 0.0,
    "dispatch_seconds": 0.0,
}
"""On a CPU: shares that mean the same as another, and latencies that the time of a call holds already."""


def starting_point(cells: Sequence[MeasuredCell]) -> tuple[TimeConstants, list[Prior]]:
    """Constants before the fit and what they may become."""
    base = default_constants(cells[0].device)
    latencies = [cell.latency_seconds for cell in cells if cell.latency_seconds is not None]
    exposed = [c.exposed_share for c in cells if c.exposed_share is not None and _overlaps(c)]
    on_cpu = cells[0].scenario.torch_device == "cpu"
    if on_cpu:
        base = replace(base, **_FIXED, matrix_share=0.1, memory_share=0.3, link_share=0.1)  # type: ignore[arg-type]
        base = replace(base, call_seconds=2e-3, contention=0.5)
    if latencies:
        base = replace(base, call_seconds=median(latencies), link_step_seconds=0.0)
    if exposed:
        base = replace(base, contention=min(1.0, max(0.02, median(exposed))))
    base = replace(base, fabric_share=1.0 if latencies else base.fabric_share, step_overhead_seconds=1e-3)
    unknown = 2.0 if on_cpu else 0.3
    deviations = {
        "matrix_share": unknown, "memory_share": unknown, "link_share": unknown, "fabric_share": 0.15,
        "call_seconds": 0.3 if latencies else 1.0, "host_factor": 0.4, "contention": 1.0,
        "step_overhead_seconds": 2.0,
    }  # fmt: skip
    priors = [
        Prior(name=name, value=getattr(base, name), deviation=deviation)
        for name, deviation in deviations.items()
    ]
    return base, priors


def _overlaps(cell: MeasuredCell) -> bool:
    rule = overlap_rule(cell.work.workload)
    return cell.scenario.world_size > 1 and (rule.gathers_ahead or rule.reduces_beside)


def _left_out(
    cells: Sequence[MeasuredCell],
    index: int,
    base: TimeConstants,
    priors: Sequence[Prior],
    *,
    start: TimeConstants,
) -> float:
    others = [cell for position, cell in enumerate(cells) if position != index]
    return _seconds(cells[index], _fit(others, base, priors, start=start))


def _fit(
    cells: Sequence[MeasuredCell],
    base: TimeConstants,
    priors: Sequence[Prior],
    *,
    start: TimeConstants | None = None,
) -> TimeConstants:
    """`start`: where the search begins; the priors hold whatever it is."""
    from scipy.optimize import least_squares

    expected = np.log([prior.value for prior in priors])
    first = np.log([getattr(start or base, prior.name) for prior in priors])
    deviations = np.array([prior.deviation for prior in priors])
    measured = np.array([cell.seconds for cell in cells])

    def residuals(point: Vector) -> Vector:
        constants = _constants(base, priors, point)
        predicted = np.array([_seconds(cell, constants) for cell in cells])
        return np.concatenate([np.log(predicted / measured) / NOISE, (point - expected) / deviations])

    # A cell that a neighbour on the machine has slowed down must not bend all others.
    solution = least_squares(residuals, first, loss="soft_l1", ftol=TOLERANCE, xtol=TOLERANCE)
    return _constants(base, priors, solution.x)


def _constants(base: TimeConstants, priors: Sequence[Prior], point: Vector) -> TimeConstants:
    values = {prior.name: float(np.exp(x)) for prior, x in zip(priors, point, strict=True)}
    values["contention"] = min(1.0, values["contention"])
    return replace(base, **values)  # type: ignore[arg-type]


def _seconds(cell: MeasuredCell, constants: TimeConstants) -> float:
    return seconds_of_step(cell.work, cell.device, constants)
