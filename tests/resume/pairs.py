"""Pairs of backend and world size: saved under one, continued under another; all in few process groups."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from harness.backends.base import Unsupported, World
from harness.job.job import Job
from tests.forkserver import run_ranks
from tests.resume.engines import Trained, resume, save_and_train_on

Key = TypeVar("Key")


JOIN_SECONDS = 400


def on_ranks(world_size: int, deeds: Sequence[Callable[[Any], Any]]) -> list[Any]:
    """Call each deed with the rank's world, on every rank; what each returned on rank 0, in order.

    A deed that raised gives its exception, if all ranks raised; the deeds must be picklable.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        run_ranks(_rank, world_size, lambda rank: (rank, world_size, list(deeds), name), folder, JOIN_SECONDS)
        return torch.load(folder / "results.pt", weights_only=False)  # type: ignore[no-any-return]


def _rank(rank: int, world_size: int, deeds: Sequence[Callable[[Any], Any]], folder: str) -> None:
    code = 1
    try:
        _do_all(rank, world_size, deeds, Path(folder))
        code = 0
    except BaseException:
        (Path(folder) / f"{rank}.error").write_text(traceback.format_exc())
    os._exit(code)


def _do_all(rank: int, world_size: int, deeds: Sequence[Callable[[Any], Any]], folder: Path) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of FSDP1, which is deprecated, by the hundred
    world = World(rank=rank, world_size=world_size, local_rank=rank, ranks_per_node=world_size, device="cpu")
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)
    results = []
    for deed in deeds:
        try:
            results.append(deed(world))
        except (Unsupported, ValueError) as error:
            results.append(error)
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.barrier()


@dataclass(frozen=True, order=True)
class Side:
    """A backend on a number of ranks."""

    backend: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.backend} on {self.world_size}"

    def folder(self, root: Path) -> Path:
        """Where its checkpoints lie."""
        return root / f"{self.backend.replace(':', '-')}-{self.world_size}"


@dataclass(frozen=True)
class Resumption:
    """A checkpoint of one side, continued by another."""

    source: Side
    target: Side
    form: str = "neutral"
    sabotage: str | None = None
    """What is left out while it is loaded."""


def save_all(
    sides: Iterable[Side], job: Job, root: Path, *, native: bool = True
) -> dict[Side, Trained | Exception]:
    """Each side's checkpoints, and the rest of its training."""
    found: dict[Side, Trained | Exception] = {}
    listed = list(sides)
    for size in sorted({side.world_size for side in listed}):
        some = [side for side in listed if side.world_size == size]
        deeds = [
            partial(save_and_train_on, s.backend, job=job, folder=s.folder(root), native=native) for s in some
        ]
        found |= zip(some, on_ranks(size, deeds), strict=True)
    return found


def resume_all(wanted: Iterable[Resumption], job: Job, root: Path) -> dict[Resumption, Trained | Exception]:
    """The rest of each training."""
    found: dict[Resumption, Trained | Exception] = {}
    listed = list(wanted)
    for size in sorted({resumption.target.world_size for resumption in listed}):
        some = [resumption for resumption in listed if resumption.target.world_size == size]
        deeds = [
            partial(
                resume,
                r.target.backend,
                job=job,
                folder=r.source.folder(root),
                form=r.form,
                sabotage=r.sabotage,
            )
            for r in some
        ]
        found |= zip(some, on_ranks(size, deeds), strict=True)
    return found


def loss_difference(expected: Trained, given: Trained) -> float:
    """Largest difference of a step's loss, nats per token."""
    return max(abs(a - b) for a, b in zip(expected.losses, given.losses, strict=True))


def weight_difference(expected: Trained, given: Trained) -> float:
    """Largest difference of a final weight."""
    return max(float((expected.weights[n] - given.weights[n]).abs().max()) for n in expected.weights)


def is_exact(expected: Trained, given: Trained) -> bool:
    """Whether losses, norms and final weights are equal to the bit."""
    same_figures = (expected.losses, expected.norms) == (given.losses, given.norms)
    return same_figures and all(torch.equal(expected.weights[n], given.weights[n]) for n in expected.weights)


def trained(results: Mapping[Key, Trained | Exception]) -> dict[Key, Trained]:
    """Every result, none of which may be an exception."""
    failed = {key: value for key, value in results.items() if isinstance(value, Exception)}
    assert not failed, failed
    return {key: value for key, value in results.items() if isinstance(value, Trained)}
