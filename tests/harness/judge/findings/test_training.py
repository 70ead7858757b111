"""Runs whose settings, dtypes, updates, losses or weights are not those of their reference."""

from dataclasses import replace
from typing import Any

import pytest

from harness.backends.options import COST_ALONE
from harness.backends.registry import BUILT_IN, create
from harness.forms.layout import Layout, Tensor
from harness.job.job import Job
from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding
from harness.judge.findings.training import exceeded
from harness.judge.wording import entries
from harness.record import (
    EvaluationPart,
    ObservationPart,
    ObservedPart,
    OddUpdatePart,
    Record,
)
from harness.record.measured import OddUpdate
from tests.records import (
    JOB,
    LOSSES,
    NORMS,
    changed,
    make_ranks,
    make_record,
    make_steps,
    make_weights,
    told,
)

BEYOND = (
    ("loss", 2.1e-4, 6.6e-6), ("norm", 0.19, 1.2e-6), ("update", 0.01, 1e-2 / 2), ("weights", 0.14, 3e-5),
    ("a.bias", 1.0, 0.11),
)  # fmt: skip


def test_measures_are_told_by_how_far_they_lie_beyond_the_model_first() -> None:
    assert exceeded(BEYOND) == [
        "a gradient norm differs by 19 %, 0.00012 % allowed",
        "final weights differ by 14 % of the distance that they moved, 0.0030 % allowed",
        "a loss differs by 2.1e-04 nats per token, 6.6e-06 allowed",
        "the distance that the weights moved differs by 1.0 %, 0.50 % allowed",
        "a.bias differs by 100 % of the distance it moved, 11 % allowed",
    ]
    assert exceeded((BEYOND[1], ("weights", float("nan"), 3e-5)))[0].startswith("final weights differ by nan")


def test_a_dtype_of_gradients_that_the_precision_leaves_to_libraries_is_no_suspect() -> None:
    training = {"precision": "bf16-mixed"}
    for dtype, suspected in (("bfloat16", False), ("float16", True)):
        later = make_steps([*LOSSES[:2], LOSSES[2] + 0.5, LOSSES[3]])
        effective = {"gradient_dtype": dtype}
        other = make_record(label="zero2", training=training, steps=later, effective=effective)
        found = told([make_record(training=training), other], "diverged", "update-differs")
        assert any("dtype of gradients" in one.message for one in found) is suspected


def test_a_run_that_diverged_tells_what_lies_beyond() -> None:
    steps = make_steps([LOSSES[0] + 0.5, *LOSSES[1:]], [norm * 1.5 for norm in NORMS])
    other = make_record(label="ddp", steps=steps, final_weights=make_weights("c" * 64))
    (found,) = told([make_record(), other], "diverged")
    assert "(a gradient norm differs by 50 %, " in found.message
    assert "a loss differs by 5.0e-01 nats per token, " in found.message
    assert list(found.values["exceeded"]) == ["loss", "norm"]


@pytest.mark.parametrize(("shift", "named"), [(1e-4, True), (1e-9, False)])
@pytest.mark.parametrize(
    ("kind", "finding", "text"),
    [
        ("frozen", "frozen-weights-moved", "frozen.weight moved, although the job freezes that"),
        (
            "unreached", "decay-without-gradient",
            "no gradient reaches frozen.weight: zeros with weight decay here, skipped in the reference",
        ),
    ],
)  # fmt: skip
def test_weights_that_nothing_should_move_are_named_whatever_else_is_said(
    kind: str, finding: str, text: str, shift: float, named: bool
) -> None:
    """By so little that every limit allows it, and where another cause explains the figures."""
    layout = Layout(parameters=[], decaying=[], buffers=[], blocks=[], **{kind: ["frozen.weight"]})
    first = {"weight": [1.0] * 9, "frozen.weight": [10.0] * 9}

    def record(moved: float = 0.0, label: str = "single", **changes: object) -> Record:
        last = {"weight": [1e4] * 9, "frozen.weight": [10.0, *[10.0 + moved] * 8]}
        return make_record(
            label=label, layout=layout, initial_weights=make_weights(sketch=first),
            final_weights=make_weights("b" * 64 if not moved else "c" * 64, last), **changes,
        )  # fmt: skip

    summed = make_steps(LOSSES, [2 * norm for norm in NORMS])
    for changes in ({}, {"steps": summed}):
        comparison = Comparison([record(), record(shift, "ddp", **changes)])
        assert [f.text for f in comparison.findings if f.id == finding] == [text] * named
    assert comparison.rows[-1].judgement.parity == "diverged"
    unseen = make_record(label="ddp", layout=layout, initial_weights=None, final_weights=None)
    assert told([record(), unseen], finding) == []


def test_a_loss_that_reads_cut_weights_beside_the_model_is_the_cause() -> None:
    steps = make_steps([LOSSES[0] - 2.5, *LOSSES[1:]], NORMS)
    layout = Layout(parameters=[], decaying=[], buffers=[], blocks=[], read_outside=["first.weight"])
    other = make_record(label="fsdp1", steps=steps, layout=layout)
    found = {finding.id: finding.text for finding in Comparison([make_record(), other]).findings}
    assert "; see weights-read-outside" in found["diverged"]
    assert "the loss reads first.weight outside of the model's forward pass" in found["weights-read-outside"]
    # Ranks then compute different losses from equal weights.
    foreign = make_steps([LOSSES[0] - 2.5, *LOSSES[1:]], NORMS)
    foreign[0] = replace(foreign[0], samples=9)
    for read, of, named in ((["first.weight"], steps, False), ([], steps, True), ([], foreign, False)):
        ranks = make_ranks(2, probe_loss=[1.0, 2.0])
        probed = changed(other, ranks=ranks, layout={"read_outside": read}, steps=of)
        assert bool(told([make_record(), probed], "replicas-differ")) == named


def test_weights_that_passes_change_are_the_cause_where_passes_use_copies() -> None:
    def found(
        label: str, losses: list[float], names: tuple[str, ...] = ("head.weight",), norms: list[float] = NORMS
    ) -> dict[str, str]:
        layout = Layout(parameters=[], decaying=[], buffers=[], blocks=[], changed_in_passes=list(names))
        run = make_record(label=label, steps=make_steps(losses, norms), layout=layout)
        return {finding.id: finding.text for finding in Comparison([make_record(), run]).findings}

    later = [LOSSES[0], *(loss - 0.5 for loss in LOSSES[1:])]
    for label in ("fsdp", "fsdp1", "zero2"):
        text = found(label, later)["weights-changed-in-passes"]
        assert "forward passes change head.weight in place" in text
    first_norm = [1.066 * NORMS[0], *NORMS[1:]]
    assert "weights-changed-in-passes" in found("fsdp", LOSSES, norms=first_norm), "gathered again"
    at_once = [LOSSES[0] - 0.5, *LOSSES[1:]]
    of_others = (
        found("ddp", later),
        found("fsdp", later, ()),
        found("fsdp", at_once),
        found("zero2", LOSSES, norms=first_norm),
        found("fsdp", LOSSES, norms=[2 * norm for norm in NORMS]),
    )
    for others in of_others:
        assert "weights-changed-in-passes" not in others
        assert "diverged" in others


@pytest.mark.parametrize("kind", ["frozen", "unreached"])
def test_what_nothing_updates_has_not_lost_its_updates(kind: str) -> None:
    still, moved = [1.0] * 9, [2.0, *range(2, 10)]

    def run(label: str, dtype: str, trained: list[float]) -> Record:
        before = make_weights(sketch={"idle": still, "trained": still, "other": still})
        after = make_weights("b" * 64, sketch={"idle": still, "trained": trained, "other": moved})
        observed = ObservedPart(master_dtypes=[dtype])
        layout = Layout(parameters=[], decaying=[], buffers=[], blocks=[], **{kind: ["idle"]})
        changes = {"initial_weights": before, "final_weights": after, "layout": layout}
        return make_record(label=label, observed=observed, **changes)

    for dtype, there, trained, lost in (
        ("float32", moved, moved, []),
        ("float32", moved, still, ["zero2"]),
        ("float32", still, still, []),  # not rounding keeps it there
        ("bfloat16", still, still, ["single", "zero2"]),
        ("bfloat16", moved, still, ["zero2"]),
    ):
        found = told([run("single", dtype, there), run("zero2", "bfloat16", trained)], "lost-updates")
        assert [label for finding in found for label in finding.backends] == lost
        assert all(finding.values["parameters_that_stood_still"] == ["trained"] for finding in found)


IDLE = ["moe.experts.0.down.weight", "moe.experts.0.up.weight", "pooler.weight"]
POOLER = ["pooler.weight"]
Steps = dict[int, list[str] | None]


def find_idle(records: list[Record]) -> list[Finding]:
    return told(records, "idle-on-some-ranks", "gradient-lost")


def without(*of_ranks: Steps, reference: Steps | None = None, norm: float = 1.0) -> list[Finding]:
    """norm: gradient norms, as a share of the reference's."""
    ranks = make_ranks(2, without_gradient=list(of_ranks))
    alone = make_record(ranks=make_ranks(1, without_gradient=reference or {}))
    steps = make_steps(norms=[norm * value for value in NORMS])
    return find_idle([alone, make_record(label="ddp", ranks=ranks, steps=steps)])


def test_an_expert_that_idles_in_a_run_that_agrees_is_not_accused() -> None:
    assert without({0: POOLER}, {0: POOLER, 3: IDLE}) == []
    (finding,) = without({0: POOLER}, {0: POOLER, 3: IDLE}, norm=0.7)
    assert finding.values == {"missing": [{"step": 3, "names": IDLE[:2], "ranks": [1]}]}


def test_an_expert_that_idles_in_a_run_that_cannot_be_judged_is_not_accused() -> None:
    ranks = make_ranks(2, without_gradient=[{0: POOLER}, {0: IDLE}])
    run = make_record(label="ddp", ranks=ranks, steps=make_steps(norms=[0.7 * value for value in NORMS]))
    assert [finding.id for finding in find_idle([make_record(), run])] == ["idle-on-some-ranks"]
    dropout = ObservedPart(dropout=0.1)
    unjudged = [make_record(observed=dropout), run.model_copy(update={"observed": dropout})]
    for records in ([run], unjudged):
        assert find_idle(records) == []


def test_what_no_rank_trains_idles_nowhere() -> None:
    assert without({0: IDLE}, {0: IDLE}) == []
    assert without({}, {0: POOLER}) == []
    assert without({0: POOLER, 2: None}, {0: POOLER, 3: IDLE}, norm=0.7) == []


def test_a_gradient_that_every_rank_loses_is_named_where_the_reference_keeps_it() -> None:
    ranks = ({0: POOLER, 2: IDLE}, {0: POOLER, 2: IDLE})
    (finding,) = without(*ranks, reference={0: POOLER})
    assert finding.id == "gradient-lost"
    assert "moe.experts.0.up.weight on any rank from step 2 on" in finding.message
    assert finding.values == {"step": 2, "parameters": IDLE[:2]}
    assert without(*ranks) == []
    assert without(*ranks, reference={0: POOLER, 2: IDLE}) == []
    assert without(*({**steps, 3: POOLER} for steps in ranks), reference={0: POOLER}) == []


def test_an_update_between_two_steps_is_outside_of_every_clock() -> None:
    for where, says in (("outside", "between two steps, where no clock runs"), ("forward", "next forward")):
        observed = ObservedPart(updates_by_phase={"step": 1, where: 2})
        (finding,) = told([make_record(label="ddp", observed=observed)], "work-outside-clock")
        assert finding.id == "work-outside-clock"
        assert says in finding.message
        assert "2 of 3" in finding.message
    sound = ObservedPart(updates_by_phase={"step": 2, "backward": 4})
    assert told([make_record(label="ddp", observed=sound)], "work-outside-clock") == []


def stale(*, before: int | None, end: int | None, losses: tuple[float, ...] | None = None) -> list[Finding]:
    record = make_record(label="zero2", **({"steps": make_steps(losses=losses)} if losses else {}))
    sides = ({"copied_elements": 1000, "stale_elements": count} for count in (before, end))
    record = changed(record, **dict(zip(("initial_weights", "final_weights"), sides, strict=True)))
    return told([make_record(), record], "weights-in-use-stale", "diverged")


@pytest.mark.parametrize("count", [0, None], ids=["all equal", "not known"])
def test_copies_that_are_their_masters_are_no_finding(count: int | None) -> None:
    assert stale(before=count, end=count) == []


@pytest.mark.parametrize(
    ("before", "end", "words", "values"),
    [
        (0, 1, "1 of 1,000 at the end", {"at the end": {"stale": 1, "copied": 1000}}),
        (900, 2, "900 of 1,000 before the first step and 2 of 1,000 at the end", None),
    ],
)
def test_it_says_how_many_and_when(before: int, end: int, words: str, values: dict[str, Any] | None) -> None:
    (finding,) = stale(before=before, end=end)
    assert finding.message.endswith(f"rounded to their dtype: {words}")
    assert values in (None, finding.values)


def test_a_first_loss_that_differs_is_explained_by_them() -> None:
    cause, diverged = stale(before=900, end=0, losses=(9.0, 3.0, 2.0, 1.0))
    assert cause.id == "weights-in-use-stale"
    assert "forward passes use other weights than the masters, see weights-in-use-stale" in diverged.message


def updating(*odd: OddUpdatePart | None, phases: dict[str, int] | None = None, label: str = "ddp") -> Record:
    """Of a rank for each."""
    parts = make_ranks(len(odd), odd_update=list(odd))
    seen = ObservedPart(updates_by_phase=phases or {"step": 2})
    return make_record(label=label, ranks=parts, observed=seen)


def altered(record: Record, reference: Record | None = None) -> list[str]:
    return [finding.message for finding in told([reference or make_record(), record], "update-altered")]


def odd(kind: OddUpdate, step: int = 2, **values: object) -> OddUpdatePart:
    return OddUpdatePart(step=step, kind=kind, **values)  # type: ignore[arg-type]


WEIGHTS, BETA = odd("weights"), odd("beta2", given=0.999, due=0.95)
STILL = odd("stood-still", parameters=["a", "b", "c", "d"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([None, STILL], "the update of step 2 (ranks: 1) is not what Adam makes of its gradient: weights "
                        "stay as they were, in a, b, c and 1 more"),
        ([BETA, BETA], "the update of step 2 is not what Adam makes of its gradient: second moments follow "
                       "beta2 0.999 and not 0.95"),
        ([odd("weights", step=3), BETA], "of step 2 (ranks: 1)"),
        ([odd("moments-rounded", given=8.0)], "moments are rounded to bfloat16"),
        *(([odd("first-moments-lost", later=later)], f"the update of step 2{again} (ranks: 0) is not what")
          for later, again in (([4, 6], ", and every 2 steps after it,"), ([4], ", and that of step 4,"),
                               ([3, 4], ""), ([4, 7], ""))),
    ],
)  # fmt: skip
def test_an_odd_update_is_told_once_with_its_steps_ranks_and_parameters(
    given: list[OddUpdatePart | None], words: str
) -> None:
    (message,) = altered(updating(*given))
    assert words in message


@pytest.mark.parametrize(
    ("parameters", "due", "ends"),
    [
        ("abc", 0.1, "in a, b; c, which must not decay, differ, too"),
        ("abc", 0.0, "in c; a, b, which do decay, differ, too"),
        ("ab", 0.1, "in a, b"),
        ("c", 0.1, "in c"),
    ],
)
def test_weights_that_must_not_decay_are_not_said_to_decay_too_little(
    parameters: str, due: float, ends: str
) -> None:
    groups = Layout(parameters=[], decaying=["a", "b"], buffers=[], blocks=[])
    of = changed(updating(odd("decay", given=0.1 - due, due=due, parameters=[*parameters])), layout=groups)
    assert altered(of)[0].endswith(ends)


@pytest.mark.parametrize(("factor", "late"), [(1.5, True), (1.51, False), (0.5, False)])
def test_a_rate_that_is_a_step_late_is_named(factor: float, late: bool) -> None:
    (message,) = altered(updating(odd("factor", given=factor, due=1.0)))
    assert ("as with the rate of the step before" in message) is late


def test_what_the_reference_does_too_is_no_finding() -> None:
    assert altered(updating(WEIGHTS), updating(WEIGHTS, label="single")) == []
    assert altered(updating(WEIGHTS, phases={"step": 1, "forward": 1})) == []


@pytest.mark.parametrize("kind", sorted(entries()["update-altered"]["text"].keys() - {"between"}))
def test_every_kind_has_words(kind: OddUpdate) -> None:
    (message,) = altered(updating(odd(kind, given=8.0, due=4.0)))
    assert "{" not in message
    assert "None" not in message


def evaluated(*losses: float | None) -> list[EvaluationPart]:
    return [EvaluationPart(step=2 * (i + 1), loss=loss, target_tokens=100) for i, loss in enumerate(losses)]


def held_out(*losses: float | None, **changes: Any) -> list[Finding]:
    record = make_record(label="ddp", eval=evaluated(*losses), **changes)
    return told([make_record(eval=evaluated(5.0, 4.0)), record], "held-out-loss-differs")


RUNNING = Layout(
    parameters=[], decaying=[], blocks=[],
    buffers=[Tensor(name="norm.running_mean", shape=[4], dtype="float32")],
)  # fmt: skip


@pytest.mark.parametrize(
    ("second", "changes", "named"),
    [
        (4.0, {}, False), (4.0 + 1e-6, {}, False), (3.0, {}, True), (None, {}, True),
        # Of another training and of running statistics nothing is said.
        (3.0, {"steps": make_steps([loss + 1 for loss in LOSSES])}, False), (3.0, {"layout": RUNNING}, False),
    ],
)  # fmt: skip
def test_the_first_held_out_loss_that_differs_is_named(
    second: float | None, changes: dict[str, Any], named: bool
) -> None:
    told = [
        ("after 4 steps" in one.text, one.values["given"], one.values["reference"])
        for one in held_out(5.0, second, **changes)
    ]
    assert told == [(True, second, 4.0)] * named


def run(label: str, precision: str = "fp32", **effective: Any) -> Record:
    return make_record(label=label, effective=effective, training={"precision": precision})


BF16, FLOAT16 = {"autocast_dtype": "bfloat16"}, ("gradient-dtype-differs", "")


@pytest.mark.parametrize(
    ("precision", "reference", "given", "told"),
    [
        ("fp32", {"autocast_dtype": None}, BF16,
         ("compute-dtype-differs", "dtype of computation differs: bfloat16 against float32 in the ref")),
        ("bf16-mixed", BF16, {"autocast_dtype": None, "parameter_dtype": "bfloat16"}, None),
        *((precision, {key: "float32"}, {key: given}, told)
          for key in ("gradient_dtype", "accumulation_dtype")
          for precision, given, told in (("fp32", "bfloat16", FLOAT16), ("bf16-mixed", "bfloat16", None),
                                         ("bf16-mixed", "float16", FLOAT16), ("fp32", "float32", None))),
        *(("fp16-mixed", {"loss_scale": reference}, {"loss_scale": given}, told)
          for reference, given, told in ((65536.0, None, ("loss-scaling-differs", "")), (None, None, None),
                                         (None, 1024.0, ("loss-scaling-differs", "")),
                                         (65536.0, 32768.0, None))),
        ("fp32", {"optimizer": "torch.AdamW"}, {"optimizer": "torch.SGD"},
         ("optimizer-differs", "optimizer differs: torch.SGD against torch.AdamW")),
        ("fp32", {}, {"accumulation_steps": 4}, ("accumulation-differs", "")),
    ],
)  # fmt: skip
def test_settings_in_force_that_the_job_does_not_call_for_are_named(
    precision: str, reference: dict[str, Any], given: dict[str, Any], told: tuple[str, str] | None
) -> None:
    found = Comparison([run("single", precision, **reference), run("ddp", precision, **given)]).findings
    assert [one.id for one in found] == ([told[0]] if told else [])
    assert all(told[1] in one.message for one in found if told)
    assert all(one.values == {"asked": 1, "given": 4} for one in found if "accumulation_steps" in given)


def layers(label: str, precision: str, most: str, **otherwise: list[str]) -> Record:
    seen = ObservedPart(compute_dtype=most, products_otherwise=otherwise)
    return run(label, precision).model_copy(update={"observed": seen})


@pytest.mark.parametrize(
    ("precision", "most", "dtype", "named"),
    [
        ("bf16-mixed", "bfloat16", "float32", True),
        ("fp32", "float32", "bfloat16", True),
        ("bf16-mixed", "float32", "bfloat16", False),  # a library may cast more than autocast does
    ],
)
def test_single_layers_in_another_dtype(precision: str, most: str, dtype: str, named: bool) -> None:
    reference, given = layers("single", precision, most), layers("ddp", precision, most, **{dtype: ["a.b"]})
    text = f"ddp on 2 ranks: dtype of computation differs in a.b: {dtype} against {most} in the reference"
    assert [f.message for f in told([reference, given], "compute-dtype-differs")] == [text] * named


def test_layers_that_the_reference_computes_so_too_are_no_finding() -> None:
    both = [layers(label, "bf16-mixed", "bfloat16", float32=["router"]) for label in ("single", "ddp")]
    assert Comparison(both).findings == []


def with_options(options: dict[str, Any], loss: float = 4.0, name: str = "zero2") -> Record:
    label = name + (":" + ",".join(f"{k}={v}" for k, v in options.items()) if options else "")
    steps = make_steps(changes={2: {"loss": loss}})
    return make_record(
        label=label, backend={"options": options}, run_id=f"run-{loss}-{len(options)}", steps=steps
    )


def costs(*records: Record) -> list[str]:
    return [f.message for f in told([make_record(), *records], "cost-setting-changes-training")]


OVERLAP, CLIPPED = {"overlap_comm": True}, {"gradient_clipping": 0.5}


@pytest.mark.parametrize(
    ("options", "loss", "base", "told"),
    [
        (OVERLAP, 4.1, "zero2", ["overlap_comm default against on: should change only the cost, but loss"]),
        (OVERLAP, 4.0, "zero2", []),
        (CLIPPED, 4.1, "zero2", []),  # which may change the loss
        (OVERLAP | CLIPPED, 4.1, "zero2", []),
        (OVERLAP, 4.1, "zero1", []),
    ],
)  # fmt: skip
def test_a_setting_that_should_change_the_cost_alone_is_named_where_the_loss_differs(
    options: dict[str, Any], loss: float, base: str, told: list[str]
) -> None:
    found = costs(with_options({}, name=base), with_options(options, loss=loss))
    assert [message.partition(" differs by")[0] for message in found] == told


@pytest.mark.parametrize("option", sorted(COST_ALONE))
def test_each_such_setting_is_an_option_of_a_backend(option: str) -> None:
    assert any(option in type(create(name).options).model_fields for name in BUILT_IN)


IN_PARTS = "fsdp on 2 ranks: no optimizer keeps the complete momentum of 14 matrices"
WIDE = "fsdp on 2 ranks: 1,444,352 bytes of optimizer states are in full width"


@pytest.mark.parametrize(
    ("kind", "optimizer", "seen", "begin"),
    [
        ("muon-on-parts", "adamw", {"matrices_in_parts": 14}, IN_PARTS),
        ("muon-on-parts", "adamw", {"matrices_in_parts": 0}, None),
        ("muon-on-parts", "adamw", {"matrices_in_parts": None}, None),
        ("low-bit-states-wide", "adamw-8bit", {"wide_optimizer_bytes": 1_444_352}, WIDE),
        ("low-bit-states-wide", "adamw-8bit", {"wide_optimizer_bytes": 0}, None),
        ("low-bit-states-wide", "adamw-8bit", {"wide_optimizer_bytes": None}, None),
        ("low-bit-states-wide", "adamw", {"wide_optimizer_bytes": 4096}, None),
    ],
)
def test_one_figure_decides(kind: str, optimizer: str, seen: dict[str, Any], begin: str | None) -> None:
    job = Job.model_validate(JOB | {"optimizer": JOB["optimizer"] | {"kind": optimizer}})
    records = [make_record(label=one, job=job, observed=ObservedPart(**seen)) for one in ("single", "fsdp")]
    messages = [finding.message for finding in told(records, kind) if finding.backends == ("fsdp",)]
    assert [message.startswith(begin or "none") for message in messages] == ([True] if begin else [])


def clipped(
    norms: list[float], applied: list[float], *, scale: float | None = None, by_rank: float = 1.0,
    base: str = "ddp", frameworks: tuple[str, ...] = (), parts: tuple[float, ...] = (1.0, 1.0),
    first: int = 0,
) -> list[str]:  # fmt: skip
    """What is said of a script that clips to 1; by_rank: norm of rank 1 over that of rank 0; parts: what
    each rank was told of the norm; first: number of the first step."""
    steps = [
        replace(step, step=step.step + first, gradient_norm=norm, applied_gradient_norm=after)
        for step, norm, after in zip(make_steps(), norms, applied, strict=True)
    ]
    ranks = make_ranks(len(parts))
    ranks = [
        part.model_copy(update={"gradient_norms": [norm * parts[n] * by_rank**n for norm in norms]})
        for n, part in enumerate(ranks)
    ]
    seen = ObservationPart(command=["torchrun", "t.py"], frameworks=[*frameworks], base=base)
    record = make_record(
        label=f"observed-{base}", steps=steps, ranks=ranks, observation=seen,
        effective={"gradient_clipping": 1.0, "loss_scale": scale},
    )  # fmt: skip
    return [finding.text for finding in told([record], "clipped-otherwise")]


@pytest.mark.parametrize(
    ("base", "limit", "calls", "why"),
    [
        ("zero2", None, 4, "since DeepSpeed holds them"),
        ("zero2", 1.0, 4, ""),
        ("ddp", 1.0, 1, ""),
        ("ddp", 1.0, 4, "as between zero_grad() and backward()"),
    ],
)
def test_clipping_that_gets_no_gradient_is_named_unless_deepspeed_clips(
    base: str, limit: float | None, calls: int, why: str
) -> None:
    seen = ObservationPart(command=["t.py"], frameworks=[], base=base, clipped_empty=calls)
    record = make_record(label="a", observation=seen, effective={"gradient_clipping": limit})
    found = [finding.text for finding in told([record], "clipped-otherwise")]
    assert found == [f"torch's clipping gets no gradient (4 calls), {why}: nothing is clipped"] * bool(why)


def test_a_script_whose_clipping_leaves_what_it_asks_for_has_no_finding() -> None:
    assert clipped([5.0, 4.0, 0.5, 2.0], [1.0, 1.0, 0.5, 1.0]) == []
    assert clipped([5.0, 4.0, 3.0, 2.0], [1.0, 1.0, 1.0, 1.0], scale=1024.0) == []
    # FSDP2 tells each rank its part: 3 and 4 of 5.
    assert clipped([5.0, 4.0, 0.5, 2.0], [1.0, 1.0, 0.5, 1.0], base="fsdp2", parts=(0.6, 0.8)) == []
    # To less in each step, none of which needed it: the limit is that of the last.
    assert clipped([5.0, 4.0, 3.0, 0.5], [5.0, 4.0, 3.0, 0.5]) == []
    # Clipped by layers or values, or altered afterwards: nobody says what it should be.
    assert clipped([5.0, 4.0, 3.0, 2.0], [1.5, 1.5, 1.5, 1.5], scale=1024.0) == []
    assert clipped([0.5, 0.4, 0.3, 0.2], [0.5, 0.4, 0.3, 0.2]) == []


@pytest.mark.parametrize(
    ("lossless", "factor", "dtypes", "words"),
    [
        ([], 3.0, {}, "gradients of rank 1 have a factor, first in step 2: the backward pass begins with 3 "),
        ([2], 1.0, {}, "its loss of step 2 is not finite"),
        ([], 1.0, {"gradient_dtype": "float16"}, "its gradients are float16, which ends at 65,504"),
        ([], 1.0, {"reduce_dtype": "float16"}, "its gradients are added up over ranks in float16"),
        ([], 1.0, {}, "no record says which gradient of step 2 was not finite"),
    ],
)
def test_a_step_that_the_scaler_skips_alone_is_named_and_why(
    lossless: list[int], factor: float, dtypes: dict[str, Any], words: str
) -> None:
    losses = [None if at in lossless else loss for at, loss in enumerate(LOSSES)]
    ends = [[[2.0, 2.0]] * 4, [[2.0, 2.0]] * 2 + [[2.0 * factor] * 2] + [[2.0, 2.0]]]
    run = make_record(
        label="ddp", steps=make_steps(losses, norms=[*NORMS[:2], None, NORMS[3]]), skipped_steps=1,
        ranks=make_ranks(2, loss_gradients=ends), effective=dtypes,
    )  # fmt: skip
    skipped = "the loss scaler skipped 1 of 4 optimizer steps"
    (alone,) = told([make_record(), run], "skipped-steps")
    assert alone.text.startswith(f"{skipped} (2; the reference's: none); {words}")
    both = told([changed(run, backend={"name": "single", "label": "single"}), run], "skipped-steps")
    assert {one.text for one in both} == {skipped}


def test_ranks_of_a_script_that_skip_an_update_alone_are_named() -> None:
    seen = ObservationPart(command=["torchrun", "t.py"], frameworks=[], base="ddp")

    def named(*norms: list[float | None], scale: float | None = 1024.0) -> list[str]:
        record = make_record(
            label="observed-ddp", observation=seen, effective={"loss_scale": scale},
            ranks=make_ranks(2, gradient_norms=[*norms]),
        )  # fmt: skip
        return [finding.text for finding in told([record], "skipped-steps")]

    assert named([1.0, 2.0], [1.0, None])[0].startswith("ranks 1 skip the update of step 1, which others")
    assert named([1.0, None], [1.0, None]) == named([1.0, 2.0], [1.0, None], scale=None) == []


def test_gradients_that_no_clipping_explains_are_named_though_runs_agree() -> None:
    def run(label: str, grown: float) -> Record:
        steps = [
            replace(step, gradient_norm=2.0, applied_gradient_norm=1 + grown * (1 + step.step))
            for step in make_steps()
        ]
        return make_record(label=label, steps=steps, effective={"gradient_clipping": 1.0})

    def named(*grown: float) -> list[str]:
        records = [run(label, part) for label, part in zip(("single", "ddp"), grown, strict=True)]
        return [finding.text for finding in told(records, "clipped-otherwise")]

    assert named(0.0, 0.0) == named(0.2, 0.2) == []
    assert named(0.0, 0.2)[0].startswith(
        "in step 0 the optimizer was given gradients of norm 1.2, clipping leaves 1"
    )


def test_what_a_script_clips_while_it_is_scaled_after_the_update_or_by_shards_is_named() -> None:
    (text,) = clipped([11541.0, 9000.0, 8000.0, 7000.0], [1 / 1024] * 3 + [1 / 512], scale=1024.0)
    assert text == (
        "gradients are clipped to 1 while a scaler multiplies them by 1024: the optimizer gets a norm of "
        "0.000977"
    )
    late = [5.0, 4.0, 3.0, 2.0]
    (text,) = clipped(late, late)
    assert text == "gradients are clipped to 1 only after the update: the optimizer gets a norm of 5"
    assert clipped(late, late, frameworks=("deepspeed",)) == []  # which clips within its update
    (text,) = clipped(late, late, by_rank=2.0, base="fsdp1")
    assert text.endswith("(5 and 10 in step 0): each by that of its shard")
    (text,) = clipped(late, late, parts=(0.6, 1.0, 0.6), base="fsdp1")
    assert text.startswith("ranks clip by different norms (3 and 5 in step 0)")
    (text,) = clipped(late, [1.0] * 4, by_rank=2.0, base="fsdp1", first=7)
    assert "in step 7" in text
    (text,) = clipped(late, late, base="fsdp2", parts=(0.6, 0.8))
    assert "only after the update" in text
