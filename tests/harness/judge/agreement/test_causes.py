"""Each hypothesis of a divergence wins on a record of its mistake; one fact that contradicts it ends it."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.backends.mesh import Mesh
from harness.forms.layout import Layout, Tensor
from harness.judge.agreement.causes import (
    HYPOTHESES,
    Explanation,
    Pair,
    altered_step,
    explain_divergence,
    name_scale,
    shown_alone,
    standing,
)
from harness.judge.agreement.job_equivalence import job_differences
from harness.judge.agreement.parity import Tolerance, measure_noise
from harness.judge.wording import entries
from harness.record import (
    DimensionPart,
    ObservedPart,
    OddUpdatePart,
    RankPart,
    Record,
    ResumedPart,
)
from tests.records import (
    LOSSES,
    NORMS,
    changed,
    make_ranks,
    make_record,
    make_steps,
    make_weights,
)
from tests.traps.gallery import OTHERS, PUBLISHED, frozen
from tests.traps.planted import of_the_trap

SCORED = {f"x.{name}.weight": 2.0 for name in ("q_proj", "k_proj", "v_proj", "o_proj", "norm")}
LIMITS = Tolerance(
    loss=1e-4, norm=1e-4, update=1e-3, weights=1e-3, parameters=dict.fromkeys(("a", "b", "c", *SCORED), 1e-3)
)
LATE = [*LOSSES[:2], LOSSES[2] + 0.01, LOSSES[3] + 0.02]
"""Losses that differ from step 2 on."""


def weights(**last: float) -> dict[str, Any]:
    """Parameters of one element that begin at 1 and end at these."""
    first = {name: [1.0] * 9 for name in last}
    sketch = {name: [abs(value), *[value] * 8] for name, value in last.items()}
    return {
        "initial_weights": make_weights(sketch=first), "final_weights": make_weights("b" * 64, sketch)
    }  # fmt: skip


ranks = partial(make_ranks, 2)
MOVED = weights(a=2.0, b=2.0)


def layout(names: str = "ab", **facts: list[str]) -> Layout:
    tensors = [Tensor(name=name, shape=[1], dtype="float32") for name in names]
    parts: dict[str, Any] = {"parameters": tensors, "decaying": [*names], "buffers": [], "blocks": []}
    return Layout(**(parts | facts))


def norms(*factors: float, times: float = 1.0) -> list[Any]:
    """Steps whose gradient norms are these times the reference's; beyond those given `times`."""
    each = [*factors, *[times] * (4 - len(factors))]
    return make_steps(norms=[norm * factor for norm, factor in zip(NORMS, each, strict=True)])


def applied(steps: list[Any], *norms: float) -> list[Any]:
    """The same; the optimizer is given gradients of these norms."""
    pairs = zip(steps, [*norms, *[norms[-1]] * 4], strict=False)
    return [replace(step, applied_gradient_norm=norm) for step, norm in pairs]


def laid_out(record: Record, *sizes: tuple[Any, int], accumulation_steps: int = 1) -> Record:
    dimensions = [DimensionPart(name=name, size=size) for name, size in sizes]
    return changed(record, world={"dimensions": dimensions, "accumulation_steps": accumulation_steps})


def explained(record: Record, reference: Record | None = None, **how: Any) -> Explanation:
    return explain_divergence(Pair(reference or make_record(**MOVED), record, LIMITS, **how))


DOUBLED = [*LOSSES[:3], 4.8]
APART = ["b" * 64, "c" * 64]
AUDITED: dict[str, Any] = {"audited_updates": 3}
ODD = OddUpdatePart(step=1, kind="decay", given=0.2, due=0.1)
UNEVEN = {"target_tokens": [[216] * 4, [800] * 4]}
HELD = ObservedPart(optimizer_groups=[{"parameters": ["a", "b", "c"]}], master_dtypes=["float32"])
RESUMED = ResumedPart(run_id="run", backend="ddp", world_size=2, step=5, format="neutral")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    # name: fields of the run, of the reference, kind, words
    "a loss that is not finite": (
        {"steps": make_steps((None, *LOSSES[1:]))}, {}, "diverged", "not finite"),
    "a reported loss that is not the computed one": (
        {"steps": make_steps([5.3, 5.15, 5.05, 4.9]),
         "ranks": ranks(
             loss_sums=[[508 * x for x in (5.6, 5.3, 5.1, 4.8)], [508 * 5.0] * 4],
             computed_loss_sums=[[508 * x for x in own] for own in ((5.6, 5.3, 5.1, 4.8),
                                                                     (5.4, 5.2, 4.9, 4.7))],
             target_tokens=[[508] * 4] * 2)},
        {}, "loss-altered", "which agrees with the reference"),
    "a rank that goes back from more than its loss": (
        {"steps": norms(1.2, times=1.2),
         "ranks": ranks(loss_gradients=[[[2.0, 2.0], [], [], []], [[3.0, 3.0], [], [], []]])},
        {}, "gradient-differs", "gradients of rank 1 have a factor, first in step 0: the backward pass "
        "begins with 1.5 times what it has elsewhere"),
    "forward passes that draw, in the loss": (
        {"steps": make_steps([6.0] * 4), "observed": ObservedPart(draws=True)},
        {"observed": ObservedPart(draws=False)}, "diverged", "as dropout outside of modules"),
    "forward passes that draw, in the norm": (
        {"steps": norms(times=0.96), "observed": ObservedPart(draws=True)},
        {"observed": ObservedPart(draws=False)}, "gradient-differs", "as dropout outside of modules"),
    "a parameter's gradients that no step shows": (
        {"moment_norms": dict.fromkeys("abdef", (1.0, 2.0)) | {"c": (0.5, 1.5)}, "ranks": ranks(**AUDITED)}
        | MOVED, {"moment_norms": dict.fromkeys("abcdef", (1.0, 2.0))}, "gradient-differs",
        "agree within rounding, but gradients of c have a factor, relative to all "
        "others, over the last steps: 0.75"),
    "a parameter's gradients among others that rounding moves": (
        {"moment_norms": {n: (1.0, f) for n, f in zip("abcde", (0.97, 1.03, 1.08, 0.98, 1.02), strict=True)}}
        | MOVED, {"moment_norms": dict.fromkeys("abcde", (1.0, 1.0))}, "gradient-differs",
        "but the size of gradients of a parameter relative to all others does not; cause not found"),
    "ranks that divide by their own tokens": (
        {"steps": norms(1.04),
         "ranks": ranks(loss_gradients=[[[1 / 216] * 2] * 4, [[1 / 800] * 2] * 4], **UNEVEN)},
        {}, "gradient-differs", "each rank divides its loss by its own target tokens (in step 0: 216, 800)"),
    "another first loss": (
        {"steps": make_steps([LOSSES[0] + 0.01, *LOSSES[1:]])}, {}, "diverged",
        "cause not found: the forward pass"),
    "another first loss from weights that are not known": (
        {"steps": make_steps([LOSSES[0] + 0.01, *LOSSES[1:]]), "initial_weights": None},
        {"initial_weights": None}, "diverged", "from equal samples; cause not found: initial weights, which"),
    "another first loss than zero": (
        {"steps": make_steps([0.25, *LOSSES[1:]])}, {"steps": make_steps([0.0, *LOSSES[1:]])},
        "diverged", "differs (0.25 against 0)"),
    "a buffer that was cast, in the loss": (
        {"steps": make_steps([6.0] * 4), "observed": ObservedPart(buffers={"scale": "3"})},
        {"observed": ObservedPart(buffers={"scale": "1"})}, "diverged", "buffer scale differs before"),
    "gradients that were summed, of whose norm each rank was told a part": (
        {"steps": norms(times=2), "ranks": ranks(gradient_norms=[[1.2 * x for x in NORMS],
                                                                 [1.6 * x for x in NORMS]])},
        {}, "gradient-scale", "x 2: summed over 2"),
    "gradients that are summed later": (
        {"steps": norms(1, 1, 2, 2)}, {}, "gradient-scale", "from step 2 on: summed over 2 ranks"),
    "gradients that are summed in one step": (
        {"steps": norms(1, 1, 2, 1)}, {}, "gradient-scale", "in step 2: summed over 2 ranks"),
    "gradients of a step that are divided again, which moves weights": (
        {"steps": make_steps(DOUBLED, [2.0, 1.5, 0.625, 1.0]), "training": {"precision": "fp16-mixed"}}, {},
        "gradient-scale", "in step 2: divided by the 2 ranks again"),
    "a norm that DeepSpeed takes of gradients divided by the loss scale it has doubled": (
        {"label": "zero3", "steps": make_steps(DOUBLED, [2.0, 1.5, 0.625, 1.0]),
         "training": {"precision": "fp16-mixed", "loss_scale_growth_interval": 2}}, {}, "gradient-differs",
        "all gradients are halved in step 2, as DeepSpeed divides by the loss scale that this step has"),
    "a norm that is halved after a skipped step, too": (
        {"label": "zero3", "steps": make_steps(norms=[2.0, 0.75, None, 0.5]),
         "training": {"precision": "fp16-mixed", "loss_scale_growth_interval": 1}}, {}, "gradient-differs",
        "that this step has doubled (deepspeedai/DeepSpeed#8588); cause not found where it cannot have grown "
        "(steps: 3)"),
    "gradients that are divided by the loss scale of before it grew": (
        {"steps": norms(1, 2, 1, 2),
         "training": {"precision": "fp16-mixed", "loss_scale_growth_interval": 1}}, {}, "gradient-differs",
        "doubled in steps 1 and 3, where the loss scale has just grown"),
    "gradients that are divided by the loss scale of before it was halved": (
        {"steps": make_steps(norms=[2.0, None, 0.625, 1.0]), "training": {"precision": "fp16-mixed"}}, {},
        "gradient-differs", "halved in step 2, where the loss scale has just been halved"),
    "gradients that are summed in every second step": (
        {"steps": norms(1, 2, 1, 1.99)}, {}, "gradient-scale", "in steps 1 and 3: summed over 2 ranks"),
    "a parameter's gradient whose size a factor fits": (
        {"steps": norms(times=2), "moment_norms": dict.fromkeys("adef", (1.0, 2.0)) | {"c": (1.0, 9.0)}},
        {"moment_norms": dict.fromkeys("acdef", (1.0, 2.0))}, "gradient-differs",
        "gradients of c have a factor, relative to all others"),
    "each rank clips its part, of two replicas": (
        {"steps": norms(0.6), "world_size": 4, "ranks": make_ranks(4, gradient_norms=[[1.2], [1.6]] * 2)}, {},
        "norm-of-shard", "by the norm of its own shard"),
    "gradients that are never reduced, weights that are averaged": (
        {"steps": norms(1.2), "ranks": ranks(gradient_norms=[[2.4], [2.5]], final_digest="b" * 64)}, {},
        "gradient-differs", "not reduced over ranks in the first step, although weights end equal"),
    "gradients that ranks clip and then reduce": (
        {"steps": applied(norms(1.2), 0.8),
         "ranks": ranks(gradient_norms=[[2.4], [2.5]], final_digest=APART)},
        {}, "gradient-differs", "each rank clips its own gradients in the first step, and they are reduced"),
    "a norm that ranks take before they reduce": (
        {"steps": norms(1.2), "ranks": ranks(gradient_norms=[[2.4], [2.5]], final_digest="b" * 64)} | MOVED,
        {}, "gradient-differs", "final weights agree: the norm is computed otherwise"),
    "a norm that every step has": (
        {"steps": make_steps(norms=[0.3, 0.30001, 0.3, 0.3])}, {}, "gradient-differs",
        "it is 0.3 in every step: gradients are clipped before their norm is taken"),
    "gradients of the step before": (
        {"steps": make_steps(norms=[NORMS[0], *NORMS[:3]])}, {}, "gradient-differs", "come a step late"),
    "gradients that are not zeroed before a step": (
        {"steps": norms(1, 1, 1.3, 1),
         "ranks": ranks(step_peak_bytes=[[50_000, 90_000, 94_000, 90_000]] * 2)},
        {}, "gradient-differs", "memory holds one more set of gradients in steps 2 than in any other"),
    "the gradient of a rank": (
        {"steps": norms(0.6)}, {}, "gradient-differs", "no gradient of one of 2 ranks; a factor on"),
    "a loss averaged per rank in the backward pass": (
        {"steps": norms(1.37), "ranks": ranks(**UNEVEN)}, {}, "gradient-differs",
        "averaged per rank or micro-step instead of per token"),
    "gradients whose lower bits are cut off": (
        {"steps": norms(times=1 - 1 / 24)} | MOVED, {"moment_norms": dict.fromkeys("ab", (1.0, 2.0))},
        "gradient-differs", "or each is cut to 4 significant bits, which shortens a norm as much"),
    "a parameter far beyond all others": (
        {"steps": norms(times=1.1)} | weights(a=2.1, b=2.4), {}, "gradient-differs",
        "b ends farthest from the reference's, by 40 % of its movement, any other by 10 % at most"),
    "parameters far beyond all others, whose gradients are as large": (
        {"steps": norms(times=1.001), "moment_norms": dict.fromkeys("abcde", (1.0, 2.02))}
        | weights(a=2.4, b=2.3, c=2.01, d=2.0, e=2.0),
        {"moment_norms": dict.fromkeys("abcde", (1.0, 2.0))} | weights(a=2.0, b=2.0, c=2.0, d=2.0, e=2.0),
        "gradient-differs", "a, b end farthest from the reference's, by 30 % of their movement at least, any "
        "other by 1.0 % at most; gradients of them are as large, but point elsewhere: rounded, noisy"),
    "queries and keys far beyond all others, whose gradients are as large": (
        {"steps": norms(times=1.001), "moment_norms": dict.fromkeys(SCORED, (1.0, 2.02))}
        | weights(**SCORED | {"x.q_proj.weight": 2.4, "x.k_proj.weight": 2.3, "x.norm.weight": 2.01}),
        {"moment_norms": dict.fromkeys(SCORED, (1.0, 2.0))} | weights(**SCORED), "gradient-differs",
        "but point elsewhere, as where attention has other positions, another mask or another scale"),
    "a factor that clipping takes out, and weights that end elsewhere": (
        {"steps": norms(times=2), "effective": {"gradient_clipping": 0.1}} | weights(a=2.1, b=2.4), {},
        "gradient-differs", "all gradients x 2: summed over 2 ranks instead of averaged; clipping takes that "
        "out, and yet final weights differ, for another reason: b ends farthest"),
    "a factor that acts at a different norm than clipping, and weights that end elsewhere": (
        {"steps": norms(times=2), "effective": {"gradient_clipping": 2.0}} | weights(a=2.1, b=2.4), {},
        "gradient-scale", "x 2: summed over 2"),
    "a norm of no known size, and gradients of several sizes": (
        {"steps": norms(0.9), "moment_norms": {
            n: (1.0, f) for n, f in zip("abcdefg", (1.0, 0.25, 0.26, 0.65, 1.04, 1.0, 1.0), strict=True)}},
        {"moment_norms": dict.fromkeys("abcdefg", (1.0, 1.0))}, "gradient-differs",
        "farthest from the usual factor over the last steps: b (x 0.25), c (x 0.26), d (x 0.65)"),
    "micro-steps that divide by their own tokens": (
        {"steps": norms(1.04),
         "ranks": ranks(loss_gradients=[[[2.0, 3.0]] * 4, [[1.9, 2.2]] * 4], **UNEVEN)},
        {}, "gradient-differs", "as where each micro-step divides its loss by its own target tokens (of the "
        "ranks: 216, 800)"),
    "a micro-step that is lost while ranks hold uneven tokens": (
        {"steps": norms(0.7),
         "ranks": ranks(loss_gradients=[[[2.0, 2.0]] * 4, [[0.0, 2.0]] * 4], **UNEVEN)},
        {}, "gradient-differs", "the backward pass begins with 0 times what it has elsewhere"),
    "a micro-step that is divided after steps with uneven tokens that agree": (
        {"steps": norms(1, 0.9),
         "ranks": ranks(
             loss_gradients=[[[2.0, 2.0]] * 4, [[end, 2.0] for end in (2.0, 1.5, 2.0, 2.0)]], **UNEVEN)},
        {}, "gradient-differs", "begins with 0.75 times what it has elsewhere"),
    "a norm of no known size": (
        {"steps": norms(1.2)}, {}, "gradient-differs",
        "cause not found: gradients of a rank, a micro-step or a parameter may be rounded or multiplied"),
    "frozen weights that move, with their gradient": (
        {"steps": norms(times=1.1)} | weights(a=2.0, b=1.5),
        weights(a=2.0, b=1.0) | {"layout": layout(frozen=["b"])}, "frozen-weights-moved", "b moved"),
    "ranks whose gradients are unlike": (
        MOVED | {"steps": make_steps(LATE),
                 "ranks": ranks(final_digest=APART, initial_digest="a" * 64, **AUDITED),
                 "final_weights": MOVED["final_weights"].model_copy(update={"apart": {"a": 0.01, "b": 0.5}})},
        {}, "diverged", "ranks hold different weights of b: gradients are unlike, since ranks begin alike"),
    "updates that are not Adam's, of which the first was not looked at": (
        {"steps": make_steps([LOSSES[0], *(loss + 0.01 for loss in LOSSES[1:])]),
         "ranks": ranks(odd_update=ODD)}, {}, "update-differs", "see update-altered"),
    "a norm that an update parts which is not Adam's": (
        {"steps": norms(1, 1, 1.2, 1.1), "ranks": ranks(odd_update=ODD)}, {}, "update-differs",
        "gradient norms first differ at step 2, although losses and gradient norms agree before (steps: 2): "
        "the update differs, see update-altered"),
    "a norm that jumps after many updates that are not Adam's": (
        {"steps": norms(1, 1, 1, 1.2), "ranks": ranks(odd_update=ODD.model_copy(update={"later": [2]}))}, {},
        "gradient-differs", "cause not found"),
    "a loss scale that DeepSpeed doubles before it divides by it": (
        {"label": "zero2", "steps": applied(make_steps(LATE), 0.9, NORMS[1] / 2, 0.9, 0.9),
         "effective": {"gradient_clipping": 0.9, "loss_scale": 65536.0}}, {},
        "update-differs", "as DeepSpeed divides by the loss scale that this step has doubled"),
    "parts that are clipped by norms of their own": (
        {"label": "fsdp", "steps": applied(make_steps(LATE), 1.2, 1.2, 1.1, 0.95),
         "effective": {"gradient_clipping": 0.9}, "moment_norms": dict.fromkeys("ab", (1.0, 1.02))},
        {"moment_norms": dict.fromkeys("ab", (1.0, 1.0))}, "update-differs",
        "something changes them in between, as where each rank clips its part by the norm of that part"),
    "gradients that differ too little for a norm": (
        {"steps": norms(1, 1, 1.01, 1.02), "ranks": ranks(**AUDITED)}, {}, "gradient-differs",
        "every update that was looked at is what Adam makes of its gradient"),
    "a parameter whose gradients are turned": (
        {"steps": norms(1, 1, 1.01, 1.02), "ranks": ranks(**AUDITED)} | weights(a=2.1, b=0.0), {},
        "gradient-differs", "b ends farthest from the reference's, by 200 % of its movement, as one that "
        "moves the other way, any other by 10 % at most"),
    "a parameter whose gradients are turned, among others that moved elsewhere": (
        {"steps": norms(1, 1, 1.01, 1.02), "ranks": ranks(**AUDITED)} | weights(a=3.2, b=0.0), {},
        "gradient-differs", "b moved against the reference's movement, as with a gradient of the other sign"),
    "what a run restored": (
        weights(a=2.0, b=2.5) | {"resumed": RESUMED}, {}, "update-differs", "from its checkpoint of step 5"),
    "weights that passes change": (
        {"label": "zero3", "steps": make_steps(LATE), "layout": layout(changed_in_passes=["b"])}
        | weights(a=2.0, b=2.5), {}, "weights-changed-in-passes", "forward passes change b in place"),
    "weights that passes change, within the limits of weights": (
        {"label": "zero3", "steps": norms(1.1), "layout": layout(changed_in_passes=["b"])}
        | weights(a=2.0, b=2.0005) | {"moment_norms": dict.fromkeys("acdef", (1.0, 2.0)) | {"b": (1.0, 3.0)}},
        {"moment_norms": dict.fromkeys("abcdef", (1.0, 2.0))}, "weights-changed-in-passes",
        "forward passes change b in place"),
    "norms that were not compared": (
        {"steps": make_steps(norms=[None] * 4)} | weights(a=2.0, b=2.5),
        {"steps": make_steps(norms=[None] * 4)}, "update-differs",
        "final weights differ (apart in the end: b), although losses agree in all 4 steps; gradient norms "
        "were not compared: the update differs; cause not found"),
}  # fmt: skip


TRAPS = {trap.name: trap for trap in (*PUBLISHED, *OTHERS)}
SAID = Path(__file__).with_name("said_of_traps.txt")


def of_trap(name: str, settings: list[str] | None = None, **changes: Any) -> Pair | None:
    """The run of a trap's ranks, if it diverged, and its reference; `changes` of the run, maybe by it."""
    trap = TRAPS[name]
    (row,) = (row for row in frozen(trap).rows if row.record.backend.label == trap.shown)
    if row.judgement.parity != "diverged":
        return None
    if settings is None:
        settings = [one.setting for one in row.judgement.settings if one.effect == "mathematics"]
    new = {field: of(row.record) if callable(of) else of for field, of in changes.items()}
    limits, shift = row.noise.widest(row.record), row.noise.norm_shift(row.record)
    return Pair(row.reference.record, changed(row.record, **new), limits, settings, shift)


def test_mistakes_that_ranks_made_are_named_and_no_other_cause(update_golden: bool) -> None:
    lines = []
    for name, trap in TRAPS.items():
        pair = of_trap(name)
        told = [explain_divergence(pair)] if pair else []
        lines += [f"{name}: {f.id}: {f.text}" for f in of_the_trap(trap, frozen(trap).findings)]
        lines += [f"{name}: diverged: {one.text}" for one in told if one.kind == "diverged"]
        lines += [f"    because: {standing(pair)[0].name}"] if pair else []
    if update_golden:
        SAID.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert lines == SAID.read_text(encoding="utf-8").splitlines()


def paired(case: str, mesh: Any = None, reference: Any = None, **changes: Any) -> Pair:
    """The run and reference of a case; `changes` of the run."""
    run, left, _, _ = CASES[case]
    record = make_record(**({"label": "ddp"} | run | changes))
    record = laid_out(record, *mesh) if mesh else record
    return Pair(make_record(**(MOVED | left | (reference or {}))), record, LIMITS)


@pytest.mark.parametrize("name", CASES)
def test_the_mistake_of_a_record_is_named(name: str) -> None:
    _, _, kind, words = CASES[name]
    found = explain_divergence(paired(name))
    assert (found.kind, words in found.text) == (kind, True), found


def test_norms_that_are_not_shortened_alike_are_not_said_to_be_cut() -> None:
    bits = [paired("gradients whose lower bits are cut off", steps=steps).cut_to_bits for steps in (
        norms(*[23 / 24] * 4), norms(1, 1, 5 / 6, 1), norms(*[23 / 24] * 3))]  # fmt: skip
    assert bits == [4, None, None]


@pytest.mark.parametrize("name", [
    "a micro-step that is lost while ranks hold uneven tokens",
    "a micro-step that is divided after steps with uneven tokens that agree",
])  # fmt: skip
def test_a_factor_that_tokens_cannot_make_is_not_told_as_theirs(name: str) -> None:
    assert "target tokens" not in explain_divergence(paired(name)).text


def each_rank(change: Callable[[RankPart], dict[str, Any]]) -> Callable[[Record], list[RankPart]]:
    return lambda run: [changed(part, **change(part)) for part in run.ranks]


def each_step(**factors: float) -> Callable[[Record], list[Any]]:
    """Fields of each step times these."""
    return lambda run: [
        replace(step, **{field: getattr(step, field) * by for field, by in factors.items()})
        for step in run.steps
    ]


CONTRADICTED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    # name: the trap or case, what is changed in the run, in the reference, the hypothesis that ends
    "no rank has samples of its own": (
        "T17 never", {"world": {"dimensions": [DimensionPart(name="data", size=1),
                                               DimensionPart(name="tensor", size=2)]}}, {}, "not-reduced"),
    "what clipping of each leaves is all that the optimizer gets": (
        "gradients that ranks clip and then reduce", {"steps": applied(norms(1.2), 1.0)}, {}, "reduced-late"),
    "norms are larger than the whole": (
        "T16",
        {"ranks": each_rank(lambda part: {"gradient_norms": [9 * n for n in part.gradient_norms]})}, {},
        "own-norms"),
    "earlier steps are as uneven and agree": (
        "a loss averaged per rank in the backward pass", {"steps": norms(1, 1, 0.76, 0.76)}, {},
        "mean-of-means"),
    "the targets are too even for so much": (
        "a loss averaged per rank in the backward pass",
        {"ranks": ranks(target_tokens=[[508] * 4, [510] * 4])}, {}, "mean-of-means"),
    "the rank was idle before, and its norm agreed": (
        "late block skipped on a rank",
        {"ranks": each_rank(lambda part: {"without_gradient": {0: [*part.without_gradient.values()][-1]}})},
        {}, "idle"),
    "the settings that differ change gradients alone": (
        "T18", {}, {"settings": ["dtype of gradients", "dtype of reduction"]}, "settings"),
    "the odd update came after the difference": (
        "moments lost, ZeRO-2",
        {"ranks": each_rank(lambda part: {"odd_update": changed(part.odd_update, step=5)})}, {},
        "altered-updates"),
    "an update is not Adam's": (
        "gradients that differ too little for a norm",
        {"ranks": ranks(audited_updates=3, odd_update=ODD)}, {}, "before-updates"),
    "an update was not looked at": (
        "gradients that differ too little for a norm", {"ranks": ranks(audited_updates=[3, 2])}, {},
        "before-updates"),
    "weights moved that passes do not change": (
        "weights that passes change", {"layout": layout(changed_in_passes=["a"])}, {}, "in-place"),
    "another step holds as many gradients": (
        "gradients that are not zeroed before a step",
        {"ranks": ranks(step_peak_bytes=[[96_000, 90_000, 96_000, 90_000]] * 2)}, {}, "kept"),
    "no step holds more gradients": (
        "gradients that are not zeroed before a step",
        {"ranks": ranks(step_peak_bytes=[[50_000, 90_000, 90_500, 90_000]] * 2)}, {}, "kept"),
    "the norm is too small without a rank": (
        "the gradient of a rank", {"steps": norms(0.4)}, {}, "part-lost"),
    "more than the wire rounds": (
        "T03", {"steps": each_step(gradient_norm=0.98)}, {}, "wire"),
    "the loss scale has not grown yet": (
        "a norm that DeepSpeed takes of gradients divided by the loss scale it has doubled",
        {"training": {"precision": "fp16-mixed", "loss_scale_growth_interval": 3}}, {}, "scale-doubled"),
    "the loss scale has grown one step before": (
        "gradients that are divided by the loss scale of before it grew",
        {"training": {"precision": "fp16-mixed", "loss_scale_growth_interval": 2}}, {}, "old-scale"),
    "later norms are halved too": (
        "a norm that DeepSpeed takes of gradients divided by the loss scale it has doubled",
        {"steps": norms(1, 1, 0.5, 0.5)}, {}, "scale-doubled"),
    "tensors have other factors than others": (
        "loss not unscaled, DDP",
        {"moment_norms": lambda run: {name: (first, n * last) for n, (name, (first, last)) in enumerate(
            run.moment_norms.items(), 1)}}, {}, "norm-alone"),
    "passes of the reference draw too": (
        "forward passes that draw, in the loss", {}, {"reference": {"observed": ObservedPart(draws=True)}},
        "drawn"),
    "the first loss precedes every update": (
        "nothing updated", {"steps": each_step(loss=1.1)}, {}, "nothing-moved"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTED)
def test_one_fact_that_contradicts_a_hypothesis_ends_it(name: str) -> None:
    case, changes, how, hypothesis = CONTRADICTED[name]
    of = of_trap if case in TRAPS else paired
    assert hypothesis not in {one.name for one in standing(of(case, **how, **changes))}
    assert hypothesis in {one.name for one in standing(of(case))}


def test_every_hypothesis_has_a_case_and_a_sentence() -> None:
    """Those without have tests below, or traps whose records are not kept."""
    elsewhere = {
        "stale-weights", "read-outside", "parts", "skipped", "gathered", "shifted", "rounded",
        "ranks-begin-apart",
    }  # fmt: skip
    assert all(one.name in entries()[one.kind]["text"] for one in HYPOTHESES)
    pairs = [*map(paired, CASES), *filter(None, map(of_trap, TRAPS))]
    assert {one.name for one in HYPOTHESES} - {standing(pair)[0].name for pair in pairs} == elsewhere


@pytest.mark.parametrize(
    ("ratio", "steps", "lost"),
    [
        (0.76, 3, ["one of 3 micro-steps"]),
        (0.6, 4, ["one of 2 ranks"]),
        (0.6, 2, ["one of 2 ranks", "one of 2 micro-steps"]),
        (0.9, 4, ["one of 4 micro-steps of one of 2 ranks"]),
        (0.3, 2, []),
        (1.1, 2, []),
    ],
)
def test_what_is_missing_shows_in_the_size_of_the_norm(ratio: float, steps: int, lost: list[str]) -> None:
    record = laid_out(make_record(label="ddp", steps=norms(ratio)), ("data", 2), accumulation_steps=steps)
    assert Pair(make_record(**MOVED), record, LIMITS).lost == lost


@pytest.mark.parametrize(
    ("ratio", "size", "steps", "told"),
    [
        (4.0, 2, 4, ["not divided by the 4 accumulation steps"]),
        (8.0, 2, 4, ["summed over 2 ranks and 4 accumulation steps"]),
        (0.125, 2, 4, ["divided by 2 ranks and 4 accumulation steps again"]),
        (2.004, 2, 1, ["summed over 2 ranks instead of averaged"]),
        (2.0, 2, 2, ["summed over 2 ranks instead of averaged", "not divided by the 2 accumulation steps"]),
        (2.02, 2, 1, []),
        (3.0, 2, 4, []),
        (1.0, 1, 1, []),
    ],
)
def test_a_ratio_of_gradients_names_what_multiplied_them(
    ratio: float, size: int, steps: int, told: list[str]
) -> None:
    assert name_scale(ratio, Mesh.data_parallel(size), steps) == told


def test_the_last_stage_of_a_pipeline_alone_goes_back_from_a_loss() -> None:
    gradients = ranks(loss_gradients=[[None] * 4, [[0.0, 2.0]] * 4])
    record = laid_out(make_record(label="pp", steps=norms(times=1.15), ranks=gradients), ("pipeline", 2))
    assert "gradients of rank 1 have a factor in some micro-step, first in step 0" in explained(record).text


@pytest.mark.parametrize(("wide", "kind"), [(True, "gradient-differs"), (False, None)])
def test_a_factor_is_told_where_norms_may_hide_it(wide: bool, kind: str | None) -> None:
    gradients = ranks(loss_gradients=[[[2.0, 2.0]] * 4, [[2.02, 2.02]] * 4])
    found = shown_alone(make_record(steps=norms()), make_record(steps=norms(), ranks=gradients), wide=wide)
    assert (found and found.kind) == kind


@pytest.mark.parametrize(
    ("label", "smallest", "are_parts"),
    [("fsdp", 1.02, True), ("fsdp", 1.0, False), ("zero1", 1.02, True), ("third-party", 1.02, True),
     ("ddp", 1.02, False), ("fsdp1-no-shard", 1.02, False)],
)  # fmt: skip
def test_parts_that_are_clipped_less_leave_every_gradient_larger(
    label: str, smallest: float, are_parts: bool
) -> None:
    moments = {"a": (1.0, 1.4), "b": (1.0, smallest)}
    pair = paired("parts that are clipped by norms of their own", label=label, moment_norms=moments)
    assert bool(pair.look("clipped_in_parts")) == are_parts


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"initial_digest": APART}, "ranks begin with unlike weights, see replicas-differ"),
        ({"audited_updates": [3, 2]}, "ranks hold different weights of b"),
        ({"otherwise": [{}, {"optimizer steps": [3, 4]}]}, "ranks hold different weights of b"),
    ],
)
def test_ranks_that_differ_in_more_than_gradients_are_not_told_of_those(
    changes: dict[str, Any], told: str
) -> None:
    rows = AUDITED | {"final_digest": APART, "initial_digest": "a" * 64} | changes
    found = explain_divergence(paired("ranks whose gradients are unlike", ranks=ranks(**rows)))
    assert found.text == told


def test_only_what_moved_against_the_reference_is_turned() -> None:
    for b, turned in ((0.0, ["b"]), (0.95, ["b"]), (1.05, []), (4.0, [])):
        pair = paired("a parameter whose gradients are turned", **weights(a=3.2, b=b))
        assert pair.look("turned") == turned
    across = make_weights("b" * 64, {"a": [2.0] * 9, "b": [2.0, *[2.0] * 4, *[0.0] * 4]})
    record = make_record(**(MOVED | {"label": "ddp", "final_weights": across}))
    assert Pair(make_record(**MOVED), record, LIMITS).look("turned") == []


def test_norms_that_part_bit_by_bit_are_an_update() -> None:
    reference = make_record(steps=make_steps(LOSSES, [5.0, 5.0, 5.0, 5.0]))
    drifting = make_record(label="ddp", steps=make_steps(LOSSES, [5.0, 5.1, 5.25, 5.4]))
    sudden = make_record(label="ddp", steps=make_steps(LOSSES, [5.0, 5.1, 5.4, 5.4]))
    limits = replace(measure_noise(reference, ()).tight, norm=0.04)
    assert explain_divergence(Pair(reference, drifting, limits)).kind == "update-differs"
    assert explain_divergence(Pair(reference, sudden, limits)).kind == "gradient-differs"


def test_parameters_that_end_elsewhere_come_farthest_first_and_decaying_ones_are_named_as_that() -> None:
    reference = make_record(**weights(a=2.0, b=2.0, c=2.0), layout=layout())
    found = explained(make_record(label="ddp", **weights(a=2.1, b=2.1, c=2.0)), reference)
    assert "apart in the end: the 2 parameters with weight decay, and no others" in found.text
    found = explained(make_record(label="ddp", **weights(a=2.1, b=2.0, c=2.1)), reference)
    assert "with weight decay" not in found.text
    assert explained(make_record(label="ddp", **weights(a=2.1, b=2.5))).values["parameters"] == ["b", "a"]


@pytest.mark.parametrize(
    ("label", "apart", "kind"),
    [
        *(
            (label, 0.5, "update-of-parts")
            for label in ("zero1", "zero3", "fsdp1", "autotp-zero1", "autotp-zero3")
        ),
        *((label, 0.5, "update-differs") for label in ("fsdp1-no-shard", "ddp", "fsdp", "zero0")),
        *(("zero3", apart, "update-differs") for apart in (1e-6, None)),
    ],
)
def test_an_optimizer_that_looks_at_shapes_updates_flat_parts_otherwise(
    label: str, apart: float | None, kind: str
) -> None:
    record = make_record(label=label, steps=make_steps(LATE), update_of_part=apart, **weights(a=2.0, b=2.5))
    found = explained(record)
    assert found.kind == kind
    assert ("moves otherwise by 50 %" in found.text) == (kind == "update-of-parts")


def test_decay_of_what_no_gradient_reaches_is_told_by_how_far_it_moves_the_weights() -> None:
    reference = make_record(**weights(a=2.0, b=1.0), layout=layout(unreached=["b"]))
    rates = [step.learning_rate for step in make_record(label="zero2").steps]
    left = math.prod(1 - rate * 0.1 for rate in rates)
    for final, told in ((left, "; it shrinks by 0.021 %, the product of"), (0.5, "skipped in the reference")):
        found = explained(make_record(label="zero2", **weights(a=2.0, b=final)), reference)
        assert (found.kind, told in found.text) == ("decay-without-gradient", True)
        assert found.values["kept"] == {"b": pytest.approx(final)}


def test_an_expert_that_idles_in_a_step_of_the_reference_is_named_where_gradients_are_flat() -> None:
    idle = make_ranks(1, without_gradient={0: [], 2: ["b"], 3: []})
    reference = make_record(ranks=idle, **MOVED)
    for label, kind in (
        *((label, "decay-without-gradient") for label in ("fsdp1", "zero2", "autotp-zero2", "autotp-zero3")),
        ("fsdp", "update-differs"), ("ddp", "update-differs"),
    ):  # fmt: skip
        assert explained(make_record(label=label, **weights(a=2.0, b=2.5)), reference).kind == kind
    found = explained(make_record(label="fsdp1", **weights(a=2.5, b=2.0)), reference)
    assert found.kind == "update-differs", "the expert is not what ends elsewhere"


@pytest.mark.parametrize(
    ("first", "names", "kind"),
    [(1.0, "bc", "parameters-not-updated"), (1.0, "b", "gradient-differs"), (0.95, "bc", "gradient-differs")],
)
def test_weights_that_stand_still_lack_a_gradient_unless_its_norm_denies_it(
    first: float, names: str, kind: str
) -> None:
    reference = make_record(**weights(**dict.fromkeys("a" + names, 2.0)))
    last = weights(**{"a": 2.0, **dict.fromkeys(names, 1.0)})
    record = make_record(label="ddp", steps=norms(first), observed=HELD, **last)
    assert explained(record, reference).kind == kind


@pytest.mark.parametrize(
    ("block", "rest", "ratio", "named"),
    [
        (
            (1.2, 1.28, 1.11),
            (1.05, 0.98, 0.99, 1.04),
            1.08,
            "gradients of block layers.1 have a factor, relative to all others",
        ),
        (
            (0.6, 1.0, 1.01),
            (1.05, 0.98, 0.99, 1.04),
            0.97,
            "gradients of layers.1.a have a factor, relative to all others",
        ),
        ((0.0, 0.0, 0.0), (1.05, 0.98, 0.99, 1.04), 0.77, "no gradient reaches block layers.1"),
        ((1.2, 1.28, 1.11), (1.05, 0.98, 0.99, 1.04), 0.6, ""),  # the norm fell, and by more
        ((1.2, 1.28, 1.11, 1.2, 1.3), (0.0, 0.0), 0.9, "no gradient reaches block layers.0"),
        ((1.2, 0.9, 1.1), (1.15, 0.88, 0.99, 1.04), 1.08, ""),
        ((1.6, 1.6), (1.0, 0.97, 1.05, 0.85, 1.2, 1.8), 1.2, ""),  # one of another block lies farther
        (
            (1.02, 1.08, 1.1),
            (2.0, 1.9, 2.1, 2.0),
            1.7,
            "gradients of block layers.0 have a factor, relative to all others",
        ),
    ],
)
def test_a_block_whose_gradients_stand_out_is_named_after_weights_parted(
    block: tuple[float, ...], rest: tuple[float, ...], ratio: float, named: str
) -> None:
    """If its factor explains the norm."""
    factors = {f"layers.1.{n}": f for n, f in zip("abcde", block, strict=False)}
    factors |= {f"layers.0.{n}": f for n, f in zip("abcdef", rest, strict=False)}
    blocks = layout(blocks=["layers.0", "layers.1"])
    moved = weights(**dict.fromkeys(factors, 2.0))
    reference = make_record(layout=blocks, moment_norms=dict.fromkeys(factors, (1.0, 1.0)), **moved)
    moments = {name: (1.0, factor) for name, factor in factors.items()}
    # Weights make up for it, so that the first norm shows more of it than the last.
    steps = norms(*(1 + (ratio - 1) * part for part in (3, 1, 0.5)), times=1 + (ratio - 1) * 0.2)
    found = explained(make_record(label="ddp", steps=steps, moment_norms=moments, **moved), reference)
    assert found.kind == "gradient-differs"
    assert any(words in found.text for words in ("relative to all others", "no gradient reaches")) == bool(
        named
    )
    assert named in found.text


def test_no_parameter_is_farthest_where_gradients_have_two_sizes() -> None:
    moments = {n: (1.0, f) for n, f in zip("abcdefg", (0.65, 0.65, 0.66, 1.07, 1.28, 1.3, 1.29), strict=True)}
    reference = make_record(moment_norms=dict.fromkeys("abcdefg", (1.0, 1.0)))
    found = explained(make_record(label="ddp", steps=norms(1.2), moment_norms=moments), reference)
    assert found.text.endswith("a parameter may be rounded or multiplied")


def test_steps_of_a_resumed_run_have_their_own_numbers() -> None:
    later = [replace(step, step=step.step + 5) for step in norms(times=0.7)]
    reference = make_record(steps=[replace(step, step=step.step + 5) for step in make_steps()])
    found = explained(make_record(label="ddp", steps=later, resumed=RESUMED), reference)
    assert "gradient norm of step 5 is 0.7 times" in found.text
    assert found.values["step"] == 5


def test_samples_that_differ_in_a_later_step_are_found() -> None:
    def hash_sums(*sums: list[str]) -> list[RankPart]:
        return make_ranks(len(sums), batch_hash_sums=list(sums))

    single = make_record(ranks=hash_sums(["03", "07", "0b", "0f"]))
    same = make_record(label="ddp", ranks=hash_sums(["01", "03", "05", "07"], ["02", "04", "06", "08"]))
    assert job_differences(single, same) == []
    late = make_record(label="ddp", ranks=hash_sums(["01", "03", "05", "07"], ["02", "04", "05", "07"]))
    (difference,) = job_differences(single, late)
    assert (difference.field, difference.kind) == ("samples of step 2", "samples-repeated")


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        ([([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])], None),
        ([([1.0, 2.0, 3.0], [1.0, 2.0, 3.0 * (1 + 5e-7)])], None),
        ([([1.0, 2.0, 3.0], [1.0, 2.0, 3.0 * (1 + 5e-6)])], 2),
        ([([1.0, 2.0, 3.0],) * 2, ([1.0, 5.0, 3.0], [1.0, 2.0, 4.0])], 1),
        ([([1.0, 2.0, 3.0],) * 2, ([1.0], [9.0])], 0),
        ([([1.0, 2.0, 3.0],) * 2, ([1.0, 5.0], [1.0])], None),
        # A step in which a rank has no number is not judged.
        ([([None, 2.0, 3.0], [1.0, 2.0, 3.0]), ([1.0, 2.0, 9.0], [7.0, 2.0, 3.0])], 2),
        ([([1.0, 2.0, 3.0], [])], None),
        ([], None),
    ],
)
def test_the_first_step_whose_reported_loss_is_not_the_computed_one(
    sums: list[tuple[list[Any], list[Any]]], expected: int | None
) -> None:
    parts = [SimpleNamespace(loss_sums=given, computed_loss_sums=own) for given, own in sums]
    assert altered_step(SimpleNamespace(ranks=parts, steps=[None] * 3)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("factors", "steps", "fields", "is_rounded"),
    [
        ((1e-4, -2e-4, 1e-4, -1e-4), (1e-4, -1e-4, 2e-4, -1e-4), {}, True),
        ((1e-4, 2e-4, 1e-4, 1e-4), (1e-4, -1e-4, 2e-4, -1e-4), {}, False),  # a factor of all tensors
        ((1e-4, -2e-4, 1e-4, -1e-4), (1e-4, 1e-4, 2e-4, 1e-4), {}, False),
        ((1e-4, -2e-2, 1e-4, -1e-4), (1e-4, -1e-4, 2e-4, -1e-4), {}, False),  # more than rounding
        ((1e-4, -2e-4, 1e-4, -1e-4), (1e-4, -1e-4, 2e-4, -1e-4), {"ranks": ranks(**UNEVEN)}, False),
    ],
)
def test_gradients_that_scatter_about_the_reference_are_rounded(
    factors: tuple[float, ...], steps: tuple[float, ...], fields: dict[str, Any], is_rounded: bool
) -> None:
    moments = {name: (1.0, 1 + factor) for name, factor in zip("abcd", factors, strict=True)}
    reference = make_record(moment_norms=dict.fromkeys("abcd", (1.0, 1.0)), **MOVED)
    run = make_record(label="ddp", steps=norms(*(1 + one for one in steps)), moment_norms=moments, **fields)
    narrow = replace(LIMITS, norm=1e-5)
    found = explain_divergence(Pair(reference, run, narrow))
    assert found.kind == "gradient-differs"
    assert ("gradients are rounded, or computed in a lower precision" in found.text) == is_rounded
