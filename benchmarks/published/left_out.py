"""Each source of published speeds, predicted by constants that it had no part in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

from tabulate import tabulate

from benchmarks.published.judge import OPEN
from benchmarks.published.mapping import Mapped, map_row
from benchmarks.published.rows import read_rows
from harness.errors import HarnessError
from harness.plan.hardware import default_constants
from harness.plan.scenario import Scenario
from harness.plan.step_time import Work, seconds_of_step
from harness.plan.trust import SHORT_TOKENS, chip_of

LOWEST, HIGHEST = 0.3, 1.25
"""Of the best matrix rate: a share outside is no property of a GPU."""
HALVINGS = 12
FILES = ("published_runs.csv", "order_runs.csv", "further_runs.csv")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run whose samples are not short: the matrix rate decides its speed."""

    mapped: Mapped

    @property
    def _scenario(self) -> Scenario:
        assert self.mapped.scenario is not None
        return self.mapped.scenario

    @cached_property
    def _work(self) -> Work:
        return Work(self._scenario)

    @property
    def source(self) -> str:
        return self.mapped.row.source

    @property
    def is_adapted(self) -> bool:
        """Whether adapters alone were trained."""
        return "lora" in self.mapped.row.method.lower()

    @property
    def is_compiled(self) -> bool:
        return self._scenario.job.model.compile != "none"

    @property
    def chip(self) -> str:
        return chip_of(self._scenario)

    def error(self, share: float | None = None) -> float:
        """Predicted over published, less one, where training keeps up this share; None: the shipped one."""
        device, published = self._scenario.device, self.mapped.row.tokens_per_second
        assert device is not None
        assert published is not None
        constants = self.mapped.constants or default_constants(device)
        if share is not None:
            constants = replace(constants, sustained_share=share)
        return self._work.tokens_per_gpu / seconds_of_step(self._work, device, constants) / published - 1


def runs_of(mapped: Iterable[Mapped]) -> list[Run]:
    """Those that can say something of the share that a chip sustains."""
    return [Run(mapped=one) for one in mapped if _counts(one)]


def _counts(one: Mapped) -> bool:
    row, scenario = one.row, one.scenario
    if scenario is None or scenario.device is None or one.speed_not_covered or row.tokens_per_second is None:
        return False
    if int(row.seq_len) < SHORT_TOKENS or row.tier.startswith(OPEN):
        return False
    with suppress(HarnessError):
        return Run(mapped=one).error() > -1
    return False


def fitted_share(runs: Sequence[Run]) -> float:
    """Where half of the runs are predicted too fast."""
    low, high = LOWEST, HIGHEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if median(run.error(middle) for run in runs) > 0 else (middle, high)
    return (low + high) / 2


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """One source's runs on one chip."""

    chip: str
    source: str
    own: float
    """The share that it sustains itself."""
    codes: str
    """The same of its eager and of its compiled runs: '0.72, 0.77'."""
    others: float
    """The middle of the shares of all other sources on that chip, each counted once, or where there are none
    on all chips."""
    shipped: tuple[float, ...]
    """Errors of its runs by the shipped constants."""
    errors: Mapping[str, float]
    """By run the same by what the others sustain."""


def left_out(runs: Sequence[Run], beside: Sequence[Run] = ()) -> list[LeftOut]:
    """Every source with at least one other to predict it from; `beside`: runs to predict from besides."""
    found = []
    sources = {(run.chip, run.source) for run in (*runs, *beside)}
    every = [*runs, *beside]
    own = {one: fitted_share([run for run in every if (run.chip, run.source) == one]) for one in sources}
    for chip, source in sorted({(run.chip, run.source) for run in runs}):
        elsewhere = {one: share for one, share in own.items() if one[1] != source}
        others = [share for one, share in elsewhere.items() if one[0] == chip] or list(elsewhere.values())
        if others:
            of_source, share = (
                [run for run in runs if (run.chip, run.source) == (chip, source)],
                median(others),
            )
            found.append(
                LeftOut(
                    chip=chip, source=source, own=own[chip, source], others=share, codes=_codes(of_source),
                    shipped=tuple(run.error() for run in of_source),
                    errors={run.mapped.row.id: run.error(share) for run in of_source},
                )
            )  # fmt: skip
    return found


def _codes(runs: Sequence[Run]) -> str:
    each = [[run for run in runs if run.is_compiled == code] for code in (False, True)]
    return ", ".join(f"{fitted_share(some):.2f}" if some else "-" for some in each)


HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "reports" / "predictions" / "published" / "left-out.md"
INTRODUCTION = """\
# Speeds by constants of other sources

What training sustains of the best matrix rate is the constant of the time model that published runs decide.
Here it is fitted to each source's runs on a chip, so that half of them are predicted too fast, and each
source is predicted by the middle of the shares of all other sources on its chip, each counted once (on all
chips where it is the only one there). Runs on samples of 1,024 tokens and more whose settings are all said;
eager are those whose page does not say that they were compiled.
`python -m benchmarks.published.left_out` writes this page again.

## Full training
"""
ADAPTED = """\
## LoRA and QLoRA

From what runs of full training and adapters of all other sources sustain. Machines whose GPUs have PCIe alone
between them (RTX, A5000, A6000) wait for it: their own share says how long, not what their matrices do.
"""


def text(full: Sequence[LeftOut], adapted: Sequence[LeftOut]) -> str:
    """The page as Markdown."""
    return f"{INTRODUCTION}\n{_table(full)}\n{ADAPTED}\n{_table(adapted)}"


def _table(found: Sequence[LeftOut]) -> str:
    rows = [
        [
            one.chip, one.source, len(one.errors), f"{one.own:.2f}", one.codes, f"{one.others:.2f}",
            *_error(one.shipped), *_error([*one.errors.values()]),
        ]
        for one in found
    ]  # fmt: skip
    shipped = [error for one in found for error in one.shipped]
    errors = [error for one in found for error in one.errors.values()]
    rows.append(["all", "", len(errors), "", "", "", *_error(shipped), *_error(errors)])
    heads = [
        "chip", "source", "runs", "its share", "eager, compiled", "share of the others",
        "shipped: median error", "bias", "left out: median error", "bias",
    ]  # fmt: skip
    return tabulate(rows, heads, tablefmt="github", disable_numparse=True) + "\n"


def _error(errors: Sequence[float]) -> tuple[str, str]:
    return f"{median(map(abs, errors)):.1%}", f"{median(errors):+.0%}"


def main() -> None:
    """Fit, predict, write the page."""
    runs = runs_of(map_row(row) for name in FILES for row in read_rows(HERE / name))
    full, adapted = ([run for run in runs if run.is_adapted == kind] for kind in (False, True))
    PAGE.write_text(text(left_out(full), left_out(adapted, full)), encoding="utf-8")


if __name__ == "__main__":
    main()
