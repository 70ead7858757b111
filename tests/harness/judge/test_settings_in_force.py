import json

from harness.judge.comparison import Comparison, DifferingSetting
from harness.record import BackendPart, Record
from harness.tell.sections.job import settings_section
from harness.tell.terminal import where_to_read
from tests.records import make_effective, make_record, make_weights


def run(label: str, world_size: int = 2, **effective: object) -> Record:
    backend = BackendPart(label=label, name=label, effective=make_effective(**effective), native_config={})
    return make_record(label=label, world_size=world_size, backend=backend)


def differing(*records: Record) -> list[DifferingSetting]:
    return Comparison([run("single", 1, prefetch="none"), *records]).settings


def test_each_value_comes_with_its_cells_and_the_reference_first() -> None:
    (setting,) = differing(
        run("zero1", prefetch="8 elements"), run("zero2", prefetch="8 elements"), run("ddp", prefetch="none")
    )
    assert setting.as_json() == {
        "job_id": "0123456789ab",
        "setting": "prefetch",
        "changes": "cost",
        "values": [
            {
                "value": "none",
                "cells": [
                    {"backend": "single", "world_size": 1},
                    {"backend": "ddp", "world_size": 2},
                ],
                "is_of_reference": True,
            },
            {
                "value": "8 elements",
                "cells": [
                    {"backend": "zero1", "world_size": 2},
                    {"backend": "zero2", "world_size": 2},
                ],
                "is_of_reference": False,
            },
        ],
    }
    assert json.loads(json.dumps(setting.as_json())) == setting.as_json()


def test_what_changes_the_mathematics_comes_first() -> None:
    found = differing(run("ddp", prefetch="all", gradient_clipping=None))
    assert [(s.setting, s.effect) for s in found] == [
        ("gradient clipping", "mathematics"),
        ("prefetch", "cost"),
    ]
    assert [value.value for value in found[0].values] == ["1", "none"]


def test_backends_are_held_against_each_other_where_the_reference_does_not_know() -> None:
    (setting,) = differing(run("ddp", gather_dtype="float32"), run("zero3", gather_dtype="bfloat16"))
    assert setting.setting == "dtype of gathering"
    assert not any(value.is_of_reference for value in setting.values)


def test_equal_and_unknown_settings_are_left_out() -> None:
    assert differing(run("ddp", prefetch="none"), run("zero1", prefetch=None)) == []


def test_a_run_of_another_job_is_left_out() -> None:
    odd = run("ddp", prefetch="all").model_copy(update={"initial_weights": make_weights("d" * 64)})
    assert differing(odd) == []


def test_another_implementation_of_the_optimizer_changes_the_cost_only() -> None:
    offloaded = run("zero3:offload=cpu", optimizer_implementation="for-loop")
    (setting,) = differing(run("ddp", optimizer_implementation="foreach"), offloaded)
    assert (setting.setting, setting.effect) == ("optimizer implementation", "cost")


def test_the_report_has_a_line_for_each_value() -> None:
    comparison = Comparison(
        [run("single", 1, prefetch="none"), run("zero1", prefetch="8 elements"), run("ddp")]
    )
    section = settings_section(comparison)
    assert section is not None
    table = section.blocks[1]
    assert table.texts() == [  # type: ignore[union-attr]
        ["prefetch", "cost only", "none", "single on 1 rank"],
        ["prefetch", "cost only", "8 elements", "zero1 on 2 ranks"],
    ]


def test_the_terminal_names_them_and_says_where_their_values_are() -> None:
    comparison = Comparison([run("single", 1, prefetch="none"), run("ddp", prefetch="all")])
    assert where_to_read(comparison) == [
        "settings that differ; cost only: prefetch (values: --json, or 'Settings in force that differ' in a\n"
        "  report)"
    ]
    assert where_to_read(Comparison([make_record(), make_record(label="ddp")])) == []
