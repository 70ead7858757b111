"""Names by which other tools and people call a strategy, and the backends that they may mean."""

from __future__ import annotations

import re
from collections.abc import Iterable

OTHER_NAMES = {
    "accelerate": ("accelerate-ddp", "accelerate-zero3", "accelerate-fsdp"),
    "baseline": ("single",),
    "contextparallel": ("cp", "fsdp-cp"),
    "dataparallel": ("ddp",),
    "deepspeed": ("zero1", "zero2", "zero3"),
    "distributeddataparallel": ("ddp",),
    "dp": ("ddp",),
    "ds": ("zero1", "zero2", "zero3"),
    "fsdp2": ("fsdp",),
    "fullshard": ("fsdp", "fsdp1"),
    "fullysharded": ("fsdp", "fsdp1"),
    "fullyshard": ("fsdp",),
    "fullyshardeddataparallel": ("fsdp1", "fsdp"),
    "hsdp": ("fsdp-hybrid", "fsdp1-hybrid"),
    "hybridshard": ("fsdp-hybrid", "fsdp1-hybrid"),
    "noshard": ("fsdp1-no-shard",),
    "none": ("single",),
    "reference": ("single",),
    "ringattention": ("cp", "fsdp-cp"),
    "sequenceparallel": ("cp", "fsdp-cp", "ulysses-zero3"),
    "shardgradop": ("fsdp-grad-op", "fsdp1-grad-op"),
    "trainer": ("trainer-ddp", "trainer-zero3"),
    "ulysses": ("ulysses-zero3",),
    "zero": ("zero1", "zero2", "zero3"),
    "zeroinfinity": ("zero3:offload=nvme-all", "zero3:offload=nvme"),
    "zerooffload": ("zero2:offload=optimizer", "zero3:offload=optimizer"),
}
"""By small letters and digits alone."""
STAGE = re.compile(r"(?:deepspeed|ds)?(?:zero)?(?:stage)?([0-3])")


def meant(given: str, known: Iterable[str]) -> list[str]:
    """Backends that 'ZeRO-3', 'deepspeed' or 'FULL_SHARD' stands for; empty if nobody can tell."""
    plain = _plain(given)
    same = [name for name in known if _plain(name) == plain]
    if same or plain in OTHER_NAMES:
        return same or list(OTHER_NAMES[plain])
    stage = STAGE.fullmatch(plain)
    return [f"zero{stage[1]}"] if stage else []


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
