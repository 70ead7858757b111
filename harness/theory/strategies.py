"""Which textbook strategy each backend name stands for."""

from __future__ import annotations

TEXTBOOK = {
    "single": "single",
    "ddp": "ddp",
    "zero0": "ddp",
    "zero1": "grad-op",
    "zero2": "grad-op",
    "zero3": "full-shard",
    "fsdp": "full-shard",
    "fsdp-grad-op": "grad-op",
    "fsdp-hybrid": "hybrid",
    "fsdp1": "full-shard",
    "fsdp1-grad-op": "grad-op",
    "fsdp1-no-shard": "ddp",
    "fsdp1-hybrid": "hybrid",
    "accelerate-ddp": "ddp",
    "accelerate-zero1": "grad-op",
    "accelerate-zero2": "grad-op",
    "accelerate-zero3": "full-shard",
    "accelerate-fsdp": "full-shard",
    "accelerate-fsdp1": "full-shard",
}
