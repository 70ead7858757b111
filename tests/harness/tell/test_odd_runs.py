from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.tell.report import Run, without_odd_runs
from tests.records import make_record

RUNS: list[Run] = [(Path(name), make_record(run_id=name)) for name in ("a", "b", "c")]


def names(runs: Sequence[Run]) -> list[str]:
    return [record.run_id for _, record in runs]


def test_sound_runs_all_stay() -> None:
    assert without_odd_runs(RUNS, names) == (RUNS, [])


def test_run_that_fails_by_itself_is_left_out_by_name() -> None:
    def trial(runs: Sequence[Run]) -> None:
        if "b" in names(runs):
            raise TypeError("odd")

    sound, problems = without_odd_runs(RUNS, trial)
    assert names(sound) == ["a", "c"]
    assert problems == ["record b is valid but cannot be shown: TypeError: odd"]


def test_run_that_fails_only_next_to_others_is_left_out() -> None:
    def trial(runs: Sequence[Run]) -> None:
        if "b" in names(runs) and len(runs) > 1:
            raise ZeroDivisionError("odd")

    assert names(without_odd_runs(RUNS, trial)[0]) == ["a", "c"]


def test_if_nothing_can_be_shown_that_is_an_error() -> None:
    def trial(runs: Sequence[Run]) -> None:
        raise MemoryError("much")

    with pytest.raises(HarnessError, match="no record can be shown: MemoryError: much"):
        without_odd_runs(RUNS, trial)
