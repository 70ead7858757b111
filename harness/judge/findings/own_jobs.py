"""What jobs with a model or data of the user's own choice must be told."""

from __future__ import annotations

from harness.backends.registry import REFERENCE
from harness.job.model import CODE_SWITCH
from harness.judge.findings.finding import Finding, labels
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.record.together import batch_statistics, is_another_computation

BYTES = "bytes"


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
