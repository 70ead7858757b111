"""Command lines that measure recommended configurations."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.planning.recommend.predict import Configuration
from harness.planning.recommend.question import Question

SITE = "SITE.yaml"


@dataclass(frozen=True, kw_only=True)
class Typed:
    """What the person typed that commands repeat."""

    config: Path | None = None
    assignments: tuple[str, ...] = ()
    model_settings: tuple[str, ...] = ()
    """Assignments that name the model of `--model`; empty: the job has it."""


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Lines to type, one after the other."""

    compare: tuple[str, ...]
    """On one node; empty for several."""
    slurm: tuple[str, ...]


def commands(question: Question, chosen: Sequence[Configuration], typed: Typed) -> Commands:
    """A comparison, and a Slurm matrix, for each set of settings among the chosen configurations.

    Backends of equal micro-batch and checkpointing share one; all of them record into one folder of runs.
    """
    groups: dict[tuple[int, bool | str], list[Configuration]] = {}
    for configuration in chosen:
        groups.setdefault((configuration.micro_batch_size, configuration.checkpointing), []).append(
            configuration
        )
    compare, slurm = [], []
    for number, group in enumerate(groups.values(), start=1):
        shared = [*_config(typed), "--backends", ",".join(c.label for c in group)]
        settings = _settings(question, group[0], typed)
        compare.append(shlex.join(["harness", "compare", *shared, "--nproc", str(question.gpus), *settings]))
        folder = f"jobs-{number}"
        world = ["--nodes", str(question.nodes), "--nproc", str(question.gpus_per_node)]
        slurm.append(
            shlex.join(
                ["harness", "slurm", "render", "--site", SITE, *shared, *world, *settings, "-o", folder]
            )
        )
        slurm.append(shlex.join(["harness", "slurm", "submit", folder, "--wait"]))
    if not chosen:
        return Commands(compare=(), slurm=())
    report = "harness report runs -o report.md"
    return Commands(
        compare=(*compare, report) if question.nodes == 1 else (),
        slurm=(*slurm, report),
    )


def in_yaml(value: object) -> str:
    """A value as `--set` reads it."""
    return json.dumps(value)


def _config(typed: Typed) -> list[str]:
    return ["--config", str(typed.config)] if typed.config is not None else []


def _settings(question: Question, configuration: Configuration, typed: Typed) -> list[str]:
    training = question.job.training
    decided = {
        "runtime.preset": question.preset,
        "data.sequence_length": question.sequence_length,
        "training.precision": training.precision,
        "training.global_batch_size": training.global_batch_size,
        "training.micro_batch_size": configuration.micro_batch_size,
        "training.activation_checkpointing": configuration.checkpointing,
        # Repetitions of a reference that one GPU cannot hold tell nothing.
        "compare.noise_runs": False,
    }
    given = [text for text in typed.assignments if text.partition("=")[0].strip() not in decided]
    settled = [
        f"{key}={value if isinstance(value, str) else in_yaml(value)}" for key, value in decided.items()
    ]
    return [word for text in (*typed.model_settings, *given, *settled) for word in ("--set", text)]
