"""Counts predictions at a terminal while a person waits for a plan."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from harness.plan.devices.constants import TimeConstants
    from harness.plan.prediction import Predictors
    from harness.plan.scenario import Scenario

T = TypeVar("T")
EVERY_SECONDS = 1.0
"""Between two looks at the clock, also while one model is traced."""


@contextmanager
def counting_predictors(constants: TimeConstants | None = None) -> Iterator[Predictors]:
    """What predicts, with a bar of what was traced and predicted so far."""
    from tqdm import tqdm

    from harness.plan.memory import predict_memory
    from harness.plan.prediction import Predictors
    from harness.plan.profiles import trace_scenarios
    from harness.plan.time.speed import predict_speed

    ended = threading.Event()
    with tqdm(
        unit=" predictions", file=sys.stderr, leave=False, mininterval=EVERY_SECONDS, disable=None
    ) as bar:

        def counted(predict: Callable[[Scenario], T]) -> Callable[[Scenario], T]:
            def predicted(scenario: Scenario) -> T:
                bar.update()
                return predict(scenario)

            return predicted

        def tick() -> None:
            while not ended.wait(EVERY_SECONDS):
                bar.refresh()

        if not bar.disable:
            threading.Thread(target=tick, name="predicting", daemon=True).start()
        try:
            yield Predictors(
                memory=counted(predict_memory),
                speed=counted(partial(predict_speed, constants=constants)),
                ahead=lambda scenarios: trace_scenarios(scenarios, bar.update),
            )
        finally:
            ended.set()
