"""The driver that observes public scripts: its list, and the order of the samples that it hands on."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks.observed_scripts.__main__ import difference, nested
from benchmarks.observed_scripts.case import RANKS, Case, cases
from benchmarks.observed_scripts.figures import kept_sums
from benchmarks.observed_scripts.job import samples
from harness.job.job import Job
from harness.rank.data import content_sum


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Two micro-batches of two samples by rank; sample 4 m + 2 r + s holds that number."""
    for rank in range(RANKS):
        batches = [
            {"0": torch.tensor([[4 * micro + 2 * rank + sample] for sample in range(2)])}
            for micro in range(2)
        ]
        torch.save(batches, tmp_path / f"batches-{rank}.pt")
    return tmp_path


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.framework}-{Path(case.script).stem}")
def test_a_public_script_is_pinned_and_its_job_is_one_of_the_harness(case: Case, tmp_path: Path) -> None:
    assert re.fullmatch("[0-9a-f]{40}", case.commit)
    assert str(tmp_path / "source" / case.script) in case.words(tmp_path)
    document = nested(case.job(tmp_path, size=4, steps=8))
    assert Job.model_validate({key: document[key] for key in Job.model_fields if key in document})
    assert (case.losses is None) == (case.why is None)


def test_samples_are_in_the_order_of_the_harness(kept: Path) -> None:
    rows = samples(str(kept), RANKS, 1, {"tokens": "0"})
    assert [int(row["tokens"]) for row in rows] == list(range(8))


def test_hashes_of_a_step_are_those_of_all_ranks_and_micro_steps(kept: Path) -> None:
    every = sum(int(content_sum({"0": torch.tensor([[number]])})) for number in range(8)) % 2**64
    assert kept_sums(kept, RANKS, 2, {"tokens": "0"}) == [every]


def test_a_missing_loss_is_no_equal_loss() -> None:
    assert difference([1.0, None], [1.0, 2.0], 2) == "n/a"
    assert difference([1.0, None], [1.0, 2.0], 1) == "0.0e+00"
