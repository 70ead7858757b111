"""What a failure is called where a library's own words do not say what happened, or what to do."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from harness.safe_text import described

NOT_DETERMINISTIC = "does not have a deterministic implementation"
"""In the error of torch's `alertNotDeterministic`."""
USE_OTHER_KERNELS = (
    "set training.deterministic=false: an operator has no deterministic kernel on CUDA, and repeats of a run "
    "will differ by rounding"
)
CUT_SHORT = "inline_container.cc"
"""In the error of `torch.save` that could not write all of a file; it does not say why."""
NO_ROOM_BYTES = 2**16


SCALAR = ("support scalar parameters", "self.dim() cannot be 0 to view")
"""In the errors of FSDP and of DeepSpeed's first broadcast."""
CUT_WEIGHTS = ("got mixed torch.Tensor and DTensor", "got [0] but expected shape compatible with")
"""In the errors of FSDP2 and ZeRO-3 where whole weights were expected."""
EXPECTED_SHAPE = re.compile(r"expected shape compatible with \[([\d, ]+)\]")
_shapes: dict[str, tuple[int, ...]] = {}


def note_parameters(model: nn.Module) -> None:
    """Note names and whole shapes, which libraries' errors do not tell."""
    _shapes.clear()
    _shapes.update((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"parameter {', '.join(repr(name) for name in names[:3])}{more}" if names else "a parameter"


def failure_message(error: BaseException, run_directory: Path) -> str:
    """What to tell of an exception that ends a rank."""
    text = described(error)
    if any(words in text for words in SCALAR):
        return (
            f"{_named([name for name, shape in _shapes.items() if not shape])} has no dimension, which this "
            "backend cannot cut or send; give it shape (1,), as torch.ones(1), or run ddp "
            f"({text})"
        )
    if any(words in text for words in CUT_WEIGHTS):
        found = EXPECTED_SHAPE.search(text)
        shape = tuple(map(int, re.findall(r"\d+", found[1]))) if found else None
        names = [name for name, own in _shapes.items() if own and shape in (None, own)]
        return (
            f"the loss, or code outside of the model's forward pass, reads {_named(names or list(_shapes))}, "
            "of which a rank holds a part there; compute that in forward and return it, use "
            f"optimizer.weight_decay for an L2 penalty, or run ddp, zero1 or zero2 ({text})"
        )
    if NOT_DETERMINISTIC in text:
        return f"{USE_OTHER_KERNELS} ({text})"
    if CUT_SHORT in text and shutil.disk_usage(run_directory).free < NO_ROOM_BYTES:
        return f"No space left on device for what torch.save writes below '{run_directory}' ({text})"
    return text
