"""What a launcher asks of the ranks: one JSON file in the run directory, nothing else crosses.

Also what a saved checkpoint says of itself: one JSON file in its folder, whatever the format.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, ConfigDict, Field, ValidationError

from harness.backends.base import Effective, Preset
from harness.backends.model_source import AskedLoading
from harness.backends.refusals import explain_refusal
from harness.bounds import MOST_DOCUMENT_BYTES
from harness.errors import HarnessError
from harness.files import PlainName, Stored, read_plain, refusing, write_atomically
from harness.forms.layout import Layout
from harness.job.batch import BatchLayout, data_size
from harness.job.experiment import Limits, MeasureSection, Price, ReportFocus
from harness.job.job import DEFAULT_STEPS, Job
from harness.nested import differences
from harness.record import CommunicationPart, GivenPart, MemoryPart, ModelPart, PredictionPart
from harness.record.measured import ResumedPart, SavedFormat
from harness.safe_text import KeptCommand

DESCRIPTION = "checkpoint.json"


class SavedCheckpoint(Stored):
    """The run that saved a checkpoint, and how far it was."""

    model_config = ConfigDict(extra="ignore")  # older versions wrote `files` and `seal`
    schema_version: Literal[1] = 1
    format: SavedFormat
    native_format: str
    """`Engine.native_format` of the engine that saved it."""
    run_id: str
    backend: str
    world_size: int
    job_id: str
    job: Job
    step: int
    """Steps taken."""
    updates: int | None = None
    """Updates that the optimizer made; None: the backend does not report them."""
    loss_scale: float | None = None
    """The loss scale in force; None: no scaler, or not reported."""
    weights_digest: str | None = None
    """Of the master weights; None: digests were not asked for."""
    moments_checksum: str | None = None
    """Of Adam's moments; None: digests were not asked for, or the format has none, or the backend does
    not list its pieces."""

    def write(self, folder: Path) -> None:
        write_atomically(folder / DESCRIPTION, self.model_dump_json(indent=1))

    @classmethod
    def read(cls, folder: Path) -> SavedCheckpoint:
        """Raises HarnessError where the folder holds no checkpoint of this harness."""
        with refusing(
            f"'{folder}' holds no checkpoint ({DESCRIPTION}",
            "); save one with measure.checkpoint=neutral and measure.keep_checkpoint=true",
        ):
            data = read_plain(folder / DESCRIPTION, MOST_DOCUMENT_BYTES)
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise HarnessError(
                f"'{folder / DESCRIPTION}' is damaged, or of another version: {explain_refusal(error, cls)}"
            ) from error

    def resumed(self) -> ResumedPart:
        """What the record of a run says that continues it."""
        return ResumedPart(**ResumedPart.shared(self))


class Resume(Stored):
    """The checkpoint that a run continues."""

    folder: Path
    saved: SavedCheckpoint


def checkpoint_folder(run_directory: Path) -> Path:
    """Where all ranks save a checkpoint, if one is asked for; deleted afterwards unless it is to be kept."""
    return run_directory / "checkpoint"


def find_checkpoint(given: str, runs: Path, *, trusted: bool = False) -> Resume:
    """The kept checkpoint of a run, by its id or folder, or a folder of a checkpoint.

    `trusted`: loading it may execute code.
    Raises HarnessError where there is none that training could go on from.
    """
    candidates = [Path(given), checkpoint_folder(Path(given)), checkpoint_folder(runs / given)]
    folder = next((path for path in candidates if (path / DESCRIPTION).is_file()), None)
    if folder is None:
        raise HarnessError(
            f"--resume-from {given}: no checkpoint in {', '.join(map(repr, map(str, candidates)))}. Keep one "
            "with measure.checkpoint=neutral and measure.keep_checkpoint=true"
        )
    saved = SavedCheckpoint.read(folder)
    if saved.format == "consolidated":
        raise HarnessError(
            f"--resume-from {given}: a consolidated checkpoint has no optimizer states, so training cannot "
            f"go on as if never stopped. Save a neutral one, or begin a new job with model.name={folder}"
        )
    if saved.format == "native" and not trusted:
        raise HarnessError(
            f"--resume-from {given}: loading a native checkpoint executes code in it; give a neutral one "
            "(measure.checkpoint=neutral), or --trust-checkpoint if you trust who saved it"
        )
    return Resume(folder=folder.resolve(), saved=saved)


def require_same_job(resume: Resume, job: Job, job_id: str) -> None:
    """Raise HarnessError unless the checkpoint is of this job and leaves steps to take."""
    saved = resume.saved
    if saved.job_id != job_id:
        fields = [
            f"{'.'.join(keys)} is {new}, the checkpoint has {old}"
            for keys, old, new in differences(saved.job.model_dump(), job.model_dump())
        ]
        raise HarnessError(
            f"the checkpoint of run {saved.run_id} is of another job: {'; '.join(fields) or 'other files'}. "
            "Give the configuration of that run"
        )
    if job.training.epochs is None:
        require_steps_left(saved, job.training.steps or DEFAULT_STEPS)


def require_steps_left(saved: SavedCheckpoint, steps: int) -> None:
    """Raise HarnessError if the checkpoint was saved after all steps of the job.

    How many an epoch has is known once the data is loaded.
    """
    if saved.step >= steps:
        raise HarnessError(
            f"the checkpoint of run {saved.run_id} was saved after {saved.step} of {steps} steps: none is "
            "left"
        )


REQUEST_NAME = "request.json"
LOCAL_RENDEZVOUS = "HARNESS_LOCAL_RENDEZVOUS"
"""In ranks that all run on this machine: for rank 0 the socket of their store, which only listens there."""


class RunRequest(Stored):
    """One run of one cell; the job's global batch is resolved and its cut is here.

    A cell of a plan is the same without the first three, which `launch.cells.begin_run` gives it.
    """

    run_id: PlainName = "planned"
    created_at: str = ""
    command: KeptCommand = []
    backend: str
    """Canonical label: name and options."""
    job: Job
    job_id: str
    key: str = Field(validation_alias=AliasChoices("key", "cell"))
    """Of the cell: equal keys mean equal job, world, measurement, code and versions."""
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
    loading: AskedLoading = "slices"
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


def numbered_file(name: str) -> Callable[[Path, int], Path]:
    """Gives the path of a rank's, or a node's, file of this name in the folder of a run."""
    return lambda run_directory, number: run_directory / name.format(number)


rank_file = numbered_file("rank-{:05d}.jsonl")
"""Where a rank appends its events, one JSON object a line."""
rank_log = numbered_file("rank-{:05d}.log")
"""Where a rank's standard output and error go."""
rank_state = numbered_file("rank-{:05d}.state")
"""Where a rank notes what it is doing, and its stacks when it is asked."""
modules_file = numbered_file("rank-{:05d}.modules")
"""Where a rank notes the modules that it runs in its first steps."""
trace_file = numbered_file("trace-{:05d}.json.gz")
"""Where a rank leaves the profiler's trace, if one is asked for."""
snapshot_file = numbered_file("memory-snapshot-{:05d}.pickle")
"""Where a rank leaves the snapshot of its CUDA memory, if one is asked for."""
RANK_OWNERS = "rank-*.owner.json"
rank_owner = numbered_file("rank-{:05d}.owner.json")
"""Where the monitor of a rank says which process it is."""
rank_exit = numbered_file("rank-{:05d}.exit.json")
"""Where the monitor of a rank notes how it ended."""
stopped_file = numbered_file("rank-{:05d}.stopped")
"""There while the monitor of a rank sees that it is stopped."""


def weights_folder(run_directory: Path) -> Path:
    """Where the initial weights lie while ranks read them; removed before the training."""
    return run_directory / "initial-weights"


def launcher_log(run_directory: Path) -> Path:
    """Where the launchers of all nodes and their ranks print, where ranks have no logs of their own."""
    return run_directory / "launcher.log"


Tensors = Literal["fake", "real"]
"""'fake': tensors without data, so that a model of any size fits; 'real': tensors with data."""


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
    layout: Layout | None = None
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
