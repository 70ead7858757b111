import pytest

from harness.judge.comparison import Comparison
from harness.judge.findings.training import exceeded
from harness.record import Record
from harness.record.run import LayoutPart, ObservedPart
from tests.records import LOSSES, NORMS, make_record, make_steps, make_weights

BEYOND = (
    ("loss", 2.1e-4, 6.6e-6),
    ("norm", 0.19, 1.2e-6),
    ("update", 0.01, 1e-2 / 2),
    ("weights", 0.14, 3e-5),
    ("a.bias", 1.0, 0.11),
)


def test_measures_are_told_by_how_far_they_lie_beyond_the_model_first() -> None:
    assert exceeded(BEYOND) == [
        "a gradient norm differs by 19 %, 0.00012 % allowed",
        "final weights differ by 14 % of the distance that they moved, 0.0030 % allowed",
        "a loss differs by 2.1e-04 nats per token, 6.6e-06 allowed",
        "the distance that the weights moved differs by 1.0 %, 0.50 % allowed",
        "a.bias differs by 100 % of the distance it moved, 11 % allowed",
    ]
    assert exceeded((BEYOND[1], ("weights", float("nan"), 3e-5)))[0].startswith("final weights differ by nan")


def test_a_run_that_diverged_tells_what_lies_beyond() -> None:
    steps = make_steps([LOSSES[0] + 0.5, *LOSSES[1:]], [norm * 1.5 for norm in NORMS])
    other = make_record(label="ddp", steps=steps, final_weights=make_weights("c" * 64))
    found = next(f for f in Comparison([make_record(), other]).findings if f.id == "diverged")
    assert "(a gradient norm differs by 50 %, " in found.message
    assert "a loss differs by 5.0e-01 nats per token, " in found.message
    assert list(found.values["exceeded"]) == ["loss", "norm"]


@pytest.mark.parametrize(("shift", "named"), [(1e-4, True), (1e-9, False)])
@pytest.mark.parametrize(
    ("kind", "told", "text"),
    [
        ("frozen", "frozen-weights-moved", "frozen.weight moved, although the job freezes that"),
        (
            "unreached", "decay-without-gradient",
            "no gradient reaches frozen.weight: zeros with weight decay here, skipped in the reference",
        ),
    ],
)  # fmt: skip
def test_weights_that_nothing_should_move_are_named_whatever_else_is_said(
    kind: str, told: str, text: str, shift: float, named: bool
) -> None:
    """By so little that every limit allows it, and where another cause explains the figures."""
    layout = LayoutPart(parameters=[], decaying=[], buffers=[], blocks=[], **{kind: ["frozen.weight"]})
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
        assert [f.text for f in comparison.findings if f.id == told] == [text] * named
    assert comparison.rows[-1].judgement.parity == "diverged"
    unseen = make_record(label="ddp", layout=layout, initial_weights=None, final_weights=None)
    assert told not in {f.id for f in Comparison([record(), unseen]).findings}


def test_a_loss_that_reads_cut_weights_beside_the_model_is_the_cause() -> None:
    steps = make_steps([LOSSES[0] - 2.5, *LOSSES[1:]], NORMS)
    other = make_record(label="fsdp1", steps=steps)
    layout = LayoutPart(parameters=[], decaying=[], buffers=[], blocks=[], read_outside=["first.weight"])
    other = other.model_copy(update={"layout": layout})
    found = {finding.id: finding.text for finding in Comparison([make_record(), other]).findings}
    assert "; see weights-read-outside" in found["diverged"]
    assert "the loss reads first.weight outside of the model's forward pass" in found["weights-read-outside"]
    # Ranks then compute different losses from equal weights.
    probed = [part.model_copy(update={"probe_loss": 1.0 + part.rank}) for part in other.ranks]
    for read, told in ((["first.weight"], False), ([], True)):
        changes = {"ranks": probed, "layout": layout.model_copy(update={"read_outside": read})}
        findings = Comparison([make_record(), other.model_copy(update=changes)]).findings
        assert ("replicas-differ" in [finding.id for finding in findings]) == told


def test_weights_that_passes_change_are_the_cause_where_passes_use_copies() -> None:
    def found(
        label: str, losses: list[float], names: tuple[str, ...] = ("head.weight",), norms: list[float] = NORMS
    ) -> dict[str, str]:
        layout = LayoutPart(parameters=[], decaying=[], buffers=[], blocks=[], changed_in_passes=list(names))
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
        layout = LayoutPart(parameters=[], decaying=[], buffers=[], blocks=[], **{kind: ["idle"]})
        changes = {"initial_weights": before, "final_weights": after, "layout": layout}
        return make_record(label=label, observed=observed, **changes)

    for dtype, there, trained, lost in (
        ("float32", moved, moved, []),
        ("float32", moved, still, ["zero2"]),
        ("float32", still, still, []),  # not rounding keeps it there
        ("bfloat16", still, still, ["single", "zero2"]),
        ("bfloat16", moved, still, ["zero2"]),
    ):
        rows = Comparison([run("single", dtype, there), run("zero2", "bfloat16", trained)])
        found = [finding for finding in rows.findings if finding.id == "lost-updates"]
        assert [label for finding in found for label in finding.backends] == lost
        assert all(finding.values["parameters_that_stood_still"] == ["trained"] for finding in found)
