"""Whether a build of torch has kernels for a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable

ENTRY = re.compile(r"(sm|compute)_(\d+)(\d)[af]?")


def runs_on(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """Whether kernels for `architectures` (torch.cuda.get_arch_list()) run on NVIDIA's `capability`.

    Binary code (sm_80) runs on later minors of the same major; intermediate code (compute_80) on all that
    came later. Source: CUDA programming guide, 'Binary Compatibility' and 'PTX Compatibility'. Code for one
    architecture alone (sm_90a) counts for it.
    """
    for text in architectures:
        match = ENTRY.fullmatch(text)
        if match is None:
            continue
        kind, own = match[1], (int(match[2]), int(match[3]))
        if text[-1] in "af" and own != capability:
            continue
        if own <= capability and (kind == "compute" or own[0] == capability[0]):
            return True
    return False


def sm_name(capability: tuple[int, int]) -> str:
    """'sm_70' of (7, 0)."""
    return f"sm_{capability[0]}{capability[1]}"
