"""What jobs of the user's own, observed scripts and labels must be told."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.backends.registry import REFERENCE
from harness.forms.terms import GATHERING, SCALAR_BYTES, may_reduce
from harness.job.job import CODE_SWITCH
from harness.judge.findings.finding import Finding, labels, of_cells
from harness.judge.rows import JudgedRun, Runs
from harness.judge.wording import counted
from harness.record import ModelLossPart, Record
from harness.record.workload import batch_statistics, depends_on_split, is_another_computation

BYTES = "bytes"


def find_own_jobs(runs: Runs) -> list[Finding]:
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


def _batch_norm(row: JudgedRun) -> Finding | None:
    layers = batch_statistics(row.record)
    if not layers or row.record.status not in ("ok", "diverged") or row.record.backend.name == REFERENCE:
        return None
    world, reference = row.record.world, row.reference.record if row.reference else None
    if reference is not None and not depends_on_split(reference):
        return None  # as measured: these layers keep statistics and do not use the batch's
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
            text=f"the pretrained model '{name}' is fed raw bytes; its own tokenizer gives other token ids",
            values={"model": name, "tokenizer": BYTES},
        )
    ]


def _feeds_bytes(row: JudgedRun) -> bool:
    job = row.record.job
    return (
        job.model.name is not None
        and job.model.weights != "random"
        and job.data.is_tokenized
        and job.data.tokenizer == BYTES
    )


def find_observed(runs: Runs) -> list[Finding]:
    """At most one finding of each kind per run of a script."""
    return [
        *of_cells(runs, _nothing_updated),
        *of_cells(runs, _empty_group),
        *of_cells(runs, _ranks_alone),
        *of_cells(runs, _samples_repeated),
    ]


def _nothing_updated(row: JudgedRun) -> Finding | None:
    record, seen = row.record, row.record.observed
    if record.observation is None or seen is None:
        return None
    rates = [rate for group in record.observation.learning_rates for rate in group if rate is not None]
    given = sum(group.get("tensors", 0) for group in seen.optimizer_groups)
    if seen.updated_tensors == 0 and not seen.optimizer_steps:
        text = (
            f"the optimizer updated nothing: none of its {counted(given, 'tensor')} had a gradient; it was "
            "probably made before the model was wrapped"
        )
    elif rates and not any(rates) and len(record.steps) > 1:
        text = f"the optimizer updated nothing: its learning rate is 0 in all {len(record.steps)} steps"
    else:
        return None
    values = {"updated_tensors": seen.updated_tensors, "tensors": given}
    return Finding(id="nothing-updated", about=row.cell, text=text, values=values)


def _empty_group(row: JudgedRun) -> Finding | None:
    record, seen = row.record, row.record.observed
    if record.observation is None or seen is None:
        return None
    counts = [group.get("tensors") for group in seen.optimizer_groups]
    empty = [place for place, count in enumerate(counts) if count == 0]
    if not empty:
        return None
    noun = f"group {empty[0]}" if len(empty) == 1 else f"groups {', '.join(map(str, empty))}"
    verb = "is" if len(empty) == 1 else "are"
    return Finding(
        id="empty-group",
        about=row.cell,
        text=f"{noun} of the optimizer's {len(counts)} {verb} empty: no parameter trains with its rate and "
        "decay",
        values={"empty": empty, "tensors": counts},
    )


def _ranks_alone(row: JudgedRun) -> Finding | None:
    record = row.record
    if record.observation is None or record.world.world_size == 1 or not record.windows:
        return None
    if record.windows.probed == 0 or record.observation.synchronised_at is not None:
        return None  # nothing was counted, or they average what they have every now and then
    moved = [part for part in record.comm if part.payload_bytes and may_reduce(part.phase, part.op)]
    wrapped = record.observation.base is not None
    if any(wrapped or (part.largest_bytes or part.payload_bytes) > SCALAR_BYTES for part in moved):
        return None
    size = record.world.world_size
    same = _on_same_samples(record)
    alike = ", all on the same samples" if same else ""
    return Finding(
        id="ranks-alone",
        about=row.cell,
        text=f"{size} ranks train without exchanging gradients: each has a model of its own{alike}",
        values={"ranks": size, "same_samples": same},
    )


def _samples_repeated(row: JudgedRun) -> Finding | None:
    record = row.record
    if record.observation is None or record.observation.base is None or _ranks_alone(row):
        return None
    # Ranks that cut layers or samples between them must share these: they talk in the forward pass.
    shares = any(part.phase == "forward" and part.op not in GATHERING for part in record.comm)
    if shares or not _on_same_samples(record):
        return None
    size, steps = record.world.world_size, len(record.ranks[0].batch_digests)
    return Finding(
        id="samples-repeated",
        about=row.cell,
        text=f"all {size} ranks train on the same samples in the first {counted(steps, 'step')}: the data is "
        "not split over ranks",
        values={"ranks": size, "steps": steps},
    )


def _on_same_samples(record: Record) -> bool:
    fed = [rank.batch_digests for rank in record.ranks]
    return len(fed) > 1 and bool(fed[0]) and all(fed[0]) and all(digests == fed[0] for digests in fed)


ROUNDING = 2.0**-23
"""Of fp32, in which both are summed."""
LOW_ROUNDING = 2.0**-8
"""Of bfloat16, the widest spacing of a precision that runs have."""
OF_A_TERM = 8
"""Roundings of one target's cross entropy: a maximum, exponentials, their sum, a logarithm, a difference."""


def find_labels(runs: Runs) -> list[Finding]:
    """Of each kind one finding per job, about the backends that trained it."""
    found = []
    for job_id in dict.fromkeys(row.record.job_id for row in runs.rows):
        rows = [row for row in runs.rows if row.record.job_id == job_id]
        if misplaced := [row for row in rows if _misplaced(row)]:
            found.append(_of_labels(misplaced))
        if adding := [row for row in rows if _adds_loss(row)]:
            found.append(_of_loss(adding))
    return found


def _adds_loss(row: JudgedRun) -> bool:
    """Whether a model adds to its loss; what a backend's run shows alone is done to its outputs there."""
    reference = row.reference.record if row.reference is not None else row.record
    known = reference.observed is not None and reference.observed.model_loss is not None
    return added_loss(row.record) is not None and not (known and added_loss(reference) is None)


def _of_labels(rows: Sequence[JudgedRun]) -> Finding:
    data, count = rows[0].record.data, _misplaced(rows[0])
    assert data is not None
    return Finding(
        id="labels-misplaced",
        about=labels(rows),
        text=f"{count:,} of {data.target_tokens:,} labels are not the token at their position: what is "
        "trained is no continuation of the text",
        values={"misplaced_labels": count, "target_tokens": data.target_tokens}
        | {"targets": rows[0].record.job.data.targets},
    )


def _misplaced(row: JudgedRun) -> int:
    return row.record.data.misplaced_labels if row.record.data else 0


def _of_loss(rows: Sequence[JudgedRun]) -> Finding:
    part = added_loss(rows[0].record)
    assert part is not None
    added = part.model - part.job
    return Finding(
        id="model-adds-loss",
        about=labels(rows),
        text=f"given labels the model returns {part.model:.4f}, the cross entropy that is trained is "
        f"{part.job:.4f}: what it adds ({added:+.4f}) is not trained",
        values={"model_loss": part.model, "job_loss": part.job, "targets": part.targets},
    )


def added_loss(record: Record) -> ModelLossPart | None:
    """The two losses where they differ by more than fp32 sums of the same terms can.

    A pairwise sum of n terms is off by at most log2(n) roundings (Higham, Accuracy and Stability of
    Numerical Algorithms, 4.2); a logarithm of a softmax adds a few, and either side may be off. Wrappers of
    a run in low precision also round what the model returns, which the reference does not; a model whose
    weights are bf16 may sum in it.
    """
    part = record.observed.model_loss if record.observed else None
    if part is None:
        return None
    relative = 2 * (math.log2(part.targets) + OF_A_TERM) * ROUNDING
    precision = record.job.training.precision
    if precision == "bf16" or (record.backend.name != REFERENCE and precision != "fp32"):
        relative = max(relative, 2 * LOW_ROUNDING)
    return part if abs(part.model - part.job) > relative * abs(part.job) else None
