"""The model as the harness hands it to a backend: strategies that shard weights read theirs from a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path

from torch import nn

from harness.backends.base import World
from harness.backends.model_source import Loading
from harness.job.job import Job
from harness.rank.data import DataFacts
from harness.rank.initial_weights import JobModelSource
from harness.rank.models.model import model_config

FOLDER = "CONTRACT_FOLDER"
"""Variable that names a folder which the ranks share."""
_cases = count()


def job_source(
    job: Job,
    vocabulary_size: int,
    world: World,
    on_built: Callable[[nn.Module], None],
    loading: Loading = "slices",
) -> JobModelSource:
    """Ranks that call this in the same order share files."""
    return JobModelSource(
        job,
        model_config(job, DataFacts(vocabulary_size=vocabulary_size)),
        world,
        loading=loading,
        folder=Path(os.environ[FOLDER]) / f"weights-{next(_cases)}",
        on_built=on_built,
    )
