from __future__ import annotations

from harness.plan.preflight import setup_bytes
from tests.harness.plan.plans import llama, scenario


def test_every_rank_builds_the_whole_model_in_fp32() -> None:
    whole = 4 * llama().parameters
    for backend, ranks in (("ddp", 2), ("zero3", 512)):
        assert setup_bytes(scenario(backend, world_size=ranks, precision="fp32")) == whole


def test_rounding_to_a_low_precision_holds_the_largest_parameter_twice() -> None:
    whole = 4 * llama().parameters
    assert setup_bytes(scenario("ddp", 2)) == whole + (2 + 4) * 32000 * 4096
