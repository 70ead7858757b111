"""Driver, libraries and settings of GPUs are conditions of a run; settings that differ are a finding."""

from dataclasses import replace
from typing import Any

import pytest

from harness.job.experiment import MeasureSection
from harness.judge.changes import named_cells, pairs
from harness.judge.comparison import Comparison, strong_scaling
from harness.judge.effective import transport_variables
from harness.judge.quantities import loss_unit
from harness.judge.rows import group_repeats, make_rows, rankings
from harness.judge.run_conditions import Spread, script_names, sessions, spread, varying, words
from harness.record import AcceleratorPart, EvaluationPart, ObservationPart, ObservedPart, Record
from harness.record.measured import SlurmPart
from harness.tell.document import Table
from harness.tell.sections.results import scaling_section
from harness.tell.tables import ONE_SESSION, sessions_words
from tests.records import LOSSES, changed, make_ranks, make_record, make_steps, told


def run(label: str = "ddp", ranks: int = 4, seconds: float = 1.0, **world: Any) -> Record:
    environment = world.pop("environment", {})
    measure = MeasureSection(**world.pop("measure", {})).model_dump(mode="json")
    steps = make_steps(seconds=seconds)
    record = make_record(label=label, world_size=ranks, environment=environment, steps=steps, measure=measure)
    return changed(record, world=world)


TWO_NODES = {"nodes": 2, "ranks_per_node": 2}
NEWER = {"environment": {"packages": {"torch": "2.12.0", "deepspeed": "0.19.8"}}}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (TWO_NODES, ["1 node x 4", "2 nodes x 2"]),
        ({"preset": "library-defaults"}, ["like-for-like", "library-defaults"]),
        (NEWER, ["torch 2.11.0", "torch 2.12.0"]),
        ({"device": "cuda"}, ["cpu over gloo", "cuda over gloo"]),
        ({"micro_batch_size": 1, "accumulation_steps": 2}, ["micro-batch 2", "micro-batch 1"]),
        ({"environment": {"code": "b" * 12}}, ["code 0123456789ab", "code bbbbbbbbbbbb"]),
        ({"environment": {"cpu": "Other CPU"}}, ["Test CPU", "Other CPU"]),
        ({"measure": {"warmup_steps": 5}}, ["measure.warmup_steps=3", "measure.warmup_steps=5"]),
        ({"measure": {"checkpoint": True}}, ["measure.checkpoint=none", "measure.checkpoint=native"]),
    ],
)
def test_runs_in_other_circumstances_are_no_repeats(other: dict[str, Any], words: list[str]) -> None:
    groups = Comparison([run(), run(**other), run()]).groups
    assert [len(group.rows) for group in groups] == [2, 1]
    assert [group.label for group in groups] == [f"ddp ({word})" for word in words]
    assert [group.record.backend.label for group in groups] == ["ddp", "ddp"]
    assert len(rankings(groups)) == 2


def test_a_preset_that_the_label_names_is_compared_with_the_others() -> None:
    own = run("zero3:preset=library-defaults", seconds=0.5)
    groups = Comparison([run("ddp"), run("zero3"), own]).groups
    assert [group.label for group in groups] == ["ddp", "zero3", "zero3:preset=library-defaults"]
    assert [order.names[0] for order in rankings(groups).values()] == ["zero3:preset=library-defaults"]
    assert len({group.place for group in groups}) == 1


def test_both_sides_of_a_baseline_keep_their_layouts_apart() -> None:
    both = Comparison([run(), run(**TWO_NODES)])
    newer = Comparison([run(**NEWER), run(**NEWER, **TWO_NODES)])
    found = pairs(*named_cells(both, newer))
    assert [pair.cell.label for pair in found] == ["ddp (1 node x 4)", "ddp (2 nodes x 2)"]
    (alone,) = pairs(*named_cells(both, Comparison.of_rows(newer.rows[1:])))
    assert alone.cell.label == "ddp (2 nodes x 2)"


def scaling_table(*records: Record) -> Table:
    section = scaling_section(Comparison(records))
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    return table


@pytest.mark.parametrize("evaluated", [False, True])
def test_scaling_table_tells_the_runs_their_range_and_an_evaluation_where_there_was_one(
    evaluated: bool,
) -> None:
    part = EvaluationPart(step=4, loss=4.5, target_tokens=254, samples=6, seconds=0.5)
    several = [changed(run(seconds=seconds), eval=[part] if evaluated else []) for seconds in (0.5, 0.7)]
    table = scaling_table(run(ranks=2), *several)
    assert [line[4:7] for line in table.values()] == [[1, 1.0, 1.0], [2, 0.5, 0.7]]
    figures = [dict(zip((c.key for c in table.columns), line, strict=True)) for line in table.values()]
    found = [(line.get("evaluation_loss"), line.get("evaluation_samples_per_second")) for line in figures]
    assert found == [(None, None), (4.5, 12.0) if evaluated else (None, None)]
    assert ("evaluation_samples_per_second" in figures[0]) is evaluated
    assert strong_scaling(Comparison([run(ranks=2), run(**NEWER)])) == [], "two versions"


def test_the_spread_of_repeats_is_that_of_runs_of_a_job_in_equal_circumstances() -> None:
    def shifted(record: Record, loss: float) -> Record:
        return changed(record, steps=make_steps([value + loss for value in LOSSES]))

    longer = {"measure": {"warmup_steps": 5}}
    comparison = Comparison(
        [run(), shifted(run(), 0.25), shifted(run(**longer), 1.0), shifted(run(**longer), 1.5)]
    )
    assert comparison.repeat_spreads == {
        "ddp (measure.warmup_steps=3) on 4": 0.25,
        "ddp (measure.warmup_steps=5) on 4": 0.5,
    }
    jobs = [run().model_copy(update={"job_id": job_id * 12}) for job_id in "aabb"]
    assert list(Comparison(jobs).repeat_spreads) == [f"ddp on 4, job {job_id * 12}" for job_id in "ab"]
    (group,) = Comparison([run(), run().model_copy(update={"measure": None})]).groups
    assert group.label == "ddp", "one that does not say how it was measured is a repeat"


def at(time: str, label: str = "ddp", *, seconds: float = 0.5, host: str = "host", **facts: Any) -> Record:
    return make_record(
        label=label, steps=make_steps(seconds=seconds), environment=facts, ranks=make_ranks(2, host=host),
        created_at=f"2026-01-0{time}:00.000+00:00",
    )  # fmt: skip


SLURM = {"slurm": SlurmPart(job="1").model_dump()}
UNKNOWN = at("1T10:00").model_copy(update={"created_at": "yesterday"})


@pytest.mark.parametrize(
    ("records", "found"),
    [
        # A pause of more than an hour begins one; that a run lasts for hours is none.
        ([at("2T09:30"), at("1T10:00"), at("1T10:59"), at("1T11:59"), at("1T13:01")], [2, 0, 0, 0, 1]),
        ([at("1T10:00", seconds=1800.0), at("1T12:30")], [0, 0]),
        ([at("1T10:00"), at("1T12:30")], [0, 1]),
        # What a scheduler began later counts from then.
        ([at("1T10:00"), at("1T10:00", started_at="2026-01-01T18:00:00+00:00")], [0, 1]),
        # Hosts that ran several cells have their own, not those that ran one each, as containers do,
        ([at("1T10:00", label, host=host) for label in ("ddp", "fsdp") for host in "ab"], [0, 1, 0, 1]),
        ([at("1T10:00", label, host=label) for label in ("ddp", "fsdp", "zero1")], [0, 0, 0]),
        # nor those on which a scheduler placed runs as it liked.
        ([at("1T10:00", label, host=host, **SLURM) for label in ("ddp", "fsdp") for host in "ab"], [0] * 4),
        # Without a time it is the first.
        ([at("2T10:00"), UNKNOWN, at("1T10:00")], [1, 0, 0]), ([UNKNOWN], [0]), ([], []),
    ],
)  # fmt: skip
def test_sessions_begin_where_time_or_host_says(records: list[Record], found: list[int]) -> None:
    assert sessions(records) == found


def test_spread_between_sessions_stands_beside_that_within_one_and_of_too_few_is_not_zero() -> None:
    found = spread({0: [0.9, 1.0, 1.1], 1: [1.95, 2.0], 4: [1.1]})
    assert found.sessions == 3
    assert found.within == pytest.approx(0.2 / 1.1)
    assert found.between == pytest.approx((1.975 - 1.0) / 1.1)
    assert spread({0: [1.0]}) == Spread(sessions=1, within=None, between=None)
    assert spread({0: [1.0], 1: [1.0]}) == Spread(sessions=2, within=None, between=0.0)
    assert spread({}) == Spread(sessions=0, within=None, between=None)


def test_a_comparison_says_in_how_many_sessions_it_was_timed() -> None:
    one = Comparison([at("1T10:00"), at("1T10:10")])
    assert (one.sessions, sessions_words(one.sessions)) == (1, ONE_SESSION)
    two = Comparison([at("1T10:00"), at("2T10:00")])
    assert two.sessions == 2
    assert "compared within each" in sessions_words(two.sessions)


SOFTWARE = AcceleratorPart(driver="580.65.06", cuda="13.0", nccl="2.29.7", cudnn="9.20.0")


def on_gpus(label: str, software: dict[str, str] | None = None, **variables: str) -> Record:
    accelerator = SOFTWARE.model_copy(update=software or {})
    environment = {"accelerator": accelerator, "variables": variables}
    return make_record(label=label, environment=environment, world={"device": "cuda", "collectives": "nccl"})


def found(*records: Record) -> dict[str, Any]:
    return {one.backends[0]: one.message for one in told(records, "step-environment-differs")}


def test_runs_under_another_nccl_are_not_repeats_and_a_record_without_versions_differs_in_none() -> None:
    records = [on_gpus("ddp"), on_gpus("ddp", {"nccl": "2.27.5"})]
    assert varying(records) == ["nccl"]
    assert words(records[1], ["nccl", "driver"]) == "NCCL 2.27.5, driver 580.65.06"
    old = changed(on_gpus("ddp"), environment={"accelerator": None})
    assert varying([old, on_gpus("ddp")]) == []
    assert transport_variables(old) is None
    assert make_record().environment.accelerator is None
    assert transport_variables(make_record(label="ddp")) is None


def test_nccl_settings_of_one_cell_are_a_finding_unless_they_have_no_effect_on_sums() -> None:
    messages = found(on_gpus("single"), on_gpus("ddp", NCCL_ALGO="Ring"), on_gpus("zero3"))
    assert list(messages) == ["ddp"]
    assert "settings of NCCL" in messages["ddp"]
    assert "NCCL_ALGO" in messages["ddp"]
    shared = {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "ib0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert transport_variables(on_gpus("ddp", None, **shared)) == {}
    assert found(on_gpus("single"), on_gpus("ddp", None, **shared)) == {}


def script(
    words: str,
    *,
    updated: int = 5,
    files: dict[str, str] | None = None,
    rate: float = 1e-3,
    label: str = "",
    judge: str | None = None,
) -> Record:
    seen = ObservationPart(
        command=["torchrun", *words.split()], files=files or {}, frameworks=[], base="ddp", loss="the scalar",
        label=label, judged_by=judge,
    )  # fmt: skip
    steps = [replace(step, learning_rate=rate) for step in make_steps()]
    observed = ObservedPart(updated_tensors=updated)
    return make_record(label="observed-ddp", world_size=2, observation=seen, observed=observed, steps=steps)


@pytest.mark.parametrize(
    ("scripts", "names"),
    [
        ([script("/a/t.py 1e-3"), script("/a/t.py 1e-3")], ["", ""]),
        ([script("/a/t.py 1e-3"), script("/b/t.py 5e-3")], ["t.py 1e-3", "t.py 5e-3"]),
        ([script("t.py"), script("t.py --drop"), script("t.py")], ["", "--drop", ""]),
        ([script("t.py"), script("t.py", updated=4)], ["gradients of 5 tensors", "gradients of 4 tensors"]),
        ([script("t.py"), script("t.py", rate=5e-3)], ["learning rate 0.001", "learning rate 0.005"]),
        ([script("t.py", files={"t.py": "a"}), script("t.py", files={"t.py": "b"})], 2),
        (
            [script("t.py --out a", label="old"), script("t.py --out b", label="old"), script("t.py")],
            ["old", "old", ""],
        ),
        ([script("t.py", label="old"), script("t.py", label="new")], ["old", "new"]),
        ([script("t.py"), script("t.py", judge="ddp"), script("t.py", judge="ddp")], 2),
        (
            [script("t.py", label="old"), script("t.py", label="old", rate=5e-3)],
            ["old, learning rate 0.001", "old, learning rate 0.005"],
        ),
    ],
)
def test_scripts_are_repeats_only_if_they_are_alike_in_all(scripts: list[Record], names: Any) -> None:
    """Each other one is a cell with a name of its own, which is compared with the others."""
    given = [script_names(scripts)[id(one)] for one in scripts]
    assert given == names or len(set(given)) == names
    rows = make_rows(scripts)
    assert len(group_repeats(rows)) == len(set(given))
    assert len({group.place for group in group_repeats(rows)}) == 1
    assert {loss_unit(row.record) for row in rows} == {""}
