"""Pairs of backend and world size: saved under one, continued under another; all in few process groups."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch

from harness.backends.base import Unsupported, World
from harness.job.job import Job
from tests.forkserver import on_ranks
from tests.resume.engines import Trained, resume, save_and_train_on

Key = TypeVar("Key")


def done_on(world_size: int, deeds: Sequence[Callable[[World], Trained]]) -> list[Trained | Exception]:
    """What each deed returned or raised on rank 0, in order; the deeds must be picklable."""
    with TemporaryDirectory() as folder:
        return on_ranks(partial(_do_all, deeds), world_size, Path(folder))[0]  # type: ignore[no-any-return]


def _do_all(deeds: Sequence[Callable[[World], Trained]], world: World) -> list[Trained | Exception]:
    warnings.simplefilter("ignore")  # of FSDP1, which is deprecated, by the hundred
    results: list[Trained | Exception] = []
    for deed in deeds:
        try:
            results.append(deed(world))
        except (Unsupported, ValueError) as error:
            results.append(error)
    return results if world.rank == 0 else []


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
        found |= zip(some, done_on(size, deeds), strict=True)
    return found


def resume_all(wanted: Iterable[Resumption], job: Job, root: Path) -> dict[Resumption, Trained | Exception]:
    """The rest of each training."""
    found: dict[Resumption, Trained | Exception] = {}
    listed = list(wanted)
    for size in sorted({resumption.target.world_size for resumption in listed}):
        some = [resumption for resumption in listed if resumption.target.world_size == size]
        deeds = [
            partial(
                resume, r.target.backend, job=job, folder=r.source.folder(root), form=r.form,
                sabotage=r.sabotage,
            )
            for r in some
        ]  # fmt: skip
        found |= zip(some, done_on(size, deeds), strict=True)
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
