"""Prints what people and programs read: no terminal escapes, no secrets, and no error if the reader left."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click
from tqdm import tqdm

from harness.cli import SPOKEN, says_that_it_works
from harness.errors import HarnessError
from harness.forms.textbook import is_stub
from harness.judge.wording import counted
from harness.run_directory.events import Event, SetupEvent, StepEvent
from harness.run_directory.request import RunRequest
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
        lead_nowhere(sys.stderr if err else sys.stdout)
        if not err and not isinstance(error, BrokenPipeError):
            raise HarnessError(f"standard output cannot be written: {error.strerror}") from error


def lead_nowhere(stream: TextIO) -> None:
    """Drop what follows, also what Python flushes."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def begin(text: str) -> None:
    """A first word for a person who waits at a terminal; a log needs none."""
    if sys.stderr.isatty():
        echo(text, err=True)


def _at_terminal(err: bool) -> bool:
    stream = sys.stderr if err else sys.stdout
    return stream is not None and stream.isatty()


@dataclass(frozen=True, kw_only=True)
class View:
    """What is shown besides results."""

    wide: bool = False
    """Whether tables have every column, whatever their width."""
    quiet: bool = False
    """Whether progress is left out: results, findings and errors stay."""

    def say(self, text: str) -> None:
        """One line on standard error for the person who waits."""
        if not self.quiet:
            echo(text, err=True)

    def begin(self, text: str) -> None:
        """A first word, for a person at a terminal; a log needs none."""
        if not self.quiet:
            begin(text)


if TYPE_CHECKING:
    from harness.plan.prediction import Predictors
    from harness.plan.scenario import Scenario

T = TypeVar("T")
EVERY_SECONDS = 1.0
"""Between two looks at the clock, also while one model is traced."""
LINE_EVERY_SECONDS = 60.0
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
def counting_predictors() -> Iterator[Predictors]:
    """What predicts, with the number of what was traced and predicted so far."""
    from harness.plan.prediction import Predictors
    from harness.plan.profiles import Tracer

    with counting("prediction", PREDICTING) as count, Tracer() as tracer:

        def each(predict: Callable[[Scenario], T]) -> Callable[[Scenario], T]:
            def predicted(scenario: Scenario) -> T:
                count()
                return predict(scenario)

            return predicted

        def trace(request: str) -> str:
            count.doing = TRACING
            try:
                return tracer(request)
            finally:
                count.doing = PREDICTING

        by = Predictors.traced_by(trace)
        yield replace(by, memory=each(by.memory), speed=each(by.speed))


PLAIN_LINES = 5
"""Progress lines of one run where there is no terminal."""


class Progress:
    """Follows the events of one run's rank 0."""

    def __init__(
        self, label: str, data_size: int, stream: TextIO, *, plain_lines: bool, bar: bool = True
    ) -> None:
        self._label = label
        self._stream = stream
        self._terminal = bar and stream.isatty()
        self._plain_lines = plain_lines and not self._terminal
        self.steps = 0
        """Of the run; 0: not known."""
        self._data_size = data_size
        self._is_timed = True
        """A stub's durations say nothing of speed."""
        self._bar: tqdm[Any] | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, SetupEvent):
            self.steps = event.steps or 0
            self._is_timed = not is_stub(event.device_name)
            if self._terminal:
                self._bar = tqdm(
                    total=self.steps, desc=harmless(self._label), unit="step", file=self._stream, leave=False
                )
        elif isinstance(event, StepEvent):
            if self._bar is not None:
                self._bar.set_postfix_str(self.words(event), refresh=False)
                self._bar.update()
            elif self._plain_lines:
                done = event.step + 1
                every = max(1, self.steps // PLAIN_LINES)
                if done % every == 0 or done == self.steps:
                    echo(f"{self._label}: step {done}/{self.steps}, {self.words(event)}", err=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def words(self, event: StepEvent) -> str:
        """'loss 4.6553 (rank 0), 30,098 tokens/s': rank 0 knows its own share of the loss only."""
        mean = event.loss_sum
        if mean is not None and event.target_tokens:
            mean /= event.target_tokens
        loss = f"loss {'not finite' if mean is None else f'{mean:.4f}'} (rank 0)"
        if not self._is_timed or event.tokens is None:
            return loss
        unit = "samples" if event.tokens == event.samples else "tokens"
        return f"{loss}, {event.tokens * self._data_size / event.seconds:,.0f} {unit}/s"


BAR = "{l_bar}{bar}| {n:.1f}/{total_fmt} runs, {elapsed}<{remaining}{postfix}"


class MatrixProgress:
    """Follows the runs of a comparison, one after the other or in turns."""

    def __init__(self, cells: int, stream: TextIO, view: View) -> None:
        self._view = view
        self._stream = stream
        self._cells = cells
        self._done = 0
        self._cell = ""
        self._followed: dict[str, Progress] = {}
        """By key of the cell."""
        self._shares: dict[str, float] = {}
        """Of each run, as far as it is."""
        self._started = time.monotonic()
        shows = stream.isatty() and not view.quiet
        self._bar: tqdm[Any] | None = (
            tqdm(total=cells, file=stream, leave=False, bar_format=BAR, dynamic_ncols=True) if shows else None
        )

    def begin(self, cell: RunRequest) -> None:
        """A run starts, or goes on."""
        self._cell = cell.key
        if cell.key not in self._followed:
            self._followed[cell.key] = Progress(
                cell.backend, cell.data_size, self._stream, plain_lines=False, bar=False
            )
        if self._bar is not None:
            self._bar.set_description_str(harmless(f"{cell.backend} on {cell.world_size}"))

    def __call__(self, event: Event) -> None:
        followed = self._followed[self._cell]
        followed(event)
        if isinstance(event, StepEvent):
            self._shares[self._cell] = min(1.0, (event.step + 1) / max(1, followed.steps))
            if self._bar is not None:
                self._bar.set_postfix_str(followed.words(event), refresh=False)
                self._to(self._ran)

    def end(self, key: str, text: str) -> None:
        """The run of a cell has ended; `text` is its line."""
        self._done += 1
        self._shares.pop(key, None)
        if self._bar is not None:
            self._bar.clear()
        left = ""
        if self._bar is None and self._done < self._cells:  # from the runs so far, where no bar shows it
            each = (time.monotonic() - self._started) / self._ran
            left = f"; about {duration(each * (self._cells - self._ran))} left"
        self._view.say(f"[{self._done}/{self._cells}] {text}{left}")
        if self._bar is not None:
            self._bar.set_postfix_str("", refresh=False)
            self._to(self._ran)

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        self._view.say(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def _ran(self) -> float:
        """Runs that have ended, and of the others what they have trained."""
        return self._done + sum(self._shares.values())

    def _to(self, place: float) -> None:
        assert self._bar is not None
        self._bar.update(place - self._bar.n)


def duration(seconds: float) -> str:
    """'40 s', '12 min' or '3.5 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
