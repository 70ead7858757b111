"""Counts what is made while a person waits: in a bar at a terminal, in lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from harness.cli.terminal.working import says_that_it_works
from harness.judge.wording import counted

if TYPE_CHECKING:
    from harness.plan.devices.constants import TimeConstants
    from harness.plan.prediction import Predictors
    from harness.plan.scenario import Scenario

T = TypeVar("T")
EVERY_SECONDS = 1.0
"""Between two looks at the clock, also while one model is traced."""
LINE_EVERY_SECONDS = 2.0
"""Between two lines where there is no terminal."""


@contextmanager
def counting(noun: str) -> Iterator[Callable[[], None]]:
    """Show how many of them there are so far; what is given counts one."""
    from tqdm import tqdm

    ended, count, begun = threading.Event(), [0], time.monotonic()
    with tqdm(unit=f" {noun}s", file=sys.stderr, leave=False, mininterval=EVERY_SECONDS, disable=None) as bar:

        def another() -> None:
            count[0] += 1
            bar.update()

        def tick() -> None:
            while not ended.wait(EVERY_SECONDS):
                bar.refresh()

        def say() -> None:
            while not ended.wait(LINE_EVERY_SECONDS):
                waited = time.monotonic() - begun
                with suppress(OSError):
                    click.echo(f"harness: {waited:.0f} s, {counted(count[0], noun)} so far", err=True)

        if not bar.disable or says_that_it_works():
            each = say if bar.disable else tick
            threading.Thread(target=each, name="counting", daemon=True).start()
        try:
            yield another
        finally:
            ended.set()


@contextmanager
def counting_predictors(constants: TimeConstants | None = None) -> Iterator[Predictors]:
    """What predicts, with the number of what was traced and predicted so far."""
    from harness.plan.memory import predict_memory
    from harness.plan.prediction import Predictors
    from harness.plan.profiles import trace_scenarios
    from harness.plan.time.speed import predict_speed

    with counting("prediction") as another:

        def each(predict: Callable[[Scenario], T]) -> Callable[[Scenario], T]:
            def predicted(scenario: Scenario) -> T:
                another()
                return predict(scenario)

            return predicted

        yield Predictors(
            memory=each(predict_memory),
            speed=each(partial(predict_speed, constants=constants)),
            ahead=lambda scenarios: trace_scenarios(scenarios, another),
        )
