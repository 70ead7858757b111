"""Saves one checkpoint of a run and loads it again, with time, memory and collectives recorded."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from harness.backends.base import Engine, Unsupported, World
from harness.backends.checkpoints.tensor_files import load_portable, save_portable
from harness.backends.checkpoints.torch_pieces import moments_checksum
from harness.rank.probes.memory import HostPeak
from harness.rank.probes.probes import Probes
from harness.rank.probes.weights import digest_weights
from harness.record.measured import CheckpointPart, SavedFormat
from harness.run_directory.events import CheckpointEvent, EventWriter
from harness.run_directory.request import RunRequest, SavedCheckpoint

T = TypeVar("T")
LOADING_PHASE = "checkpoint_load"


@dataclass(frozen=True, kw_only=True)
class CheckpointProbe:
    """Called once, between two steps, while the allocator still counts."""

    folder: Path
    """Where the files go; the same path on every rank."""
    request: RunRequest
    world: World
    events: EventWriter
    config: Any
    """The model's, which Hugging Face needs to read the weights; None: a model of the user's own."""

    def save(self, engine: Engine, probes: Probes, steps_taken: int) -> None:
        """Save through `engine` and load again, then delete the files unless they are kept; a collective.

        Raises what the library raises where it cannot save.
        """
        form: SavedFormat = self.request.measure.checkpoint  # type: ignore[assignment]
        with (
            probes.memory_of("during_checkpoint", steps_taken),
            _measured("save", form, steps_taken, self.folder, self.world, self.events),
            probes.counting("checkpoint"),
        ):
            if form == "native":
                engine.save(self.folder)
            else:
                save_portable(engine, self.folder, form)
        self._describe(engine, form, steps_taken)
        with probes.memory_of("during_checkpoint_load", steps_taken):
            load(engine, self.folder, form, steps_taken, self.world, self.events, probes)
        dist.barrier()  # no rank deletes what another still reads
        if not self.request.measure.keep_checkpoint and self.world.local_rank == 0:
            # Nodes that share the folder delete it side by side.
            shutil.rmtree(self.folder, ignore_errors=True)

    def _describe(self, engine: Engine, form: SavedFormat, steps_taken: int) -> None:
        """Note next to the files what was saved; a collective where digests are asked for."""
        request = self.request
        digests = request.measure.keep_checkpoint and request.measure.weight_digests
        weights = digest_weights(engine) if digests else None
        moments = (
            if_supported(lambda: moments_checksum(engine)) if digests and form != "consolidated" else None
        )
        if self.world.rank == 0:
            progress = if_supported(engine.progress)
            saved = SavedCheckpoint(
                format=form, native_format=engine.native_format(), run_id=request.run_id,
                backend=request.backend, world_size=self.world.world_size, job_id=request.job_id,
                job=request.job, step=steps_taken, updates=progress.updates if progress else None,
                loss_scale=progress.loss_scale if progress else None,
                weights_digest=weights.digest if weights else None, moments_checksum=moments,
            )  # fmt: skip
            if request.measure.keep_checkpoint and form == "native":
                saved = saved.sealed(self.folder)
            saved.write(self.folder)
            if form != "native" and self.config is not None:
                self.config.save_pretrained(self.folder)


@contextmanager
def _measured(
    operation: Literal["save", "load"],
    form: SavedFormat,
    step: int,
    folder: Path,
    world: World,
    events: EventWriter,
) -> Iterator[None]:
    """Write one event of what happens inside: its time, the memory of the host, the size of the files."""
    dist.barrier()
    begin = time.perf_counter()
    with HostPeak() as host:
        yield
        dist.barrier()
    files = (path for path in folder.rglob("*") if path.is_file())
    part = CheckpointPart(
        operation=operation,
        format=form,
        step=step,
        seconds=time.perf_counter() - begin,
        file_bytes=sum(path.stat().st_size for path in files) if world.rank == 0 else None,
        host_before_bytes=host.before_bytes,
        host_peak_bytes=host.peak_bytes,
    )
    events.write(CheckpointEvent(part=part))


def load(
    engine: Engine, folder: Path, form: SavedFormat, step: int, world: World, events: EventWriter,
    probes: Probes,
) -> None:  # fmt: skip
    """Load what was saved after so many steps, measured and counted; a collective."""
    with _measured("load", form, step, folder, world, events), probes.counting(LOADING_PHASE):
        if form == "native":
            engine.load(folder)
        else:
            load_portable(engine, folder, form)


def if_supported(ask: Callable[[], T]) -> T | None:
    """What an engine answers; None: it does not support the question."""
    try:
        return ask()
    except Unsupported:
        return None
