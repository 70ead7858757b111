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

from harness.backends.base import Engine, Unsupported
from harness.backends.checkpoints.tensor_files import load_portable, save_portable
from harness.backends.checkpoints.torch_pieces import moments_checksum
from harness.rank.instruments import RankContext
from harness.rank.probes.memory import HostPeak
from harness.rank.probes.probes import Probes
from harness.rank.probes.weights import digest_weights
from harness.record.measured import CheckpointPart, SavedFormat
from harness.run_directory.events import CheckpointEvent
from harness.run_directory.request import SavedCheckpoint, checkpoint_folder

T = TypeVar("T")
LOADING_PHASE = "checkpoint_load"


@dataclass(frozen=True, kw_only=True)
class CheckpointProbe:
    """Called once, between two steps, while the allocator still counts."""

    rank: RankContext
    config: Any
    """The model's, which Hugging Face needs to read the weights; None: a model of the user's own."""

    def save(self, engine: Engine, probes: Probes, steps_taken: int) -> None:
        """Save through `engine` and load again, then delete the files unless they are kept; a collective.

        Raises what the library raises where it cannot save.
        """
        rank, folder = self.rank, checkpoint_folder(self.rank.run_directory)  # the same path on every rank
        form: SavedFormat = rank.request.measure.checkpoint  # type: ignore[assignment]
        with (
            probes.memory_of("during_checkpoint", steps_taken),
            _measured("save", form, steps_taken, folder, rank),
            probes.counting("checkpoint"),
        ):
            if form == "native":
                engine.save(folder)
            else:
                save_portable(engine, folder, form)
        self._describe(engine, folder, form, steps_taken)
        with probes.memory_of("during_checkpoint_load", steps_taken):
            load(engine, folder, form, steps_taken, rank, probes)
        dist.barrier()  # no rank deletes what another still reads
        if not rank.request.measure.keep_checkpoint and rank.world.local_rank == 0:
            # Nodes that share the folder delete it side by side.
            shutil.rmtree(folder, ignore_errors=True)

    def _describe(self, engine: Engine, folder: Path, form: SavedFormat, steps_taken: int) -> None:
        """Note next to the files what was saved; a collective where digests are asked for."""
        request, world = self.rank.request, self.rank.world
        digests = request.measure.keep_checkpoint and request.measure.weight_digests
        weights = digest_weights(engine) if digests else None
        moments = (
            if_supported(lambda: moments_checksum(engine)) if digests and form != "consolidated" else None
        )
        if world.rank == 0:
            progress = if_supported(engine.progress)
            saved = SavedCheckpoint(
                format=form, native_format=engine.native_format(), run_id=request.run_id,
                backend=request.backend, world_size=world.world_size, job_id=request.job_id,
                job=request.job, step=steps_taken, updates=progress.updates if progress else None,
                loss_scale=progress.loss_scale if progress else None,
                weights_digest=weights.digest if weights else None, moments_checksum=moments,
            )  # fmt: skip
            saved.write(folder)
            if form != "native" and self.config is not None:
                self.config.save_pretrained(folder)


@contextmanager
def _measured(
    operation: Literal["save", "load"], form: SavedFormat, step: int, folder: Path, rank: RankContext
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
        file_bytes=sum(path.stat().st_size for path in files) if rank.world.rank == 0 else None,
        host_before_bytes=host.before_bytes,
        host_peak_bytes=host.peak_bytes,
    )
    rank.events.write(CheckpointEvent(part=part))


def load(
    engine: Engine, folder: Path, form: SavedFormat, step: int, rank: RankContext, probes: Probes
) -> None:
    """Load what was saved after so many steps, measured and counted; a collective."""
    with _measured("load", form, step, folder, rank), probes.counting(LOADING_PHASE):
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
