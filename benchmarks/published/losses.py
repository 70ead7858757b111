"""What losses hold per logit: ours, and those of other programs, as `programs.yaml` names them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from harness.forms.activations import ActivationProfile, Size


@dataclass(frozen=True, kw_only=True)
class LogitBytes:
    """Bytes per logit in the order of a step, the logits themselves counted."""

    forward: int
    """At most in the forward pass."""
    saved: int
    """Between the passes."""
    backward: int
    """At most in the loss's backward pass."""
    reserved: int
    """At most of the allocator: a block of s - 1 tokens serves no tensor of s, nor the other way round."""
    kept: int = 0
    """Through the whole backward pass, where the program still holds the model's output."""
    source: str


OURS = LogitBytes(
    forward=10, saved=4, backward=12, reserved=14,
    source="harness.rank.models.losses, traced: logits in 2 bytes, shifted and widened to 4, log-softmax 4, "
    "and two gradients of 4",
)  # fmt: skip


def with_loss(profile: ActivationProfile, of: LogitBytes) -> ActivationProfile:
    """The same with a loss that holds other bytes per logit; its moments stay in proportion."""
    # Logits lie below the loss's forward pass, and as long as its backward pass's own gradient of them.
    below = 2
    forward = Fraction(of.forward - below, OURS.forward - below)
    backward = Fraction(of.backward - below, OURS.backward - below)
    saved = Fraction(of.saved, OURS.saved)

    def scaled(size: Size, share: Fraction) -> Size:
        return Size(tuple(round(value * share) for value in size.coefficients))

    each = profile.loss.saved[0].size if profile.loss.saved else Size()
    shares = [partial(scaled, share=share) for share in (saved, forward, backward)]
    kept = profile.kept + scaled(each, Fraction(of.kept, OURS.saved))
    return replace(profile, loss=profile.loss.sized(*shares), kept=kept)


AUTOCAST_SHIFTED = LogitBytes(
    forward=12, saved=4, backward=12, reserved=16,
    source="model code that shifts logits into a copy and computes the loss under autocast: logits 2, "
    "copy 2, widened 4, log-softmax 4",
)  # fmt: skip
LOW_SHIFTED = LogitBytes(
    forward=6,
    saved=2,
    backward=6,
    reserved=8,
    source="the same without autocast, as DeepSpeed runs it: everything in 2 bytes",
)
WIDENED_SHIFTED = LogitBytes(
    forward=12,
    saved=4,
    backward=12,
    reserved=18,
    source="transformers before 4.45, modeling_llama.py: logits.float(), a shifted copy, log-softmax, 4 each",
)
WIDENED = LogitBytes(
    forward=8, saved=4, backward=12, reserved=12,
    source="torchtitan, model.py at pull request 165: self.output(h).float() in place of a copy: 4, "
    "log-softmax 4, two gradients of 4",
)  # fmt: skip
FAST = LogitBytes(
    forward=8,
    saved=4,
    backward=8,
    reserved=12,
    source="unsloth's cross entropy in the place of torch's: widened logits 4 and a shifted copy 4, whose "
    "gradient overwrites it",
)
FAST_LOW = LogitBytes(
    forward=4, saved=2, backward=4, reserved=6,
    source="the same on logits that are not widened: 2 and 2",
)  # fmt: skip
FUSED = LogitBytes(
    forward=2, saved=2, backward=4, reserved=4,
    source="flash-attn, csrc/xentropy, not in place: logits of 2 bytes and their gradient",
)  # fmt: skip
LOW = LogitBytes(
    forward=4,
    saved=4,
    backward=8,
    reserved=8,
    source="torch's cross entropy on logits of 2 bytes as they are: log-softmax and two gradients, 2 each",
)
LOW_CHUNKS = LogitBytes(
    forward=4,
    saved=4,
    backward=4,
    reserved=6,
    source="litgpt, utils.py, chunked_cross_entropy: all logits of 2 bytes and their log-softmax, 128 tokens "
    "at a time",
)
