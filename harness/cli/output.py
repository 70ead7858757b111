"""Prints what people and programs read: no terminal escapes, no secrets, and no error if the reader left."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from harness.cli import SPOKEN, says_that_it_works
from harness.errors import HarnessError
from harness.judge.wording import counted
from harness.safe_text import harmless, redacted
from harness.tell.formats import folded


def echo(text: str, *, err: bool = False) -> None:
    """One text on standard output or standard error; sentences fold where a person reads them at a terminal.

    A pipe whose reader is gone (`harness run 2>&1 | head -1`) swallows what follows; the run goes on. Raises
    HarnessError if standard output cannot be written otherwise.
    """
    SPOKEN.set()
    try:
        shown = harmless(redacted(text))
        click.echo(folded(shown) if _at_terminal(err) and not shown.startswith("{") else shown, err=err)
    except OSError as error:
        _discard(err)
        if not err and not isinstance(error, BrokenPipeError):
            raise HarnessError(f"standard output cannot be written: {error.strerror}") from error


def begin(text: str) -> None:
    """A first word for a person who waits at a terminal; a log needs none."""
    if sys.stderr.isatty():
        echo(text, err=True)


def _at_terminal(err: bool) -> bool:
    stream = sys.stderr if err else sys.stdout
    return stream is not None and stream.isatty()


def _discard(err: bool) -> None:
    """Send what follows nowhere, also what Python flushes at its end."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, (sys.stderr if err else sys.stdout).fileno())
        os.close(null)


@dataclass(frozen=True, kw_only=True)
class View:
    """What is shown besides results."""

    wide: bool = False
    """Whether tables have every column, whatever their width."""
    quiet: bool = False
    """Whether progress is left out: results, findings and errors stay."""
    verbose: bool = False
    """Whether every run shows its steps."""

    def say(self, text: str) -> None:
        """One line on standard error for the person who waits."""
        if not self.quiet:
            echo(text, err=True)

    def begin(self, text: str) -> None:
        """A first word, for a person at a terminal; a log needs none."""
        if not self.quiet:
            begin(text)


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
