"""Jobs of the user's own: what depends on the split of a batch is judged by a reference with that split."""

import pytest

from tests.representatives import COSTLY, EXHAUSTIVE, first
from tests.sweep.table import own

from .clean import not_as_wanted
from .matrix import Matrix
from .planted import CLIPPED, EXECUTION, LATE_SETTINGS, OWN_JOBS, SPLITS, UPDATED, Trap, assert_named

pytestmark = pytest.mark.long(seconds=55)
FEW = ("contrastive loss", "decay", "frozen", "nothing", "held-out", "0.99", "halves", "training mode",
       "moments lost", "part of a rank")  # fmt: skip
"""The others are exhaustive, and so is the same fault in another family of engines."""
ALWAYS = ("nothing updated", *SPLITS)
FAMILIES = (", hybrid", ", ZeRO-3", ", DDP", ", FSDP", ", FSDP1", ", ZeRO-1")


def _marked(name: str) -> tuple[pytest.MarkDecorator, ...]:
    if not any(few in name for few in FEW) or name.endswith(FAMILIES):
        return (EXHAUSTIVE,)
    return () if name in ALWAYS else (COSTLY,)


@pytest.mark.parametrize(
    "trap",
    [
        pytest.param(t, marks=_marked(t.name))
        for t in (*OWN_JOBS, *EXECUTION, *LATE_SETTINGS, *CLIPPED, *UPDATED)
    ],
    ids=lambda trap: trap.name,
)
def test_a_planted_trap_is_named(trap: Trap, matrix: Matrix, tally) -> None:
    assert_named(trap, matrix, tally)


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marked(name)) for name in SPLITS])
def test_a_sound_run_whose_loss_depends_on_the_split_agrees(name: str, matrix: Matrix, tally) -> None:
    comparison = matrix.compare(["ddp", "zero2"], 2, SPLITS[name])
    reference, *rows = comparison.rows
    assert reference.record.split.difference > 1e3 * reference.record.split.rounding
    assert [row.judgement.parity in ("exact", "tight") for row in rows] == [True, True], rows
    found = [f.id for f in matrix.findings(["ddp", "zero2"], 2, SPLITS[name])]
    assert set(found) <= {"batch-norm", "loss-depends-on-split"}
    assert ("loss-depends-on-split" in found) is ("batch-norm" not in found)
    tally["clean"][1] += 2


def test_an_unused_layer_is_no_fault_where_it_is_skipped(matrix: Matrix, tally) -> None:
    labels, settings = ["ddp:find_unused_parameters=True", "fsdp"], own("mlp", unused=True)
    assert [f.message for f in matrix.findings(labels, 2, settings)] == []
    rows = matrix.compare(labels, 2, settings).rows
    assert not not_as_wanted(rows, {"exact", "tight"}, derived=True)
    tally["clean"][1] += 2


@pytest.mark.exhaustive
def test_a_rank_without_dropout_is_named_though_dropout_is_not_judged(matrix: Matrix, tally) -> None:
    tally["planted"][1] += 1
    found = matrix.findings(["planted-NoDropoutOnOneRank"], 2, ("model.dropout=0.1",))
    assert [f.text for f in found if f.id == "ranks-differ"] == [
        "differs from rank 0 (ranks: 1): dropout 0 against 0.1"
    ]
    tally["planted"][0] += 1


@pytest.mark.costly
def test_random_parts_of_a_batch_are_not_judged(matrix: Matrix) -> None:
    (_, row) = matrix.compare(["ddp"], 2, own("mlp", "of_mixed", loss_random=True)).rows
    assert row.judgement.parity == "unjudged"
    assert str(row.judgement.reason).startswith("the loss depends on how the batch is split: ")
    assert "with 4 samples at once" in str(row.judgement.reason)
    assert "draws random numbers" in str(row.judgement.reason)


def test_a_mean_over_samples_does_not_depend_on_the_split(matrix: Matrix) -> None:
    reference, row = matrix.compare(["ddp"], 2, own("mlp")).rows
    assert not reference.record.split.depends
    assert row.judgement.parity in ("exact", "tight")
    assert row.reference is reference.run


@pytest.mark.parametrize("with_gradient", first([False], [True, False]))
@pytest.mark.costly
def test_a_loss_over_all_ranks_is_that_of_the_whole_batch_unless_its_gather_loses_the_gradient(
    with_gradient: bool, matrix: Matrix
) -> None:
    settings = own("towers", "of_pairs", loss_gathered=True, loss_with_gradient=with_gradient)
    found = matrix.findings(["zero2"], 2, settings)
    causes = [f for f in found if f.id != "diverged"]
    assert [f.id for f in causes] == ([] if with_gradient else ["gradient-differs"])
    _, *rows = matrix.compare(["zero2"], 2, settings).rows
    for row in rows:
        sent = {row.op for row in row.record.comm if row.of_job and row.phase in ("forward", "backward")}
        assert "all_gather" in sent
        if with_gradient:
            assert row.judgement.parity in ("exact", "tight")
        else:  # each rank takes the gradient of its own samples alone
            assert row.judgement.parity == "diverged"
            assert "the job's own all_gather in the forward pass hands on no gradient" in causes[0].text
