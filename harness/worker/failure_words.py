"""What a failure is called where a library's own words do not say what happened, or what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

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


def failure_message(error: BaseException, run_directory: Path) -> str:
    """What to tell of an exception that ends a rank."""
    text = described(error)
    if NOT_DETERMINISTIC in text:
        return f"{USE_OTHER_KERNELS} ({text})"
    if CUT_SHORT in text and shutil.disk_usage(run_directory).free < NO_ROOM_BYTES:
        return f"No space left on device for what torch.save writes below '{run_directory}' ({text})"
    return text
