"""The samples of a job and their order: addressed by (step, micro-step, data rank), equal for every world."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.batch import BatchLayout
from harness.errors import JobError
from harness.spec import Job
from harness.spec.data import IMAGES
from harness.worker.dataset import IGNORED as IGNORED
from harness.worker.dataset import Samples as Samples
from harness.worker.documents import read_documents
from harness.worker.image_samples import load_images
from harness.worker.own_samples import load_own_samples
from harness.worker.row_samples import load_classified, load_pairs
from harness.worker.text_samples import load_text


def load_samples(job: Job) -> Samples:
    """Read the job's data, tokenise and cut text.

    Raises JobError if there is none.
    """
    data = job.data
    if data.factory is not None:
        samples = load_own_samples(job)
    elif data.source in IMAGES:
        samples = load_images(job)
    elif job.task == "classification":
        samples = load_classified(job)
    elif job.task == "seq2seq":
        samples = load_pairs(job, read_documents(data))
    else:
        samples = load_text(job, read_documents(data))
    source = f"data source '{data.source}'" + (f" ('{data.path}')" if data.path else "")
    if len(samples) == 0:
        if data.factory is not None or not data.is_packed:
            raise JobError(f"{data.factory or source} gives no sample; give more data")
        raise JobError(
            f"{source} gives no sample of {data.sequence_length} tokens; give more text or a smaller "
            "data.sequence_length"
        )
    return samples


class Sampler:
    """Which samples each step trains on. Epochs are permuted by the seed alone."""

    def __init__(self, samples: Samples, job: Job) -> None:
        batch = job.training.global_batch_size
        assert batch is not None
        held_out = job.evaluation.samples if job.evaluation.every_steps else 0
        self.training_count = len(samples) - held_out
        if self.training_count < 1:
            raise JobError(
                f"the data has {len(samples)} samples and evaluation.samples holds out {held_out}: none "
                "is left to train on; give more data or hold out fewer"
            )
        self._samples = samples
        self.global_batch_size = batch
        self.evaluation_ids = list(range(self.training_count, len(samples)))
        self._shuffle = job.data.shuffle
        self._seed = job.training.seed
        self._permutations: dict[int, Tensor] = {}
        self._steps: dict[int, list[int]] = {}

    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor that data keeps in memory: the samples, and the order in which they are drawn."""
        samples = self._samples
        yield from (*samples.fields.values(), samples.lengths, samples.targets)
        yield from self._permutations.values()

    def step_ids(self, step: int) -> list[int]:
        """Sample ids of the global batch of a step, in order; epochs follow each other without a gap."""
        if step not in self._steps:
            first = step * self.global_batch_size
            ids = [self._sample_id(first + i) for i in range(self.global_batch_size)]
            self._steps = {step: ids}
        return self._steps[step]

    def micro_batch_ids(
        self, step: int, micro_step: int, data_rank: int, data_size: int, layout: BatchLayout
    ) -> list[int]:
        """A data rank's part of a global batch: micro-steps first, then data ranks, then samples."""
        start = (micro_step * data_size + data_rank) * layout.micro_batch_size
        return self.step_ids(step)[start : start + layout.micro_batch_size]

    def _sample_id(self, position: int) -> int:
        epoch, index = divmod(position, self.training_count)
        return int(self._permutation(epoch)[index]) if self._shuffle else index

    def _permutation(self, epoch: int) -> Tensor:
        if epoch not in self._permutations:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            order = torch.randperm(self.training_count, generator=generator)
            self._permutations = {epoch: order} | {
                e: p for e, p in self._permutations.items() if e == epoch - 1
            }
        return self._permutations[epoch]
