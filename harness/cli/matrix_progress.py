"""Progress of all runs of a comparison: one bar with the time left on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import Any, TextIO

from tqdm import tqdm

from harness.cli.progress import Progress, StepWords
from harness.cli.view import View
from harness.launch.cells import Cell
from harness.run_directory.events import Event, SetupEvent, StepEvent
from harness.safe_text import harmless

BAR = "{l_bar}{bar}| {n:.1f}/{total_fmt} runs, {elapsed}<{remaining}{postfix}"


class MatrixProgress:
    """Follows the runs of a comparison, one after the other."""

    def __init__(self, cells: int, stream: TextIO, view: View) -> None:
        self._view = view
        self._stream = stream
        self._cells = cells
        self._done = 0
        self._steps = 0
        self._words = StepWords(1)
        self._lines: Progress | None = None
        self._started = time.monotonic()
        shows = stream.isatty() and not view.quiet
        self._bar: tqdm[Any] | None = (
            tqdm(total=cells, file=stream, leave=False, bar_format=BAR, dynamic_ncols=True) if shows else None
        )

    def begin(self, cell: Cell) -> None:
        """A run starts."""
        self._steps, self._words = 0, StepWords(cell.data_size)
        self._lines = Progress(
            cell.backend, cell.data_size, self._stream, plain_lines=self._view.verbose, bar=False
        )
        if self._bar is not None:
            self._bar.set_description_str(harmless(f"{cell.backend} on {cell.world_size}"))

    def __call__(self, event: Event) -> None:
        """Show one event of the run."""
        if self._bar is None:
            if self._lines is not None:
                self._lines(event)
        elif isinstance(event, SetupEvent):
            self._steps = event.steps or 0
            self._words.note(event)
        elif isinstance(event, StepEvent):
            self._bar.set_postfix_str(self._words.of(event), refresh=False)
            self._to(self._done + min(1.0, (event.step + 1) / max(1, self._steps)))

    def end(self, text: str) -> None:
        """The run has ended; `text` is its line."""
        self._done += 1
        if self._bar is not None:
            self._bar.clear()
        self._view.say(f"[{self._done}/{self._cells}] {text}{self._left()}")
        if self._bar is not None:
            self._bar.set_postfix_str("", refresh=False)
            self._to(self._done)

    def say(self, text: str) -> None:
        """A line between runs."""
        if self._bar is not None:
            self._bar.clear()
        self._view.say(text)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()

    def _to(self, place: float) -> None:
        assert self._bar is not None
        self._bar.update(place - self._bar.n)

    def _left(self) -> str:
        """The time left where no bar shows it, from the runs so far."""
        if self._bar is not None or self._done == self._cells:
            return ""
        each = (time.monotonic() - self._started) / self._done
        return f"; about {duration(each * (self._cells - self._done))} left"


def duration(seconds: float) -> str:
    """'40 s', '12 min' or '3.5 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
