"""What is asked of a simulated rank, and which worlds are refused."""

import pytest

from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.plan.simulation import plan_simulation, with_model


def test_without_a_batch_the_micro_batch_is_one_sample() -> None:
    asked = plan_simulation(load_experiment(None), "fsdp", 1024, ranks_per_node=8)
    run = asked.request.run
    assert (run.micro_batch_size, run.accumulation_steps, run.ranks_per_node) == (1, 1, 8)
    assert run.job.training.global_batch_size == 1024
    assert asked.cell.nodes == 128


def test_a_batch_of_the_job_is_kept() -> None:
    experiment = load_experiment(None, ["training.global_batch_size=64", "training.accumulation_steps=2"])
    run = plan_simulation(experiment, "fsdp", 4, ranks_per_node=8).request.run
    assert (run.micro_batch_size, run.accumulation_steps, run.ranks_per_node) == (8, 2, 4)


def test_ranks_must_fill_nodes() -> None:
    with pytest.raises(HarnessError, match=r"12 ranks do not fill nodes of 8"):
        plan_simulation(load_experiment(None), "fsdp", 12, ranks_per_node=8)


def test_the_rank_must_be_in_the_world() -> None:
    with pytest.raises(HarnessError, match=r"rank 4 is not in a world of 4; give 0 to 3"):
        plan_simulation(load_experiment(None), "fsdp", 4, ranks_per_node=4, rank=4)


def test_another_model_keeps_the_rest_of_the_job() -> None:
    experiment = load_experiment(None, ["model.attention=eager", "data.sequence_length=64"])
    changed = with_model(experiment, {"model_type": "gpt2"})
    assert changed.model.config == {"model_type": "gpt2"}
    assert (changed.model.attention, changed.data.sequence_length) == ("eager", 64)
