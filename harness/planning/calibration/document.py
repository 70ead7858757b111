"""A calibration as a file: constants, the cells that they are from, and the error on cells left out."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, ValidationError, field_validator

from harness.atomic_write import write_atomically
from harness.bounds import MOST_DOCUMENT_BYTES
from harness.errors import HarnessError
from harness.plain_files import read_plain
from harness.planning.constants import TimeConstants, default_constants
from harness.planning.device import Device

SCHEMA_VERSION: Literal[1] = 1
CLEARLY = 0.05
"""Cells whose step times differ by less are not put into an order."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CellFit(_Part):
    """One cell: its step as it was measured and as the model has it."""

    cell: str
    group: str
    """Cells of one group ran over the same network: their order is a question."""
    measured_seconds: PositiveFloat
    """Median of the timed steps of all its runs."""
    spread: float
    """Largest minus smallest median of its runs, over the median: what repetition alone changes."""
    fitted_seconds: float
    left_out_seconds: float | None
    """By constants from all other cells; None: there are too few."""

    @property
    def error(self) -> float | None:
        """Relative, of the prediction that did not see this cell."""
        return None if self.left_out_seconds is None else self.left_out_seconds / self.measured_seconds - 1


class Calibration(_Part):
    """Constants of one kind of device and its network."""

    schema_version: Literal[1] = SCHEMA_VERSION
    device: str
    transport: str
    constants: dict[str, float]
    cells: list[CellFit]
    not_used: list[str] = []
    """Cells that were found and not fitted, with the reason."""
    load_averages: tuple[float, float] | None = None
    """Least and most that the runs found on their machine."""

    @field_validator("constants")
    @classmethod
    def _are_known(cls, constants: dict[str, float]) -> dict[str, float]:
        shares = {field.name for field in fields(TimeConstants) if field.type == "float"}
        if unknown := sorted(constants.keys() - shares):
            raise ValueError(f"constant '{unknown[0]}' is unknown")
        return constants

    @property
    def errors(self) -> list[float]:
        return [abs(cell.error) for cell in self.cells if cell.error is not None]

    def time_constants(self, device: Device) -> TimeConstants:
        """The constants for predictions. Raises HarnessError for another device than the calibrated one."""
        check_device(self.device, device)
        values = self.constants
        return replace(
            default_constants(device),
            **values,  # type: ignore[arg-type]
            matrix_source=self.origin,
            attention_source=self.origin,
            origin=self.origin,
            fitted=tuple(sorted(values)),
        )

    @property
    def origin(self) -> str:
        """Where a prediction's constants come from, with their error."""
        return f"calibrated on {len(self.cells)} cells; {self.accuracy}"

    @property
    def accuracy(self) -> str:
        """The error on cells left out, in words."""
        if not self.errors:
            return "too few cells to leave one out: error unknown"
        right, pairs = self.order()
        order = f", order right in {right} of {pairs} pairs" if pairs else ""
        return (
            f"each predicted from the others: median error {median(self.errors):.1%}, "
            f"mean {mean(self.errors):.1%}, worst {max(self.errors):.1%}{order}"
        )

    def order(self) -> tuple[int, int]:
        """How many pairs of a group that differ by over 5 % are in the right order, and all such pairs."""
        right = total = 0
        for one, other in combinations(self.cells, 2):
            if one.group != other.group or one.left_out_seconds is None or other.left_out_seconds is None:
                continue
            measured = one.measured_seconds - other.measured_seconds
            if abs(measured) <= CLEARLY * min(one.measured_seconds, other.measured_seconds):
                continue
            total += 1
            right += measured * (one.left_out_seconds - other.left_out_seconds) > 0
        return right, total


def check_device(calibrated: str, device: Device) -> None:
    """Refuse constants of one device for another."""
    if device.name != calibrated:
        raise HarnessError(
            f"this calibration is of {calibrated}, not of {device.name}; calibrate with records of "
            f"{device.name}, or leave --calibrate out for published constants"
        )


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write the document. Raises HarnessError."""
    try:
        write_atomically(path, calibration.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise HarnessError(f"calibration '{path}' cannot be written: {error.strerror}") from error


def read_calibration(path: Path) -> Calibration:
    """Read a document. Raises HarnessError if it is none."""
    try:
        return Calibration.model_validate_json(read_plain(path, MOST_DOCUMENT_BYTES))
    except OSError as error:
        raise HarnessError(f"calibration {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise HarnessError(
            f"{path} is no calibration that this version reads; give a folder or archive of runs to make one"
        ) from error
