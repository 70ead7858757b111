"""A person at a terminal sees that a plan is being made, whether or not a prediction ends."""

import io
import sys
from threading import Event

import pytest

from harness.cli.terminal import predicting
from harness.cli.terminal.predicting import counting_predictors
from tests.harness.plan.plans import scenario
from tests.patience import SECONDS


class Terminal(io.StringIO):
    """Says when a text was shown so often."""

    def __init__(self, text: str, times: int) -> None:
        super().__init__()
        self.text, self.left, self.shown = text, times, Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.left -= self.text in text
        if self.left <= 0:
            self.shown.set()
        return super().write(text)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicting, "EVERY_SECONDS", 0.001)


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
