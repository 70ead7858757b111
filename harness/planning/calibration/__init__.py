"""Constants of the time model from records of this place, and how far they miss records left out."""

from harness.planning.calibration.document import (
    Calibration,
    CellFit,
    check_device,
    read_calibration,
    write_calibration,
)
from harness.planning.calibration.fitting import calibrate
from harness.planning.calibration.measured import MeasuredCell, measured_cells

__all__ = [
    "Calibration",
    "CellFit",
    "MeasuredCell",
    "calibrate",
    "check_device",
    "measured_cells",
    "read_calibration",
    "write_calibration",
]
