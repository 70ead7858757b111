"""Driver, libraries and settings of GPUs are conditions of a run; settings that differ are a finding."""

from typing import Any

from harness.judge.comparison import Comparison
from harness.judge.effective import transport_variables
from harness.judge.run_conditions import varying, words
from harness.record import AcceleratorPart, Record
from tests.records import make_record

SOFTWARE = AcceleratorPart(driver="580.65.06", cuda="13.0", nccl="2.29.7", cudnn="9.20.0")


def on_gpus(label: str, software: dict[str, str] | None = None, **variables: str) -> Record:
    record = make_record(label=label)
    environment = record.environment.model_copy(
        update={"accelerator": SOFTWARE.model_copy(update=software or {}), "variables": variables}
    )
    world = record.world.model_copy(update={"device": "cuda", "collectives": "nccl"})
    return record.model_copy(update={"environment": environment, "world": world})


def found(*records: Record) -> dict[str, Any]:
    return {
        finding.backends[0]: finding.message
        for finding in Comparison(records).findings
        if finding.id == "step-environment-differs"
    }


def test_runs_under_another_nccl_are_not_repeats() -> None:
    records = [on_gpus("ddp"), on_gpus("ddp", {"nccl": "2.27.5"})]
    assert varying(records) == ["nccl"]
    assert words(records[1], ["nccl", "driver"]) == "NCCL 2.27.5, driver 580.65.06"


def test_an_older_record_without_versions_differs_in_none() -> None:
    old = on_gpus("ddp")
    old = old.model_copy(update={"environment": old.environment.model_copy(update={"accelerator": None})})
    assert varying([old, on_gpus("ddp")]) == []
    assert transport_variables(old) is None


def test_nccl_settings_of_one_cell_are_a_finding() -> None:
    messages = found(on_gpus("single"), on_gpus("ddp", NCCL_ALGO="Ring"), on_gpus("zero3"))
    assert list(messages) == ["ddp"]
    assert "settings of NCCL" in messages["ddp"]
    assert "NCCL_ALGO" in messages["ddp"]


def test_variables_without_effect_on_sums_are_none() -> None:
    shared = {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "ib0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert transport_variables(on_gpus("ddp", None, **shared)) == {}
    assert found(on_gpus("single"), on_gpus("ddp", None, **shared)) == {}


def test_the_environment_of_a_record_on_the_cpu_is_not_judged() -> None:
    assert make_record().environment.accelerator is None
    assert transport_variables(make_record(label="ddp")) is None
