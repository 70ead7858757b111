"""What a launcher asks of the ranks: one JSON file in the run directory, nothing else crosses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from harness.backends.base import Effective, Preset
from harness.backends.model_source import Loading
from harness.bounds import MOST_DOCUMENT_BYTES
from harness.files import Stored, read_plain, write_atomically
from harness.job.batch import BatchLayout, data_size
from harness.job.experiment import Limits, MeasureSection, Price, ReportFocus
from harness.job.job import Job
from harness.record import CommunicationPart, GivenPart, LayoutPart, MemoryPart, ModelPart, PredictionPart
from harness.record.store import RunId
from harness.run_directory.checkpoint import Resume
from harness.safe_text import KeptCommand

REQUEST_NAME = "request.json"
LOCAL_RENDEZVOUS = "HARNESS_LOCAL_RENDEZVOUS"
"""Set in ranks that all run on this machine, so that their store listens there only."""


class RunRequest(Stored):
    """One run of one cell; the job's global batch is resolved and its cut is here.

    A cell of a plan is the same without the first three, which `launch.cells.begin_run` gives it.
    """

    run_id: RunId = "planned"
    created_at: str = ""
    command: KeptCommand = []
    backend: str
    """Canonical label: name and options."""
    job: Job
    job_id: str
    cell: str
    """Key: equal keys mean equal job, world, measurement, code and versions."""
    repeat: int
    measure: MeasureSection
    preset: Preset
    """The one that the label names, else the experiment's."""
    device: str
    """'cpu' or 'cuda'; 'auto' is resolved before."""
    world_size: int
    ranks_per_node: int
    threads_per_rank: int
    micro_batch_size: int
    accumulation_steps: int
    question: ReportFocus | None = None
    """What the comparison that asked for the run is made to answer."""
    price_per_gpu_hour: Price | None = None
    """What the user pays; the ranks do not read it."""
    loading: Loading = "slices"
    """How initial weights reach ranks that shard them."""
    memory_limit_bytes: int | None = None
    """What torch's allocator may serve each rank; None: all that there is."""
    prediction: PredictionPart | None = None
    """Made before the ranks start; they do not read it."""
    resume: Resume | None = None
    """None: the run begins at its first step."""
    given: GivenPart | None = None
    """The file of another tool that the settings came from; the ranks do not read it."""
    examine_steps: list[int] = []
    """Stop after the last of these steps and write the gradients and updates of each by parameter."""
    launcher_settings: dict[str, str] = {}
    """Variables of the launcher that the ranks drop, since the job decides."""
    limits: Limits = Limits()
    """How long it may take, and its ranks may stand still."""

    @property
    def key(self) -> str:
        return self.cell

    @property
    def layout(self) -> BatchLayout:
        total = self.job.training.global_batch_size
        assert total is not None
        return BatchLayout(
            global_batch_size=total,
            micro_batch_size=self.micro_batch_size,
            accumulation_steps=self.accumulation_steps,
        )

    @property
    def nodes(self) -> int:
        return max(1, self.world_size // self.ranks_per_node)

    @property
    def data_size(self) -> int:
        """Ranks, or groups of ranks, with samples of their own."""
        return data_size(self.backend, self.world_size)

    def write(self, run_directory: Path) -> None:
        write_atomically(run_directory / REQUEST_NAME, self.model_dump_json(indent=1))

    @classmethod
    def read(cls, run_directory: Path) -> RunRequest:
        return cls.model_validate_json(read_plain(run_directory / REQUEST_NAME, MOST_DOCUMENT_BYTES))


class RankExit(Stored):
    """How a rank ended, as its monitor notes it."""

    exit_code: int
    """Negative: killed by that signal."""
    at: float
    max_resident_bytes: int | None = None


def rank_file(run_directory: Path, rank: int) -> Path:
    """Where a rank appends its events, one JSON object a line."""
    return run_directory / f"rank-{rank:05d}.jsonl"


def rank_log(run_directory: Path, rank: int) -> Path:
    """Where a rank's standard output and error go."""
    return run_directory / f"rank-{rank:05d}.log"


def rank_state(run_directory: Path, rank: int) -> Path:
    """Where a rank notes what it is doing, and its stacks when it is asked."""
    return run_directory / f"rank-{rank:05d}.state"


def modules_file(run_directory: Path, rank: int) -> Path:
    """Where a rank notes the modules that it runs in its first steps."""
    return run_directory / f"rank-{rank:05d}.modules"


def trace_file(run_directory: Path, rank: int) -> Path:
    """Where a rank leaves the profiler's trace, if one is asked for."""
    return run_directory / f"trace-{rank:05d}.json.gz"


def snapshot_file(run_directory: Path, rank: int) -> Path:
    """Where a rank leaves the snapshot of its CUDA memory, if one is asked for."""
    return run_directory / f"memory-snapshot-{rank:05d}.pickle"


def weights_folder(run_directory: Path) -> Path:
    """Where the initial weights lie while ranks read them; removed before the training."""
    return run_directory / "initial-weights"


RANK_OWNERS = "rank-*.owner.json"


def rank_owner(run_directory: Path, rank: int) -> Path:
    """Where the monitor of a rank says which process it is."""
    return run_directory / f"rank-{rank:05d}.owner.json"


def rank_exit(run_directory: Path, rank: int) -> Path:
    """Where the monitor of a rank notes how it ended."""
    return run_directory / f"rank-{rank:05d}.exit.json"


def launcher_log(run_directory: Path) -> Path:
    """Where the launchers of all nodes and their ranks print, where ranks have no logs of their own."""
    return run_directory / "launcher.log"


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
