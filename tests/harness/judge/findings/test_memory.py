from collections.abc import Sequence
from dataclasses import replace

import pytest

from harness.forms.layout import Layout, Tensor
from harness.job.job import OptimizerSection
from harness.judge.findings.amounts import _gap
from harness.judge.quantities import STEP_MOMENTS, derived_states
from harness.judge.wording import sentence
from harness.record import CommunicationPart, MemoryPart, Record
from harness.record.run import ObservationPart
from tests.records import changed, make_effective, make_ranks, make_record, told

LAYOUT = Layout(
    parameters=[Tensor(name="a.w", shape=[100, 10], dtype="float32")],
    decaying=["a.w"],
    buffers=[],
    blocks=["a", "b", "c"],
)
EXACT = {"weights": 4000, "gradients": 4000, "optimizer": 8004}


def moment(step: int, name: str, allocated: int, **changes) -> MemoryPart:
    values = {"peak_bytes": allocated, "kinds": EXACT} | changes
    return MemoryPart(step=step, moment=name, allocated_bytes=allocated, **values)


def run(memory: list[list[MemoryPart]], label: str = "ddp", **changes) -> Record:
    ranks = make_ranks(len(memory), memory=memory)
    return make_record(label=label, **{"world_size": len(memory), "layout": LAYOUT, "ranks": ranks} | changes)


def ids(record: Record) -> list[str]:
    return [finding.id for finding in told([record], "memory-")]


def steady(**changes) -> list[MemoryPart]:
    return [moment(step, name, 16_004, **changes) for step in (1, 2) for name in STEP_MOMENTS]


def test_states_off_by_more_than_a_thousandth_are_a_finding_with_both_figures() -> None:
    half = EXACT | {"optimizer": 4004}
    (finding,) = told([run([steady(kinds=half)] * 2)], "memory-")
    assert finding.id == "memory-differs"
    assert finding.values["differences"] == [
        {"rank": rank, "kind": "optimizer", "measured_bytes": 4004, "expected_bytes": 8004} for rank in (0, 1)
    ]
    assert ids(run([steady(kinds=EXACT | {"masters": 4000})])) == ["memory-differs"]


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [("torch.optim.sgd.SGD", []), ("torch.optim.adamw.AdamW", ["memory-differs"])],
)
def test_an_observed_script_is_held_to_adams_states_only_if_it_steps_adam(
    optimizer: str, found: list[str]
) -> None:
    record = run([steady(kinds=EXACT | {"optimizer": 4000})] * 2)
    seen = ObservationPart(command=["python", "train.py"], frameworks=[], base="ddp")
    effective = make_effective(optimizer=optimizer)
    assert ids(changed(record, backend={"effective": effective}, observation=seen)) == found


def test_parameters_that_a_script_may_leave_unused_owe_no_gradient() -> None:
    record = run([steady(kinds=EXACT | {"gradients": 3000})] * 2)
    seen = ObservationPart(command=["python", "train.py"], frameworks=[], base="ddp")
    for unused, found in ((True, []), (False, ["memory-differs"])):
        how = {"native_config": {"find_unused_parameters": unused}}
        assert ids(changed(record, backend=how, observation=seen)) == found


def leaking(per_step: int, moments: Sequence[str] = STEP_MOMENTS) -> list[MemoryPart]:
    return held(*(per_step * step for step in (1, 2, 3)), moments=moments)


def held(*allocated: int, moments: Sequence[str] = STEP_MOMENTS) -> list[MemoryPart]:
    """One probed step per figure; other moments stay at 16,004 bytes."""
    return [
        moment(step, name, 16_004 + (more if name in moments else 0), peak_bytes=20_000)
        for step, more in enumerate(allocated, start=1)
        for name in STEP_MOMENTS
    ]


def lingering(*grown: int) -> list[MemoryPart]:
    """Buffers that are held at changing moments, beside what grows."""
    buffers = {
        (2, "after_forward"): 9000, (3, "after_backward"): 5000, (4, "after_forward"): 3000,
        (4, "after_backward"): 6000,
    }  # fmt: skip
    return [
        m.model_copy(update={"allocated_bytes": m.allocated_bytes + buffers.get((m.step, m.moment), 0)})
        for m in held(*grown)
    ]


@pytest.mark.parametrize("memory", [[leaking(4000), leaking(0)], [lingering(0, 4000, 8000, 12_000)]])
def test_growth_at_every_moment_is_a_leak_through_buffers_too(memory: list[list[MemoryPart]]) -> None:
    (finding,) = told([run(memory)], "memory-")
    assert finding.id == "memory-grows"
    assert finding.values == {"bytes_per_step_by_rank": {"0": 4000}}


@pytest.mark.parametrize("begin", [0, 4000])
def test_a_leak_in_every_second_step_is_half_as_steep(begin: int) -> None:
    steps = [begin, 4000, begin + 4000, 8000, begin + 8000]
    (finding,) = told([run([held(*steps)])], "memory-")
    (growth,) = finding.values["bytes_per_step_by_rank"].values()
    assert growth == pytest.approx(2000, rel=0.35)


ADAM_OUTSIDE = {"kinds": {"weights": 4000, "gradients": 4000}, "outside_kinds": {"optimizer": 8004}}


NO_STATES_YET = [moment(0, "after_backward", 8000, kinds=ADAM_OUTSIDE["kinds"])]


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param(steady(), id="exact and steady"),
        pytest.param(steady(**ADAM_OUTSIDE), id="bytes outside the allocator count as held"),
        pytest.param(NO_STATES_YET, id="the first step"),
        pytest.param(leaking(4000, moments=("after_backward",)), id="a buffer that is held for a while"),
        pytest.param(held(0, 0, 4000, 4000, 4000), id="allocated once"),
        pytest.param(held(0, 0, 4000), id="allocated once, at last"),
        pytest.param(held(0, 4000), id="allocated once, of two probed steps"),
        pytest.param(leaking(-2000), id="shrinks"),
        pytest.param(leaking(4000)[:3], id="one probed step"),
        pytest.param(lingering(0, 0, 0, 0), id="buffers that linger"),
    ],
)
def test_what_is_exact_and_does_not_rise_at_every_moment_is_no_finding(memory: list[MemoryPart]) -> None:
    assert ids(run([memory])) == []


def later(ended: Sequence[int], peaks: Sequence[int] = (), label: str = "ddp", **changes) -> Record:
    """A probed step of 20,000 bytes, and steps after it."""
    moments = [moment(1, name, 16_000, peak_bytes=20_000) for name in STEP_MOMENTS]
    return followed(run([moments], label, **changes), ended, peaks)


def followed(record: Record, ended: Sequence[int], peaks: Sequence[int] = ()) -> Record:
    """The record with steps after its last probed one."""
    step = record.steps[0]
    windows = ["probed", *["timed"] * max(len(ended), len(peaks))]
    steps = [replace(step, step=number, window=window) for number, window in enumerate(windows)]
    (part,) = record.ranks
    series = {"step_allocated_bytes": [None, *ended], "step_peak_bytes": [None, *peaks]}
    return record.model_copy(update={"steps": steps, "ranks": [part.model_copy(update=series)]})


@pytest.mark.parametrize(
    ("ended", "growth"),
    [
        ([16_000, 20_000, 24_000, 28_000, 32_000, 36_000], 4000),
        ([16_000, 16_000, 16_000, 20_000, 24_000, 28_000], 2666),
        ([16_000, 20_000, 16_000, 18_000, 19_000, 17_000], None),  # buffers that linger
        ([16_000, 20_000, 24_000, 28_000, 28_000, 28_000, 28_000, 28_000], None),  # what is made once
        ([16_000, 20_000, 24_000, 28_000], None),  # too few steps
    ],
)
def test_a_leak_that_begins_after_the_probed_steps_is_found(ended: list[int], growth: int | None) -> None:
    found = told([later(ended)], "memory-grows")
    assert [f.values for f in found] == ([{"bytes_per_step_by_rank": {"0": growth}}] if growth else [])
    assert all("per step after the probed steps" in f.message for f in found)
    assert ids(changed(later(ended), layout={"unreached": None})) == []


USUAL = [20_000, 20_500, 19_000, 20_000]


def test_a_step_that_needs_far_more_than_the_others_is_found() -> None:
    (finding,) = told([later([], [*USUAL, 30_000])], "memory-")
    assert finding.id == "memory-spikes"
    assert finding.values == {"rank": 0, "step": 5, "peak_bytes": 30_000, "usual_peak_bytes": 20_000}
    assert ids(later([], [*USUAL, 21_500])) == []
    assert ids(later([], [30_000] * 4 + [20_000])) == []  # data may differ from step to step
    (finding,) = told([later([], [30_000, 32_000, *[30_000] * 3])], "memory-")
    assert finding.message.endswith("32,000 bytes in step 2, 20,000 in probed steps")
    assert ids(later([], [*USUAL[1:], 30_000])) == []  # too few steps


def test_a_spike_of_the_job_is_no_backends_fault() -> None:
    single, ddp = (later([], [*USUAL, 30_000], label) for label in ("single", "ddp"))
    found = told([single, ddp], "memory-")
    assert [f.backends for f in found] == [("single",)]


def test_a_copy_that_the_probed_steps_lack_is_found_and_states_to_come_are_not() -> None:
    """A sixth of the model's weights may be chance; what the reference keeps, too, is the job's."""
    kept = [16_000, 16_000, 20_000, 16_000]
    finding, *_ = told([later(kept)], "memory-")
    (difference,) = finding.values["differences"]
    assert difference == {
        "rank": 0, "kind": "unprobed", "step": 3, "measured_bytes": 20_000, "expected_bytes": 16_000,
    }  # fmt: skip
    assert (
        "rank 0 holds 20,000 bytes at the end of step 3, 16,000 at that of the probed steps" in finding.text
    )
    assert ids(later([16_000, 16_900])) == []
    single, ddp = (later(kept, label=label) for label in ("single", "ddp"))
    assert [f.backends for f in told([single, ddp], "memory-")] == [("single",)]
    assert ids(changed(later(kept), layout={"unreached": None})) == []


@pytest.mark.parametrize(
    ("seconds", "ended", "found"),
    [
        (0.1, [20_000, 24_000], []),
        (0.1, [20_000, 28_000], ["memory-differs"]),
        (0.4, [16_000, 20_000, 24_000, 28_000, 28_000], []),
        (0.4, [16_000, 20_000, 24_000, 28_000, 32_000], ["memory-differs"]),  # it comes within a second
        (0.1, [20_000, 24_000, 28_000, 32_000, 36_000, 40_000], []),
    ],
)
def test_what_ddp_reduced_is_held_until_nccls_watchdog_comes(
    seconds: float, ended: list[int], found: list[str]
) -> None:
    """4,000 bytes in each step, since buffers were released before the probed one."""
    record = later(ended)
    reduced = CommunicationPart(
        rank=0, phase="backward", op="all_reduce", dtype="float32", group="0", group_ranks=[0, 1],
        group_size=2, calls=2, payload_bytes=4000,
    )  # fmt: skip
    assert record.windows.probed == 1
    of_nccl = {
        "comm": [reduced], "world": record.world.model_copy(update={"collectives": "nccl"}),
        "steps": [replace(step, seconds=seconds) for step in record.steps],
    }  # fmt: skip
    assert ids(record.model_copy(update=of_nccl)) == found
    assert ids(record.model_copy(update={"comm": []}))


@pytest.mark.parametrize(
    ("ended", "found"),
    [
        ([20_000, 20_000, 16_000, 20_000, 20_000], []),  # a busy machine: buffers after most steps
        ([20_000, 20_000, 20_000], []),  # too few to tell
        ([20_000, 20_000, 20_000, 20_000], ["memory-differs"]),
        ([16_000, 28_000, 16_000], ["memory-differs"]),  # more than a buffer
    ],
)
def test_a_buffer_of_gloo_after_most_steps_is_no_copy(ended: list[int], found: list[str]) -> None:
    sent = CommunicationPart(
        rank=0, phase="backward", op="all_reduce", dtype="float32", group="0", group_ranks=[0, 1],
        group_size=2, calls=1, payload_bytes=4000, largest_bytes=4000,
    )  # fmt: skip
    record = later(ended)
    world = record.world.model_copy(update={"collectives": "gloo"})
    assert ids(record.model_copy(update={"comm": [sent], "world": world})) == found


def test_what_steps_leave_is_that_of_the_rank_whose_states_are_known() -> None:
    """Rank 0 holds the copy and counted no kinds: nothing is said of rank 1."""
    moments = [moment(1, name, 16_000, peak_bytes=20_000) for name in STEP_MOMENTS]
    record = run([[m.model_copy(update={"kinds": None}) for m in moments], moments])
    series = ([None, 16_000, 20_000, 16_000], [None, 16_000, 16_000, 16_000])
    for copied, ranks in ((0, []), (1, [1])):
        parts = [
            part.model_copy(update={"step_allocated_bytes": series[part.rank != copied]})
            for part in record.ranks
        ]
        steps = [
            replace(record.steps[0], step=n, window="timed" if n else "probed") for n in range(len(series[0]))
        ]
        found = told([record.model_copy(update={"ranks": parts, "steps": steps})], "memory-differs")
        assert [one["rank"] for f in found for one in f.values["differences"]] == ranks


def test_a_rank_that_holds_much_more_is_a_finding() -> None:
    (finding,) = told([run([steady(), steady(peak_bytes=40_000)])], "memory-")
    assert finding.id == "memory-imbalance"
    assert finding.values["peak_bytes_by_rank"] == [16_004, 40_000]
    assert finding.values["expected_model_state_bytes_by_rank"] == [16_004, 16_004]
    assert finding.message == (
        "ddp on 2 ranks: rank 1 has a peak of 40,000 bytes, rank 0 of 16,004: a gap of 86 % of the mean "
        "over ranks"
    )
    assert ids(changed(run([steady(), steady(peak_bytes=40_000)]), layout={"unreached": None})) == []
    memory = [steady(peak_bytes=20_000) for _ in range(8)]
    memory[5] = steady(peak_bytes=24_000)
    (finding,) = told([run(memory)], "memory-")
    assert "rank 5 has a peak of 24,000 bytes, rank 0 of 20,000: a gap of 20 % of the mean" in finding.message


def test_what_a_strategy_divides_unevenly_is_no_imbalance_where_the_optimizer_is_not_known() -> None:
    """Two parameters of one group: the rank whose part one of them only reaches into keeps all of it."""
    names = [Tensor(name=name, shape=[size], dtype="float32") for name, size in (("a", 900), ("b", 300))]
    layout = {"parameters": names, "decaying": ["a", "b"]}
    job = {"optimizer": OptimizerSection(factory="own:lion")}
    record = changed(run([steady(), steady()], "zero1"), layout=layout, job=job)
    forms = [derived_states(record, rank) for rank in (0, 1)]
    sizes = [form.kinds()["gradients"] for form in forms if form is not None]
    assert sizes == [900 * 4, 1200 * 4]
    seen = ObservationPart(command=["python", "train.py"], frameworks=[], base="zero1")
    effective = make_effective(optimizer="own.Lion")
    script = changed(
        record, backend={"effective": effective}, observation=seen, job={"optimizer": OptimizerSection()}
    )
    for extra, found in ((0, []), (2000, ["memory-imbalance"])):
        # How it cuts states of its own is its own design, too.
        kinds = [
            EXACT | {"gradients": sizes[0], "optimizer": 9000},
            EXACT | {"gradients": sizes[1] + extra, "optimizer": 3000},
        ]
        ranks = make_ranks(2, memory=[steady(kinds=of, peak_bytes=sum(of.values())) for of in kinds])
        for run_of in (record, script):
            assert ids(changed(run_of, ranks=ranks)) == found


def test_a_peak_higher_by_one_buffer_of_the_transport_is_chance() -> None:
    record = run([steady(), steady(peak_bytes=20_000)])
    comm = [part.model_copy(update={"largest_bytes": 4000}) for part in record.comm]
    assert comm
    assert ids(record) == ["memory-imbalance"]
    assert ids(changed(record, comm=comm)) == []
    assert ids(changed(record, comm=comm, world={"collectives": "nccl"})) == ["memory-imbalance"]
    # With what a rank gives or gets of the whole.
    for op, found in (("all_reduce", ["memory-imbalance"]), ("reduce_scatter", []), ("all_gather", [])):
        parts = [part.model_copy(update={"largest_bytes": 2000, "op": op}) for part in record.comm]
        assert [one.id for one in told([changed(record, comm=parts)], "memory-")] == found


def test_a_gap_is_told_less_what_the_strategy_itself_cuts_unevenly() -> None:
    forms: list[dict[int, int]] = [{0: 80, 1: 130}, {0: 80, 1: 80}, {}]
    gaps = [_gap("a peak", {0: 100, 1: 150}, form) for form in forms]
    assert [gap["share"] for gap in gaps] == [0, 50 / 125, 50 / 125]
    assert _gap("a peak", {}, {}) == {}
    assert sentence("memory-imbalance", **_gap("a peak", {0: 100, 1: 150}, {0: 80, 1: 90})) == (
        "rank 1 has a peak of 150 bytes, rank 0 of 100: a gap of 32 % of the mean over ranks, minus what the "
        "closed forms expect of each"
    )


@pytest.mark.parametrize(("at_the_end", "found"), [(2, []), (5, ["3"])])
def test_retries_of_the_allocator_after_the_probed_steps_are_named(at_the_end: int, found: list[str]) -> None:
    memory = [moment(1, "after_step", 4000, num_alloc_retries=2)]
    ranks = make_ranks(2, memory=[memory] * 2, num_alloc_retries=[None, at_the_end])
    findings = told([run([memory] * 2, ranks=ranks)], "allocator-retries")
    assert [finding.values["retries_by_rank"]["1"] for finding in findings] == [int(n) for n in found]
