"""What jobs with a model or data of the user's own choice must be told."""

from __future__ import annotations

from harness.backends.registry import REFERENCE
from harness.job.model import CODE_SWITCH
from harness.judge.findings.finding import Finding, Kind, labels
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.record.together import batch_statistics, is_another_computation

BYTES = "bytes"

KINDS = (
    Kind(
        id="batch-norm",
        title="The model normalises over micro-batches, whose samples depend on the ranks",
        cause="BatchNorm takes mean and variance over the samples of one rank's micro-batch. With another "
        "micro-batch the same global batch is another computation, so losses differ from those of one "
        "process that takes more samples at once; `compare` repeats the reference with as many. Each rank "
        "also keeps running statistics of its own samples, which evaluation uses: DDP copies those of rank 0 "
        "to all ranks before each forward pass (`broadcast_buffers`), ZeRO and FSDP leave them apart, and no "
        "strategy reduces them.",
        confirm="The values hold the number of such layers and the micro-batches of the run and of the "
        "reference. With equal ones losses and gradients agree; evaluation losses still differ. That ranks "
        "compute with equal weights is not checked for such a model.",
        fix="`training.micro_batch_size` keeps the samples at once equal over numbers of ranks. For "
        "statistics over all ranks use `torch.nn.SyncBatchNorm` (CUDA only), or a model with GroupNorm or "
        "LayerNorm.",
    ),
    Kind(
        id="bytes-for-pretrained",
        title="A pretrained model is fed raw bytes instead of the tokens that it was trained on",
        cause="`data.tokenizer` is bytes, so the numbers 0 to 256 select rows of an embedding that stand for "
        "other words. The loss starts above that of the model's own tokens and says nothing of fine-tuning.",
        confirm="`job.data.tokenizer` of the record.",
        fix="Leave `data.tokenizer` out to use the model's own, or name one; for speed and memory alone "
        "set `model.weights: random`.",
    ),
    Kind(
        id="custom-code",
        title="Code that the model's folder brings ran on every rank",
        cause="`model.trust_remote_code` is on: classes that `auto_map` of the folder's config.json names "
        "replace those of transformers. They can compute anything, and run with the rights of the user.",
        confirm="`job.model.trust_remote_code` of the record. The content of a local folder is part of the "
        "job's id; a repository of a hub can change unless `model.revision` is a commit.",
        fix="Read that code before its figures are trusted. Without need of it leave the switch out.",
    ),
)


def find(runs: Runs) -> list[Finding]:
    """One per run that normalises over micro-batches; one for bytes for pretrained weights; one for code."""
    return [
        *(finding for row in runs.rows if (finding := _batch_norm(row)) is not None),
        *_bytes(runs),
        *_custom_code(runs),
    ]


def _custom_code(runs: Runs) -> list[Finding]:
    ran = [row for row in runs.rows if row.record.job.model.trust_remote_code]
    if not ran:
        return []
    model = ran[0].record.job.model
    at = f", revision {model.revision}" if model.revision else ""
    return [
        Finding(
            id="custom-code",
            about=labels(ran),
            text=f"{CODE_SWITCH} is on: Python code of '{model.name}'{at} ran on every rank",
            values={"model": model.name, "revision": model.revision},
        )
    ]


def _batch_norm(row: Row) -> Finding | None:
    layers = batch_statistics(row.record)
    if not layers or row.record.status not in ("ok", "diverged") or row.record.backend.name == REFERENCE:
        return None
    world, reference = row.record.world, row.reference.record if row.reference else None
    same = reference is None or not is_another_computation(row.record, reference)
    count = "1 layer normalises" if len(layers) == 1 else f"{len(layers)} layers normalise"
    text = f"{count} over the {world.micro_batch_size} samples of a rank's micro-batch"
    if not same and reference is not None:
        text += (
            f", over {reference.world.micro_batch_size} in the reference: another computation; set "
            "training.micro_batch_size"
        )
    elif world.world_size > 1:
        text += ", as the reference does; running statistics, and so evaluation losses, differ by rank"
    return Finding(
        id="batch-norm",
        about=row.cell,
        text=text,
        values={
            "layers": len(layers),
            "micro_batch_size": world.micro_batch_size,
            "reference_micro_batch_size": reference.world.micro_batch_size if reference else None,
        },
    )


def _bytes(runs: Runs) -> list[Finding]:
    fed = [row for row in runs.rows if _feeds_bytes(row)]
    if not fed:
        return []
    name = fed[0].record.job.model.name
    return [
        Finding(
            id="bytes-for-pretrained",
            about=labels(fed),
            text=f"the pretrained model '{name}' is fed raw bytes; its own tokenizer makes other numbers",
            values={"model": name, "tokenizer": BYTES},
        )
    ]


def _feeds_bytes(row: Row) -> bool:
    job = row.record.job
    return (
        job.model.name is not None
        and job.model.weights != "random"
        and job.data.is_tokenized
        and job.data.tokenizer == BYTES
    )
