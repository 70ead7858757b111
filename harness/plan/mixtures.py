"""Mixtures of experts: what is called for, and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.plan.architectures import EXPERTS, MIXTURES
from harness.tell.formats import gigabytes

MIXTURE = "mixture of experts"
COVERED = f"of mixtures, types {' and '.join(MIXTURES)} are covered"
OTHER_TOOL = (
    "expert parallelism is called for, which puts experts on different GPUs, and no strategy here does"
)
UNLIKE_SHARE = 0.05
"""Of the states of another strategy, from which a difference is explained."""


def why_uneven(held_bytes: Mapping[str, int], config: Mapping[str, Any]) -> str | None:
    """Why fsdp holds more than zero3 on as many ranks; None: it does not. held_bytes: of states, by label."""
    fsdp, zero3 = held_bytes.get("fsdp", 0), held_bytes.get("zero3", 0)
    if not zero3 or fsdp <= (1 + UNLIKE_SHARE) * zero3:
        return None
    experts = next(config[key] for key in EXPERTS if config.get(key))
    return (
        f"fsdp holds {gigabytes(fsdp)} GB of states and zero3 {gigabytes(zero3)}: FSDP2 cuts the experts of "
        f"a layer, one tensor, by their number, so no more than {experts} ranks share them; ZeRO-3 and FSDP1 "
        "cut flat tensors"
    )
