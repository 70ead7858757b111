"""Hugging Face's hub: asked once whether it answers."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

SECONDS = 5.0
"""For an answer. Compute nodes often drop what would leave the cluster, which shows as silence."""


def settle_hub(name: str) -> None:
    """Have Hugging Face's libraries read their cache at once where the hub does not answer.

    They would try each file six times over 23 seconds, in every process. A local folder asks nobody.
    """
    if not Path(name).exists() and not _answers():
        import huggingface_hub.constants

        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        huggingface_hub.constants.HF_HUB_OFFLINE = True


@cache
def _answers() -> bool:
    import huggingface_hub.constants
    from huggingface_hub import get_session

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(huggingface_hub.constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # of the library's HTTP client, which it replaced once
        return False
    return True
