"""Runs of the same job that diverged from their reference, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.judge.explain import altered_step, explain, of_one_rank, sums_of_step
from harness.judge.findings.finding import Finding, Kind
from harness.judge.metrics import metrics_in
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.judge.wording import listed, percent

DIAGNOSE = "`harness diagnose RUN_A RUN_B` reruns the step and compares gradients and updates by parameter."

KINDS = (
    Kind(
        id="diverged",
        title="Losses, gradient norms or weights differ from the reference by more than rounding explains",
        cause="The backend computes something else. Other findings about the run name the recognised cause.",
        confirm=DIAGNOSE,
        fix="Compare the effective configuration with that of the reference and remove the differences that "
        "change the mathematics.",
    ),
    Kind(
        id="gradient-scale",
        title="Gradients are scaled by a constant factor",
        cause="Gradients are summed over ranks instead of averaged, or divided by the world size or the "
        "accumulation steps twice or not at all. Adam hides it: the loss hardly moves, while "
        "clipping acts at a different norm.",
        confirm="The ratio of the first gradient norms is the world size, the accumulation steps, or their "
        "product or inverse. " + DIAGNOSE,
        fix="Divide in one place only. DeepSpeed divides by world size itself, and by the "
        "accumulation steps in `engine.backward` unless `scale_wrt_gas=False`; DDP and FSDP average over "
        "ranks; `accelerator.backward` divides by `gradient_accumulation_steps`.",
    ),
    Kind(
        id="gradient-differs",
        title="The gradient of a step differs although its loss agrees",
        cause="Gradients of a rank, a micro-step or a parameter are dropped, or the loss is normalised per "
        "rank.",
        confirm=DIAGNOSE,
        fix="Synchronise in the last micro-step (`no_sync` must not cover it; FSDP2: "
        "`set_requires_gradient_sync(True)`; DeepSpeed: `set_gradient_accumulation_boundary`), and divide "
        "the summed loss by the target tokens of the global batch."
        " Accelerate: `accelerator.accumulate(model)` around every micro-step, and no scaling of your own.",
    ),
    Kind(
        id="norm-of-shard",
        title="Ranks see different gradient norms",
        cause="Clipping uses the norm of the local shard instead of the global norm.",
        confirm="`ranks[].gradient_norms` of the record differ.",
        fix="FSDP1: `model.clip_grad_norm_`, not `torch.nn.utils.clip_grad_norm_`; Accelerate: "
        "`accelerator.clip_grad_norm_`; FSDP2: torch's function, and `.full_tensor()` of what it returns.",
    ),
    Kind(
        id="loss-normalisation",
        title="Loss is a mean of per-rank means instead of a per-token mean",
        cause="Each rank divides by its own target tokens, although ranks hold different numbers of them.",
        confirm="`ranks[].target_tokens` differ; with samples of equal length the difference disappears.",
        fix="Sum the loss, divide by the target tokens of the global batch, and multiply by the world size "
        "since DDP, FSDP and DeepSpeed average gradients. Trainer: `average_tokens_across_devices=True`.",
    ),
    Kind(
        id="loss-of-one-rank",
        title="The loss is that of rank 0 only",
        cause="The other ranks report 0, or their losses are not gathered.",
        confirm="`ranks[].loss_sums` of the record.",
        fix="Reduce the loss over ranks before it is logged (`accelerator.reduce`, `dist.all_reduce`).",
    ),
    Kind(
        id="loss-altered",
        title="The reported loss is not the computed loss",
        cause="The backend returns something other than the loss of its batch: averaged, scaled, smoothed, "
        "from another batch or from another rank.",
        confirm="`ranks[].loss_sums` against `ranks[].computed_loss_sums` of the record.",
        fix="Return the loss of the batch as it was computed; scale a copy for the backward pass.",
    ),
    Kind(
        id="attention-within-part",
        title="Attention sees each rank's own part of a sample only",
        cause="torch's `context_parallel` replaces `scaled_dot_product_attention`, and DeepSpeed's Ulysses "
        "the kernel that it was registered for. A model with another attention runs on without a word: no "
        "token attends to those of another rank.",
        confirm="`observed.attention` of the record is 'eager', and the ranks that share samples exchange "
        "nothing in the forward pass (`comm[]`, role 'sequence'). The loss differs in the first step.",
        fix='`attn_implementation="sdpa"` (model.attention=sdpa).',
    ),
    Kind(
        id="weights-read-outside",
        title="The loss reads weights of which a rank holds a part",
        cause="FSDP1 has whole weights within the forward pass of their unit only. Code outside of it, such "
        "as a penalty on `model.parameters()`, gets each rank's own part without a word; ZeRO-3 and FSDP2 "
        "end with an error.",
        confirm="`layout.read_outside` of the record names them; the loss differs in the first step.",
        fix="Compute it in the model's forward pass and return it, use optimizer.weight_decay for an L2 "
        "penalty, or run ddp, zero1 or zero2.",
    ),
    Kind(
        id="loss-scale",
        title="Losses are scaled by a constant factor",
        cause="The reported loss was divided by the world size or the accumulation steps, or summed.",
        confirm="The ratio of the first losses.",
        fix="Report the loss before it is divided for the backward pass.",
    ),
    Kind(
        id="update-differs",
        title="Losses agree at first, and so do gradient norms where there are any: the update differs",
        cause="What turns a gradient into weights is not the reference's: clipping, the optimizer or its "
        "constants, or the dtype of masters. The text names settings that were seen to differ; of a resumed "
        "run the suspect is what it restored.",
        confirm=DIAGNOSE,
        fix="Compare the optimizer's groups; set clipping, betas, epsilon and weight decay explicitly; keep "
        "fp32 masters.",
    ),
    Kind(
        id="parameters-not-updated",
        title="Parameters never moved",
        cause="They were left out of the optimizer, frozen, or replaced after the optimizer was built.",
        confirm="The values name them; their initial and final sketches in the record are equal.",
        fix="Build the optimizer after sharding, from the parameters of the wrapped model (FSDP1 and FSDP2), "
        "and check that every name is in a group.",
    ),
    Kind(
        id="frozen-weights-moved",
        title="Weights that the job freezes moved",
        cause="They were made trainable again after they were frozen, by a wrapper, an adapter or a call of "
        "`requires_grad_(True)` on the whole model, and an optimizer was given them.",
        confirm="The values name them; their initial and final sketches in the record differ.",
        fix="Freeze before wrapping, and give the optimizer only parameters with `requires_grad`.",
    ),
    Kind(
        id="decay-without-gradient",
        title="Weight decay moves parameters that no gradient reaches",
        cause="torch's optimizers skip a parameter whose `grad` is None. A library that keeps gradients in a "
        "flat buffer (ZeRO, FSDP1) has zeros there instead, so that weight decay, and moments that were not "
        "zero, move it on.",
        confirm="The values name the parameters and how much of their norm is kept. Losses and gradient "
        "norms agree, since nothing reads these parameters.",
        fix="Freeze what the loss does not use, or take it out of the model; or let it be, where its values "
        "do not matter.",
    ),
    Kind(
        id="lost-updates",
        title="Updates vanish in low-precision weights",
        cause="The optimizer updates bf16 or fp16 weights: an update below half their spacing (about 1/256 "
        "of a weight's size in bf16) changes nothing.",
        confirm="The weights moved far less than the reference's, and more so at a smaller learning rate.",
        fix="Keep fp32 masters: DeepSpeed does with `bf16.enabled`; FSDP: load the model in fp32 and set "
        "`MixedPrecision(param_dtype=torch.bfloat16)`, not `model.to(torch.bfloat16)`; Accelerate: "
        "`mixed_precision: bf16` with the model loaded in fp32.",
    ),
)

MEASURES = {
    "norm": ("a gradient norm differs", ""),
    "update": ("the distance that the weights moved differs", ""),
    "weights": ("final weights differ", " of the distance that they moved"),
}
"""What a run is judged by, in words, and what its percent are of, unless of itself. The loss has a unit, and
anything else is a parameter's name."""
MOST_MEASURES = 3
"""The text names this many; the values hold all."""
LOST_SHARE = 0.5
"""Weights that moved less than this share of the reference's distance lost updates."""


def find(runs: Runs) -> list[Finding]:
    """Each run that diverged from its reference, with the cause if it was recognised."""
    found = []
    for row in runs.rows:
        if row.judgement.parity != "diverged" or row.reference is None or row.noise is None:
            continue
        values = row.figures
        limits = row.noise.widest(row.record)
        settings = [s.setting for s in row.judgement.settings if s.effect == "mathematics"]
        cause = explain(row.reference.record, row.record, limits, settings)
        beyond = _exceeded(row.judgement.exceeded)
        why = cause.text if cause.kind == "diverged" else f"see {cause.kind}"
        found.append(
            Finding(
                id="diverged",
                about=row.cell,
                text=f"diverges from the reference ({beyond or 'a loss or norm became NaN or infinite'}); "
                f"{why}" + ("" if cause.kind == "update-differs" else _named(settings)),
                values={metric.key: values[metric.key] for metric in metrics_in("parity")}
                | {"exceeded": {name: rest for name, *rest in row.judgement.exceeded}},
            )
        )
        if cause.kind != "diverged":
            found.append(
                Finding(
                    id=cause.kind,
                    about=row.cell,
                    text=cause.text,
                    values=cause.values,
                )
            )
    return found + _altered_losses(runs.rows) + _lost_updates(runs.rows)


def _exceeded(measures: Sequence[tuple[str, float, float]]) -> str:
    """What lies beyond its limit, the model before single parameters, farthest first."""
    ordered = sorted(measures, key=lambda m: (m[0] == "loss" or m[0] in MEASURES, _times_its_limit(m)))[::-1]
    rest = len(ordered) - MOST_MEASURES
    shown = [_measure(*measure) for measure in ordered[:MOST_MEASURES]]
    return "; ".join([*shown, *([f"and {rest} more"] if rest > 0 else [])])


def _times_its_limit(measure: tuple[str, float, float]) -> float:
    """How many times its limit a measure is; one that is not a number is beyond any."""
    _, found, allowed = measure
    return found / allowed if allowed > 0 and not math.isnan(found) else math.inf


def _measure(name: str, found: float, allowed: float) -> str:
    """'a gradient norm differs by 19 %, 0.00012 % allowed'."""
    if name == "loss":
        return f"a loss differs by {found:.1e} nats per token, {allowed:.1e} allowed"
    differs, of = MEASURES.get(name, (f"{name} differs", " of the distance it moved"))
    return f"{differs} by {percent(found)}{of}, {percent(allowed)} allowed"


def _named(settings: list[str]) -> str:
    return f"; settings that differ: {', '.join(settings)}" if settings else ""


def _altered_losses(rows: Sequence[Row]) -> list[Finding]:
    """Of runs that stay within their level, where the reported losses alone would not show it."""
    found = []
    for row in rows:
        index = altered_step(row.record)
        if index is None or row.judgement.parity in ("diverged", "unjudged"):
            continue
        one = of_one_rank(row.record, index)
        values = {
            "step": row.record.steps[index].step,
            "reported": sums_of_step(row.record, index, "loss_sums"),
            "computed": sums_of_step(row.record, index, "computed_loss_sums"),
        }
        found.append(
            Finding(
                id="loss-of-one-rank" if one else "loss-altered",
                about=row.cell,
                text=(
                    "the loss is that of rank 0 only"
                    if one
                    else "ranks report another loss than they compute"
                )
                + f", from step {row.record.steps[index].step} on",
                values=values,
            )
        )
    return found


def _lost_updates(rows: Sequence[Row]) -> list[Finding]:
    from harness.judge.distance import movement

    found = []
    for row in rows:
        masters = row.record.observed.master_dtypes if row.record.observed else []
        if row.reference is None or not row.judgement.settings or masters in ([], ["float32"]):
            continue
        moved = sum(value**2 for value in movement(row.record).values()) ** 0.5
        expected = sum(value**2 for value in movement(row.reference.record).values()) ** 0.5
        sizes = movement(row.record)
        still = [name for name, size in sizes.items() if size == 0]
        if expected and (moved < LOST_SHARE * expected or still):
            dtypes = listed(masters)
            one = f"{len(still)} of {len(sizes)} tensors, such as {still[0]}, never changed" if still else ""
            far = f"weights moved {moved / expected:.0%} as far as the reference's"
            parts = [one, far if moved < LOST_SHARE * expected else ""]
            found.append(
                Finding(
                    id="lost-updates",
                    about=row.cell,
                    text=f"{' and '.join(filter(None, parts))}: {dtypes} rounded updates away",
                    values={"moved": moved, "reference": expected, "parameters_that_stood_still": still},
                )
            )
    return found
