"""Runs cells of tiny jobs, each once until what runs in it changes, whichever worker asks for it first."""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import isabstract
from pathlib import Path

import pytest
import torch

from harness.backends import registry
from harness.doctor.self_check import ABOUT_TIME
from harness.files import write_atomically
from harness.job.batch import batch_layout, reference_layout
from harness.job.config import load_experiment
from harness.job.experiment import Experiment
from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding
from harness.launch.cells import (
    canonical_label,
    make_cell,
    noise_labels,
    same_split_labels,
    samples_of_cuts,
    tensor_sizes,
)
from harness.launch.launcher import run_cell
from harness.record import Record
from harness.record.store import RECORD_NAME, Store, read_record
from harness.run_directory.request import RunRequest
from tests import kept
from tests.forkserver import launcher
from tests.made_once import MadeOnce
from tests.plugins import register

from . import adapters, families, libraries

TINY = [
    "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 2, max_position_embeddings: 16}",
    "data.sequence_length=16", "data.limit=64", "training.steps=6", "training.global_batch_size=8",
    "schedule.warmup_steps=1", "measure.warmup_steps=1", "measure.probed_steps=2",
    "runtime.threads_per_rank=1", "runtime.device=cpu",
]  # fmt: skip
OF_MODEL = 2
"""So many of them at the beginning are about the model and its samples."""


UNTRACED = "measure.traced_steps=0"
"""Starting and reading the profiler takes longer than all steps, and only findings of speed read it."""


class Matrix:
    """Runs and remembers cells; one fork server serves them all.

    `further`: settings of all cells, before their own. `made_once`: where others' runs lie.
    """

    def __init__(self, folder: Path, further: Sequence[str] = (), made_once: MadeOnce | None = None) -> None:
        self.store = Store(folder / "runs")
        self.store.prepare()
        self._further = further
        self._made_once = made_once
        self._records: dict[tuple[str, int, tuple[str, ...]], Record] = {}
        self._comparisons: dict[tuple[tuple[str, ...], int, tuple[str, ...]], Comparison] = {}

    def _experiment(self, settings: Sequence[str]) -> Experiment:
        """The tiny job with these settings; a model of its own replaces the model."""
        own = any(setting.startswith("model.factory=") for setting in settings)
        return load_experiment(None, [*TINY[OF_MODEL if own else 0 :], *self._further, *settings])

    def record(self, label: str, world_size: int, settings: Sequence[str]) -> Record:
        key = (label, world_size, tuple(settings))
        if key not in self._records:
            self._records[key] = self._run(label, world_size, settings)
        return self._records[key]

    def compare(self, labels: Sequence[str], world_size: int, settings: Sequence[str] = ()) -> Comparison:
        """Rows of these backends beside the reference and its repetitions."""
        key = (tuple(labels), world_size, tuple(settings))
        if key not in self._comparisons:
            self._comparisons[key] = self._compare(labels, world_size, settings)
        return self._comparisons[key]

    def _compare(self, labels: Sequence[str], world_size: int, settings: Sequence[str]) -> Comparison:
        experiment = self._experiment(settings)
        layout = reference_layout(batch_layout(experiment.training, world_size), experiment.training)
        parts = tensor_sizes(labels, world_size)
        references = [registry.REFERENCE, *noise_labels(layout, experiment, parts)]
        records = [self._reference(label, world_size, settings) for label in references]
        runs = [self.record(label, world_size, settings) for label in labels]
        for samples in samples_of_cuts(records[0], runs):
            cuts = same_split_labels(samples, experiment, parts)
            records += [self._reference(label, world_size, settings) for label in cuts]
        return Comparison([*{record.run_id: record for record in records}.values(), *runs])

    def findings(self, labels: Sequence[str], world_size: int, settings: Sequence[str] = ()) -> list[Finding]:
        comparison = self.compare(labels, world_size, settings)
        broken = [
            (r.record.backend.label, r.record.error) for r in comparison.rows if r.record.status == "failed"
        ]
        assert not broken, broken
        return [finding for finding in comparison.findings if finding.id not in ABOUT_TIME]

    def _reference(self, label: str, world_size: int, settings: Sequence[str]) -> Record:
        experiment = self._experiment(settings)
        layout = reference_layout(batch_layout(experiment.training, world_size), experiment.training)
        key = (label, 1, (*settings, str(layout)))
        if key not in self._records:
            self._records[key] = self._run(label, world_size, settings)
        return self._records[key]

    def _run(self, label: str, world_size: int, settings: Sequence[str]) -> Record:
        experiment = self._experiment(settings)
        layout = batch_layout(experiment.training, world_size)
        if registry.parse(label)[0].name == registry.REFERENCE:
            world_size, layout = 1, reference_layout(layout, experiment.training)
        cell = make_cell(experiment, canonical_label(label), world_size, layout, 0, "cpu")
        if self._made_once is None:
            return self._made(cell, experiment)
        with self._made_once.place(cell.key) as place:
            if place.exists():
                record = read_record(place / RECORD_NAME)
                shutil.copytree(place, self.store.root / record.run_id, dirs_exist_ok=True)
                return record
            record = self._made(cell, experiment)
            if record.status != "failed":
                self._made_once.fill(place, self.store.root / record.run_id)
            return record

    def _made(self, cell: RunRequest, experiment: Experiment) -> Record:
        return run_cell(cell, self.store, launcher(), command=["make", "gallery"])


def skip_without_fp16(record: Record) -> None:
    """Where DeepSpeed refuses fp16 on this processor, of which it asks torch."""
    if record.status == "unsupported" and "here has no fp16" in record.reasons[0]:
        assert not torch.ops.mkldnn._is_mkldnn_fp16_supported()
        pytest.skip(record.reasons[0])


def install(folder: Path) -> None:
    """Make the broken adapters known as a third party's distribution would."""
    broken = {
        name: module.__name__
        for module in (adapters, families, libraries)
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and not isabstract(value)
    }
    register(folder, {f"planted-{name}": f"{module}:{name}" for name, module in broken.items()})
    sys.path.insert(0, str(folder))


@contextmanager
def planted_matrix(
    folder: Path, further: Sequence[str] = (), made_once: MadeOnce | None = None
) -> Iterator[Matrix]:
    """A matrix of runs in the folder; meanwhile the broken adapters are known."""
    install(folder / "site")
    try:
        yield Matrix(folder, further, made_once)
    finally:
        sys.path.remove(str(folder / "site"))


@pytest.fixture(scope="package")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    """The runs of all tests, whichever package asks and whichever session made them."""
    with planted_matrix(tmp_path_factory.mktemp("matrix"), [UNTRACED], kept.runs()) as found:
        yield found


def padded_documents(path: Path) -> str:
    """A JSON lines file whose samples have very different numbers of target tokens."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away"]
    lines = [json.dumps({"text": " ".join(words[: 1 + index % 3])}) for index in range(64)]
    write_atomically(path, "\n".join(lines) + "\n")
    return str(path)
