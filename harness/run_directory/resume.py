"""Which checkpoint a run continues, and whether it is of the same job."""

from __future__ import annotations

from pathlib import Path

from harness.errors import HarnessError
from harness.job.job import DEFAULT_STEPS, Job
from harness.nested import differences
from harness.run_directory.checkpoint import DESCRIPTION, SavedCheckpoint
from harness.run_directory.request import Resume, checkpoint_folder


def find_checkpoint(given: str, runs: Path, *, trusted: bool = False) -> Resume:
    """The kept checkpoint of a run, by its id or folder, or a folder of a checkpoint.

    `trusted`: it may execute code, whoever saved it.
    Raises HarnessError where there is none that training could go on from.
    """
    candidates = [Path(given), checkpoint_folder(Path(given)), checkpoint_folder(runs / given)]
    folder = next((path for path in candidates if (path / DESCRIPTION).is_file()), None)
    if folder is None:
        raise HarnessError(
            f"--resume-from {given}: no checkpoint in {', '.join(map(repr, map(str, candidates)))}. Keep one "
            "with measure.checkpoint=neutral and measure.keep_checkpoint=true"
        )
    try:
        return _continued(given, folder, trusted)
    except OSError as error:
        raise HarnessError(
            f"--resume-from {given}: {error.filename} cannot be read: {error.strerror}"
        ) from error


def _continued(given: str, folder: Path, trusted: bool) -> Resume:
    saved = SavedCheckpoint.read(folder)
    if saved.format == "consolidated":
        raise HarnessError(
            f"--resume-from {given}: a consolidated checkpoint has no optimizer states, so training cannot "
            f"go on as if never stopped. Save a neutral one, or begin a new job with model.name={folder}"
        )
    if saved.format == "native" and not trusted and (why := saved.why_foreign(folder)) is not None:
        raise HarnessError(
            f"--resume-from {given}: loading a native checkpoint executes code in it, and {why}; give "
            "a neutral one (measure.checkpoint=neutral), or --trust-checkpoint if you trust who saved it"
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
