"""What a saved checkpoint says of itself: one JSON file in its folder, whatever the format."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.atomic_write import write_atomically
from harness.backends.explain import explain
from harness.bounds import MOST_DOCUMENT_BYTES
from harness.errors import HarnessError
from harness.plain_files import read_plain
from harness.record.checkpoint import ResumedPart, SavedFormat
from harness.spec import Job

DESCRIPTION = "checkpoint.json"


class SavedCheckpoint(BaseModel):
    """The run that saved a checkpoint, and how far it was."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
        try:
            data = read_plain(folder / DESCRIPTION, MOST_DOCUMENT_BYTES)
        except OSError as error:
            raise HarnessError(
                f"'{folder}' holds no checkpoint ({DESCRIPTION}: {error.strerror}); save one with "
                "measure.checkpoint=neutral and measure.keep_checkpoint=true"
            ) from error
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise HarnessError(
                f"'{folder / DESCRIPTION}' is damaged, or of another version: {explain(error, cls)}"
            ) from error

    def resumed(self) -> ResumedPart:
        """What the record of a run says that continues it."""
        return ResumedPart(
            format=self.format,
            run_id=self.run_id,
            backend=self.backend,
            world_size=self.world_size,
            step=self.step,
            updates=self.updates,
            weights_digest=self.weights_digest,
        )
