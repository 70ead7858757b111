"""What a saved checkpoint says of itself: one JSON file in its folder, whatever the format."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from harness.backends.refusals import explain_refusal
from harness.bounds import MOST_DOCUMENT_BYTES
from harness.errors import HarnessError
from harness.files import Stored, read_plain, refusing, write_atomically
from harness.job.job import DEFAULT_STEPS, Job
from harness.nested import differences
from harness.record.measured import ResumedPart, SavedFormat

DESCRIPTION = "checkpoint.json"
KEY_BYTES = 32


class SavedCheckpoint(Stored):
    """The run that saved a checkpoint, and how far it was."""

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

    files: dict[str, str] = {}
    """SHA-256 of each file by its path, of formats that execute code when they are loaded."""
    seal: str | None = None
    """Of these digests with the key of the user who saved them; None: there is none."""

    def sealed(self, folder: Path) -> SavedCheckpoint:
        """With the digests of the files that were just saved; without a key, unsealed."""
        files = _digests(folder)
        key = _user_key(make=True)
        return self.model_copy(update={"files": files, "seal": _seal(files, key) if key else None})

    def why_foreign(self, folder: Path) -> str | None:
        """Why the files may not be those that this user saved; None: they are."""
        key = _user_key(make=False)
        if self.seal is None:
            return "nothing tells who saved it"
        if key is None or not hmac.compare_digest(_seal(self.files, key), self.seal):
            return "another user, or another home folder, saved it"
        found = _digests(folder)
        changed = sorted(name for name in {*found, *self.files} if found.get(name) != self.files.get(name))
        return f"{changed[0]} is not as it was saved" if changed else None

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


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint but its description, by its path in the folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / DESCRIPTION:
            with path.open("rb") as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _seal(files: Mapping[str, str], key: bytes) -> str:
    return hmac.new(key, json.dumps(dict(files), sort_keys=True).encode(), "sha256").hexdigest()


def _user_key(*, make: bool) -> bytes | None:
    """A secret of this user, by which files of others are told from own ones; None: it cannot be kept."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "sharding-harness" / "key"
    with suppress(OSError):
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(own := f"{path}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            with suppress(FileExistsError):  # another process was first
                os.link(own, path)
            os.unlink(own)
        key = path.read_bytes()
        return key if len(key) == KEY_BYTES else None
    return None


class Resume(Stored):
    """The checkpoint that a run continues."""

    folder: Path
    saved: SavedCheckpoint


def checkpoint_folder(run_directory: Path) -> Path:
    """Where all ranks save a checkpoint, if one is asked for; deleted afterwards unless it is to be kept."""
    return run_directory / "checkpoint"


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
