"""Samples of several documents that are kept apart: what the model is given of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from harness.backends.base import Batch
from harness.errors import JobError
from harness.spec import Job
from harness.worker.dataset import POSITIONS
from harness.worker.factories import configuration

KEEP_APART = ("gpt2", "llama", "mistral", "qwen2")
"""Model types whose causal mask follows positions that restart (transformers 5.23, masking_utils.py,
`find_packed_sequence_indices`), as tests hold: a document's logits are those that it has alone."""


def inputs_of(batch: Batch) -> dict[str, Tensor]:
    """Arguments of a causal model's forward pass; positions that restart keep documents apart."""
    inputs = {"input_ids": batch["tokens"]}
    return inputs | ({"position_ids": batch[POSITIONS]} if POSITIONS in batch else {})


MASKING = "transformers.masking_utils"
"""What makes masks from positions; transformers before 4.53 lacks it, and leaves documents together."""


@contextmanager
def unpacked_samples() -> Iterator[None]:
    """Tell transformers that samples are not packed: of fake tensors it would read the positions' values."""
    if find_spec(MASKING) is None:
        yield
        return
    with patch(f"{MASKING}.find_packed_sequence_indices", lambda *_, **__: None):
        yield


def require_packing(job: Job, model: nn.Module) -> None:
    """Raise JobError for a model that is not known to attend within documents."""
    config: Any = configuration(model)
    known = getattr(config, "model_type", None)
    if find_spec(MASKING) is None:
        raise JobError("data.document_attention=within needs transformers 4.53 or newer; use across")
    if job.model.factory is not None or known not in KEEP_APART:
        raise JobError(
            f"data.document_attention=within: whether {type(model).__name__} keeps documents apart was not "
            f"looked up; use a model of type {', '.join(KEEP_APART)}, or across"
        )
