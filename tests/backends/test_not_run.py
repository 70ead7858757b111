"""What DeepSpeed has and no run can have is a row with its reason and version."""

from importlib.metadata import version

import pytest

from harness.backends import registry
from harness.backends.base import World
from harness.backends.not_run import NOT_RUN, NotRun
from tests.harness.plan.estimate.test_question import row

FOUR = World(rank=0, world_size=4, local_rank=0, ranks_per_node=4, device="cpu")


@pytest.mark.parametrize("feature", NOT_RUN, ids=lambda feature: feature.label)
def test_it_is_unsupported_with_its_name_and_version(feature: NotRun) -> None:
    assert registry.canonical_label(feature.label).lower() == feature.label
    (reason,) = registry.unmet_requirements(registry.create(feature.label), FOUR)
    assert reason == feature.reason
    assert feature.name in reason
    assert version("deepspeed") in reason
    assert feature.option in registry.BUILT_IN[feature.backend].options_class().model_fields


@pytest.mark.parametrize("feature", NOT_RUN, ids=lambda feature: feature.label)
def test_a_plan_has_the_same_reason(feature: NotRun) -> None:
    planned = row(backends=feature.label)
    assert planned.unsupported == feature.reason


def test_an_option_switched_off_refuses_nothing() -> None:
    backend = registry.create("zero3:qwz=false,qgz=false,deepcompile=false,offload=optimizer")
    assert registry.unmet_requirements(backend, FOUR) == []
