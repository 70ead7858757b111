import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from harness.backends.base import Effective
from harness.rank.events import EventWriter
from harness.run_directory.events import (
    DoneEvent,
    EvaluationEvent,
    FailureEvent,
    SetupEvent,
    Tail,
    read_event,
)
from tests.records import make_effective


@dataclass(frozen=True, kw_only=True)
class WithDepth(Effective):
    """What a third party's backend may say beyond the contract."""

    pipeline_depth: int = 4


def setup_event(effective: Effective, **changes: Any) -> SetupEvent:
    values: dict[str, Any] = {
        "native_config": {"stages": [1, 2]}, "versions": {}, "initial_weights": None, "collectives": "gloo",
        "rank": 0, "host": "node1", "device_name": "cpu", "steps": 2, "setup_seconds": 1.0,
        "data": dict.fromkeys(
            ("samples", "training_samples", "evaluation_samples", "target_tokens", "vocabulary_size"), 8
        ),
    }  # fmt: skip
    return SetupEvent(effective=effective, **(values | changes))


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    events = [
        setup_event(make_effective()),
        FailureEvent(status="failed", error_kind="E", message="line\nline", at=1.0),
        DoneEvent(),
    ]
    writer = EventWriter(path)
    for event in events:
        writer.write(event)
    writer.close()
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(events)
    tail = Tail(path)
    assert tail.read() == events
    assert tail.broken_lines == 0


def test_a_line_that_is_still_written_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    line = DoneEvent().model_dump_json().encode() + b"\n"
    path.write_bytes(line[:5])
    tail = Tail(path)
    assert tail.read() == []
    path.write_bytes(line)
    assert tail.read() == [DoneEvent()]
    assert tail.broken_lines == 0


def test_numbers_that_are_not_finite_are_null() -> None:
    evaluation = EvaluationEvent(step=1, loss_sum=math.nan, target_tokens=8, samples=2, seconds=1.0)
    assert json.loads(evaluation.model_dump_json())["loss_sum"] is None
    config = setup_event(make_effective(), native_config={"scale": [math.inf]})
    assert json.loads(config.model_dump_json())["native_config"] == {"scale": [None]}


def test_what_only_a_third_party_says_is_among_the_details() -> None:
    said = setup_event(WithDepth(**vars(make_effective(details={"mesh": [2]})))).effective
    assert type(said) is Effective
    assert said.details == {"mesh": [2], "pipeline_depth": 4}


def test_a_backend_that_says_what_runs_in_other_types_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"effective\.accumulation_steps"):
        setup_event(make_effective(accumulation_steps="many"))


@pytest.mark.parametrize("line", [b"", b"[]", b'{"kind": "other"}', b'{"kind": "done", "more": 1}', b'{"ki'])
def test_a_line_that_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(ValidationError):
        read_event(line)
