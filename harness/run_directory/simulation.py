"""What simulated ranks are asked and what they answer: files of one directory, nothing else crosses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from harness.backends.base import Effective
from harness.files import Stored, write_atomically
from harness.record import CommunicationPart, LayoutPart, MemoryPart, ModelPart
from harness.run_directory.request import RunRequest

Tensors = Literal["fake", "real"]
"""'fake': tensors without data, so that a model of any size fits; 'real': tensors with data."""
REQUESTS_NAME = "requests.json"


class SimulationRequest(Stored):
    """One rank of a run that does not take place."""

    run: RunRequest
    rank: int
    tensors: Tensors


class SimulatedRank(Stored):
    """What one rank communicated and held in its third step; the steps before prepare it."""

    status: Literal["ok", "unsupported", "failed", "refused"]
    """failed: the library broke off; refused: the job itself cannot run, under no backend."""
    reason: str | None = None
    tensors: Tensors
    substitutions: list[str] = []
    """What was done otherwise than in a run."""
    versions: dict[str, str] = {}
    effective: Effective | None = None
    model: ModelPart | None = None
    layout: LayoutPart | None = None
    configuration: dict[str, Any] = {}
    """Of the model, in full, as Hugging Face writes it."""
    communication: list[CommunicationPart] = []
    """Of one step."""
    memory: list[MemoryPart] = []
    """After setup and at the moments of that step."""
    seconds: float = 0.0
    """What the simulation took, imports not included."""
    host_peak_bytes: int = 0
    """Largest resident set of the process that simulated."""


_REQUESTS = TypeAdapter(list[SimulationRequest])


def write_requests(directory: Path, requests: list[SimulationRequest]) -> None:
    """Write what the process in `directory` shall simulate."""
    write_atomically(directory / REQUESTS_NAME, _REQUESTS.dump_json(requests).decode())


def read_requests(directory: Path) -> list[SimulationRequest]:
    """What `write_requests` wrote."""
    return _REQUESTS.validate_json((directory / REQUESTS_NAME).read_bytes())


def write_result(directory: Path, index: int, result: SimulatedRank) -> None:
    """Write the answer to request `index`."""
    write_atomically(_result_file(directory, index), result.model_dump_json())


def read_result(directory: Path, index: int) -> SimulatedRank | None:
    """The answer to request `index`; None: there is none."""
    try:
        return SimulatedRank.model_validate_json(_result_file(directory, index).read_bytes())
    except FileNotFoundError:
        return None


def _result_file(directory: Path, index: int) -> Path:
    return directory / f"result-{index:05d}.json"
