"""Planted defects of time, at the level of records."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.forms.layout import Layout, Tensor
from harness.job.experiment import MeasureSection
from harness.judge.comparison import Comparison
from harness.judge.findings import timing
from harness.judge.findings.finding import Finding, role_of, statements
from harness.judge.quantities import Run
from harness.rank.probes.time import read
from harness.record import DimensionPart, OverlapPart, PlacementPart, RankPart, Record
from harness.record.run import ObservationPart
from tests.harness.cli.command_line import SMALL, records, succeeds
from tests.plugins import register
from tests.records import changed, make_model, make_ranks, make_record, make_steps, told
from tests.timed_records import COUNT, found, phases, processors, ranks, repeats, run, steps

SCRIPT = ObservationPart(command=["train.py"], frameworks=[])


def test_a_timer_that_stops_too_early_is_found_and_fetching_overlaps_on_cuda_alone() -> None:
    # The host's clock saw 20 ms, the device's events half a second.
    record = run(ranks=ranks(of_all={"step_seconds": [0.02] * COUNT}), world={"device": "cuda"})
    (finding,) = [f for f in found(record) if f.id != "slow-data"]
    assert (finding.id, finding.values["step_seconds"]) == ("inconsistent-timing", 0.02)
    assert finding.values["phase_seconds"] == pytest.approx(0.45)
    parts = ranks(of_all={"data_seconds": [0.09] * COUNT})
    assert [f.id for f in found(run(ranks=parts))] == ["inconsistent-timing"]
    assert found(run(ranks=parts, world={"device": "cuda"})) == []


@pytest.mark.parametrize(
    ("trained", "changes", "said"),
    [
        (5, {}, "all 5 steps warm up, are probed or traced; train at least 7 steps"),
        (7, {"world": {"device": "cuda"}}, "or traced; train at least 8 steps"),
        (8, {"observation": SCRIPT}, "all 8 steps warm up, are probed or cool down; train at least 9 steps"),
        (5, {"measure": None}, "train more steps"),
    ],
)
def test_a_run_without_a_timed_step_says_how_many_it_needs(
    trained: int, changes: dict[str, Any], said: str
) -> None:
    early = make_steps([5.0] * trained, [1.0] * trained, changes={n: {"window": "warmup"} for n in range(8)})
    measure = MeasureSection(traced_steps=0 if "observation" in changes else 1)
    record = changed(make_record(), **{"steps": early, "measure": measure} | changes)
    (finding,) = told([record], "nothing-timed")
    assert said in finding.message


def billion(seconds: float, **of_ranks: Any) -> Record:
    """A model of 10^9 parameters on two A100, 1024 tokens a step: 6.1e12 FLOPs."""
    shape = {"multiplying_parameters": 10**9, "layers": 1, "attention_width": 1}
    parts = ranks(of_all={
        "device_name": "NVIDIA A100-SXM4-80GB", "phase_seconds": {}, "data_seconds": [0.0] * COUNT,
        "step_seconds": [seconds] * COUNT, **of_ranks,
    })  # fmt: skip
    tensor = Tensor(name="h.0.weight", shape=[30_000, 30_000], dtype="float32")
    layout = Layout(parameters=[tensor], decaying=[], buffers=[], blocks=["h.0"])
    return changed(
        run(ranks=parts, steps=steps([seconds] * COUNT), layout=layout), model=make_model(geometry=shape)
    )


def test_a_debugging_variable_in_one_row_is_found_and_in_all_it_is_not() -> None:
    environment = {"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}
    (finding,) = found(run(environment=environment))
    assert finding.values["ddp on 2"] == ["CUDA_LAUNCH_BLOCKING=1"]
    both = [make_record(steps=steps(), ranks=ranks(1), environment=environment), run(environment=environment)]
    assert Comparison(both).findings == []


SOMEWHAT = phases(0.15)
"""1.5 times as slow as the others."""
MUCH = phases(0.3)
"""Almost three times as slow."""


def slow(*records: Record) -> list[Finding]:
    return [finding for finding in found(*records) if finding.id == "slow-rank"]


def test_a_rank_that_is_slow_in_every_repeat_is_found() -> None:
    first, *others = slow(*repeats(3, ranks=ranks(4, phase_seconds=SOMEWHAT)))
    assert len(others) == 2
    assert first.values["rank"] == 1
    assert first.values["median_seconds"]["1"] == pytest.approx(0.16)
    assert first.runs is None


@pytest.mark.parametrize("runs", [1, 2])
def test_few_runs_must_show_more_than_a_neighbour_on_the_same_core_does(runs: int) -> None:
    assert slow(*repeats(runs, ranks=ranks(4, phase_seconds=SOMEWHAT))) == []
    assert len(slow(*repeats(runs, ranks=ranks(4, phase_seconds=MUCH)))) == runs


def test_a_device_that_is_slow_under_every_backend_is_found_without_repeats() -> None:
    labels = ("ddp", "zero1", "fsdp")
    records = [run(label, ranks=ranks(phase_seconds=SOMEWHAT)) for label in labels]
    assert [finding.backends for finding in slow(*records)] == [("ddp",), ("zero1",), ("fsdp",)]
    assert slow(*records, run("zero2")) == []


def test_a_rank_that_lost_its_core_to_another_program_is_not_slow() -> None:
    # 0.2 s in each of 8 steps went to another program while this rank waited.
    taken = {"machine_busy_seconds": 9.6, "process_seconds": 4.0}
    disturbed = ranks(
        of_all={"processors": processors(**taken)}, phase_seconds=MUCH,
        processors=processors(waiting_seconds=1.6, **taken),
    )  # fmt: skip
    (busy,) = found(run(ranks=disturbed, environment={"cores": 2}))
    assert busy.id == "busy-machine"
    assert busy.values["other_cores"] == pytest.approx(0.4)


def test_a_rank_that_waits_for_a_core_because_of_another_rank_is_slow() -> None:
    # Both are bound to one core: nothing else ran, so the waiting is the run's own.
    own = {"machine_busy_seconds": 4.0, "process_seconds": 2.0, "waiting_seconds": 1.6}
    (finding,) = slow(run(ranks=ranks(phase_seconds=MUCH, processors=processors(**own))))
    assert finding.values["rank"] == 1


def traced(seconds: float) -> list[OverlapPart]:
    part = OverlapPart(
        step=3, seconds=0.5, compute_seconds=seconds, communication_seconds=0.1,
        exposed_seconds=0.1, idle_seconds=0.4 - seconds,
    )  # fmt: skip
    return [part] * 5


def test_a_rank_that_computes_longer_in_traced_steps_is_found() -> None:
    even = {"overlap": traced(0.1)}
    assert slow(run(ranks=ranks(of_all=even))) == []
    (finding,) = slow(run(ranks=ranks(of_all=even, overlap=traced(0.3))))
    assert (finding.values["rank"], finding.values["what"]) == (1, "computing (traced steps)")


def asleep(first: list[float], second: list[float], **changes: Any) -> Record:
    """A run whose ranks lie idle for so many milliseconds of each traced step."""
    idle, sleepy = (
        [traced(0.1)[0].model_copy(update={"asleep_seconds": ms / 1e3}) for ms in of_rank]
        for of_rank in (first, second)
    )
    return run(ranks=ranks(of_all={"overlap": idle}, overlap=sleepy), **changes)


def test_a_rank_that_sleeps_is_named_by_what_a_third_of_the_steps_shows() -> None:
    (finding,) = slow(asleep([0, 0, 0.5, 0, 0, 0], [0, 4, 5, 0, 1, 0]))
    assert finding.values["rank"] == 1
    assert finding.values["seconds"] == {"0": 0.0, "1": 0.004}
    assert finding.message == (
        "ddp on 2 ranks: rank 1 is idle for 4 ms of a step, outside of communication, and makes the others "
        "wait"
    )
    assert len(slow(asleep([1.2] * 6, [20] * 6))) == 1
    records = [asleep([0], [ms], repeat=n, run_id=f"r{n}") for n, ms in enumerate((5, 0, 4))]
    assert len(slow(*records)) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([0, 0, 0], [0, 0, 40]),
        ([3, 3, 3], [4, 4, 4]),
        ([0, 0], [5, 5]),
        ([0, 0, 0], [0.9, 0.9, 0.9]),
        ([0, 6.9, 27.8], [0, 0.9, 20.4]),
        ([0, 3.4, 85, 0, 0, 0, 9.1], [0, 0, 155, 0, 0, 0, 0.6]),
        ([0, 0, 99, 1.5, 0, 0, 0], [0, 0, 49, 1.6, 0, 0, 4.6]),
    ],
    ids=[
        "one step", "both ranks", "too few steps", "little", "a disk twice", "a machine that stops",
        "another",
    ],
)  # fmt: skip
def test_what_is_no_sleep_of_one_rank_is_not_named(first: list[float], second: list[float]) -> None:
    assert slow(asleep(first, second)) == []


def test_threads_of_a_rank_wait_for_each_other_and_stages_for_other_stages() -> None:
    record = asleep([0] * 3, [5] * 3)
    for world in ({"threads_per_rank": 2}, {"dimensions": [DimensionPart(name="pipeline", size=2)]}):
        assert slow(changed(record, world=world)) == []


def test_the_slowest_rank_is_that_of_most_steps() -> None:
    series = np.array([[1.0] * 10, [2.0] * 8 + [0.5] * 2])
    assert timing.persistently_slowest(series) == 1
    assert timing.persistently_slowest(np.array([[1.0] * 10, [2.0] * 7 + [0.5] * 3])) is None
    assert timing.persistently_slowest(series[:, :4]) is None
    assert Comparison([make_record()]).findings == []


LONG = (3.0, 3.0, 9.0, 9.0, 2.5, 2.0, *[0.5] * 6)
"""Timing begins at step 4; the steps are steady from step 6."""
LONGER = (0.7, 0.7, 9.0, 9.0, 0.7, 0.7, *[0.5] * 6)
"""The early steps take 1.4 times as long."""
STEADY = (3.0, 2.0, 9.0, 9.0, *[0.5] * 8)


def early(*records: Record) -> list[Finding]:
    return [finding for finding in found(*records) if finding.id == "warmup-too-short"]


def lasting(count: int, seconds: Sequence[float], **changes: Any) -> list[Record]:
    return repeats(count, steps=steps(seconds), **changes)


TIMED = {"first_timed_step": 4, "first_steady_step": 6, "warmup_steps": 1}
SOONER = (3.0, 3.0, 9.0, 9.0, 2.5, *[0.5] * 7)
NEVER = (4.0, 4.0, 9.0, 9.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("records", "first_steady", "clause"),
    [
        (lasting(3, LONGER), 6, "timing begins at step 4, steps are steady from step 6"),
        (lasting(1, LONG), 6, "timing begins at step 4, steps are steady from step 6"),
        # The latest steady step of the repeats is told.
        ([*lasting(2, SOONER), run(repeat=2, run_id="r2", steps=steps(LONG))], 6, "from step 6"),
        (lasting(3, NEVER), None, "do not become steady"),
    ],
    ids=["three runs", "one run", "the latest", "never"],
)  # fmt: skip
def test_timing_that_begins_before_the_steady_state_is_found(
    records: list[Record], first_steady: int | None, clause: str
) -> None:
    (finding,) = early(*records)
    assert finding.values == TIMED | {"first_steady_step": first_steady}
    assert clause in finding.clause


@pytest.mark.parametrize("count", [1, 2])
def test_few_runs_must_show_more_than_a_host_that_changes_its_speed(count: int) -> None:
    assert early(*lasting(count, LONGER)) == []
    assert len(early(*lasting(count, LONG))) == 1


# Sound backends that were once accused, as the machine was busy or shared. Where a record did not say who
# used the processors, nothing is taken to be lost, which is the hardest case.
CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("disturbed_runs.json").read_text())
NAMES = [f"{case['backend']}, {case['source']}" for case in CASES]


def recorded(case: dict[str, Any], *, undisturbed: bool = False, repeat: int = 0) -> Record:
    """The run of a case; `undisturbed`: as if other work had taken nothing."""
    count = len(case["seconds"])
    timed = zip(case["windows"], case["seconds"], strict=True)
    changes = {step: {"window": window, "seconds": seconds} for step, (window, seconds) in enumerate(timed)}
    ranks = [
        rank.model_copy(
            update=own
            | {"processors": processors(**own["processors"] if own["processors"] and not undisturbed else {})}
        )
        for rank, own in zip(make_ranks(len(case["ranks"])), case["ranks"], strict=True)
    ]
    steps = make_steps([5.0] * count, [1.0] * count, changes=changes)
    return make_record(label=case["backend"], ranks=ranks, steps=steps, repeat=repeat, run_id=f"r{repeat}")


def alarms(*records: Record) -> set[str]:
    return {finding.id for finding in told(records, "slow-rank", "warmup-too-short")}


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_disturbed_run_is_not_accused(case: dict[str, Any]) -> None:
    assert alarms(recorded(case)) == set()


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_what_the_run_shows_is_there_and_every_repeat_showing_it_would_be_found(case: dict[str, Any]) -> None:
    run = Run.of(recorded(case, undisturbed=True))
    shown = timing.slow_ranks(run) if case["alarm"] == "slow-rank" else timing.slowed_early(run)
    assert shown
    repeats = [recorded(case, undisturbed=True, repeat=repeat) for repeat in range(3)]
    assert alarms(*repeats) == {case["alarm"]}


def loaded(load: float | None) -> Comparison:
    """One thread of the reference and two of ddp, on 8 cores."""
    quiet = make_record(environment={"load_average": 0.1})
    return Comparison([quiet, make_record(label="ddp", environment={"load_average": load})])


def test_a_load_that_no_run_before_it_leaves_is_told_of_what_ran() -> None:
    (finding,) = (f for f in loaded(10.5).findings if f.id == "busy-machine")
    assert finding.backends == ("ddp",)
    assert finding.values == {"load_average": 10.5, "cores": 8, "threads_of_largest_run": 2}
    assert role_of("busy-machine") == "figures"
    busy = make_record(environment={"load_average": 30.0})
    assert len(told([busy], "busy-machine")) == 1
    assert told([changed(busy, status="unsupported")], "busy-machine") == []


@pytest.mark.parametrize(
    ("kind", "records", "sentence"),
    [
        ("busy-machine", [make_record(label=label, environment={"load_average": load})
                          for label, load in (("ddp", 10.5), ("zero1", 12.25))],
         "ddp and zero1 on 2 ranks: the load average at the start exceeded cores and threads of the largest "
         "run combined: other programs, or processes of an earlier run, were running"),
        ("cores-shared", [make_record(label=label, world_size=16) for label in ("ddp", "fsdp")],
         "ddp and fsdp on 16 ranks: 16 threads per node share 8 cores: speed and scaling say little about "
         "the strategies"),
    ],
    ids=["load", "cores"],
)  # fmt: skip
def test_only_what_was_seen_is_told_and_of_cells_alike_once(
    kind: str, records: list[Record], sentence: str
) -> None:
    (one,) = statements(told(records, kind))
    assert (one.sentence, one.role) == (sentence, "figures")


def beside(other_seconds: float, *, cores: int = 2, **changes: Any) -> set[str]:
    """Findings of two ranks of one thread beside work that used so many processor seconds of four."""
    used = processors(machine_busy_seconds=8.0 + other_seconds)
    record = run(
        ranks=ranks(of_all={"processors": used}),
        environment={"cores": cores} | changes,
    )
    return {finding.id for finding in Comparison([record]).findings}


def unbound(*places: PlacementPart, device: str = "cpu", threads: int = 1) -> list[str]:
    """What is said of two ranks in these places."""
    parts = ranks(of_all={"placement": places[0]}, placement=places[1])
    record = run(ranks=parts, world={"device": device, "threads_per_rank": threads})
    return [f.text for f in told([record], "numa-unbound")]


def place(*numa_nodes: int, gpu: int | None = None, count: int = 8) -> PlacementPart:
    return PlacementPart(
        processors=f"0-{count - 1}", processor_count=count, numa_nodes=list(numa_nodes), device_numa_node=gpu
    )


PLUGIN = """
import time

from harness.backends.ddp import DdpBackend


class SlowRank(DdpBackend):
    '''Rank 1 takes 0.4 s longer for each forward pass: more than tests next to this one take from it.'''

    def prepare(self, build_model, build_optimizer, context):
        engine = super().prepare(build_model, build_optimizer, context)
        forward = engine.forward

        def slow_forward(batch):
            loss = forward(batch)
            time.sleep(0.4 * context.world.rank)
            return loss

        engine.forward = slow_forward
        return engine
"""


@pytest.mark.skipif(read() is None, reason="this system does not say who used the processors")
def test_a_slow_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_plugin.py").write_text(PLUGIN)
    register(tmp_path, {"slow-rank": "slow_plugin:SlowRank"})
    monkeypatch.syspath_prepend(tmp_path)
    steps = ["--set", "training.steps=12", "--set", "measure.warmup_steps=1"]
    succeeds("run", "--backend", "slow-rank", "--nproc", "2", *SMALL, *steps, cwd=tmp_path)
    (record,) = records(tmp_path / "runs")
    # The other rank waits in the backward pass, so whole steps last as long on both and tell nothing.
    (finding,) = told([record], "slow-rank")
    assert (finding.values["rank"], finding.values["what"]) == (1, "fetching and forward pass")


def slow_data(**of_rank_1: Any) -> list[RankPart]:
    return ranks(data_seconds=[0.15] * COUNT, phase_seconds={}, **of_rank_1)


def of_phases(forward: list[float], other: list[float]) -> list[Record]:
    """Three runs whose ranks spend these seconds in forward passes."""
    rest: dict[str, Any] = {"backward": [0.05] * COUNT, "step": [0.01] * COUNT}
    parts = ranks(
        of_all={"phase_seconds": {"forward": forward, **rest}}, phase_seconds={"forward": other, **rest}
    )
    return repeats(3, ranks=parts)


UNKNOWN = {"processors": None}
STOLEN = {"processors": processors(machine_busy_seconds=6.4, machine_stolen_seconds=1.6, process_seconds=3.2)}
# 0.15 s of fetching in 8 steps: 0.8 s of the 1.2 s are another program's.
FETCHING = slow_data(processors=processors(waiting_seconds=0.8, machine_busy_seconds=8.8))
# Early steps last 3.5 s longer than the others, of which another program took 3.4 s.
WAITED = ranks(of_all={"processors": processors(waiting_seconds=3.4, machine_busy_seconds=11.4)})
# Rank 0 begins 0.05 s late; rank 1 waits for its broadcast, and both end together.
EARLY = ranks(
    phase_seconds={"forward": [0.15] * COUNT, "backward": [0.3] * COUNT, "step": [0.05] * COUNT},
    step_seconds=[0.55] * COUNT,
)  # fmt: skip
EVEN, ODD = ([0.4 if n % 2 == which else 0.1 for n in range(COUNT)] for which in (1, 0))
SLIGHTLY = (3.0, 2.0, 9.0, 9.0, 0.55, 0.55, *[0.5] * 6)
SWAPPED = [
    part.model_copy(update={"rank": 1 - part.rank}) for part in ranks(phase_seconds=MUCH)
]  # fmt: skip
NOT_TOLD: dict[str, tuple[str, list[Record]]] = {
    "a clean run": ("", [run()]),
    "fetching is slow in some repeats": ("slow-data", [run(ranks=slow_data()), run(repeat=1, run_id="r1")]),
    "fetching waits for a processor": ("slow-data", [run(ranks=FETCHING)]),
    "a rank is fast in one repeat": (
        "slow-rank",
        [*repeats(2, ranks=ranks(4, phase_seconds=MUCH)), run(repeat=2, run_id="r2", ranks=ranks(4))]),
    "ranks are slow in turns": (
        "slow-rank",
        [*repeats(2, ranks=ranks(phase_seconds=MUCH)), run(repeat=2, run_id="r2", ranks=SWAPPED)]),
    "a hypervisor took it": ("slow-rank", [run(ranks=ranks(of_all=STOLEN, phase_seconds=MUCH))]),
    "nobody says who used the processors": (
        "slow-rank", repeats(3, ranks=ranks(of_all=UNKNOWN, phase_seconds=MUCH))),
    "ranks take turns within a run": ("slow-rank", of_phases(EVEN, ODD)),
    "a rank begins early and waits in the forward pass": ("slow-rank", repeats(3, ranks=EARLY)),
    "a small difference compared with the step": (
        "slow-rank",
        repeats(3, ranks=ranks(of_all={"phase_seconds": phases(0.005)}, phase_seconds=phases(0.025)))),
    "one repeat is steady": (
        "warmup-too-short", [*lasting(2, LONG), run(repeat=2, run_id="r2", steps=steps(STEADY))]),
    "early steps, and nobody says who used the processors": (
        "warmup-too-short", lasting(3, LONG, ranks=ranks(of_all=UNKNOWN))),
    "one early stretch waited for a processor": (
        "warmup-too-short", [run(steps=steps(LONG), ranks=WAITED)]),
    "all waited for a processor": ("warmup-too-short", lasting(3, LONG, ranks=WAITED)),
    "early steps hardly change the average": ("warmup-too-short", lasting(3, SLIGHTLY)),
    "early steps are covered by the warm-up": ("warmup-too-short", lasting(3, STEADY)),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_TOLD)
def test_what_may_be_the_machine_or_costs_nothing_is_not_told(name: str) -> None:
    kind, records = NOT_TOLD[name]
    assert [finding for finding in found(*records) if finding.id.startswith(kind)] == []


@pytest.mark.parametrize(
    ("record", "kind", "values"),
    [
        (run(ranks=slow_data()), "slow-data", {"data_share": pytest.approx(0.3)}),
        (run(ranks=ranks(timed_probes=["counter"])), "instrumented-timing",
         {"single on 1": [], "ddp on 2": ["counter"]}),
        (run("zero1", backend={"native_config": {"comms_logger": {"enabled": True}}}), "instrumented-timing",
         {"zero1 on 2": ["comms_logger"]}),
    ],
)  # fmt: skip
def test_what_one_row_shows_is_found_with_its_figures(
    record: Record, kind: str, values: dict[str, Any]
) -> None:
    (finding,) = found(record)
    assert (finding.id, finding.backends) == (kind, (record.backend.label,))
    assert {name: finding.values[name] for name in values} == values


@pytest.mark.parametrize(
    ("seconds", "device", "values"),
    [
        # fp32 on two A100 is 39 TFLOP/s at most: 6.1e12 in 0.1 s is too much, in 0.2 s it is not.
        (0.1, {}, {"peak_flops_per_second": pytest.approx(39e12)}),
        (0.2, {}, None),
        (
            0.5,
            {"device_name": "cpu", "matmul_flops_per_second": {"float32": 1e12}},
            {"peak_source": "measured"},
        ),
        (1e-6, {"device_name": "cpu"}, None),
    ],
    ids=["beyond the sheet", "possible", "beyond the measured peak", "no peak is known"],
)
def test_throughput_beyond_the_peak_is_found(
    seconds: float, device: dict[str, Any], values: dict[str, Any] | None
) -> None:
    """Of this module alone: the collectives of these records are not those of the model."""
    record = billion(seconds, **device)
    findings = told([record], "faster-than-possible", "inconsistent-timing", "work-outside-clock")
    assert [finding.id for finding in findings] == ["faster-than-possible"] * (values is not None)
    assert all(
        finding.values[name] == value for finding in findings for name, value in (values or {}).items()
    )


@pytest.mark.parametrize(
    ("other_seconds", "environment", "busy"),
    [
        pytest.param(0.7, {}, False, id="less than a fifth of a core"),
        pytest.param(0.9, {}, True, id="a fifth of a core"),
        pytest.param(3.9, {"cores": 3}, False, id="a core that the ranks leave free"),
        pytest.param(4.9, {"cores": 3}, True, id="more than that core"),
        pytest.param(0.0, {"load_average": 30.0}, False, id="a load before the run alone"),
        pytest.param(4.0, {"load_average": 0.1}, True, id="no load before the run"),
    ],
)
def test_work_that_takes_a_fifth_of_a_core_from_the_ranks_is_told(
    other_seconds: float, environment: dict[str, Any], busy: bool
) -> None:
    assert ("busy-machine" in beside(other_seconds, **environment)) is busy


@pytest.mark.parametrize("load", [None, 0.0, 2.0, 8.5, 10.0])
def test_cells_one_after_the_other_are_no_other_work(load: float | None) -> None:
    assert "busy-machine" not in {f.id for f in loaded(load).findings}


def test_as_many_threads_as_cores_take_no_turns_nor_do_ranks_on_gpus() -> None:
    for size, device in ((8, "cpu"), (16, "cuda")):
        record = make_record(label="ddp", world_size=size, world={"device": device})
        assert told([record], "cores-shared") == []


MOVED = "may run on processors of several NUMA nodes in turn (ranks: 0, 1; NUMA nodes: 0, 1)"
FAR = "may run on processors of another NUMA node than their GPU (ranks: 1; NUMA nodes: 0)"


@pytest.mark.parametrize(
    ("places", "world", "texts"),
    [
        pytest.param([place(0, 1), place(0, 1)], {}, [MOVED], id="moved between sockets"),
        pytest.param([place(0, 1, gpu=0), place(0, 1, gpu=1)], {"device": "cuda", "threads": 8}, [MOVED],
                     id="moved beside their GPUs"),
        pytest.param([place(0, gpu=0), place(0, gpu=1)], {"device": "cuda"}, [FAR], id="far from its GPU"),
        pytest.param([place(0), place(1)], {}, [], id="bound"),
        pytest.param([place(0, gpu=0), place(1, gpu=1)], {"device": "cuda"}, [], id="bound to their GPUs"),
        pytest.param([place(0, 1), place(0, 1)], {"threads": 8}, [], id="threads for both nodes"),
        pytest.param([place(), place()], {}, [], id="unknown nodes"),
    ],
)  # fmt: skip
def test_ranks_that_may_run_far_from_their_memory_are_told(
    places: list[PlacementPart], world: dict[str, Any], texts: list[str]
) -> None:
    assert unbound(*places, **world) == texts
