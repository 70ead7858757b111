"""What is noted of one optimizer step while it runs, and its event once its clock has stopped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.backends.base import Batch
from harness.rank.data import IGNORED, content_digests, content_sum
from harness.rank.live.observer import DIGESTED_STEPS
from harness.record import Window
from harness.record.run import LABELLED, PADDING, PER_TOKEN
from harness.run_directory.events import AppliedGradients, StepEvent

FIRST = (
    "input_ids", "pixel_values", "input_values", "input_features", "inputs_embeds", "x", "input", "inputs",
    "ids", "tokens", "token_ids", "idx",
)  # fmt: skip
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
    of_samples: bool = False
    """Whether the model says one thing of each sample, however many tokens that has."""

    @classmethod
    def of(cls, arguments: tuple[Any, ...], named: Mapping[str, Any], *, causal: bool) -> MicroBatch | None:
        """What a module was called with; None: no tensor with a dimension is among it.

        causal: whether the model is one of Hugging Face's causal language models.
        """
        found: dict[str, Tensor] = {}
        for name, value in [*named.items(), *_positional(arguments)]:
            if not isinstance(value, Tensor) or value.dim() == 0 or value.layout is not torch.strided:
                continue
            if not (value.is_quantized or value.is_nested or value.is_meta):
                found.setdefault(name, value)
        if not found:
            return None
        others = [name for name in found if name not in TARGETS + MASKS] or list(found)
        name = next((name for name in FIRST if name in found), others[0])
        labels = next((found[target] for target in TARGETS if target in found and target != name), None)
        return cls(samples=found[name], labels=labels, mask=found.get("attention_mask"), shifts=causal)

    def answered(self, output: Any) -> MicroBatch:
        """The batch as what the model said of it tells; a loss alone is of tokens unless labels are not."""
        told = [one.shape for one in (*tensors_in(output), self.labels) if one is not None]
        first = next((shape for shape in told if shape not in ((), (1,))), ())
        is_whole = len(first) < 3 and first[:1] == (self.count,) and first[1:] != (self.length,)
        return replace(self, of_samples=is_whole)

    @property
    def count(self) -> int:
        """Samples."""
        return self.samples.shape[0]

    @property
    def length(self) -> int | None:
        """Tokens of each sample; None: the samples are no tokens."""
        return self.samples.shape[1] if self._is_text else None

    def tokens(self) -> int | None:
        """Tokens that are not masked; a sample that is no text, or of which one thing is said, counts as one.

        None: embeddings.
        """
        if self.of_samples or not self._is_text:
            return None if self.shifts else self.count
        masked = self.mask is not None and self.mask.shape == self.samples.shape
        return int((self.mask != 0).sum()) if masked and self.mask is not None else self.samples.numel()

    @cached_property
    def targets(self) -> int | None:
        """Tokens whose prediction counts in the loss; None: not known."""
        if self.labels is None or not self.shifts or self.labels.dim() != 2:
            return None
        return int((self.labels[:, 1:] != IGNORED).sum())

    def padding(self) -> dict[str, float]:
        """Tokens of padding that are no first ones, and those of them with a label; {}: there are none."""
        labels, mask = self.labels, self.mask
        if labels is None or mask is None or not self._is_text or not self.shifts:
            return {}
        if not labels.shape == mask.shape == self.samples.shape:
            return {}
        padded = mask[:, 1:] == 0
        labelled = padded & (labels[:, 1:] != IGNORED)
        return {PADDING: float(padded.sum()), LABELLED: float(labelled.sum())}

    def labels_are_ahead(self) -> bool:
        """Whether each label is the token after the one at its position, and not that one."""
        labels, tokens = self.labels, self.samples
        if labels is None or not self._is_text or labels.shape != tokens.shape:
            return False
        count = labels[:, :-1] != IGNORED
        ahead, same = labels[:, :-1] == tokens[:, 1:], labels == tokens
        return bool(count.any() and ahead[count].all() and not same[:, :-1][count].all())

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


def _positional(arguments: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Positional arguments by name; a batch that is handed over as one mapping or sequence is looked into."""
    for position, value in enumerate(arguments):
        if isinstance(value, Mapping):
            yield from ((str(key), item) for key, item in value.items())
        elif isinstance(value, (list, tuple)):
            yield from ((f"{position}.{place}", item) for place, item in enumerate(value))
        else:
            yield str(position), value


def tensors_in(output: Any) -> list[Tensor]:
    """Those that a model returned, not within what it nested."""
    values = output.values() if isinstance(output, Mapping) else output
    values = values if isinstance(output, (Mapping, list, tuple)) else [output]
    return [one for one in values if isinstance(one, Tensor)]


BACKWARD = "the scalar on which backward() was called"
MODEL = "the loss that the model returned"
TRAINER = "Trainer.compute_loss"
PER_BATCH = "averaged over micro-batches and ranks"


def returned_loss(output: Any) -> Tensor | None:
    """The loss in a model's output; None: the output names none."""
    value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return value if isinstance(value, Tensor) and value.numel() == 1 else None


@dataclass
class MicroLoss:
    """The losses that were seen in one micro-step, nearest to the model first."""

    returned: Tensor | None = None
    framework: Tensor | None = None
    framework_name: str = ""
    may_be_divided: bool = True
    """Whether the script may have divided `framework` by the number of micro-steps."""
    scalar: Tensor | None = None
    divisor: float | None = None
    """By what the script divided a mean to get the loss that it hands on; None: not known."""
    items: float | None = None
    """Tokens by which the model was told to divide its summed loss (`num_items_in_batch`)."""
    shifts: bool = False
    """Whether the model shifts the labels of which it returns the loss."""
    lacks_world: bool = False
    """Whether `framework` is a sum, divided by the targets of all ranks."""
    gradients: list[Tensor] = field(default_factory=list)
    """Those that reached the loss that the model returned."""
    origin: tuple[Hashable, Hashable] = (None, None)
    """Whether its backward pass exchanges gradients, and the calls that led to it."""

    def returns(self, loss: Tensor) -> None:
        """A model's output has this loss."""
        self.returned = loss.detach().clone()  # the Trainer multiplies the loss in place afterwards
        if loss.requires_grad:
            gradients = self.gradients = []
            # None: DDP's outputs that the script's own loss leaves out get no gradient.
            loss.register_hook(lambda grad: None if grad is None else gradients.append(grad.detach()))

    def add(self, scalar: Tensor | None) -> None:
        """backward() was called on another scalar of the same forward pass."""
        known = self.scalar is not None and scalar is not None
        self.scalar = self.scalar + scalar if known else None  # type: ignore[operator]
        self.divisor = None

    def value(self, *, alone: bool) -> tuple[float, str] | None:
        """The loss and where it is from. A scalar of several micro-steps may have been divided or not."""
        if self.returned is not None:
            return float(self.returned), MODEL
        if self.framework is not None:
            return float(self.framework), f"what {self.framework_name} was given"
        return (float(self.scalar), BACKWARD) if alone and self.scalar is not None else None

    @property
    def factor(self) -> float | None:
        """What backward() took this loss times; None: not known, or 0 beside a loss that is not."""
        if self.gradients:
            found = float(self.gradients[0]) if len(self.gradients) == 1 else None
        else:
            found = 1 / self.divisor if self.divisor and self.returned is None else None
        return found if found or (self.scalar is not None and not float(self.scalar)) else None

    @property
    def of_backward(self) -> tuple[float, float] | None:
        """What backward() got and the loss of the micro-step, which may have been divided in between.

        None: one is not known, or the loss is a share of that of all micro-steps, as one may be that a
        library left as the script gave it.
        """
        loss = self.framework if self.returned is None else self.returned
        if self.scalar is None or self.items is not None:
            return None
        if self.returned is None and self.divisor is not None:
            return float(self.scalar), float(self.scalar if loss is None else loss) * self.divisor
        if loss is None:
            return None
        # Of one that no gradient reached the scalar is another loss.
        is_other = bool(self.gradients) and not any(map(float, self.gradients))
        given, own = 0.0 if is_other else float(self.scalar), float(loss)
        is_undivided = self.returned is None and self.may_be_divided and given == own  # by the library
        return None if is_undivided else (given, own)


class LossSum(NamedTuple):
    """The loss of a step of one rank, weighted."""

    value: float
    weight: float
    source: str


def total_loss(micro: Sequence[MicroLoss], batches: Sequence[MicroBatch]) -> LossSum | None:
    """Sum and weight over the micro-steps of a step; None: the loss is not known.

    Reads tensors of the device.
    """
    seen = [value for loss in micro if (value := loss.value(alone=len(micro) == 1)) is not None]
    if not seen or len(seen) < len(micro):
        return None
    values, source = [value for value, _ in seen], seen[0][1]
    known = [count for batch in batches if (count := batch.targets) is not None]
    if len(known) == len(batches) == len(micro) and any(known):
        scales = [
            count if loss.items is None else loss.items for loss, count in zip(micro, known, strict=True)
        ]
        sums = sum(value * scale for value, scale in zip(values, scales, strict=True))
        return LossSum(sums, float(sum(known)), f"{source}, {PER_TOKEN}")
    if any(loss.items is not None for loss in micro):
        return None
    return LossSum(sum(values), float(len(micro)), f"{source}, {PER_BATCH}")


def alone(tensors: Any) -> Any:
    """What backward() is called on, where that is one."""
    return tensors[0] if isinstance(tensors, (list, tuple)) and len(tensors) == 1 else tensors


def scalar_of(tensors: Any) -> Tensor | None:
    """The scalar on which backward is called; None: it is called on something else."""
    one = alone(tensors)
    return one.detach().clone() if isinstance(one, Tensor) and one.numel() == 1 else None


@dataclass
class Step:
    """One optimizer step of one rank."""

    number: int
    window: Window
    began: float
    """By the monotonic clock."""
    own_seconds: float = 0.0
    """Spent on observing within the step."""
    ended: float | None = None
    """None: the optimizer has not stepped."""
    micro_steps: int = 0
    """Backward passes that have ended."""
    data_seconds: float = 0.0
    batches: list[MicroBatch] = field(default_factory=list)
    losses: list[MicroLoss] = field(default_factory=lambda: [MicroLoss()])
    """Of each micro-step, with the one that is next or under way."""
    norm: Any = None
    """As clipping returned it; None: nothing clipped."""
    evaluates: nn.Module | None = None
    """The model, if a backward pass found it in evaluation mode, and dropout or the like in it."""
    rate: float | None = None
    group_rates: dict[int, float | None] = field(default_factory=dict)
    """By group of the optimizers that stepped."""
    figures: dict[str, float] = field(default_factory=dict)
    """See `habits.Habits.figures`."""
    in_micro_step: bool = False
    """Whether a forward pass has begun whose backward pass has not ended."""
    bits: dict[str, int] = field(default_factory=dict)
    """See `facts.bits_of`: as the step begins; {}: not looked at."""
    goes_on: bool = False
    """Whether this backward pass is another one of the micro-step before."""
    called: set[int] = field(default_factory=set)
    """Ids of modules that were called for gradients since the last backward pass."""

    def begin_again(self) -> None:
        """What was accumulated is thrown away."""
        self.micro_steps, self.batches, self.losses, self.norm = 0, [], [MicroLoss()], None
        self.evaluates = None

    @property
    def has_several_losses(self) -> bool:
        """Whether unlike calls led to its backward passes, as for real and for generated samples: they are no
        shares of one batch. A last micro-step that alone exchanges gradients may have code of its own."""
        origins = {loss.origin for loss in self.losses[: self.micro_steps]}
        return len(origins) > len({exchanges for exchanges, _ in origins})

    def backward_ratio(self) -> float | None:
        """The sum of what backward() got over the mean of the micro-steps' losses: 1 if it is that mean.

        None where a micro-step adds nothing, which no division does, and of several losses.
        """
        pairs = [pair for loss in self.losses[: self.micro_steps] if (pair := loss.of_backward) is not None]
        total = sum(loss for _, loss in pairs)
        if not self.micro_steps or len(pairs) < self.micro_steps or not total or self.has_several_losses:
            return None
        if any(loss and not given for given, loss in pairs):
            return None
        return finite_or_none(len(pairs) * sum(given for given, _ in pairs) / total)

    def labels_are_ahead(self) -> bool:
        """Whether every micro-step trains on what a model returned for labels that were shifted before."""
        losses = self.losses[: self.micro_steps]
        return len(losses) == len(self.batches) > 0 and all(
            one.shifts and one.gradients and batch.labels_are_ahead()
            for one, batch in zip(losses, self.batches, strict=True)
        )

    def lacks_world(self) -> bool:
        """Whether every micro-step's loss lacks the number of ranks as factor."""
        known = [one for one in self.losses[: self.micro_steps] if one.lacks_world]
        pairs = [(one.scalar, one.framework) for one in known]
        return bool(known) and len(known) == self.micro_steps and all(
            given is not None and own is not None and float(given) == float(own) for given, own in pairs
        )  # fmt: skip

    def loss_factors(self) -> list[float] | None:
        """Least and most of `MicroLoss.factor`; None: not all are known, or finite."""
        known = [loss.factor for loss in self.losses[: self.micro_steps]]
        factors = [one for one in known if one is not None and math.isfinite(one)]
        return [min(factors), max(factors)] if factors and len(factors) == len(known) else None

    @property
    def seconds(self) -> float:
        assert self.ended is not None
        return max(0.0, self.ended - self.began - self.own_seconds)

    def event(
        self, phases: dict[str, float], applied: tuple[float, float] | None, trained: int
    ) -> tuple[StepEvent, LossSum | None]:
        """The event of the step and where its loss is from; reads tensors of the device.

        applied: squares and elements of the gradients that the optimizer was given. trained: elements of the
        whole model that train.
        """
        loss = total_loss(self.losses[: self.micro_steps], self.batches)
        share = None
        if applied is not None:
            squares, count = applied
            share = AppliedGradients(squares=finite_or_none(squares), share=count / max(1, trained))
        norm, is_partial = (None, False) if self.norm is None else number(self.norm)
        hashes = [batch.hash_sum() for batch in self.batches]
        total = f"{sum(hashes) % 2**64:016x}" if hashes else None
        padding = Counter[str]()
        for batch in self.batches:
            padding.update(batch.padding())  # type: ignore[arg-type]
        looked_at = self.batches if self.number < DIGESTED_STEPS else []
        digests = [digest for batch in looked_at for digest in batch.digests()]
        rates = [self.group_rates.get(place) for place in range(max(self.group_rates, default=-1) + 1)]
        event = StepEvent(
            step=self.number, window=self.window, seconds=self.seconds, phase_seconds=phases,
            data_seconds=min(self.data_seconds, self.seconds),
            loss_sum=finite_or_none(loss.value) if loss else None, loss_weight=loss.weight if loss else None,
            gradient_norm=None if norm is None else finite_or_none(norm), norm_is_partial=is_partial,
            learning_rate=self.rate or 0.0, applied_learning_rate=self.rate, group_learning_rates=rates,
            applied=share, global_target_tokens=None,
            samples=sum(batch.count for batch in self.batches) if self.batches else None,
            tokens=_sum([batch.tokens() for batch in self.batches]),
            target_tokens=_sum([batch.targets for batch in self.batches]),
            sample_hashes=total, batch_hash_sum=total,
            batch_digests=digests if self.number < DIGESTED_STEPS else None,
            loss_factors=self.loss_factors(), weight_bits=self.bits,
            figures=(dict(padding) if padding[PADDING] else {}) | self.figures,
        )  # fmt: skip
        return event, loss


def finite_or_none(value: float) -> float | None:
    """The value; None where it is not finite."""
    return value if math.isfinite(value) else None


def number(value: Any) -> tuple[float, bool]:
    """A scalar of torch or of Python; whether it is this rank's part of a norm.

    The norm that FSDP2 returns is that of each rank's shards until somebody asks for all of it, which takes a
    collective (torch 2.13, `_NormPartial`). The squares of the parts add up to the square of the norm.
    """
    value = value.detach() if isinstance(value, Tensor) else value
    if not isinstance(value, DTensor):
        return float(value), False
    mesh = value.device_mesh
    replicas = mesh.size() // mesh.shape[-1]
    return float(value.to_local()) / replicas**0.5, any(p.is_partial() for p in value.placements)


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
