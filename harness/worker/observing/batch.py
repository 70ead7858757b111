"""What a script feeds to its model in one step: samples, tokens, targets and what they contain.

Tensors are noted while the step runs and read once its clock has stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from harness.backends.base import Batch
from harness.worker.batch_digest import content_digests, content_sum
from harness.worker.samples import IGNORED

FIRST = (
    "input_ids",
    "pixel_values",
    "input_values",
    "input_features",
    "inputs_embeds",
    "x",
    "input",
    "inputs",
    "ids",
    "tokens",
    "token_ids",
    "idx",
)
"""Names under which models take their samples, the likeliest first; else the first tensor counts that is
neither a target nor a mask."""
TARGETS = ("labels", "label", "targets", "target", "y")
MASKS = ("attention_mask", "mask", "padding_mask")


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The arguments of one forward pass."""

    samples: Tensor
    """The tensor whose first dimension counts the samples."""
    labels: Tensor | None
    mask: Tensor | None
    shifts: bool
    """Whether the model predicts each label from the tokens before it, so that the first counts nowhere."""

    @classmethod
    def of(cls, arguments: tuple[Any, ...], named: Mapping[str, Any], *, causal: bool) -> MicroBatch | None:
        """What a module was called with; None: no tensor with a dimension is among it.

        causal: whether the model is one of Hugging Face's causal language models.
        """
        found = _named(arguments, named)
        if not found:
            return None
        others = [name for name in found if name not in TARGETS + MASKS] or list(found)
        name = next((name for name in FIRST if name in found), others[0])
        labels = next((found[target] for target in TARGETS if target in found and target != name), None)
        return cls(samples=found[name], labels=labels, mask=found.get("attention_mask"), shifts=causal)

    @property
    def count(self) -> int:
        """Samples."""
        return self.samples.shape[0]

    @property
    def length(self) -> int | None:
        """Tokens of each sample; None: the samples are no tokens."""
        return self.samples.shape[1] if self._is_text else None

    def tokens(self) -> int | None:
        """Tokens that are not masked; None: the samples are no tokens."""
        if not self._is_text:
            return None
        masked = self.mask is not None and self.mask.shape == self.samples.shape
        return int((self.mask != 0).sum()) if masked and self.mask is not None else self.samples.numel()

    def targets(self) -> int | None:
        """Tokens whose prediction counts in the loss; None: not known."""
        if self.labels is None or not self.shifts or self.labels.dim() != 2:
            return None
        return int((self.labels[:, 1:] != IGNORED).sum())

    def hash_sum(self) -> int:
        """Sum of a hash of each sample, as of a batch of the harness where there are labels of each token."""
        return int(content_sum(self._content()))

    def digests(self) -> list[str]:
        """A digest of each sample."""
        return content_digests(self._content())

    @property
    def _is_text(self) -> bool:
        """A matrix of integers: the only form in which models take tokens."""
        return self.samples.dim() == 2 and not self.samples.is_floating_point()

    def _content(self) -> Batch:
        """As the harness feeds its own tasks: the samples, and labels that belong to them one by one."""
        labels = self.labels
        if labels is None or len(labels) != len(self.samples):
            return {"tokens": self.samples.detach()}
        return {"tokens": self.samples.detach(), "labels": labels.detach()}


def _named(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors with a dimension, by name; a batch that is handed over as one mapping is looked into."""
    found: dict[str, Tensor] = {}
    for name, value in [*named.items(), *_positional(arguments)]:
        if isinstance(value, Tensor) and value.dim() > 0:
            found.setdefault(name, value)
    return found


def _positional(arguments: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    for position, value in enumerate(arguments):
        if isinstance(value, Mapping):
            yield from ((str(key), item) for key, item in value.items())
        elif isinstance(value, (list, tuple)):
            yield from ((f"{position}.{place}", item) for place, item in enumerate(value))
        else:
            yield str(position), value
