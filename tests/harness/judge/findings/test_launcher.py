"""What `accelerate launch` was configured to do and the job did not."""

from __future__ import annotations

from typing import Any

import pytest

from harness.judge.comparison import Comparison
from harness.judge.findings.jobs import OVERRIDDEN
from harness.launch.launcher import launcher_settings
from tests.records import ENVIRONMENT, make_record

QUIET = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_CPU": "True",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_OFFLOAD_PARAMS": "false"}


def texts(settings: dict[str, str], **training: Any) -> list[str]:
    environment = ENVIRONMENT | {"launcher_settings": settings}
    record = make_record(label="ddp", environment=environment, training=training)
    return [f.text for f in Comparison([record]).findings if f.id == OVERRIDDEN]


def test_a_launcher_that_asks_for_nothing_is_no_finding() -> None:
    assert texts(QUIET) == []


def test_bf16_of_the_launcher_is_named_where_fp32_ran() -> None:
    (text,) = texts(QUIET | {"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert text == (
        "the launcher's ACCELERATE_MIXED_PRECISION=bf16 (in force: no) had no effect: job and backend decide"
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_precision_that_ran_is_no_finding(precision: str) -> None:
    given = {"ACCELERATE_MIXED_PRECISION": precision}
    assert texts(given, precision=f"{precision}-mixed") == []
    assert len(texts(given)) == 1


def test_sharding_of_the_launcher_is_named_without_what_is_off() -> None:
    (text,) = texts(FSDP)
    assert text.startswith("the launcher's FSDP_SHARDING_STRATEGY=FULL_SHARD had no effect")


@pytest.mark.parametrize(("given", "count"), [("1", 0), ("1.0", 0), ("0.5", 1), ("none", 1)])
def test_clipping_is_compared_as_a_number(given: str, count: int) -> None:
    assert len(texts({"ACCELERATE_GRADIENT_CLIPPING": given}, gradient_clipping=1.0)) == count


def test_variables_of_the_process_are_no_settings_of_a_job() -> None:
    given = {"ACCELERATE_CPU_AFFINITY": "1", "ACCELERATE_MIXED_PRECISION": "bf16", "HOME": "/"}
    assert launcher_settings(given) == {"ACCELERATE_MIXED_PRECISION": "bf16"}
