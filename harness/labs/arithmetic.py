"""Tables that need no run: memory by dtype, and a large model's memory and traffic by strategy."""

from __future__ import annotations

from typing import Any

from harness.job.config import load_experiment
from harness.labs.document import GB, MIB, LabTable, ratio, scaled, shown
from harness.plan.estimate import document, question
from harness.plan.estimate.row import estimate
from harness.plan.models import load_model

MODELS = ("bert-base-cased", "llama-3-8b")
DTYPES = {"float32": 4.0, "float16, bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a parameter."""
LECTURE_MODEL = "llama-3.1-70b"
LECTURE_STRATEGIES = ("fsdp1-no-shard", "fsdp1-grad-op", "fsdp1", "fsdp1-hybrid")
LECTURE_RANKS = (128, 1280)


def memory_tables() -> list[LabTable]:
    """The Accelerate talk: weights, gradients, both, and with Adam, in one dtype; then mixed precision."""
    headers = ("Model", "Dtype", "Weights", "Gradients", "Backward pass", "Step with Adam")
    body = []
    for name in MODELS:
        parameters = load_model(name).parameters
        for dtype, width in DTYPES.items():
            weights = parameters * width
            training = (weights, 2 * weights, 4 * weights) if width >= 2 else (None, None, None)
            body.append([name, dtype, *map(_size, (weights, *training))])
        mixed = (2 * parameters, 2 * parameters, 4 * parameters, 16 * parameters)
        body.append([name, "mixed: 16-bit, fp32 masters", *map(_size, mixed)])
    notes = (
        "Backward pass: weights and gradients; step: with Adam's two moments, and under mixed precision the "
        "fp32 masters. Activations come on top: `harness estimate`",
        "Parameters only; Accelerate also counts buffers, of bert-base-cased 8 KiB of positions",
        "int8 and int4 hold weights; nothing is trained in them",
    )
    return [LabTable(headers=headers, rows=body, notes=notes)]


def lecture_tables() -> list[LabTable]:
    """The FSDP lecture: what a GPU holds and sends, by strategy and number of GPUs, 16-bit compute."""
    settings = ["training.precision=bf16-mixed", "training.micro_batch_size=1", "data.sequence_length=4096"]
    asked = question(
        load_model(LECTURE_MODEL), load_experiment(None, settings), backends=LECTURE_STRATEGIES,
        world_sizes=LECTURE_RANKS, ranks_per_node=8,
    )  # fmt: skip
    rows: list[dict[str, Any]] = document(asked, estimate(asked))["rows"]
    headers = (
        "Strategy", "GPUs", "Weights (GB)", "Gathered (GB)", "Gradients (GB)", "Adam (GB)",
        "Sent per step (GB)", "Of NO_SHARD",
    )  # fmt: skip
    sent = {
        row["world_size"]: row["sent_bytes_per_step"] for row in rows if row["backend"] == "fsdp1-no-shard"
    }
    body = [
        [
            row["backend"], str(row["world_size"]),
            shown(scaled(row["weights_bytes"], GB), 3), shown(scaled(row["gathered_bytes"], GB), 2),
            shown(scaled(row["gradients_bytes"], GB), 3),
            shown(scaled(row["optimizer_parts"]["moments_bytes"], GB), 3),
            shown(scaled(row["sent_bytes_per_step"], GB), 1),
            shown(ratio(row["sent_bytes_per_step"], sent[row["world_size"]])),
        ]
        for row in rows
    ]  # fmt: skip
    notes = (
        f"{LECTURE_MODEL}, mixed precision with fp32 shards, micro-batch 1 of 4,096 tokens, nodes of 8 "
        "GPUs; hybrid shards within a node",
        "Ring algorithm, all collectives of a step, the gradient norm included",
    )
    return [LabTable(headers=headers, rows=body, notes=notes)]


def _size(count: float | None) -> str:
    """Binary units, as the talk has them."""
    if count is None:
        return shown(None)
    return f"{count / MIB:,.2f} MiB" if count < 2**30 else f"{count / 2**30:,.2f} GiB"
