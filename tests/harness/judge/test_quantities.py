"""What other work took from a run, from the accounts of its ranks."""

import gc
from dataclasses import replace
from typing import Any
from weakref import ref

import numpy as np
import pytest

from harness.backends.mesh import Mesh
from harness.forms.pipeline import bubble_share
from harness.forms.textbook import BILLION, JOULES_PER_KILOWATT_HOUR, SECONDS_PER_HOUR
from harness.forms.workload import ELSEWHERE, Workload
from harness.job.experiment import Price
from harness.judge import quantities
from harness.judge.agreement.job_equivalence import job_differences
from harness.judge.comparison import Comparison
from harness.judge.quantities import (
    DATA,
    WAITING,
    WHOLE,
    Disturbance,
    Run,
    expected_sent_bytes_per_step,
    idle_share,
    is_beyond_noise,
    pipeline_use,
    usage,
    volume_differences,
    why_unknown,
)
from harness.record import (
    BackendPart,
    CommunicationPart,
    EnergyPart,
    EvaluationPart,
    ProcessorPart,
    Record,
    WindowsPart,
)
from harness.record.workload import of_record
from harness.tell.document import Table
from harness.tell.sections.amounts import pipeline_section
from tests.pipelines import OTHER, SAME, SHARED, make_pipeline
from tests.records import (
    changed,
    make_communication,
    make_effective,
    make_model,
    make_ranks,
    make_record,
    make_steps,
    on_stub,
    told,
)
from tests.timed_records import processors
from tests.volumes import ELEMENTS, make_volume_record, with_rows


def test_rates_take_timed_steps_only() -> None:
    steps = make_steps(changes={0: {"seconds": 100.0}, 1: {"seconds": 100.0}, 3: {"seconds": 1.5}})
    record = make_record(steps=steps)
    assert quantities.rate(record, "tokens") == 1024.0
    assert quantities.rate(record, "samples") == 8.0
    assert Run.of(record).median_step_seconds == 1.0
    untimed = Run.of(make_record(steps=make_steps()[:2]))
    assert (untimed.tokens_per_second, untimed.median_step_seconds, untimed.step_seconds) == (None, None, [])


def test_evaluations_are_timed_once_steps_are() -> None:
    """Steps 2 and 3 are timed: what was evaluated before the end of step 2 has probes around it."""
    parts = [
        EvaluationPart(step=step, loss=5.0, target_tokens=254, samples=6, seconds=seconds)
        for step, seconds in ((1, 100.0), (2, 100.0), (3, 0.5), (4, 1.5))
    ]
    assert quantities.timed_evaluations(make_record(eval=parts)) == [(6, 0.5), (6, 1.5)]
    assert quantities.evaluation_rate(make_record(eval=parts)) == (12 + 4) / 2
    assert quantities.evaluation_rate(make_record(eval=parts[:2])) is None
    untimed = EvaluationPart(step=4, loss=5.0, target_tokens=1)
    assert quantities.evaluation_rate(make_record(eval=[untimed])) is None, "an older record"


def with_moments(*changes: dict[str, Any]) -> Record:
    """A record of as many ranks, whose only moment of memory is changed."""
    plain = make_ranks(len(changes))
    memory = [[part.memory[0].model_copy(update=of)] for part, of in zip(plain, changes, strict=True)]
    ranks = make_ranks(len(changes), memory=memory)
    return make_record(label="ddp", world_size=len(changes), ranks=ranks)


KINDS = {"weights": 1, "gradients": 2, "masters": 4, "optimizer": 8, "gathered": 16, "buffers": 32}


@pytest.mark.parametrize(
    ("changes", "peaks", "states"),
    [
        ([{}, {}], [2_000_000, 2_001_000], 16_000),
        ([{"peak_bytes": None, "kinds": None}], [], None),
        ([{"kinds": KINDS}], [2_000_000], 15),
        ([{"kinds": {"weights": 3}}, {"kinds": {"weights": 5}}], [2_000_000, 2_001_000], 5),
    ],
    ids=["each rank", "no counting allocator", "without gathered weights and buffers", "largest rank"],
)
def test_peaks_are_each_ranks_and_states_the_largest(
    changes: list[dict[str, Any]], peaks: list[int], states: int | None
) -> None:
    record = with_moments(*changes)
    assert Run.of(record).rank_peaks == peaks
    assert quantities.model_state_bytes(record) == states


def test_sent_bytes_are_ring_bytes_of_the_steps_per_probed_step_and_rank() -> None:
    """gloo sends a reduce-scatter as an all-reduce."""
    communication = make_communication(4, "all_reduce", 4000) + make_communication(4, "all_gather", 800)
    outside = [
        row.model_copy(update={"phase": phase})
        for phase in ("setup", "digest", "evaluation", "checkpoint")
        for row in make_communication(4)
    ]
    windows = WindowsPart(warmup=1, probed=2, timed=1)
    record = make_record(label="ddp", world_size=4, comm=[*communication, *outside], windows=windows)
    assert quantities.sent_bytes_per_step(record) == (1.5 * 4000 + 0.75 * 800) / 2
    communication = make_communication(4, "reduce_scatter", 800) + make_communication(4, "all_gather", 800)
    record = make_record(label="fsdp", world_size=4, comm=communication)
    assert quantities.sent_bytes_per_step(record) == 600 + 600
    assert quantities.transport_bytes_per_step(record) == 1200 + 600
    assert quantities.transport_bytes_per_step(changed(record, world={"collectives": "nccl"})) == 1200


@pytest.mark.parametrize(
    ("label", "ranks", "effective", "sent"),
    [
        ("ddp", 2, {}, 4000.0),
        ("zero1", 2, {}, 4000.0),
        ("zero3", 2, {}, 6000.0),
        ("single", 2, {}, 0.0),
        ("fsdp", 2, {"parameter_dtype": "bfloat16", "reduce_dtype": "float32"}, 4000.0),
        ("fsdp-hybrid", 4, {"details": {"shard_size": 2}}, 0.5 * 1000 * 12 + 2 * 0.5 * 500 * 4),
        ("mine", 2, {}, None),
        ("ddp", 2, None, None),
    ],
)
def test_textbook_volume_follows_the_strategy_and_what_ran(
    label: str, ranks: int, effective: dict[str, Any] | None, sent: float | None
) -> None:
    ran = None if effective is None else make_effective(**effective)
    part = BackendPart(label=label, name=label, effective=ran)
    record = make_record(label=label, world_size=ranks, backend=part)
    assert quantities.textbook_bytes_per_step(record) == sent


def test_host_peak_is_that_of_the_largest_process() -> None:
    record = make_record(label="ddp", ranks=make_ranks(2, host_peak_bytes=[5, 7]))
    assert quantities.host_peak_bytes(record) == 7
    assert quantities.host_peak_bytes(changed(record, ranks=[])) is None


@pytest.mark.parametrize("reporting", [[], [0], [1]])
def test_bytes_are_unknown_where_no_step_was_probed_or_a_killed_rank_did_not_report(
    reporting: list[int],
) -> None:
    rows = [row for row in make_communication(2) if row.rank in reporting]
    killed = make_record(label="ddp", status="failed", comm=rows)
    assert quantities.sent_bytes_per_step(killed) is None
    assert quantities.transport_bytes_per_step(killed) is None
    assert quantities.sent_bytes_per_step(make_record(label="ddp", status="failed")) is not None
    assert quantities.sent_bytes_per_step(make_record(status="failed")) is None  # on one rank
    unprobed = make_record(label="ddp", windows=WindowsPart(warmup=1, probed=0, timed=3))
    assert quantities.sent_bytes_per_step(unprobed) is None


@pytest.mark.parametrize("label", ["ddp", "zero1", "zero3", "fsdp", "fsdp1", "fsdp-hybrid"])
def test_what_is_expected_differs_nowhere(label: str) -> None:
    assert volume_differences(make_volume_record(label)) == []


def test_one_byte_is_a_difference_and_so_is_a_rank_that_counted_nothing() -> None:
    record = with_rows(
        make_volume_record("ddp"),
        lambda row: (
            row.model_copy(update={"payload_bytes": row.payload_bytes + 1})
            if row.rank == 1 and row.phase == "backward"
            else row
        ),
    )
    (found,) = volume_differences(record) or []
    assert (found.rank, found.measured_bytes, found.expected_bytes) == (1, 4 * ELEMENTS + 1, 4 * ELEMENTS)
    silent = with_rows(make_volume_record("fsdp"), lambda row: row if row.rank == 0 else None)
    assert {one.measured_bytes for one in volume_differences(silent) or []} == {0}


@pytest.mark.parametrize(
    ("phase", "ranks", "differing"),
    [
        ("forward", [0], 0),  # of one rank alone
        ("forward", [0, 1], 1),
        # Outside of steps nothing is judged.
        *((phase, [0, 1], 0) for phase in ("setup", "digest", "evaluation", "checkpoint", "checkpoint_load")),
    ],
)
def test_a_collective_more_is_a_difference_in_a_step_among_several(
    phase: str, ranks: list[int], differing: int
) -> None:
    record = make_volume_record("ddp")
    own = CommunicationPart(
        rank=0, phase=phase, op="all_reduce", dtype="float64", group="7", group_ranks=ranks,
        group_size=len(ranks), calls=1, payload_bytes=8,
    )  # fmt: skip
    found = volume_differences(record.model_copy(update={"comm": [*record.comm, own]})) or []
    assert [(d.op, d.dtype) for d in found] == [("all_reduce", "float64")] * differing
    # What is expected follows from the job alone.
    assert expected_sent_bytes_per_step(record.model_copy(update={"comm": []})) == 4 * ELEMENTS


def test_a_group_of_the_right_size_and_other_ranks_is_a_difference() -> None:
    def turned(row: CommunicationPart) -> CommunicationPart:
        replicas = {0: [0, 3], 3: [0, 3], 1: [1, 2], 2: [1, 2]}[row.rank]
        return row.model_copy(update={"group_ranks": replicas}) if row.role == "replica" else row

    found = volume_differences(with_rows(make_volume_record("fsdp-hybrid"), turned)) or []
    assert {(d.group, d.measured_bytes > 0) for d in found} == {("replica", False), ("ranks 0, 3", True)}


def test_groups_with_the_ranks_of_their_role_are_no_difference() -> None:
    groups = {"world": ([0, 1, 2, 3],), "shard": ([0, 1], [2, 3]), "replica": ([0, 2], [1, 3])}

    def named(row: CommunicationPart) -> CommunicationPart:
        (ranks,) = (group for group in groups[row.role] if row.rank in group)
        return row.model_copy(update={"group_ranks": ranks})

    assert volume_differences(with_rows(make_volume_record("fsdp-hybrid"), named)) == []


def test_a_number_of_ranks_that_a_record_claims_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(quantities, "expected_states", lambda _, rank: asked.append(rank))
    claims = changed(make_volume_record("ddp"), world={"world_size": 2**20, "ranks_per_node": 2**20})
    assert quantities.expected_model_state_bytes(claims) is None
    assert asked == list(range(quantities.MOST_UNDESCRIBED))
    placed: list[int] = []
    monkeypatch.setattr(Mesh, "data_rank", lambda _, rank: placed.append(rank) or rank)
    monkeypatch.setattr(Workload, "group_ranks", lambda *_: pytest.fail("lists all ranks"))
    named = changed(claims, comm=[row.model_copy(update={"group_ranks": [0, 1]}) for row in claims.comm])
    workload = of_record(named)
    assert workload is not None
    assert {role for *_, role in quantities.measured_payload(named, workload)[0]} == {ELSEWHERE}
    assert job_differences(named, named) == []
    assert set(placed) == {rank.rank for rank in named.ranks}
    described = changed(claims, ranks=claims.ranks * 100)
    assert quantities.ranks_described(described) == range(len(described.ranks))


def test_where_nothing_is_expected_the_reason_is_named() -> None:
    assert why_unknown(make_volume_record("zero3")) is None
    record = make_volume_record("zero3")
    training = record.job.training.model_copy(update={"activation_checkpointing": True})
    recomputed = changed(record, job={"training": training})
    assert "is not modelled for this architecture" in (why_unknown(recomputed) or "")
    known = changed(recomputed, model=make_model(architecture="LlamaForCausalLM"))
    assert why_unknown(known) is None
    mine = changed(record, backend={"name": "mine"})
    assert why_unknown(mine) == "mine has no closed form here"
    assert "does not describe the model" in (why_unknown(make_record(label="ddp")) or "")
    unprobed = record.model_copy(update={"steps": record.steps[3:]})
    assert "no step was probed" in (why_unknown(unprobed) or "")


def test_of_complex_parameters_nothing_is_expected() -> None:
    record = make_volume_record("ddp")
    first, *rest = record.layout.parameters
    turned = (replace(first, dtype="complex64"), *rest)
    record = changed(record, layout={"parameters": turned})
    assert volume_differences(record) is None
    assert str(why_unknown(record)).startswith(f"{first.name} is complex, which")


def test_of_unknown_steps_nothing_is_judged() -> None:
    record = make_volume_record("zero3")
    early = [replace(step, step=step.step - 3) for step in record.steps]
    record = record.model_copy(update={"steps": early})
    assert volume_differences(record) == []
    assert expected_sent_bytes_per_step(record) is None
    assert expected_sent_bytes_per_step(record.model_copy(update={"steps": []})) is None


def taken_from(*accounts: ProcessorPart | None) -> Disturbance | None:
    ranks = make_ranks(len(accounts), processors=list(accounts))
    return Run.of(make_record(label="ddp", world_size=len(accounts), ranks=ranks)).disturbance


BUSY = {"machine_busy_seconds": 10.0}
STOLEN = {"machine_busy_seconds": 7.0, "machine_stolen_seconds": 1.0, "process_seconds": 3.5}


@pytest.mark.parametrize(
    ("ranks", "other_cores", "lost"),
    [
        ([BUSY, BUSY], 0.5, [0.0, 0.0]),
        # No more than a rank waited, nor than others used.
        ([BUSY | {"waiting_seconds": 0.5}, BUSY | {"waiting_seconds": 3.0}], 0.5, [0.5, 2.0]),
        ([STOLEN, STOLEN], 0.25, [1.0, 1.0]),  # by a hypervisor, without waiting
        ([{"waiting_seconds": 2.0}, {"waiting_seconds": 2.0}], 0.0, [0.0, 0.0]),  # for each other
        # Machines are counted one by one; the busiest is told.
        ([{"boot": "a", "machine_busy_seconds": 4.0},
          {"boot": "b", "machine_busy_seconds": 6.0, "waiting_seconds": 1.0}], 0.5, [0.0, 1.0]),
    ],
    ids=["others", "waiting", "stolen", "each-other", "machines"],
)  # fmt: skip
def test_what_no_rank_used_went_to_others(
    ranks: list[dict[str, Any]], other_cores: float, lost: list[float]
) -> None:
    found = taken_from(*(processors(**rank) for rank in ranks))
    assert found.other_cores == pytest.approx(other_cores)
    assert (found.lost_by_rank, found.lost_seconds) == (lost, max(lost))
    # Of the work that a rank did: each of two did half of it, so lost half of a second to the hypervisor.
    assert found.lost_share == (0.125 if ranks[0] is STOLEN else max(lost) / 4)


def test_a_rank_without_an_account_leaves_the_others_in_doubt() -> None:
    assert taken_from(processors(), None) is None
    assert Run.of(make_record(ranks=[])).disturbance is None


def test_three_runs_persist_and_fewer_need_more_than_twice() -> None:
    assert is_beyond_noise([1.3, 1.3, 1.3])
    assert not is_beyond_noise([3.0, 1.9])
    assert is_beyond_noise([3.0, 2.1])
    assert not is_beyond_noise([])


TOKENS_PER_SECOND = 2048.0


def measured(*parts: dict[str, Any] | None, device: str = "cuda", price: Price | None = None) -> Record:
    """A run of ddp whose ranks read this within one second."""
    energy = [EnergyPart(seconds=1.0, **part) if part is not None else None for part in parts]
    return make_record(
        label="ddp", world_size=len(parts), ranks=make_ranks(len(parts), energy=energy),
        price_per_gpu_hour=price, world={"device": device},
    )  # fmt: skip


HOURS = 2 * BILLION / TOKENS_PER_SECOND / SECONDS_PER_HOUR
"""Of two GPUs."""


@pytest.mark.parametrize(
    ("parts", "changes", "expected"),
    [
        ([{"device_joules": 300.0}, {"device_joules": 500.0}], {},
         {"device_watts": 800.0,
          "kilowatt_hours": 800.0 * BILLION / TOKENS_PER_SECOND / JOULES_PER_KILOWATT_HOUR}),
        # Of an older record: processors do not count.
        ([{"host_joules": 90.0, "boot": "a"}] * 2, {"device": "cpu"}, {"kilowatt_hours": None}),
        ([{}, {}], {"price": Price(amount=2.5, currency="USD")},
         {"gpu_hours": HOURS, "cost": 2.5 * HOURS, "kilowatt_hours": None}),
        ([{}, {}], {"price": Price(amount=1, currency="EUR"), "device": "cpu"},
         {"gpu_hours": None, "cost": None}),
        # A rank without a figure leaves the run without one.
        ([{"device_joules": 300.0}, {"device_unknown": "Not Supported"}], {}, {"device_watts": None}),
    ],
    ids=["power", "host", "price", "processors", "unknown"],
)  # fmt: skip
def test_energy_and_cost_of_a_run(
    parts: list[dict[str, Any]], changes: dict[str, Any], expected: dict[str, float | None]
) -> None:
    found = usage(measured(*parts, **changes))
    assert usage(on_stub(measured({"device_joules": 9.0}, {"device_joules": 9.0}))) == {}
    assert {name: found[name] for name in expected} == {
        name: None if value is None else pytest.approx(value) for name, value in expected.items()
    }


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"device_joules": 900.0, "device_limit_watts": 700.0}, "900 W on average, its power limit is 700 W"),
        ({"device_joules": 90.0, "device_sampled_watts": 450.0}, "90 W by its energy counter, 450 W by"),
    ],
    ids=["beyond the limit", "samples differ"],
)
def test_energy_that_cannot_be_right_is_named(part: dict[str, Any], says: str) -> None:
    sound = {"device_joules": 600.0, "device_limit_watts": 700.0, "device_sampled_watts": 590.0}
    (finding,) = told([make_record(), measured(sound, part)], "implausible-energy")
    assert says in finding.message
    assert finding.values["rank"] == 1
    assert told([make_record(), measured(sound, sound)], "implausible-energy") == []


def test_arrays_hold_the_timed_steps_of_each_rank_up_to_where_one_died() -> None:
    record = make_record(label="ddp")
    found = Run.of(record).timings
    timed = [step.step for step in record.steps if step.window == "timed"]
    assert found.steps.tolist() == [[rank.step_seconds[step] for step in timed] for rank in record.ranks]
    assert found.data.tolist() == [[rank.data_seconds[step] for step in timed] for rank in record.ranks]
    shorter = record.ranks[-1].model_copy(update={"step_seconds": record.ranks[-1].step_seconds[:-1]})
    cut = Run.of(record.model_copy(update={"ranks": [*record.ranks[:-1], shorter]})).timings
    assert cut.steps.shape == (found.steps.shape[0], found.steps.shape[1] - 1)
    for nothing in ({"ranks": []}, {"steps": []}):
        empty = Run.of(record.model_copy(update=nothing))
        assert (empty.timings, empty.rank_medians(WHOLE), empty.largest_median(DATA)) == (None, [], None)


def test_phases_are_added_up_only_where_every_rank_timed_all_and_waiting_is_part_of_a_step() -> None:
    phases = {"forward": [0.2] * 4, "backward": [0.3] * 4, "step": [0.1] * 4}
    whole = Run.of(make_record(label="ddp", ranks=make_ranks(2, phase_seconds=phases))).timings
    assert whole.phases == pytest.approx(0.6)
    del phases["step"]
    part = Run.of(make_record(label="ddp", ranks=make_ranks(2, phase_seconds=phases))).timings
    assert part.phases is None
    assert part.medians["backward"] == pytest.approx([0.3] * 2)
    pipeline = Run.of(make_pipeline()).timings
    assert pipeline.phases == pytest.approx(4.1)
    assert pipeline.medians[WAITING] == [1.0, 2.0]


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_a_rank_waits_until_the_last_one_has_ended(micro_batches: int) -> None:
    """GPipe on 2 ranks by a clock of equal ticks: the second begins a tick later and ends a tick sooner."""
    computing = np.array([[2.0 * micro_batches], [2.0 * micro_batches]])
    until_last = computing + np.array([[2.0], [1.0]])
    share = idle_share(computing, until_last, [0, 0])
    assert share == pytest.approx(bubble_share(ranks=2, micro_batches=micro_batches))


def test_pipelines_do_not_wait_for_each_other_in_their_passes() -> None:
    computing, until_last = np.full((4, 3), 2.0), np.array([[4.0], [3.0], [2.0], [2.0]]) * np.ones(3)
    assert idle_share(computing, until_last, [0, 0, 1, 1]) == pytest.approx((1 / 2 + 1 / 2 + 0 + 0) / 4)


def test_messages_are_told_apart_by_what_they_carry_and_the_bubble_is_predicted_and_measured() -> None:
    use = pipeline_use(make_pipeline())
    assert use["expected_bubble"] == pytest.approx(1 / 5)
    assert use["measured_bubble"] == pytest.approx((1 / 4 + 2 / 4) / 2)
    sent = "activation_bytes", "gradient_bytes", "blocks"
    assert [[stage[key] for key in sent] for stage in use["by_rank"]] == [[4096, 0, 1], [0, 4096, 1]]


def test_the_section_of_a_pipeline_alone_has_a_line_for_it_and_for_each_rank() -> None:
    assert pipeline_use(make_record(label="ddp")) == {}
    assert pipeline_section(Comparison([make_record()])) is None
    section = pipeline_section(Comparison([make_pipeline()]))
    tables = {block.key: block for block in section.blocks if isinstance(block, Table)}
    assert [len(tables[key].rows) for key in ("pipelines", "pipeline_stages")] == [1, 2]


def test_copies_of_a_tied_weight_that_came_apart_are_named() -> None:
    (finding,) = told([make_pipeline((SAME, OTHER))], "tied-weight-apart")
    assert finding.values == {"weights": SHARED}
    assert told([make_pipeline()], "tied-weight-apart") == []


def test_everything_that_was_computed_dies_with_the_comparison() -> None:
    comparison = Comparison([make_record(), make_record(label="ddp")])
    comparison.as_json()
    row = ref(comparison.rows[0])
    del comparison
    gc.collect()
    assert row() is None
