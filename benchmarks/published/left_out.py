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
from harness.plan.hardware import default_constants, is_sustained_rate_known
from harness.plan.scenario import Scenario
from harness.plan.step_time import Work, seconds_of_step
from harness.plan.trust import ENOUGH_SOURCES, SHORT_TOKENS, chip_of

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
    def is_compiled(self) -> bool:
        return self._scenario.job.model.compile != "none"

    @property
    def chip(self) -> str:
        return generation(self._scenario)

    def error(self, share: float | None = None) -> float:
        """Predicted over published, less one, where training keeps up this share; None: the shipped one."""
        device, published = self._scenario.device, self.mapped.row.tokens_per_second
        assert device is not None
        assert published is not None
        constants = self.mapped.constants or default_constants(device)
        if share is not None:
            constants = replace(constants, sustained_share=share)
        return self._work.tokens_per_gpu / seconds_of_step(self._work, device, constants) / published - 1


def generation(scenario: Scenario) -> str:
    """The chip whose share a device has, else the device."""
    assert scenario.device is not None
    return chip_of(scenario) if is_sustained_rate_known(scenario.device) else scenario.device.name


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


def own_shares(runs: Iterable[Run]) -> dict[tuple[str, str], float]:
    """By chip and source what training sustained there: a source counts once, however many runs it has."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.chip, run.source), []).append(run)
    return {one: fitted_share(of_source) for one, of_source in sorted(found.items())}


def middle(own: Mapping[tuple[str, str], float], chip: str, without: str | None = None) -> float | None:
    """Of what all sources on a chip but one sustain, to two digits, as it ships; None: these are fewer than
    three."""
    shares = [share for (of, source), share in own.items() if of == chip and source != without]
    enough = len(shares) + (without is not None and (chip, without) in own) >= ENOUGH_SOURCES
    return round(median(shares), 2) if enough else None


def share_of_others(own: Mapping[tuple[str, str], float], one: Mapped) -> float | None:
    """What a row's speed is predicted by as if its source were not known; None: by what ships, which no
    published run suggested."""
    known = one.scenario is not None and one.scenario.device is not None
    return middle(own, generation(one.scenario), one.row.source) if known else None  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """One source's runs on one chip."""

    chip: str
    source: str
    own: float
    """The share that it sustains itself."""
    codes: str
    """The same of its eager and of its compiled runs: '0.72, 0.77'."""
    others: float | None
    """The middle of the shares of all other sources on that chip, each counted once; None: too few."""
    shipped: tuple[float, ...]
    """Errors of its runs by the shipped constants."""
    errors: tuple[float, ...]
    """The same by what the others sustain."""


def left_out(runs: Sequence[Run]) -> list[LeftOut]:
    """Every source on every chip."""
    found, own = [], own_shares(runs)
    for (chip, source), share in own.items():
        of_source = [run for run in runs if (run.chip, run.source) == (chip, source)]
        others = middle(own, chip, source)
        found.append(
            LeftOut(
                chip=chip, source=source, own=share, others=others, codes=_codes(of_source),
                shipped=tuple(run.error() for run in of_source),
                errors=tuple(run.error(others) for run in of_source),
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

What training sustains of the best matrix rate is the constant of the time model that published runs decide
(`sustained` in `harness/plan/catalogue/hardware/shares.yaml`). Here it is fitted to each source's runs on a
chip, of full training and of adapters, so that half of them are predicted too fast. What ships is the middle
of the sources, each counted once, on chips with at least three. Each source is predicted by the middle of all
others. Runs on samples of 1,024 tokens and more whose settings are all said; eager are those whose page does
not say that they were compiled. H200 counts as H100, whose chip it has.
`python -m benchmarks.published.left_out` writes this page again.
"""
FEW = """\
## Chips with fewer than three sources

Nothing is fitted. Machines whose GPUs have PCIe alone between them (RTX, A5000, A6000) wait for it: their
share says how long, not what their matrices do.
"""


def text(found: Sequence[LeftOut]) -> str:
    """The page as Markdown."""
    chips = {one.chip: one.others is not None for one in found}
    own = {(one.chip, one.source): one.own for one in found}
    ships = [
        f"- {chip}: {middle(own, chip)}, the middle of {sum(one.chip == chip for one in found)} sources"
        for chip, is_fitted in chips.items()
        if is_fitted
    ]
    fitted, few = ([one for one in found if chips[one.chip] == kind] for kind in (True, False))
    heads = [
        "chip", "source", "runs", "its share", "eager, compiled", "share of the others",
        "shipped: median error", "bias", "left out: median error", "bias",
    ]  # fmt: skip
    rows = [[*_row(one), f"{one.others}", *_error(one.shipped), *_error(one.errors)] for one in fitted]
    sources = [[median(map(abs, errors)) for errors in (one.shipped, one.errors)] for one in fitted]
    if sources:
        shipped, others = (f"{median(errors):.1%}" for errors in zip(*sources, strict=True))
        every = sum(len(one.errors) for one in fitted)
        rows.append(["all", "middle of sources", every, "", "", "", shipped, "", others, ""])
    own_rows = [[*_row(one), *_error(one.shipped)] for one in few]
    tables = (
        tabulate(table, titles, tablefmt="github", disable_numparse=True) + "\n"
        for table, titles in ((rows, heads), (own_rows, [*heads[:5], *heads[6:8]]))
    )
    of_fitted, of_few = tables
    return "\n".join([INTRODUCTION, *ships, "", of_fitted, FEW, of_few])


def _row(one: LeftOut) -> list[object]:
    return [one.chip, one.source, len(one.errors), f"{one.own:.2f}", one.codes]


def _error(errors: Sequence[float]) -> tuple[str, str]:
    return f"{median(map(abs, errors)):.1%}", f"{median(errors):+.0%}"


def main() -> None:
    """Fit, predict, write the page."""
    runs = runs_of(map_row(row) for name in FILES for row in read_rows(HERE / name))
    PAGE.write_text(text(left_out(runs)), encoding="utf-8")


if __name__ == "__main__":
    main()
