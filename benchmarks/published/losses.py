"""What the losses of other programs hold per logit, as `settings.yaml` names them."""

from harness.forms.activations import OURS, LogitBytes

__all__ = ["OURS", "LogitBytes"]

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
