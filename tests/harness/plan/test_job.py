from typing import Any

import pytest

from harness.forms.families import model_states
from harness.job.batch import batch_layout
from harness.job.config import load_experiment
from harness.launch.cells import make_cell
from harness.plan.scenario import Scenario, planned_model, scenario_of
from harness.rank.job_check import check_job

EXPERIMENT = load_experiment(None, ["training.global_batch_size=8", "training.micro_batch_size=1"])


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return check_job(make_cell(EXPERIMENT, "ddp", 4, batch_layout(EXPERIMENT.training, 4), 0, "cpu").job)


def scenario(facts: dict[str, Any], label: str, nodes: int = 1) -> Scenario | None:
    cell = make_cell(EXPERIMENT, label, 4, batch_layout(EXPERIMENT.training, 4), 0, "cpu", nodes=nodes)
    return scenario_of(cell, planned_model(facts, cell.job))


def test_the_model_is_that_of_the_job(facts: dict[str, Any]) -> None:
    model = planned_model(facts, EXPERIMENT.job())
    assert (model.name, model.architecture, model.layers) == ("llama", "LlamaForCausalLM", 4)
    assert model.parameters == facts["parameters"]
    # The embedding is only looked up: 128 numbers for each token of the vocabulary.
    assert model.multiplying_parameters == model.parameters - 128 * model.config["vocab_size"]
    assert model.config["intermediate_size"] == 352
    assert model.attention_width == 128


def test_a_cell_becomes_a_scenario_with_its_batch(facts: dict[str, Any]) -> None:
    found = scenario(facts, "zero2:offload=optimizer")
    assert (found.world_size, found.ranks_per_node, found.micro_batch_size) == (4, 4, 1)
    assert (found.accumulation_steps, found.transport) == (2, "gloo")
    assert found.options["offload"] == "optimizer"
    assert found.strategy.zero_stage == 2
    # Without sharding a rank holds weights, gradients and two moments in fp32.
    states = model_states(scenario(facts, "ddp").workload())  # type: ignore[union-attr]
    assert states.model_state_bytes >= 16 * found.model.parameters


@pytest.mark.parametrize(
    ("label", "nodes", "shards"),
    [("ddp", 1, None), ("fsdp", 1, None), ("fsdp-hybrid", 1, 2), ("fsdp-hybrid", 2, 2),
     ("fsdp-hybrid:shard_size=4", 2, 4)],
)  # fmt: skip
def test_only_a_hybrid_strategy_has_shard_groups(
    facts: dict[str, Any], label: str, nodes: int, shards: int | None
) -> None:
    found = scenario(facts, label, nodes)
    assert found.shard_size == shards


def test_nothing_is_predicted_for_a_backend_of_unknown_strategy(facts: dict[str, Any]) -> None:
    assert scenario(facts, "planted-out-of-memory") is None
