"""Searches against a machine whose peak is known: fixed bytes and some for each sample and token."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.gpus.found import Gpus
from harness.job.config import load_experiment
from harness.launch.cells import plan
from harness.plan import fit
from harness.plan.hardware import MemoryLimits, load_hardware
from harness.plan.prediction import MemoryPrediction, Predictors
from harness.plan.scenario import Scenario
from harness.rank.job_check import check_job
from harness.run_directory.request import RunRequest
from tests.gpus import gpus_of
from tests.harness.plan.plans import needing
from tests.records import make_ranks, make_record


def search(sizes, first: int, largest: int, estimate=lambda tried: None) -> tuple[int | None, list[int]]:
    """What was found, and the sizes that were tried for it."""
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= largest

    return fit.largest_fitting(sizes, first, fits, lambda: estimate(tried)), tried


@pytest.mark.parametrize("sizes", [range(1, 101), [1, 2, 4, 8, 16, 32, 64], [5]])
@pytest.mark.parametrize("largest", [0, 1, 2, 5, 31, 32, 33, 99, 100, 1000])
@pytest.mark.parametrize("first", [1, 7, 50, 1000])
def test_the_largest_is_found_whatever_the_guess(sizes, largest: int, first: int) -> None:
    found, tried = search(sizes, first, largest)
    assert found == max((size for size in sizes if size <= largest), default=None)
    assert len(tried) == len(set(tried))


@pytest.mark.parametrize(
    ("first", "largest", "estimate", "most"),
    [
        (40, 40, None, 2),  # a right guess
        (1000, 970, None, 8),  # some percent off
        (1000, 123, 123, 7),  # down to something that fits, to the estimate, and to the size above it
        *((500, 321, wrong, 40) for wrong in (1, 90, 10**6, -5)),
    ],
)
def test_guesses_and_estimates_cost_trials_but_no_answer(
    first: int, largest: int, estimate: int | None, most: int
) -> None:
    found, tried = search(range(1, 2**16), first, largest, lambda _: estimate)
    assert found == largest
    assert len(tried) <= most


def test_the_largest_that_is_predicted_to_fit() -> None:
    assert fit.largest_predicted(range(1, 100), lambda size: size <= 42) == 42
    assert fit.largest_predicted([2, 4, 8], lambda size: size <= 5) == 4
    assert fit.largest_predicted([2, 4, 8], lambda size: False) is None
    assert fit.largest_predicted([2, 4, 8], lambda size: True) == 8
    asked: list[int] = []
    sizes = [2**n for n in range(10)]
    assert fit.largest_predicted(sizes, lambda size: asked.append(size) or size <= 40, {32, 64}) == 32  # type: ignore[func-returns-value]
    assert min(asked) == 32


def trial(size: int, rate: float | None = 100.0, spread: float = 0.0, **changes) -> fit.Trial:
    values = {
        "micro_batch_size": size, "accumulation_steps": 1, "global_batch_size": 2 * size,
        "sequence_length": 128, "predicted_bytes": 110, "status": "ok", "peak_bytes": 100,
        "tokens_per_second": rate, "slowest_tokens_per_second": rate and rate - spread,
        "fastest_tokens_per_second": rate and rate + spread, "num_alloc_retries": None,
        "run_id": f"run-{size}",
    }  # fmt: skip
    return fit.Trial(**(values | changes))


def test_a_trial_reads_its_record() -> None:
    ranks = [part.model_copy(update={"num_alloc_retries": n}) for n, part in enumerate(make_ranks(2))]
    found = fit.trial_of(make_record(label="zero2", ranks=ranks), 2_100_000)
    assert (found.micro_batch_size, found.accumulation_steps, found.global_batch_size) == (4, 1, 8)
    assert found.peak_bytes == 2_001_000
    assert found.tokens_per_second == 1024 / 0.5
    assert found.num_alloc_retries == 1
    assert found.prediction_error == pytest.approx(2_100_000 / 2_001_000 - 1)
    assert found.fits


def test_a_run_out_of_memory_does_not_fit_and_has_no_error_and_one_whose_loss_became_nan_fits() -> None:
    found = fit.trial_of(make_record(label="ddp", status="oom", ranks=[], steps=[]), 100)
    assert not found.fits
    assert (found.peak_bytes, found.tokens_per_second, found.prediction_error) == (None, None, None)
    assert fit.trial_of(make_record(label="ddp", status="diverged"), None).fits


def test_of_equally_fast_trials_the_smaller_is_named_and_overlapping_ones_are_not_ranked() -> None:
    trials = [
        trial(8, 100.0), trial(4, 120.0), trial(2, 120.0), trial(16, 900.0, status="oom"), trial(1, None),
    ]  # fmt: skip
    assert fit.fastest(trials) is trials[2]
    assert fit.fastest([trial(1, None)]) is None
    trials = [trial(1, 120.0, 10.0), trial(2, 105.0, 6.0), trial(4, 105.0, 4.0)]
    assert [t.micro_batch_size for t in fit.tied_with(trials[0], trials)] == [2]


def test_a_global_batch_leaves_its_divisors_of_which_a_pipeline_takes_multiples_of_its_parts() -> None:
    given = load_experiment(None, ["training.global_batch_size=24"])
    found = fit.micro_batches(given, 2)
    assert list(found.sizes) == [1, 2, 3, 4, 6, 12]
    assert found.bound == "the global batch of 24 has 12 samples for each of 2 ranks"
    assert found.remark is None
    assert list(fit.micro_batches(given, 2, parts=4).sizes) == [4, 12]


def test_without_a_global_batch_every_size_is_tried_and_that_is_said() -> None:
    given = load_experiment(None, ["training.accumulation_steps=3"])
    found = fit.micro_batches(given, 2)
    assert list(found.sizes[:3]) == [1, 2, 3]
    assert "the global batch grows with the micro-batch (2 ranks x micro-batch x 3)" in found.remark
    assert fit.micro_batches(given, 2, parts=4).sizes[:2] == range(4, 12, 4)


@pytest.mark.parametrize(
    ("settings", "parts", "problem"),
    [
        (["training.global_batch_size=8", "training.accumulation_steps=2"], 1, "leave no choice"),
        (["training.global_batch_size=9"], 1, "does not divide among 2 ranks"),
        (["training.global_batch_size=24"], 5, "not whole micro-batches"),
    ],
)
def test_a_job_that_leaves_no_choice_is_refused(settings: list[str], parts: int, problem: str) -> None:
    with pytest.raises(HarnessError, match=problem):
        fit.micro_batches(load_experiment(None, settings), 2, parts=parts)


def test_a_trial_is_short_and_measures_memory_only() -> None:
    given = load_experiment(
        None, ["training.epochs=3", "training.global_batch_size=16", "measure.matmul_peak=true",
               "evaluation.every_steps=5", "model.config={hidden_size: 64}"],
    )  # fmt: skip
    trial = fit.trial_experiment(given, micro_batch_size=4, limit_bytes=10**9)
    assert (trial.training.steps, trial.training.epochs) == (8, None)
    assert (trial.training.micro_batch_size, trial.training.global_batch_size) == (4, 16)
    assert trial.runtime.memory_limit == 10**9
    assert [trial.measure.window(step, 8) for step in range(8)] == ["warmup"] * 2 + ["probed"] + ["timed"] * 5
    assert not trial.measure.matmul_peak
    assert trial.evaluation.every_steps is None
    assert trial.model == given.model


FIXED, PER_TOKEN = 1000, 1


@dataclass
class Machine:
    """Runs nothing; `error` is how far its predictions are off, `apart` how far bounds lie from the peak."""

    limit: fit.Limit
    error: float | None = 0.0
    apart: float | None = None
    most_runs: int = 50
    best: int = 4
    trials: list[fit.Trial] = field(default_factory=list)

    def peaks(self, micro_batch_size: int) -> list[int]:
        peak = self._peak(micro_batch_size)
        if self.error is not None:
            return [round((1 + self.error) * peak)]
        return [] if self.apart is None else [round(peak * (1 + side * self.apart)) for side in (-1, 1)]

    def why_unpredicted(self) -> str | None:
        return "nothing is known of it" if self.error is None else None

    def run(self, micro_batch_size: int) -> fit.Trial:
        if len(self.trials) == self.most_runs:
            raise fit.OutOfTrials
        peak = self._peak(micro_batch_size)
        predicted = next(iter(self.peaks(micro_batch_size)), None)
        shared = {"sequence_length": 128, "predicted_bytes": predicted}
        if peak > self.limit.limit_bytes:
            self.trials.append(trial(micro_batch_size, None, peak_bytes=None, status="oom", **shared))
        else:
            rate = 1000.0 - abs(micro_batch_size - self.best)
            self.trials.append(trial(micro_batch_size, rate, peak_bytes=peak, **shared))
        return self.trials[-1]

    def _peak(self, micro_batch_size: int) -> int:
        return FIXED + PER_TOKEN * micro_batch_size * 128


def machine(limit_bytes: int, **changes) -> Machine:
    return Machine(fit.Limit(limit_bytes=limit_bytes, origin="test", imposed=True), **changes)


EVERY = fit.Sizes(sizes=range(1, 2**16 + 1), bound="no larger one is tried")


@pytest.mark.parametrize("error", [0.0, 0.05, -0.05, 0.5, -0.5, -0.99, None])
def test_the_largest_is_exact_however_wrong_the_prediction(error: float | None) -> None:
    runner = machine(FIXED + 100 * 128 + 5, error=error)
    found = fit.find(runner, EVERY, None)
    assert (found.largest.micro_batch_size, found.too_large, found.complete) == (100, 101, True)
    assert len(runner.trials) <= 12


def test_a_right_prediction_takes_two_runs_and_two_for_the_fastest() -> None:
    runner = machine(FIXED + 16 * 128, best=4)
    found = fit.find(runner, EVERY, None)
    assert [t.micro_batch_size for t in runner.trials] == [16, 17, 8, 4]
    assert (found.predicted, found.fastest.micro_batch_size, found.tied) == (16, 4, [])


def test_bounds_say_between_which_sizes_and_the_search_begins_at_the_less() -> None:
    runner = machine(FIXED + 32 * 128, error=None, apart=0.25)
    found = fit.find(runner, EVERY, 5)
    # 4 / 5 and 4 / 3 of 5,096 bytes, less what is fixed, are 24.0 and 45.2 samples.
    assert (found.predicted, found.predicted_between) == (None, (24, 45))
    assert runner.trials[0].micro_batch_size == 24
    assert found.largest.micro_batch_size == 32
    (said,) = (line for line in fit.answer_lines(found, runner.limit) if line.startswith("predicted"))
    assert said == "predicted: between 24 and 45, measured: 32; nothing is known of it"
    assert found.as_json()["predicted_between"] == (24, 45)


@pytest.mark.parametrize(
    ("limit", "error", "line"),
    [
        (FIXED, 0.0, "predicted: nothing fits"),
        (FIXED + 7 * 128, None, "predicted: n/a: nothing is known of it"),
        (FIXED + 7 * 128, 99, "predicted: nothing fits, measured: 7"),
    ],
)
def test_what_does_not_fit_or_is_not_predicted_is_said(limit: int, error: float | None, line: str) -> None:
    runner = machine(limit, error=error)
    found = fit.find(runner, EVERY, None)
    largest, *_, predicted = fit.answer_lines(found, runner.limit)
    assert predicted == line
    assert found.as_json()["unpredicted"] == (None if error is not None else "nothing is known of it")
    if limit == FIXED:
        assert (found.largest, found.fastest, found.predicted, found.too_large) == (None, None, None, 1)
        assert largest.startswith("largest micro-batch: none. Even 1 runs out of memory with")


def test_the_answer_comes_in_words() -> None:
    runner = machine(FIXED + 7 * 128, error=0.2)
    found = fit.find(runner, fit.Sizes(sizes=[1, 2, 3, 4, 6, 12], bound="12 samples a rank"), None)
    assert fit.answer_lines(found, runner.limit) == [
        "largest micro-batch: 6: peak 0.00177 MB of 0.0019 MB (93 %); 12 runs out of memory "
        "(12 samples a rank)",
        "highest throughput: micro-batch 4, 1,000 tokens/s (one run of each size, not tested against noise)",
        "predicted: 4, measured: 6",
    ]
    assert fit.error_line(runner.trials) == "error of the predicted peaks: mean 20 %, worst 20 % (4 runs)"
    assert "+20.0 %" in fit.trial_table(runner.trials)
    assert fit.error_line([trial(1, status="oom", peak_bytes=None)]) is None


def test_a_search_that_ran_out_of_runs_says_at_least_and_ranks_nothing() -> None:
    runner = machine(FIXED + 100 * 128, most_runs=1)
    found = fit.find(runner, EVERY, None)
    assert not found.complete
    lines = fit.answer_lines(found, runner.limit)
    assert any("raise --most-runs" in line for line in lines)
    assert lines[0].startswith("largest micro-batch: at least 100 (ended after 1 run): peak ")
    assert not any(line.startswith("highest throughput") for line in lines)


def test_a_typed_limit_goes_before_a_configured_one() -> None:
    assert fit.find_limit("1MB", 5, "cpu", 1) == fit.Limit(limit_bytes=10**6, origin="1MB", imposed=True)
    assert fit.find_limit(None, 5, "cpu", 1) == fit.Limit(
        limit_bytes=5, origin="runtime.memory_limit", imposed=True
    )
    # A GPU stands for what its allocator can serve.
    usable = load_hardware().device("A100-40").usable_bytes
    limit = fit.Limit(limit_bytes=usable, origin="A100-40", imposed=True)
    assert fit.find_limit("a100-40", None, "cuda", 8) == limit


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        *((text, f"--limit was given '{text}'") for text in ("0", "-1GB", "3 apples")),
        ("A100-41", r"--limit takes bytes such as 2GB, or a GPU: .*'A100-40' or"),
        (None, "such as --limit 2GB"),
        ("4GB", r"is 8.00 GB, but this machine has 6.00 GB; .*harness estimate --gpu"),
    ],
)
def test_what_is_no_limit_of_two_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: str | None, problem: str
) -> None:
    monkeypatch.setattr("harness.plan.fit.host_memory_bytes", lambda: 6 * 10**9)
    assert fit.find_limit("3GB", None, "cpu", 2).limit_bytes == 3 * 10**9
    with pytest.raises(HarnessError, match=problem):
        fit.find_limit(given, None, "cpu", 2)


def test_the_smallest_gpu_limits_and_without_one_its_memory_must_be_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = gpus_of(81559 * 2**20, 40960 * 2**20)
    monkeypatch.setattr("harness.plan.fit.find_gpus", lambda: found)
    limit = fit.find_limit(None, None, "cuda", 2)
    assert limit == fit.Limit(limit_bytes=40960 * 2**20, origin="memory of the GPU", imposed=False)
    none = Gpus(why_none="this machine shows no GPU")
    monkeypatch.setattr("harness.plan.fit.find_gpus", lambda: none)
    with pytest.raises(HarnessError, match="shows no GPU; give the memory of a rank with --limit"):
        fit.find_limit(None, None, "cuda", 1)


EXPERIMENT = load_experiment(None, ["training.global_batch_size=48", "runtime.memory_limit=10MB"])
CELLS = plan(EXPERIMENT, ["ddp", "zero3", "planted-wrong-beta2"], [2], 2, "cpu")
SAMPLE_BYTES = {"ddp": 2_000_000, "zero3": 600_000}
"""Of each sample of a micro-batch; nothing else takes memory here."""


def memory(scenario: Scenario) -> MemoryPrediction:
    return needing(activations=scenario.micro_batch_size * SAMPLE_BYTES[scenario.label])


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return {CELLS[0].job_id: check_job(CELLS[0].job)}


def states_and_activations(scenario: Scenario) -> MemoryPrediction:
    activations = 10**6 if scenario.job.training.activation_checkpointing else 4 * 10**6
    return needing(weights=sum(scenario.held_states.values()), activations=activations)


@dataclass
class Launcher:
    """Starts nothing."""

    facts: dict[str, Any]
    device: str = "cpu"

    def check(self, job: str) -> dict[str, Any]:
        return self.facts

    def trace(self, asked: object) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        # Of 869,760 parameters: 16 bytes each under DDP, 12 under ZeRO-1, 8 under FSDP.
        (0.1, []),
        (2.5, ["QLoRA, with activation checkpointing and a chunked loss"]),
        (5.5, ["QLoRA"]),
        (12.5, ["fsdp-grad-op", "fsdp", "bf16 without fp32 masters", "LoRA", "QLoRA"]),
        (15.5, ["activation checkpointing", "zero1", "zero2", "fsdp-grad-op", "fsdp", "8-bit AdamW",
                "bf16 without fp32 masters", "LoRA", "QLoRA"]),
    ],
)  # fmt: skip
def test_where_nothing_fits_the_changes_that_do_are_named(
    facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, limit: float, said: list[str]
) -> None:
    monkeypatch.setattr(Predictors, "traced_by", lambda _: Predictors(memory=states_and_activations))
    runner = fit.Runner(
        experiment=load_experiment(None, ()), label="ddp", world_size=2, launcher=Launcher(*facts.values()),
        limit=fit.Limit(limit_bytes=int(limit * 10**6), origin="test", imposed=True), store=None, command=[],
        most_runs=0, fresh=True, on_event=lambda _: None, on_trial=lambda _: None,
    )  # fmt: skip
    found = runner.ways_out(1)
    assert [one["name"] for one in found] == said
    assert all(one["peak_bytes"] <= runner.limit.limit_bytes for one in found)
    assert runner.peaks(1) > [runner.limit.limit_bytes]


def batches(facts: dict[str, Any], limit: int = 10_000_000) -> fit.LargestBatches:
    limits = MemoryLimits(imposed_bytes=limit)
    return fit.LargestBatches(experiment=EXPERIMENT, limits=limits, facts=facts, by=Predictors(memory=memory))


def cuts(cells: list[RunRequest], repeat: int = 0) -> dict[str, tuple[int, int]]:
    layouts = {cell.backend: cell.layout for cell in cells if cell.repeat == repeat}
    return {name: (one.micro_batch_size, one.accumulation_steps) for name, one in layouts.items()}


def test_each_backend_gets_the_largest_micro_batch_that_divides_and_fits(facts: dict[str, Any]) -> None:
    before, after = cuts(CELLS), cuts(batches(facts).enlarged(CELLS))
    # 24 samples a rank: 5 of DDP fit, of which 4 divides; 16 of ZeRO-3, of which 12 divides.
    assert (after["ddp"], after["zero3"]) == ((4, 6), (12, 2))
    assert after["single"] == before["single"]
    assert after["planted-wrong-beta2"] == before["planted-wrong-beta2"]
    enlarged = batches(facts).enlarged(CELLS)
    assert cuts(enlarged, repeat=1)["zero3"] == (12, 2)
    # The job stays the same, the reference has no limit, and what was chosen is shown once.
    assert {cell.job_id for cell in enlarged} == {CELLS[0].job_id}
    assert len({cell.key for cell in enlarged}) == len(CELLS)
    noise = "single:micro_batch_size=24,norm=fp32,backward=reordered"
    assert {cell.backend: cell.memory_limit_bytes for cell in enlarged} == {
        "single": None, noise: None, "ddp": 10**7, "zero3": 10**7, "planted-wrong-beta2": 10**7,
    }  # fmt: skip
    lines = batches(facts).lines(enlarged)
    assert (lines[0], len(lines)) == ("ddp on 2 ranks: micro-batch 4, accumulation 6", 3)
    fit.require_limit(MemoryLimits(device_bytes=1))
    with pytest.raises(HarnessError, match=r"--set runtime\.memory_limit=2GB"):
        fit.require_limit(MemoryLimits(host_bytes=1))


def test_both_kinds_of_kernels_get_the_micro_batch_and_stay_what_they_are(facts: dict[str, Any]) -> None:
    asked = plan(EXPERIMENT, ["ddp"], [2], 1, "cuda")
    made = batches(facts).enlarged(asked)
    kinds = [cell.job.training.deterministic for cell in asked]
    assert kinds.count(False) == 1
    assert [cell.job.training.deterministic for cell in made] == kinds
    assert {cell.layout.micro_batch_size for cell in made if cell.backend == "ddp"} == {4}
    assert len({cell.key for cell in made}) == len(made)


def test_a_run_out_of_memory_is_tried_again_with_the_next_smaller(facts: dict[str, Any]) -> None:
    largest = batches(facts)
    cells = largest.enlarged(CELLS)
    outcome = {"ddp": "oom", "single": "oom"}
    ends = {cell.key: outcome.get(cell.backend, "ok") for cell in cells}
    done = {key: make_record(label="ddp", status=status, cell=key) for key, status in ends.items()}
    after = largest.after(cells, done)
    assert cuts(after)["ddp"] == (3, 8)
    assert [one for one in after if one.backend != "ddp"] == [one for one in cells if one.backend != "ddp"]
    smallest = batches(facts, limit=1).enlarged(CELLS)  # where nothing fits
    assert cuts(smallest)["ddp"] == (1, 24)
    all_oom = {cell.key: make_record(label="ddp", status="oom") for cell in smallest}
    assert cuts(largest.after(smallest, all_oom))["ddp"] == (1, 24)
