"""What a launcher asks of the ranks: one JSON file in the run directory, nothing else crosses."""

from __future__ import annotations

from pathlib import Path

from harness.backends.model_source import Loading
from harness.bounds import MOST_DOCUMENT_BYTES
from harness.files import Stored, read_plain, write_atomically
from harness.job.experiment import Limits, MeasureSection, Price, ReportFocus
from harness.job.job import Job
from harness.record import GivenPart, PredictionPart
from harness.record.run_id import RunId
from harness.run_directory.checkpoint import SavedCheckpoint
from harness.safe_text import KeptCommand

REQUEST_NAME = "request.json"
LOCAL_RENDEZVOUS = "HARNESS_LOCAL_RENDEZVOUS"
"""Set in ranks that all run on this machine, so that their store listens there only."""


class Resume(Stored):
    """The checkpoint that a run continues."""

    folder: Path
    saved: SavedCheckpoint


class RunRequest(Stored):
    """One run of one cell; the job's global batch is resolved and its cut is here."""

    run_id: RunId
    created_at: str
    command: KeptCommand
    backend: str
    """Canonical label: name and options."""
    job: Job
    job_id: str
    cell: str
    repeat: int
    measure: MeasureSection
    preset: str
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


def checkpoint_folder(run_directory: Path) -> Path:
    """Where all ranks save a checkpoint, if one is asked for; deleted afterwards unless it is to be kept."""
    return run_directory / "checkpoint"


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
