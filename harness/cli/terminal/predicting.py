"""Counts what is made while a person waits: in a bar at a terminal, in lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from harness.cli.terminal.working import says_that_it_works
from harness.judge.wording import counted

if TYPE_CHECKING:
    from harness.plan.hardware import TimeConstants
    from harness.plan.prediction import Predictors
    from harness.plan.scenario import Scenario

T = TypeVar("T")
EVERY_SECONDS = 1.0
"""Between two looks at the clock, also while one model is traced."""
LINE_EVERY_SECONDS = 2.0
"""Between two lines where there is no terminal."""
PREDICTING, TRACING = "predicting", "tracing the model's activations"


class PredictionCount:
    """How many there are of what is made, and what is done meanwhile."""

    def __init__(self, noun: str, doing: str, each: Callable[[], object]) -> None:
        self._noun, self._each, self._number = noun, each, 0
        self.doing = doing
        """What is done until the next one is there; empty: something else, which speaks for itself."""

    def __call__(self) -> None:
        """Another one is there."""
        self._number += 1
        self._each()

    @property
    def text(self) -> str:
        """'predicting: 36 predictions so far'; before the first 'tracing the model's activations'."""
        return f"{self.doing}: {counted(self._number, self._noun)} so far" if self._number else self.doing


@contextmanager
def counting(noun: str, doing: str) -> Iterator[PredictionCount]:
    """Show what is done, and how many there are so far of what a noun names."""
    from tqdm import tqdm

    ended, begun = threading.Event(), time.monotonic()
    with tqdm(unit=f" {noun}s", file=sys.stderr, leave=False, mininterval=EVERY_SECONDS, disable=None) as bar:
        count = PredictionCount(noun, doing, bar.update)

        def tick() -> None:
            while not ended.wait(EVERY_SECONDS):
                if count.doing:
                    bar.set_description_str(count.doing)

        def say() -> None:
            while not ended.wait(LINE_EVERY_SECONDS):
                if not count.doing:
                    continue
                with suppress(OSError):
                    click.echo(f"harness: {time.monotonic() - begun:.0f} s, {count.text}", err=True)

        if not bar.disable or says_that_it_works():
            each = say if bar.disable else tick
            threading.Thread(target=each, name="counting", daemon=True).start()
        try:
            yield count
        finally:
            ended.set()


@contextmanager
def counting_predictors(constants: TimeConstants | None = None) -> Iterator[Predictors]:
    """What predicts, with the number of what was traced and predicted so far."""
    from harness.plan.prediction import Predictors, least_memory, predict_memory
    from harness.plan.profiles import kept_tracers, trace_scenarios
    from harness.plan.time.speed import predict_speed

    with counting("prediction", PREDICTING) as count, kept_tracers():

        def each(predict: Callable[[Scenario], T]) -> Callable[[Scenario], T]:
            def predicted(scenario: Scenario) -> T:
                count()
                return predict(scenario)

            return predicted

        def trace(scenarios: Iterable[Scenario]) -> None:
            count.doing = TRACING
            trace_scenarios(scenarios, tell)
            count.doing = PREDICTING

        def tell(done: int, of: int) -> None:
            count.doing = f"{TRACING}, {done} of {of} done"

        yield Predictors(
            memory=each(predict_memory),
            speed=each(partial(predict_speed, constants=constants)),
            least=least_memory,
            ahead=trace,
        )
