"""A person at a terminal sees that a plan is being made, whether or not a prediction ends."""

import io
import sys
from threading import Event

import pytest

from harness.cli import WORKING_AFTER, output
from harness.cli.output import counting_predictors
from harness.plan import profiles
from harness.plan.profiles import Progress
from tests.harness.plan.plans import scenario
from tests.patience import SECONDS


class Terminal(io.StringIO):
    """Says when a text was shown so often. is_one: or it is a pipe."""

    def __init__(self, text: str, times: int, *, is_one: bool = True) -> None:
        super().__init__()
        self.is_one = is_one
        self.text, self.left, self.shown = text, times, Event()

    def isatty(self) -> bool:
        return self.is_one

    def write(self, text: str) -> int:
        self.left -= self.text in text
        if self.left <= 0:
            self.shown.set()
        return super().write(text)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "EVERY_SECONDS", 0.001)
    monkeypatch.setattr(output, "LINE_EVERY_SECONDS", 0.001)


def test_each_prediction_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal("3 predictions", 1))
    with counting_predictors() as predictors:
        for _ in range(3):
            predictors.speed(scenario("fsdp", 4))
        assert terminal.shown.wait(SECONDS)


def test_the_bar_goes_on_while_nothing_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while one model is traced, which takes longer than a second."""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal("0 predictions", 5))
    with counting_predictors():
        assert terminal.shown.wait(SECONDS)


def test_while_profiles_are_traced_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "harness: 0 s, tracing the model's activations, 2 of 4 done\n"
    monkeypatch.setattr(sys, "stderr", pipe := Terminal(text, 3, is_one=False))
    monkeypatch.setenv(WORKING_AFTER, "1")
    seen: list[bool] = []

    def trace(_: object, tell: Progress) -> None:
        tell(2, 4)
        seen.append(pipe.shown.wait(SECONDS))

    monkeypatch.setattr(profiles, "trace_scenarios", trace)
    with counting_predictors() as predictors:
        predictors.ahead([])
    assert seen == [True]


def test_a_pipe_gets_lines_unless_no_word_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", pipe := Terminal("1 prediction so far", 3, is_one=False))
    with counting_predictors() as predictors:
        predictors.speed(scenario("fsdp", 4))
        assert not pipe.shown.wait(0.1)  # conftest.py wants none
    monkeypatch.setenv(WORKING_AFTER, "1")
    with counting_predictors() as predictors:
        predictors.speed(scenario("fsdp", 4))
        assert pipe.shown.wait(SECONDS)
