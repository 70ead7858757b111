"""What answers say of their own error comes from published runs, which are predicted here again."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import benchmarks.published
from benchmarks.published.__main__ import REPORT
from benchmarks.published.judge import Judged, errors_of, judge
from benchmarks.published.left_out import FILES, PAGE, generation
from benchmarks.published.mapping import Mapped, map_row, unread
from benchmarks.published.rows import read_rows
from harness.errors import HarnessError
from harness.job.job import Job
from harness.plan import trust
from harness.plan.hardware import default_constants
from harness.plan.profiles import Trace
from harness.plan.trust import COVERED, CPU_ERRORS, measured_errors, trust_in
from tests.harness.plan.plans import scenario
from tests.records import changed

RUNS = Path(benchmarks.published.__file__).with_name("published_runs.csv")
FIGURES = ("memory", "speed")


Errors = Callable[..., None]


def run(source: str, place: int = 0, **changes: Any) -> dict[str, Any]:
    """A measured run, of full training under FSDP1 on 8 A100 unless it says otherwise."""
    plain = {
        "run": f"{source}-{place}", "source": source, "adapted": False, "statistic": "allocated",
        "kind": "fsdp1", "gpu": "A100", "gpus": 8, "parameters": 70e9, "tokens": 4096,
        "compiled": False, "pcie": False, "memory": None, "speed": None,
    }  # fmt: skip
    return plain | changes


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> Errors:
    """Puts runs in the place of those that were measured."""

    def put(*runs: dict[str, Any]) -> None:
        monkeypatch.setattr(trust, "measured_errors", lambda: runs)

    return put


def job(**sections: dict[str, str]) -> Job:
    return Job.model_validate({"data": {"sequence_length": 4096}, **sections})


def again(mapped: list[Mapped], trace: Trace | None = None) -> None:
    """What other sources sustain follows from all runs: the page has it."""
    kept = {str(one["run"]): one for one in measured_errors()}
    table = ([cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines())
    others = {(cells[0], cells[1]): cells[5] for cells in table if len(cells) == 10}

    def judged(one: Mapped) -> Judged:
        asked = one.scenario is not None and one.scenario.device is not None
        share = others.get((generation(one.scenario), one.row.source)) if asked else None  # type: ignore[arg-type]
        return judge(one, None if share is None else float(share), trace)

    for one in errors_of(map(judged, map(unread, mapped))):
        for figure in FIGURES:
            if one[figure] is not None:
                assert one[figure] == pytest.approx(kept[one["run"]][figure], abs=0.0011), (one, figure)


def test_every_tenth_run_without_tracing_has_the_kept_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the profiles that ship, whatever was traced here
    mapped = [map_row(row) for row in read_rows(RUNS)[::10]]
    needs: list[str] = []

    def trace(request: str) -> str:
        needs.append(request)
        raise HarnessError("needs a trace")

    again([one for one in mapped if one.memory_scenario is not None], trace)
    assert len(needs) > 10


@pytest.mark.exhaustive
@pytest.mark.long(seconds=120)
def test_every_run_has_the_kept_error() -> None:
    mapped = [map_row(row) for name in FILES for row in read_rows(RUNS.with_name(name))]
    again(mapped)


def test_a_source_counts_once_however_many_runs_it_has(errors: Errors) -> None:
    errors(
        *(run("one", place, memory=0.01) for place in range(40)), run("two", memory=0.04),
        run("three", memory=-0.2), run("four", memory=0.3),
    )  # fmt: skip
    known = trust_in(scenario("fsdp1", 8), speed=False).memory
    assert (known.runs, len(known.sources), known.typical, known.worst) == (43, 4, 0.3, 0.3)
    assert known.bias == pytest.approx(0.025)
    assert known.text() == "±30 % (4 sources, 43 published runs)"


@pytest.mark.parametrize(("sources", "covered"), [(3, 3), (4, 4), (5, 5), (9, 8), (14, 12)])
def test_an_error_covers_as_many_sources_as_a_new_one_needs(
    errors: Errors, sources: int, covered: int
) -> None:
    """0.8 of n + 1: 8 of 9 sources, 12 of 14, but never more than there are."""
    errors(*(run(str(nth), memory=nth / 100) for nth in range(1, sources + 1)))
    known = trust_in(scenario("fsdp1", 8), speed=False).memory
    assert known.typical == covered / 100


def test_fewer_than_three_sources_or_ones_that_lie_far_apart_state_no_percentage(errors: Errors) -> None:
    errors(run("llm-foundry", 1, memory=0.01), run("llm-foundry", 2, memory=0.02))
    trust = trust_in(scenario("fsdp1", 8), speed=False)
    assert trust.memory.typical is None
    assert trust.memory.text() == "tested on one source (llm-foundry, 8 A100)"
    assert trust.lines()[0].endswith("memory tested on one source (llm-foundry, 8 A100)")
    errors(run("a", memory=0.01), run("b", memory=0.01))
    trust = trust_in(scenario("fsdp1", 8), speed=False)
    assert "%" not in trust.lines()[0]
    assert "tested on two sources (a, 8 A100; b, 8 A100)" in trust.lines()[0]
    errors(*(run(name, speed=error) for name, error in (("a", 0.1), ("b", 2.0), ("c", 3.0))))
    known = trust_in(scenario("fsdp1", 8)).speed
    assert known.typical is None
    assert known.text().startswith("not stated: 3 sources and 3 published runs lie up to 300 % off")


def test_what_no_run_had_is_said(errors: Errors) -> None:
    errors(*(run(name, memory=0.1, speed=0.1, parameters=8e9) for name in "abc"))
    asked = replace(scenario("fsdp1", 1024), world_size=1024)
    known = trust_in(asked).memory
    assert known.beyond == ("1,024 GPUs (at most 8)",)
    assert (
        known.text()
        == "±10 % (3 sources, 3 published runs, on the whole 10 % too high; none with 1,024 GPUs (at most 8))"
    )
    on_other = replace(asked, device=replace(asked.device, name="MI300X"))  # type: ignore[type-var]
    trust = trust_in(on_other)
    assert trust.memory.beyond[-1] == "MI300X"
    assert trust.speed is None
    assert "speed not known (no published run of that kind)" in trust.lines()[0]


def test_runs_of_the_strategy_count_before_those_that_divide_as_much(errors: Errors) -> None:
    kinds = {"fsdp1": ("abc", 0.1), "zero3": ("def", 0.2), "ddp": ("ghi", 0.4)}
    kinds["zero12+offload"] = ("jkl", 0.3)
    errors(*(run(name, memory=error, kind=kind) for kind, (names, error) in kinds.items() for name in names))
    for label, of, typical in (
        ("fsdp1", "full training under fsdp1", 0.1),
        ("fsdp", "full training under zero3 and all FSDP", 0.2),
        ("zero2", "full training under ddp and zero0 to zero2", 0.4),
    ):
        known = trust_in(scenario(label, 8), speed=False).memory
        assert (known.of, known.typical) == (of, typical)
    assert trust_in(scenario("fsdp1", 8), speed=False, without="a").memory.typical == 0.2  # type: ignore[union-attr]
    known = trust_in(scenario("zero3", 8, options={"offload": "cpu"}), speed=False).memory
    assert (known.of, known.typical) == ("all full training with offload", 0.3)


def test_a_kind_that_nobody_ran_has_no_error(errors: Errors) -> None:
    runs = [run(name, memory=0.1, speed=0.1, kind=kind) for name in "abc" for kind in ("fsdp1", "zero12")]
    errors(*runs, run("d", memory=0.1, speed=0.1, kind="fsdp2-tensor"))
    for label in ("pp", "ulysses-zero3", "fsdp-cp"):
        trust = trust_in(scenario(label, 8))
        assert (trust.memory, trust.speed) == (None, None), label
        assert trust.lines()[0].endswith("speed not known (no published run of that kind)")
        beside = trust_in(scenario("fsdp1", 8), scenario(label, 8))
        assert (beside.memory.typical, beside.speed.typical, len(beside.untested)) == (0.1, 0.1, 1)
        assert f"; no published run of {beside.untested[0]}" in beside.lines()[0]
    cut = trust_in(scenario("fsdp-tp", 8))
    for known in (cut.memory, cut.speed):
        assert known.text() == "tested on one source (d, 8 A100)"


def test_speed_is_of_the_gpu_the_code_and_the_length(errors: Errors) -> None:
    errors(
        *(run(name, speed=0.1) for name in "abc"), *(run(name, speed=0.2, compiled=True) for name in "def"),
        *(run(name, speed=0.3, gpu="H100") for name in "ghi"),
        *(run(name, speed=0.4, tokens=256) for name in "jkl"),
    )  # fmt: skip
    plain = scenario("fsdp1", 8)
    short = changed(plain.job, data={"sequence_length": 256})
    asked = {
        0.1: plain,
        0.2: replace(plain, job=job(model={"compile": "block"})),
        0.3: replace(plain, device=replace(plain.device, name="H200-141")),  # type: ignore[type-var]
        0.4: replace(plain, job=short),
    }
    for typical, one in asked.items():
        known = trust_in(one).speed
        assert known.typical == typical


def test_stated_errors_hold_for_sources_left_out() -> None:
    """What the page says: of the rows with an error, and of those within it, and the middle of the errors."""
    page = (REPORT / "README.md").read_text()
    line = r"^- (.+): an error is stated for (\d+)% of \d+ rows .* in (\d+)% of them .* its median is (\d+)%"
    found = {name: list(map(int, of)) for name, *of in re.findall(line, page, re.MULTILINE)}
    assert list(found) == ["memory", "speed", "memory, with tier C", "speed, with tier C"]
    for name in ("memory", "speed"):
        stated, within, width = found[name]
        assert stated >= 50, name
        assert within >= 80, name
        assert width <= 25, name


def test_the_largest_assumption_is_the_one_of_the_question() -> None:
    plain = scenario("fsdp", 8)
    short = changed(plain.job, data={"sequence_length": 256})
    pcie = replace(plain.device, link="PCIe 4", link_bandwidth=32e9)
    own = replace(default_constants(plain.device), origin="my runs", fitted=("a",))
    texts = {
        "host memory gives the update of each rank 6 GB/s": scenario("zero3", 8, options={"offload": "cpu"}),
        "short": replace(plain, job=short),
        "too few runs on L40S": replace(plain, device=replace(plain.device, name="L40S")),
        "PCIe gives each GPU 25 GB/s": replace(plain, device=pcie),
        "one kernel between two products": replace(plain, job=job(model={"compile": "block"})),
        "4 bits": replace(plain, job=job(adapter={"kind": "lora", "base_dtype": "nf4"})),
        "my runs": replace(plain, constants=own),
    }
    for word, asked in texts.items():
        assert word in (trust_in(asked).assumption or ""), word
    assert "NCCL" in (trust_in(replace(plain, device=None)).assumption or "")


@pytest.mark.parametrize(
    ("device", "place"), [("cuda", "outside of it lie "), ("cpu", "gloo gives its buffers")]
)
def test_where_no_speed_is_predicted_the_assumption_is_of_memory(device: str, place: str) -> None:
    trust = trust_in(replace(scenario("fsdp", 8), torch_device=device), speed=False)
    assert trust.speed is None
    assert place in str(trust.assumption)


def test_strategies_of_one_answer_are_judged_together_and_a_range_has_no_error_of_its_own() -> None:
    both = trust_in(scenario("fsdp", 8), scenario("fsdp1", 8))
    assert both.speed.runs >= max(trust_in(scenario(name, 8)).speed.runs for name in ("fsdp", "fsdp1"))
    assert "fsdp and fsdp1" in both.runs
    ranged = trust_in(scenario("fsdp1", 8), bounded=True)
    assert (ranged.memory, ranged.speed is None) == (None, False)
    assert "memory is a range" in ranged.lines()[0]


def test_cpu_ranks_are_judged_by_cpu_ranks() -> None:
    known = trust_in(replace(scenario("fsdp1", 2), torch_device="cpu"), speed=False).memory
    errors = sorted(abs(r["memory"]) for r in json.loads(CPU_ERRORS.read_text()) if r["kind"] == "fsdp1")
    assert known.runs == len(errors)
    assert known.typical in errors
    assert sum(error <= known.typical for error in errors) >= COVERED * len(errors)
    assert f"({len(errors)} runs on CPU ranks" in known.text()


def test_without_a_run_like_it_that_is_said_and_no_other_s_error_is_borrowed() -> None:
    plain = scenario("fsdp", 8)
    asked = {
        "optimizer.kind=adamw-8bit": replace(plain, job=job(optimizer={"kind": "adamw-8bit"})),
        "training.precision=fp8": replace(plain, job=job(training={"precision": "fp8"})),
    }
    for word, one in asked.items():
        trust = trust_in(one)
        assert (trust.memory, trust.speed) == (None, None), word
        assert "not known (no published run of that kind)" in trust.lines()[0], word
        assert word in trust.lines()[0]
