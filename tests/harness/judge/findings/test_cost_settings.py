from typing import Any

import pytest

from harness.backends.options import COST_ALONE
from harness.backends.registry import BUILT_IN, create
from harness.judge.comparison import Comparison
from harness.record import BackendPart, Record
from tests.records import make_effective, make_record, make_steps

KIND = "cost-setting-changes-training"


def run(options: dict[str, Any], loss: float = 4.0, name: str = "zero2") -> Record:
    label = name + (":" + ",".join(f"{k}={v}" for k, v in options.items()) if options else "")
    backend = BackendPart(
        label=label, name=name, options=options, effective=make_effective(), native_config={}
    )
    return make_record(
        label=label,
        backend=backend,
        run_id=f"run-{loss}-{len(options)}",
        steps=make_steps(changes={2: {"loss": loss}}),
    )


def found(*records: Record) -> list[str]:
    findings = Comparison([make_record(steps=make_steps()), *records]).findings
    return [f.message for f in findings if f.id == KIND]


def test_overlap_that_changes_the_loss_is_named() -> None:
    (message,) = found(run({}), run({"overlap_comm": True}, loss=4.1))
    assert message.startswith(
        "overlap_comm default against on: should change only the cost, but loss differs"
    )


def test_overlap_that_leaves_the_loss_alone_is_not() -> None:
    assert found(run({}), run({"overlap_comm": True})) == []


def test_settings_that_may_change_the_loss_are_not_judged() -> None:
    assert found(run({}), run({"gradient_clipping": 0.5}, loss=4.1)) == []
    assert found(run({}), run({"overlap_comm": True, "gradient_clipping": 0.5}, loss=4.1)) == []


def test_another_backend_is_not_judged() -> None:
    assert found(run({}, name="zero1"), run({"overlap_comm": True}, loss=4.1)) == []


@pytest.mark.parametrize("option", sorted(COST_ALONE))
def test_each_such_setting_is_an_option_of_a_backend(option: str) -> None:
    assert any(option in type(create(name).options).model_fields for name in BUILT_IN)
