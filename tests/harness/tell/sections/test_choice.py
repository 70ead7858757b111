"""Closed forms of measured cells on other numbers of ranks; of published runs, which have layouts."""

import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from harness.cli.estimate import estimate
from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison
from harness.judge.quantities import expected_model_state_bytes
from harness.record import CommunicationPart, Record
from harness.tell.document import Block, Line, Paragraph, Table
from harness.tell.sections import choice
from tests.harness.tell.cells import of_size, repeats, stage_of, with_world
from tests.pipelines import make_pipeline
from tests.records import (
    NORMS,
    changed,
    make_record,
    make_steps,
    make_weights,
    published,
)

CELLS = [
    make_record(), of_size("ddp", 9_000_000, sent=4_000_000), of_size("zero1", 8_000_000, sent=6_000_000),
    of_size("fsdp", 3_000_000, sent=6_000_000),
]  # fmt: skip


def blocks(question: ReportFocus, *records: Record) -> list[Block]:
    section = choice.choice_section(Comparison(records), question)
    return [] if section is None else list(section.blocks)


def tables(question: ReportFocus, *records: Record) -> dict[str, Table]:
    return {block.key: block for block in blocks(question, *records) if isinstance(block, Table)}


def advice(question: ReportFocus, *records: Record) -> dict[str, str]:
    return {b.name: b.text for b in blocks(question, *records) if isinstance(b, Line)}


def notes(question: ReportFocus, *records: Record) -> str:
    return "\n".join(b.text for b in blocks(question, *records) if isinstance(b, Paragraph))


def on_gpu(record: Record) -> Record:
    return with_world(record, device="cuda")


def test_a_threshold_is_a_row_and_so_is_a_simpler_cell_that_sends_no_more() -> None:
    assert tables("all", *map(on_gpu, CELLS))["decision"].texts() == [
        ["from 9.00", "ddp", "4.00"], ["from 8.00", "zero1", "6.00"],
        ["from 3.00", "fsdp", "6.00"], ["less", choice.NONE_FITS, ""],
    ]  # fmt: skip


def test_of_cpu_ranks_the_thresholds_are_what_strategies_hold_on_gpus_besides_activations() -> None:
    default = published("default")
    assert tables("all", *default)["decision"].texts() == [
        ["from 13.9", "ddp", "3.48"],
        ["from 10.0", "fsdp-grad-op", "3.48"],
        ["from 9.64", "fsdp:preset=library-defaults", "5.09"],
        ["less", choice.NONE_FITS, ""],
    ]


def test_memory_is_named_by_what_it_counts_and_cells_without_a_row_are_named() -> None:
    default = published("default")
    assert tables("all", *default)["decision"].columns[0].title == "memory without activations, MB"
    text = notes("all", *default)
    worse = "fsdp1 9.63 MB; fsdp 9.64 MB; zero1, zero2 15.7 MB; zero3 15.8 MB; zero0 17.4 MB; "
    assert f"than one that sends no more: {worse}zero3:preset=library-defaults 2,016 MB." in text
    alike = "zero3, zero3:leaf_module=blocks, zero3:stage3_max_live_parameters=1000000000, zero3:stage3"
    assert alike in notes("all", *published("explain-zero3-speed"))  # in the order of the cells
    assert tables("all", *map(on_gpu, CELLS))["decision"].columns[0].title == "peak memory, MB"


def test_the_command_for_more_micro_steps_is_of_the_job_of_the_runs() -> None:
    command = notes("all", *published("default")).partition("With more: harness estimate ")[2].splitlines()[0]
    assert command.startswith("--config configs/default.yaml --world-size 2 ")
    answer = CliRunner().invoke(estimate, shlex.split(command))
    assert (answer.exit_code, answer.output.count("2 ranks, micro-batch 4, accumulation 8")) == (0, 1)
    assert "With more" not in notes(
        "all", *(one.model_copy(update={"command": ["torchrun", "x.py"]}) for one in CELLS)
    )


def test_of_pipelines_the_bubble_is_named_which_neither_memory_nor_traffic_shows() -> None:
    pipeline = with_world(make_pipeline(), micro_batch_size=8)  # of as many samples
    assert "ranks idle (the bubble): pp 20 %." in notes("all", *map(on_gpu, [*CELLS, pipeline]))
    assert "bubble" not in notes("all", *CELLS)


def test_a_question_on_memory_or_what_ranks_hold_and_send_is_not_answered_with_speed() -> None:
    records = published("bloom-560m")
    assert all(blocks(question, *records) == [] for question in ("memory", "parity", "scaling"))
    assert "decision" in tables("footprint", *published("default"))
    assert advice("footprint", *CELLS) == {}


def test_speed_is_advised_only_on_gpus_and_where_the_runs_support_an_order() -> None:
    few = [*repeats("ddp", 0.5), *repeats("zero3", 1.0)]
    assert "Pareto frontier" not in advice("speed", *map(on_gpu, few))
    more = [*repeats("ddp", *[0.5, 0.51] * 3), *repeats("zero3", *[1.0, 1.1] * 3)]
    assert advice("speed", *map(on_gpu, more))["Pareto frontier"].startswith("speed relative to ddp, and")
    assert "Pareto frontier" not in advice("speed", *more)


def test_with_one_cell_or_one_rank_nothing_is_to_be_chosen() -> None:
    assert blocks("all", make_record(), make_record(label="ddp")) == []
    assert blocks("all", *(make_record(label=label, world_size=1) for label in ("ddp", "fsdp"))) == []


FIGURES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=7)

DOUBLED = make_steps(norms=[norm * 2 for norm in NORMS])
DDP, FSDP = make_record(label="ddp"), make_record(label="fsdp")


@pytest.mark.parametrize(
    ("records", "size", "labels"),
    [
        # The reference, compared only where it ran alone, does not make one rank the place to compare.
        ([make_record(), *(make_record(label=n, world_size=1) for n in ("ddp", "fsdp")), DDP, FSDP], 2,
         ["ddp", "fsdp"]),
        ([make_record(), make_record(label="ddp", world_size=1)], 1, ["ddp"]),
        ([make_record()], 1, ["single"]),
        # Ranks with cores of their own are compared before those that take turns.
        ([make_record(), *(make_record(label=n, world_size=16) for n in ("ddp", "fsdp", "zero1")), DDP, FSDP],
         2, ["ddp", "fsdp"]),
        # What diverged, failed or is wrong on purpose is not compared.
        ([make_record(), DDP, make_record(label="zero2", status="failed"),
          make_record(label="zero1", steps=DOUBLED, final_weights=make_weights("c" * 64)),
          make_record(label="planted-wrong-beta2")], 2, ["ddp"]),
    ],
)  # fmt: skip
def test_where_cells_are_compared_and_which(records: list[Record], size: int, labels: list[str]) -> None:
    found = stage_of(*records)
    assert (found.size, [group.label for group in found.groups]) == (size, labels)


def test_ddp_is_the_base_whatever_marks_its_place_and_a_cell_under_other_conditions_is_alone() -> None:
    kinds = [
        make_record(label=label, training={"deterministic": asked})
        for label in ("fsdp", "ddp")
        for asked in (True, False)
    ]
    assert stage_of(make_record(), *kinds).base.label == "ddp (not deterministic)"
    assert stage_of(make_record(), DDP, with_world(FSDP, micro_batch_size=1)).is_alone
    assert not stage_of(make_record(), DDP).is_alone


@given(FIGURES)
def test_the_frontier_of_bytes_holds_exactly_the_cells_that_no_other_beats(
    figures: list[tuple[int, int]],
) -> None:
    groups = [of_size(f"ddp:n={n}", 10**6 * m, sent=4000 * s) for n, (s, m) in enumerate(figures)]
    found = [group.label for group in choice.bytes_frontier(stage_of(make_record(), *groups))]
    known = {f"ddp:n={n}": figure for n, figure in enumerate(figures)}
    front = [known[label] for label in found]
    assert front == sorted(front), "traffic rises"
    assert [m for _, m in front] == sorted({m for _, m in front}, reverse=True), "memory falls"
    for sent, most in figures:
        assert any(s <= sent and m <= most for s, m in front), "nothing is left out that none beats"


def test_a_backend_that_is_not_installed_has_the_most_moving_parts() -> None:
    groups = [
        of_size("of-others", 4, sent=8),
        of_size("ddp:of-another-version=1", 3, sent=8),
        of_size("fsdp", 5, sent=8),
    ]
    place = stage_of(make_record(), *groups)
    found = choice.worth_taking(place, place.figures(choice.sent_once), place.figures(choice.peak))
    assert found == ["fsdp", "ddp:of-another-version=1"]
    assert [group.label for group in choice.bytes_frontier(place)] == ["ddp:of-another-version=1"]


NOISE = (0.99, 1.0, 1.01, 0.995, 1.005, 1.002)
"""Repeats of one cell, relative."""


def run(
    label: str, seconds: float, repeat: int, *, calls: int = 10, units: int = 5, prefetch: str | None = None
) -> Record:
    """One run whose timed steps last `seconds`, with `calls` gathers in its one probed step."""
    ranks = 1 if label == "single" else 2
    return make_record(
        label=label, world_size=ranks, repeat=repeat, run_id=f"{label}-{repeat}",
        steps=make_steps(seconds=seconds),
        comm=[gathers(rank, calls) for rank in range(ranks)] if ranks > 1 else [],
        effective={"wrap_units": [f"unit {n}" for n in range(units)], "prefetch": prefetch},
    )  # fmt: skip


def gathers(rank: int, calls: int) -> CommunicationPart:
    return CommunicationPart(
        rank=rank, phase="forward", op="all_gather", dtype="float32", group="0", group_ranks=[0, 1],
        group_size=2, calls=calls, payload_bytes=4_000_000,
    )  # fmt: skip


def runs(label: str, seconds: float, repeats: int = 6, **facts: object) -> list[Record]:
    return [run(label, seconds * NOISE[n], n, **facts) for n in range(repeats)]  # type: ignore[arg-type]


def base(repeats: int = 6) -> list[Record]:
    """zero3 takes twice the time of fsdp."""
    return [
        *runs("single", 1.0, 1),
        *runs("ddp", 0.5, repeats, calls=1, units=1),
        *runs("fsdp", 1.0, repeats, calls=15),
        *runs("zero3", 2.0, repeats, calls=83, units=39, prefetch="none"),
    ]


def explained(records: Sequence[Record]) -> choice.SlowestExplanation:
    found = choice.explain_slowest(Comparison(records))
    assert found is not None
    return found


def closed(found: choice.SlowestExplanation) -> dict[str, str]:
    """Share of the gap that each row of the table closes."""
    return {row[0]: row[2] for row in found.table().texts()}


def test_without_variants_facts_are_stated_and_no_cause() -> None:
    found = explained(base())
    assert (found.slowest.label, found.fastest.label) == ("zero3", "fsdp")
    assert found.ratio == pytest.approx(2.0)
    assert (found.gap.order, found.effects) == ("faster", ())
    assert not found.is_tested
    _, _, open_cause = found.answer.partition("; ")
    assert open_cause.startswith("cause: not measured; to find it, compare zero3 with one setting changed")
    (example,) = [word.rstrip(",") for word in open_cause.split() if word.startswith("configs/")]
    assert (Path(__file__).parents[4] / example).is_file()
    gap = "zero3: 2.00 (2.00 to 2.00) x the time of fsdp, which shards the same tensors"
    assert found.answer == f"{gap}; {open_cause}"
    table = found.table()
    assert [column.title for column in table.columns] == [
        "configuration", "time / fsdp", "collectives per step", "units gathered", "sends per step, MB",
        "gathers ahead",
    ]  # fmt: skip
    assert table.texts() == [
        ["fsdp", "1.00", "15", "5", "2.00", "n/a"], ["zero3", "2.00", "83", "39", "2.00", "none"]
    ]  # fmt: skip


def test_the_share_of_the_gap_that_a_setting_closes_is_measured() -> None:
    """The truth: blocks close 60 % of the gap, prefetch nothing, and reuse makes it worse by a quarter."""
    found = explained(
        [
            *base(),
            *runs("zero3:leaf_module=blocks", 1.4, calls=15),
            *runs("zero3:stage3_max_live_parameters=1000", 2.0),
            *runs("zero3:stage3_max_reuse_distance=1000", 2.25),
        ]
    )
    shares = {effect.changed: effect.closed for effect in found.effects}
    assert shares["leaf_module=blocks"] == pytest.approx(0.6)
    assert shares["stage3_max_live_parameters=1000"] == pytest.approx(0.0, abs=1e-9)
    assert shares["stage3_max_reuse_distance=1000"] == pytest.approx(-0.25)
    assert [effect.difference.order for effect in found.effects] == ["faster", "equal", "slower"]
    assert found.is_tested
    assert found.answer.endswith("; cause: see the settings that were varied")
    assert closed(found) == {
        "fsdp": "", "zero3": "", "zero3:leaf_module=blocks": "60 %",
        "zero3:stage3_max_live_parameters=1000": "no change shown",
        "zero3:stage3_max_reuse_distance=1000": "made it slower",
    }  # fmt: skip
    assert [row[1] for row in found.table().texts()] == ["1.00", "2.00", "1.40", "2.00", "2.25"]


def test_the_share_of_the_gap_follows_from_the_same_rounds_as_the_times_beside_it() -> None:
    """On a machine that drifts medians of runs are of other rounds: they would say that a part is closed."""
    drift = (1.0, 1.1, 1.2, 9.0, 9.5, 10.0)

    def drifting(label: str, seconds: float, lags: Sequence[float]) -> list[Record]:
        return [run(label, seconds * drift[n] * lag, n) for n, lag in enumerate(lags)]

    even, uneven = (1.0,) * 6, (1.0, 1.0, 0.97, 1.03, 1.0, 1.0)
    found = explained([
        *runs("single", 1.0, 1), *drifting("ddp", 0.5, even), *drifting("fsdp", 1.0, uneven),
        *drifting("zero3", 2.0, even), *drifting("zero3:leaf_module=blocks", 1.02, even),
        *drifting("zero3:stage3_max_reuse_distance=1000", 1.4, even[::-1]),
    ])  # fmt: skip
    for effect, row in zip(found.effects, found.table().texts()[2:], strict=True):
        assert effect.difference.middle is not None
        time = found.ratio / effect.difference.middle
        assert row[1] == f"{time:.2f}"
        assert effect.closed == pytest.approx((found.ratio - time) / (found.ratio - 1))
    assert [effect.changed for effect in found.effects] == [
        "leaf_module=blocks", "stage3_max_reuse_distance=1000"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "seconds", "said", "share"),
    [
        ("stage3_max_live_parameters=1000", 2.0, "; cause: none of the settings that were varied",
         "no change shown"),
        # A preset changes several settings.
        ("preset=library-defaults", 1.5, "; cause: not measured; to find it, compare zero3 with", "50 %"),
    ],
)  # fmt: skip
def test_what_a_variant_says_of_the_cause(variant: str, seconds: float, said: str, share: str) -> None:
    found = explained([*base(), *runs(f"zero3:{variant}", seconds)])
    assert said in found.answer
    assert closed(found)[f"zero3:{variant}"] == share
    assert found.effects[0].is_preset == variant.startswith("preset")


def test_too_few_runs_show_no_cause_however_large_the_difference() -> None:
    found = explained([*base(3), *runs("zero3:leaf_module=blocks", 1.0, 3)])
    assert (found.gap.extent, found.effects[0].difference.extent) == (None, None)
    assert found.effects[0].closed == pytest.approx(1.0)
    assert not found.is_tested
    assert " (not tested) x the time of " in found.answer
    assert found.answer.endswith("; cause: not shown; settings were varied in fewer than 6 rounds")
    assert closed(found)["zero3:leaf_module=blocks"] == "no change shown"


def test_a_tie_is_no_gap() -> None:
    level = [*runs("single", 1.0, 1), *runs("fsdp", 1.0), *runs("zero3", 1.0001)]
    found = explained([*level, *runs("zero3:leaf_module=blocks", 0.5)])
    assert found.gap.order == "equal"
    assert found.answer == "zero3: not shown to be slower than fsdp, which shards the same tensors"


def test_of_twins_through_accelerate_the_one_with_variants_is_explained() -> None:
    twin = runs("accelerate-zero3", 2.001, calls=83, units=39, prefetch="none")
    found = explained([*base(), *twin, *runs("zero3:leaf_module=blocks", 1.5)])
    assert found.slowest.label == "zero3"
    assert [effect.changed for effect in found.effects] == ["leaf_module=blocks"]


def test_neither_a_variant_nor_a_diverged_cell_is_a_candidate_for_the_slowest_nor_one_alone() -> None:
    """In what it shards, so that it has nothing to be compared with."""
    alone = Comparison([*runs("single", 1.0, 1), *runs("ddp", 1.0), *runs("zero3", 2.0)])
    assert choice.explain_slowest(alone) is None
    steps = make_steps(seconds=9.0, losses=[9.0] * 4)
    diverged = [changed(record, steps=steps) for record in runs("fsdp1", 9.0)]
    variant = runs("zero3:stage3_max_reuse_distance=1000", 9.0)
    for others in (diverged, variant):
        assert explained([*base(), *others]).slowest.label == "zero3"


SHARDED = ("zero1", "zero2", "zero3", "fsdp", "fsdp1")


@cache
def cells(report: str) -> dict[tuple[str, int], Record]:
    """The first sound run of each cell of built-in backends."""
    found: dict[tuple[str, int], Record] = {}
    for record in published(report):
        if record.status == "ok" and not record.backend.name.startswith("planted-"):
            found.setdefault((record.backend.label, record.world.world_size), record)
    return found


@pytest.mark.parametrize("report", ["default", "full-matrix", "same-job-on-nodes", "twelve-ways"])
def test_on_its_own_ranks_and_micro_steps_a_cell_has_the_figures_that_its_run_is_held_to(report: str) -> None:
    for (label, _), record in cells(report).items():
        held = choice.held_with(record)
        states = expected_model_state_bytes(record)
        # All states lie on the GPU but AdamW's counters, 4 bytes a parameter tensor.
        assert held is None or states is None or held >= 0.9999 * states, label


def test_of_a_script_it_need_not_be_known_how_long_samples_are_nor_how_its_update_works() -> None:
    for label in (*SHARDED, "ddp"):
        record = cells("default")[label, 2]
        unknown = {"data": {"sequence_length": None}, "optimizer": {"implementation": None}}
        held = choice.held_with(changed(record, job=unknown))
        assert held is not None
        assert held == choice.held_with(record)


def test_a_run_without_a_layout_or_with_forms_of_its_own_has_none() -> None:
    assert choice.held_with(make_record(label="ddp")) is None
    planted = next(
        record
        for record in published("full-matrix")
        if record.backend.name == "planted-gradients-summed" and record.status == "ok"
    )
    assert choice.held_with(planted) is None
