"""The configurations on which predicted memory is judged: drawn with seeds, before they were run."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

SEED = 20261122
THIRD_SEED = 20261123
DIVIDED_SEED = 20261124
AUTOTP_SEED = 20261125
AUTOTP_AGAIN_SEED = 20261126
DRAWS_PER_HALF = 2
"""Of each backend."""
BACKENDS = (
    "single", "ddp", "zero0", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op", "fsdp1", "fsdp1-grad-op",
    "fsdp1-no-shard", "fsdp-hybrid", "accelerate-ddp", "accelerate-zero2", "accelerate-zero3",
    "fsdp:offload=cpu", "fsdp:prefetch=2", "zero2:offload=optimizer", "zero3:offload=cpu",
)  # fmt: skip
DIVIDED = (
    "tp:tensor=2", "fsdp-tp:tensor=2", "pp:schedule=gpipe", "pp", "pp:schedule=interleaved",
    "pp:stages=2,micro_batches=4", "cp", "fsdp-cp", "ulysses-zero1", "ulysses-zero2", "ulysses-zero3",
    "zero3:hpz=2", "fsdp:reshard=2",
)  # fmt: skip
"""Backends whose ranks share samples, and those that keep a second copy within a group of ranks."""
AUTOTP = ("autotp-zero1", "autotp-zero2", "autotp-zero3")
"""The same, predicted later."""
AUTOTP_AGAIN = ("autotp-zero3:tensor=2",)
"""Drawn once more after its prediction was corrected, on ranks that share states."""
GEOMETRIES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "vocab_size": 1000, "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 160, "n_layer": 3, "n_head": 5, "n_positions": 512, "vocab_size": 700,
    },
    "bloom": {"model_type": "bloom", "hidden_size": 144, "n_layer": 4, "n_head": 4, "vocab_size": 2000},
    "qwen2": {
        "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 600,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """One run whose peak is predicted and measured."""

    backend: str
    world_size: int
    geometry: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted settings of the job and of the runtime."""
    part: int
    """1: looked at while the prediction was developed; 2: not, but it showed defects that were corrected; 3:
    drawn and run when all that was done."""


def memory_cases() -> list[MemoryCase]:
    """The list, in a fixed order: each backend twice in the first and second part, once in the third."""
    source, third = random.Random(SEED), random.Random(THIRD_SEED)
    halves = [
        _draw(source, backend, part) for backend in BACKENDS for part in (1, 2) for _ in range(DRAWS_PER_HALF)
    ]
    return halves + [_draw(third, backend, 3) for backend in BACKENDS]


def divided_cases() -> list[MemoryCase]:
    """Each of DIVIDED, AUTOTP and AUTOTP_AGAIN twice, on models whose layers are cut.

    A micro-step is 4 samples, for pipelines.
    """
    draws = ((DIVIDED_SEED, DIVIDED), (AUTOTP_SEED, AUTOTP), (AUTOTP_AGAIN_SEED, AUTOTP_AGAIN))
    return [
        _draw_divided(source, name)
        for source, names in ((random.Random(seed), names) for seed, names in draws)
        for name in names
        for _ in range(2)
    ]


def _draw_divided(source: random.Random, backend: str) -> MemoryCase:
    in_groups = any(word in backend for word in ("hpz", "reshard", "fsdp-tp", "stages=2", "zero3:tensor"))
    return MemoryCase(
        backend=backend,
        world_size=4 if in_groups else source.choice((2, 2, 4)) if "interleaved" not in backend else 2,
        geometry=source.choice(("llama", "qwen2")),
        settings={
            "training.precision": source.choice(("fp32", "bf16-mixed")),
            "training.micro_batch_size": 4,
            "training.accumulation_steps": source.choice((1, 1, 2)),
            "training.activation_checkpointing": source.random() < 0.3,
            "data.sequence_length": source.choice((64, 96, 128, 192)),
            "runtime.preset": "like-for-like",
            "optimizer.implementation": "default",
        },
        part=1,
    )


def _draw(source: random.Random, backend: str, part: int) -> MemoryCase:
    name = backend.partition(":")[0]
    worlds = {"single": (1,), "fsdp-hybrid": (4,)}.get(name, (1, 2, 2, 2, 4))
    precisions = ["fp32", "fp32", "bf16-mixed", "bf16-mixed", "bf16"]
    if name == "zero0" or (name.startswith("zero") and "offload" in backend):
        precisions.remove("bf16")  # DeepSpeed has none there
    return MemoryCase(
        backend=backend,
        world_size=source.choice(worlds),
        geometry=source.choice(sorted(GEOMETRIES)),
        settings={
            "training.precision": source.choice(precisions),
            "training.micro_batch_size": source.choice((1, 2, 3, 4)),
            "training.accumulation_steps": source.choice((1, 1, 1, 2)),
            "training.activation_checkpointing": source.random() < 0.3,
            "data.sequence_length": source.choice((64, 96, 128, 192)),
            "runtime.preset": source.choice(("like-for-like", "like-for-like", "library-defaults")),
            "optimizer.implementation": source.choice(("default", "default", "foreach")),
        },
        part=part,
    )
