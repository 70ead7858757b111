"""How wrong predictions like one have been, by sources that measured runs; what they rest on most."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from harness.backends.registry import REFERENCE
from harness.backends.strategy import StrategyKind
from harness.judge.wording import counted, listed
from harness.nested import grouped
from harness.plan.hardware import default_constants, is_sustained_rate_known
from harness.plan.prediction import device_overhead
from harness.plan.scenario import COMPILED as COMPILATION
from harness.plan.scenario import Scenario, unpredicted_axes
from harness.plan.step_time import host_update_rate

ERRORS = Path(__file__).with_name("data") / "published-errors.json"
"""By run, relative, without those that a constant is from; `python -m benchmarks.published` writes it."""
CPU_ERRORS = ERRORS.with_name("cpu-errors.json")
"""The same of measured CPU ranks; `python -m benchmarks.memory_predictions` writes it."""
CPU = "cpu"
"""What the peak of those is, among the statistics of published ones."""
SHORT_TOKENS = 1024
"""Samples below are steps that wait for the host."""
ENOUGH_SOURCES = 3
"""From which an error is stated."""
COVERED = 0.8
"""Of the runs of a source that is not among those known, which the stated error is to hold for. Of n known
ones, each counted once, it covers (n + 1) / n times that, at most all: conformal prediction, where the new
source is like any of them (Vovk et al., Algorithmic Learning in a Random World). The page of published runs
counts how often it holds."""
WIDEST = 0.5
"""Sources that lie further apart agree on nothing."""
HOST_SHARE = 0.1
"""Of a step, from which waiting for the host, or its update, decides it."""
WORTH_SAYING = 0.05
"""Bias from which a direction is named."""
SMALL = 0.005
"""Errors below are given to a digit."""
FEW_SOURCES = ("no source", "one source", "two sources")


@dataclass(frozen=True, kw_only=True)
class KnownErrors:
    """Errors of one figure over runs that were measured."""

    of: str
    """What runs those are: 'full training under zero3'."""
    runs: int
    sources: tuple[str, ...]
    """Who measured, with the most GPUs of each; empty: CPU ranks of this harness, each run for itself."""
    typical: float | None
    """Without sign, what `COVERED` says; None: too few sources, or too far apart."""
    bias: float
    """Median, with sign, of the sources' medians."""
    worst: float
    beyond: tuple[str, ...] = ()
    """What of the question none of these runs had: '405B parameters (at most 70B)'."""

    @property
    def whose(self) -> str:
        return "published runs" if self.sources else "runs on CPU ranks"

    def as_json(self) -> dict[str, Any]:
        """As JSON has it: lists, no tuples."""
        return vars(self) | {"whose": self.whose, "sources": [*self.sources], "beyond": [*self.beyond]}

    def text(self) -> str:
        """'±9 % (6 sources, 61 published runs, on the whole 7 % too low)'."""
        beyond = f"; none with {listed(self.beyond)}" if self.beyond else ""
        if self.sources and len(self.sources) < ENOUGH_SOURCES:
            named = "; ".join(self.sources)
            return f"tested on {FEW_SOURCES[len(self.sources)]} ({named}{beyond})"
        counted_runs = f"{self.runs} {self.whose if self.runs > 1 else self.whose.replace('runs', 'run', 1)}"
        parts = [counted(len(self.sources), "source"), counted_runs] if self.sources else [counted_runs]
        if self.typical is None:
            return f"not stated: {listed(parts)} lie up to {_percent(self.worst)} off{beyond}"
        direction = [] if abs(self.bias) < WORTH_SAYING else [
            f"on the whole {_percent(abs(self.bias))} too {'low' if self.bias < 0 else 'high'}"
        ]  # fmt: skip
        return f"±{_percent(self.typical)} ({', '.join([*parts, *direction])}{beyond})"


def _percent(size: float) -> str:
    return (f"{size:.0%}" if size >= SMALL else f"{100 * size:.1g}%").replace("%", " %")


@dataclass(frozen=True, kw_only=True)
class Trust:
    """How wrong answers like one have been."""

    runs: str
    """What is asked: 'full training under zero3'."""
    memory: KnownErrors | None
    speed: KnownErrors | None
    bounded: bool = False
    """Whether the memory is a range, which has no error of its own."""
    is_timed: bool = True
    """Whether the answer has a speed."""
    on_gpu: bool = True
    untested: tuple[str, ...] = ()
    """Of the strategies asked, those that nobody published a run of, beside others."""
    assumption: str | None
    """The largest that the speed rests on, or the memory where no speed is predicted."""

    def lines(self) -> list[str]:
        """In words, for people."""
        asked = {"memory": not self.bounded, "speed": self.is_timed}
        parts = []
        for name, is_asked in asked.items():
            known: KnownErrors | None = getattr(self, name)
            if known is not None:
                of = "" if known.of == self.runs else f" of {known.of}"
                parts.append(f"{name}{of} {known.text()}")
            elif is_asked:
                parts.append(f"{name} not known (no {'published ' * self.on_gpu}run of that kind)")
        found = [f"typical error, {self.runs}: {', '.join(parts)}"] if parts else []
        if parts and self.untested:
            found.append(f"no published run of {listed(self.untested)}")
        if self.bounded:
            found.append("memory is a range between two predictions, not a figure with an error")
        assumed = [f"largest assumption: {self.assumption}"] * bool(self.assumption)
        return ["; ".join(found)] * bool(found) + assumed

    def as_json(self) -> dict[str, Any]:
        known = {"memory": self.memory, "speed": self.speed}
        return {name: one.as_json() if one else None for name, one in known.items()} | {
            "runs": self.runs, "untested": [*self.untested], "bounded": self.bounded,
            "assumption": self.assumption,
        }  # fmt: skip


def trust_in(
    *scenarios: Scenario,
    speed: bool = True,
    bounded: bool = False,
    host_share: float | None = None,
    update_share: float | None = None,
    without: str | None = None,
) -> Trust:
    """Errors of the most similar runs that enough sources measured: under the same families of strategies,
    else under those that divide as much, else all of the kind of training.

    On one GPU every family counts that runs on one. `scenarios`: of one job on one kind of device. `speed`:
    whether the answer predicts any. `bounded`: whether its memory is a range. `host_share`: of a step that
    waits for the host, at most; None: not known, so the length of a sample decides. `update_share`: of the
    first one's step, in which the host updates; None: not known, so offload decides. `without`: a source that
    is left out, as if it were not known.
    """
    first = scenarios[0]
    on_gpu, adapted = first.torch_device != "cpu", first.job.adapter.is_present
    kinds = tuple(dict.fromkeys(kind_of(one.strategy, one.options) for one in scenarios))
    axes = unpredicted_axes(first.job, (COMPILATION,))  # of which nobody published a run
    tried = {_divided(run["kind"]) for run in measured_errors() if run["statistic"] != CPU}
    untested = [kind for kind in kinds if on_gpu and _divided(kind) not in tried | WHOLE_LAYERS.keys()]
    kinds = tuple(kind for kind in kinds if kind not in untested) or kinds
    # Runs of one process are like those of a strategy that shares with no other rank.
    is_alone = first.world_size == 1 and not all(kind.endswith(OFFLOADED) for kind in kinds)
    counting = {*kinds, REFERENCE} if is_alone else set(kinds)
    near = [] if axes else [
        run for run in measured_errors()
        if (run["statistic"] != CPU) == on_gpu
        and (run["source"] != without if on_gpu else run["kind"] in counting)
    ]  # fmt: skip
    training = "adapters" if adapted else "full training"
    runs = f"{training} under {listed([*_named(kinds)])}" + (f" with {listed(axes)}" if axes else "")
    offloaded = any(kind.endswith(OFFLOADED) for kind in kinds)
    divided = {_divided(kind) for kind in counting}
    cuts_layers = not divided <= WHOLE_LAYERS.keys()
    speed = speed and first.device is not None

    def alike(run: dict[str, Any]) -> bool:
        same = run["adapted"] == adapted and run["kind"].endswith(OFFLOADED) == offloaded
        return (same and cut_alike(run)) or not on_gpu

    def cut_alike(run: dict[str, Any]) -> bool:
        """Ranks that divide layers or samples are no evidence but for their own kind."""
        return not cuts_layers or _divided(run["kind"]) in divided

    def timed(run: dict[str, Any]) -> bool:
        """What decides the share of a rate that a step reaches, whatever the strategy."""
        short = first.job.data.sequence_length < SHORT_TOKENS
        return (
            run["gpu"] == chip_of(first) and (run["tokens"] < SHORT_TOKENS) == short
            and run["kind"].endswith(OFFLOADED) == offloaded and run["pcie"] == crosses_pcie(first)
            and cut_alike(run)
        )  # fmt: skip

    of_memory: list[tuple[str, Callable[[dict[str, Any]], bool]]] = [
        (runs, lambda run: alike(run) and run["kind"] in counting),
        (_runs(training, divided), lambda run: alike(run) and _divided(run["kind"]) in divided),
        (f"all {training}{' with offload' if offloaded else ''}", alike),
    ]
    compiled = first.job.model.compile != "none"
    code = "compiled" if compiled else "eager"
    of_speed: list[tuple[str, Callable[[dict[str, Any]], bool]]] = [] if first.device is None else [
        (f"{code} {training} on {chip_of(first)}",
         lambda run: timed(run) and run["adapted"] == adapted and run["compiled"] == compiled),
        (f"{code} runs on {chip_of(first)}", lambda run: timed(run) and run["compiled"] == compiled),
        (f"runs on {chip_of(first)}", timed),
    ]  # fmt: skip
    return Trust(
        runs=runs,
        memory=None if bounded else _known(near, "memory", of_memory, first),
        speed=_known(near, "speed", of_speed, first) if speed else None,
        bounded=bounded,
        is_timed=speed,
        on_gpu=on_gpu,
        untested=tuple(_named(kind for kind in untested if kind not in kinds)),
        assumption=largest_assumption(first, host_share, update_share) if speed else largest_of_memory(first),
    )


OFFLOADED = "+offload"


def kind_of(strategy: StrategyKind, options: Mapping[str, Any]) -> str:
    """What of a strategy decides how well it is predicted: 'zero3', 'fsdp2-ring', 'zero12+offload'."""
    name = strategy.family if strategy.sequence is None else f"{strategy.family}-{strategy.sequence}"
    return name if options.get("offload", "none") == "none" else f"{name}{OFFLOADED}"


def _divided(kind: str) -> str:
    """What ranks divide under a kind of strategy: nothing, the optimizer's states or gradients, or all."""
    family = kind.partition("+")[0]
    whole = {REFERENCE: "alone", **dict.fromkeys(("ddp", "replicate", "zero0", "zero12"), "copies")}
    return whole.get(family, "all" if family in ("fsdp1", "fsdp2", "zero3") else family)


WHOLE_LAYERS = {"alone": "single", "copies": "ddp and zero0 to zero2", "all": "zero3 and all FSDP"}
"""What ranks divide that compute every layer of their own samples, and the strategies that do, in words."""


def _runs(training: str, divided: Iterable[str]) -> str:
    return f"{training} under {listed([WHOLE_LAYERS.get(what, what) for what in sorted(divided)])}"


CHIPS = {"H200": "H100", "GH200": "H100", "H800": "H100", "A800": "A100"}
"""Device -> whose chip it has."""


def chip_of(scenario: Scenario) -> str:
    """The GPU of a scenario, whatever its memory: 'A100', 'RTX-4090'."""
    assert scenario.device is not None
    name = scenario.device.name
    name = name if name.startswith("RTX") else name.partition("-")[0]
    return CHIPS.get(name, name)


NAMES = {"zero12": "zero1/zero2", "fsdp2": "fsdp", "tensor": "tp", "pipeline": "pp"}
"""Of families whose own people do not write."""


def _named(kinds: Iterable[str]) -> Iterator[str]:
    """'zero1/zero2 with offload' of 'zero12+offload'."""
    for kind in kinds:
        family = kind.removesuffix(OFFLOADED)
        first, dash, divided = family.partition("-")
        name = NAMES.get(first, first) + dash + divided
        yield f"{name} with offload" if kind.endswith(OFFLOADED) else name


def largest_of_memory(scenario: Scenario) -> str:
    """What of a peak no closed form has."""
    if scenario.torch_device == "cpu":
        return "gloo gives its buffers back at once, and nothing else takes memory of this machine"
    beside = [f"{term.bytes / 1e9:.2g} GB of {term.name}" for term in device_overhead(scenario)]
    return f"the allocator wastes nothing{'; outside of it lie ' if beside else ''}{listed(beside)}"


def largest_assumption(
    scenario: Scenario, host_share: float | None = None, update_share: float | None = None
) -> str | None:
    """What of the time model no run has shown for this question; None: no speed is predicted."""
    device = scenario.device
    if device is None:
        return None
    if scenario.constants is not None and scenario.constants.fitted:
        return f"constants of {scenario.constants.origin}"
    offloads = scenario.options.get("offload", "none") != "none" and scenario.torch_device != "cpu"
    if offloads and (update_share is None or update_share > HOST_SHARE):
        rate = host_update_rate(scenario, default_constants(device)) / 1e9
        return (
            f"host memory gives the update of each rank {rate:.0f} GB/s, of which few cores or many ranks a "
            "node leave a fraction"
        )
    if scenario.job.model.compile != "none":
        return "compiled code has one kernel between two products, which reads and writes what it must"
    kept = f"{100 * default_constants(device).sustained_share:.0f} %"
    waits = (
        scenario.job.data.sequence_length < SHORT_TOKENS if host_share is None else host_share > HOST_SHARE
    )
    if waits:
        micro = 1e6 * default_constants(device).dispatch_seconds
        return f"the host takes {micro:.2g} us to start a kernel, which decides steps this short"
    if crosses_pcie(scenario):
        rate = device.link_bandwidth * default_constants(device).link_share / 1e9
        return (
            f"PCIe gives each GPU {rate:.0f} GB/s while all send; slow lanes, cards without peer access and "
            "rented machines give a fraction"
        )
    if scenario.job.adapter.is_quantised:
        return "weights of 4 bits are unpacked at the speed of the memory"
    if not is_sustained_rate_known(device):
        return f"training sustains {kept} of the best matmul rate, which too few runs on {device.name} show"
    if scenario.nodes > 1 and scenario.fabric is not None:
        joined = f"nodes are joined by {scenario.fabric.name}, which" if scenario.fabric.assumed else None
        line_rate = f"its line rate, {scenario.fabric.bandwidth_per_gpu / 1e9:.3g} GB/s for each GPU,"
        return f"{joined or scenario.fabric.name} gives {line_rate} to every node at once"
    return f"training sustains {kept} of the best matmul rate of {device.name}"


@cache
def measured_errors() -> tuple[dict[str, Any], ...]:
    """One entry a run: adapted, kind (`kind_of`), statistic, tokens, memory, speed; of published ones source,
    gpu (`chip_of`), gpus, parameters, and whether it was compiled and its GPUs had PCIe alone between."""
    found: list[dict[str, Any]] = [
        one for file in (ERRORS, CPU_ERRORS) for one in json.loads(file.read_text())
    ]
    return tuple(found)


def crosses_pcie(scenario: Scenario) -> bool:
    """Whether the GPUs of a node have nothing but PCIe between them."""
    return scenario.world_size > 1 and scenario.device is not None and scenario.device.link.startswith("PCIe")


def _known(
    runs: list[dict[str, Any]],
    figure: str,
    levels: Sequence[tuple[str, Callable[[dict[str, Any]], bool]]],
    asked: Scenario,
) -> KnownErrors | None:
    """Errors of the first level that enough sources have measured, else of the one with most."""
    having = [run for run in runs if run[figure] is not None]
    pools = [(name, [run for run in having if is_like(run)]) for name, is_like in levels]
    pools = [(name, pool) for name, pool in pools if pool]
    if not pools:
        return None
    enough = (one for one in pools if len(_by_source(one[1])) >= ENOUGH_SOURCES)
    name, pool = next(enough, max(pools, key=lambda one: len(_by_source(one[1]))))
    sources = _by_source(pool)
    on_cpu = pool[0]["statistic"] == CPU
    typical = None
    if on_cpu or len(sources) >= ENOUGH_SOURCES:
        within = sorted((abs(run[figure]), 1 / len(own)) for own in sources.values() for run in own)
        reached = accumulate(share for _, share in within)
        least = min(len(sources), COVERED * (len(sources) + 1)) - 1e-9
        error = next(error for (error, _), share in zip(within, reached, strict=True) if share >= least)
        typical = error if error <= WIDEST else None
    return KnownErrors(
        of=name,
        runs=len(pool),
        sources=() if on_cpu else tuple(
            f"{source}, {max(run['gpus'] for run in own)} {own[0]['gpu']}" for source, own in sources.items()
        ),
        typical=typical,
        bias=median(median(run[figure] for run in own) for own in sources.values()),
        worst=max(abs(run[figure]) for run in pool),
        beyond=() if on_cpu else tuple(_beyond(pool, asked)),
    )  # fmt: skip


def _by_source(runs: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return grouped((run.get("source", run["run"]), run) for run in runs)


FURTHER = 1.25
"""Times the largest of the runs, from which a question lies beyond them."""


def _beyond(runs: Sequence[dict[str, Any]], asked: Scenario) -> Iterator[str]:
    """What of a question is larger than in any of the runs, and its GPU where none had it."""
    for name, own, form in (
        ("parameters", asked.model.parameters, lambda size: f"{size / 1e9:.3g}B"),
        ("gpus", asked.world_size, lambda size: f"{size:,}"),
        ("tokens", asked.job.data.sequence_length, lambda size: f"{size:,}"),
    ):
        most = max(run[name] for run in runs)
        if own > FURTHER * most:
            yield f"{form(own)} {'GPUs' if name == 'gpus' else name} (at most {form(most)})"
    if asked.device is not None and chip_of(asked) not in {run["gpu"] for run in runs}:
        yield chip_of(asked)
