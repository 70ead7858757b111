"""The machine of the CUDA stub: runs cells of small jobs on its devices."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from harness.backends import registry
from harness.job.batch import batch_layout, reference_layout
from harness.job.config import load_experiment
from harness.judge.comparison import Comparison
from harness.launch.cells import canonical_label, make_cell, noise_labels, tensor_sizes
from harness.launch.launcher import run_cell
from harness.record import Record
from harness.record.store import Store
from harness.run_directory.request import find_checkpoint
from tests.gpu_stub.launcher import FORKS, launcher
from tests.traps.matrix import TINY, UNTRACED

SETTINGS = (*TINY, UNTRACED, "runtime.device=cuda", "measure.warmup_steps=2")
"""A Llama of two blocks, six steps. In the first two, stage 3 compares its trace of modules between ranks,
for which there is no closed form."""
SET = tuple(word for setting in SETTINGS for word in ("--set", setting))
"""The same as the command line takes them."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
DEVICES = 8
COMMAND = ("make", "test-gpu-stub")


class Machine:
    """Runs and remembers cells; one fork server serves them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(folder / "runs")
        self.store.prepare()
        self._records: dict[tuple[object, ...], Record] = {}

    def run(
        self,
        label: str,
        nproc: int = 2,
        settings: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        repeat: int = 0,
        log: bool = False,
        resume_from: Record | None = None,
    ) -> Record:
        """The record of one run, whatever became of it; equal ones are run once.

        `environment`: variables of its ranks, besides CUDA_STUB_DEVICES. `repeat` tells equal runs apart.
        `log`: have the stub log its calls in the run's directory. `resume_from`: a run whose checkpoint is
        continued.
        """
        experiment = load_experiment(None, [*SETTINGS, *settings])
        layout = batch_layout(experiment.training, nproc)
        if registry.parse(label)[0].name == registry.REFERENCE:
            nproc, layout = 1, reference_layout(layout, experiment.training)
        variables = {"CUDA_STUB_DEVICES": str(DEVICES)} | dict(environment or {})
        resume = find_checkpoint(resume_from.run_id, self.store.root, trusted=True) if resume_from else None
        saved_by = resume_from and resume_from.run_id
        key = (label, nproc, tuple(settings), layout, tuple(sorted(variables.items())), repeat, log, saved_by)
        if key not in self._records:
            name = canonical_label(label)
            cell = make_cell(experiment, name, nproc, layout, repeat, "cuda", resume=resume)
            ranks = launcher()
            with ranks.environment(variables, log=log):
                self._records[key] = run_cell(cell, self.store, ranks, command=list(COMMAND))
        return self._records[key]

    def run_directory(self, record: Record) -> Path:
        """Where its ranks' logs are."""
        return self.store.root / record.run_id

    def compare(
        self, labels: Sequence[str], nproc: int = 2, settings: Sequence[str] = (), *, log: bool = False
    ) -> Comparison:
        """Rows of these backends next to the reference and its repetitions."""
        references = self.references(nproc, settings, tensor_sizes(labels, nproc), log=log)
        return Comparison([*references, *(self.run(label, nproc, settings, log=log) for label in labels)])

    def references(
        self, nproc: int, settings: Sequence[str] = (), parts: Iterable[int] = (), *, log: bool = False
    ) -> list[Record]:
        """The reference and its repetitions for this number of ranks and parts of cut layers."""
        experiment = load_experiment(None, [*SETTINGS, *settings])
        layout = reference_layout(batch_layout(experiment.training, nproc), experiment.training)
        labels = [registry.REFERENCE, *noise_labels(layout, experiment, parts)]
        return [self.run(label, nproc, settings, log=log) for label in labels]

    def variables(self, **more: str) -> dict[str, str]:
        """Of a process on the machine that is not one of the launcher's ranks."""
        own = {name: value for name, value in os.environ.items() if name != FORKS}
        return own | {"CUDA_STUB_DEVICES": str(DEVICES)} | more

    def harness(
        self,
        *words: str,
        environment: Mapping[str, str] | None = None,
        launched_by: Sequence[str] = (),
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line in the machine's folder; `launched_by`: words before `-m harness`."""
        return subprocess.run(
            [sys.executable, *launched_by, "-m", "harness", *words], cwd=self.folder,
            env=self.variables(**(environment or {})), capture_output=True, text=True, check=False,
            timeout=timeout,
        )  # fmt: skip
