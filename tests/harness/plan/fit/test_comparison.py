from typing import Any

import pytest

from harness.errors import HarnessError
from harness.forms.terms import Term
from harness.job.config import load_experiment
from harness.launch.cells import plan
from harness.plan.fit import LargestBatches, cut_lines, require_limit
from harness.plan.limits import MemoryLimits
from harness.plan.prediction import MemoryPrediction, Moment, Predictors
from harness.plan.scenario import Scenario
from harness.rank.job_check import check_job
from harness.run_directory.request import RunRequest
from tests.records import make_record

EXPERIMENT = load_experiment(None, ["training.global_batch_size=48", "runtime.memory_limit=10MB"])
CELLS = plan(EXPERIMENT, ["ddp", "zero3", "planted-wrong-beta2"], [2], 2, "cpu")
SAMPLE_BYTES = {"ddp": 2_000_000, "zero3": 600_000}
"""Of each sample of a micro-batch; nothing else takes memory here."""


def memory(scenario: Scenario) -> MemoryPrediction:
    needed = scenario.micro_batch_size * SAMPLE_BYTES[scenario.label]
    term = Term(kind="activations", name="", bytes=needed, formula="", source="test")
    return MemoryPrediction(moments=(Moment(name="optimizer step", terms=(term,)),))


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return {CELLS[0].job_id: check_job(CELLS[0].job)}


def batches(facts: dict[str, Any], limit: int = 10_000_000) -> LargestBatches:
    limits = MemoryLimits(imposed_bytes=limit)
    return LargestBatches(
        experiment=EXPERIMENT, torch_device="cpu", limits=limits, facts=facts, by=Predictors(memory=memory)
    )


def cuts(cells: list[RunRequest], repeat: int = 0) -> dict[str, tuple[int, int]]:
    return {
        c.backend: (c.layout.micro_batch_size, c.layout.accumulation_steps)
        for c in cells
        if c.repeat == repeat
    }


def test_each_backend_gets_the_largest_micro_batch_that_divides_and_fits(facts: dict[str, Any]) -> None:
    before, after = cuts(CELLS), cuts(batches(facts).enlarged(CELLS))
    # 24 samples a rank: 5 of DDP fit, of which 4 divides; 16 of ZeRO-3, of which 12 divides.
    assert (after["ddp"], after["zero3"]) == ((4, 6), (12, 2))
    assert after["single"] == before["single"]
    assert after["planted-wrong-beta2"] == before["planted-wrong-beta2"]
    assert cuts(batches(facts).enlarged(CELLS), repeat=1)["zero3"] == (12, 2)


def test_both_kinds_of_kernels_get_the_micro_batch_and_stay_what_they_are(facts: dict[str, Any]) -> None:
    asked = plan(EXPERIMENT, ["ddp"], [2], 1, "cuda")
    made = batches(facts).enlarged(asked)
    kinds = [cell.job.training.deterministic for cell in asked]
    assert kinds.count(False) == 1
    assert [cell.job.training.deterministic for cell in made] == kinds
    assert {cell.layout.micro_batch_size for cell in made if cell.backend == "ddp"} == {4}
    assert len({cell.key for cell in made}) == len(made)


def test_the_reference_is_not_limited(facts: dict[str, Any]) -> None:
    limits = {cell.backend: cell.memory_limit_bytes for cell in batches(facts).enlarged(CELLS)}
    noise = "single:micro_batch_size=24,norm=fp32,backward=reordered"
    assert limits == {"single": None, noise: None, "ddp": 10**7, "zero3": 10**7, "planted-wrong-beta2": 10**7}


def test_the_job_stays_the_same(facts: dict[str, Any]) -> None:
    enlarged = batches(facts).enlarged(CELLS)
    assert {cell.job_id for cell in enlarged} == {CELLS[0].job_id}
    assert len({cell.key for cell in enlarged}) == len(CELLS)


def test_where_nothing_fits_the_smallest_is_tried(facts: dict[str, Any]) -> None:
    assert cuts(batches(facts, limit=1).enlarged(CELLS))["ddp"] == (1, 24)


def test_a_run_out_of_memory_is_tried_again_with_the_next_smaller(facts: dict[str, Any]) -> None:
    largest = batches(facts)
    cells = largest.enlarged(CELLS)
    outcome = {"ddp": "oom", "single": "oom"}
    done = {
        cell.key: make_record(label="ddp", status=outcome.get(cell.backend, "ok"), cell=cell.key)
        for cell in cells
    }
    after = largest.after(cells, done)
    assert cuts(after)["ddp"] == (3, 8)
    assert [cell for cell in after if cell.backend != "ddp"] == [
        cell for cell in cells if cell.backend != "ddp"
    ]
    smallest = batches(facts, limit=1).enlarged(CELLS)
    all_oom = {cell.key: make_record(label="ddp", status="oom") for cell in smallest}
    assert cuts(largest.after(smallest, all_oom))["ddp"] == (1, 24)


def test_what_was_chosen_is_shown_once(facts: dict[str, Any]) -> None:
    lines = cut_lines(batches(facts).enlarged(CELLS))
    assert lines[0] == "ddp on 2 ranks: micro-batch 4, accumulation 6"
    assert len(lines) == 3


def test_a_limit_is_needed() -> None:
    require_limit(MemoryLimits(device_bytes=1))
    with pytest.raises(HarnessError, match=r"--set runtime\.memory_limit=2GB"):
        require_limit(MemoryLimits(host_bytes=1))
