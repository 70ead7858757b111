"""How wrong predictions like one have been, of runs of others and of CPU ranks; what they rest on most."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

from harness.backends.registry import REFERENCE
from harness.backends.strategy import StrategyKind
from harness.judge.wording import counted, listed
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
HOST_SHARE = 0.1
"""Of a step, from which waiting for the host, or its update, decides it."""
WORTH_SAYING = 0.05
"""Bias from which a direction is named."""
SMALL = 0.005
"""Errors below are given to a digit."""
FEW_RUNS = 2
"""Up to so many are listed, since they have no typical error."""
ENOUGH_RUNS = 5
"""From which runs of a question's own settings are counted alone."""
LIKE_LENGTH = 4
"""Lengths of samples within this factor are alike."""


@dataclass(frozen=True, kw_only=True)
class KnownErrors:
    """Errors of one figure over runs that were measured."""

    runs: int
    whose: str = "published runs"
    typical: float
    """Mean for memory, median for speed, without sign."""
    bias: float
    """The same with sign."""
    worst: float
    listed: tuple[float, ...] = ()
    """Of each run with sign, where there are few."""
    unlike: tuple[str, ...] = ()
    """How many have a setting of the question that not all have: '3 with checkpointing'."""
    not_of: str | None = None
    """What decides the figure and none has: 'without checkpointing'; None: some have it."""

    def as_json(self) -> dict[str, Any]:
        """As JSON has it: lists, no tuples."""
        return vars(self) | {"listed": list(self.listed), "unlike": list(self.unlike)}

    def text(self) -> str:
        """'±9 % (61 published runs, on the whole 7 % too low)', '12 % too high (1 published run)'."""
        if self.not_of is not None:
            other = "without it" if self.not_of.startswith("with ") else "with it"
            return f"n/a {self.not_of}, {other} {replace(self, not_of=None).text()}"
        whose = f"{self.runs} {self.whose if self.runs > 1 else self.whose.replace('runs', 'run', 1)}"
        if self.listed:
            size = " and ".join(map(_signed, self.listed))
            return f"{size} ({'; '.join([whose, *self.unlike])})".replace("%", " %")
        direction = (f", on the whole {_signed(self.bias)}",) if abs(self.bias) >= WORTH_SAYING else ()
        about = "; ".join(["".join([whose, *direction]), *self.unlike])
        return f"±{_percent(self.typical)} ({about})".replace("%", " %")


def _percent(size: float) -> str:
    return f"{size:.0%}" if size >= SMALL else f"{100 * size:.1g}%"


def _signed(error: float) -> str:
    return f"{_percent(abs(error))} too {'low' if error < 0 else 'high'}" if error else "right"


@dataclass(frozen=True, kw_only=True)
class Trust:
    """How wrong answers like one have been."""

    runs: str
    """What runs those are: 'full training under zero3'."""
    allocated: KnownErrors | None
    reserved: KnownErrors | None
    """Reserved or device memory."""
    speed: KnownErrors | None
    unseen: tuple[str, ...] = ()
    """Strategies of the answer of which there is no such run."""
    other_training: tuple[str, ...] = ()
    """Of those, with what there is of adapters where all is trained, and the other way round."""
    bounded: bool = False
    """Whether the memory is a range, which has no error of its own."""
    is_timed: bool = True
    """Whether the answer has a speed."""
    assumption: str | None
    """The largest that the speed rests on, or the memory where no speed is predicted."""

    @property
    def _figures(self) -> dict[str, KnownErrors | None]:
        return {"allocated": self.allocated, "reserved": self.reserved, "speed": self.speed}

    def lines(self) -> list[str]:
        """In words, for people."""
        parts = [f"{name} {known.text()}" for name, known in self._figures.items() if known is not None]
        if parts:
            if self.is_timed and self.speed is None:
                parts.append("speed n/a (no published run like this)")
            found = [f"typical error, {self.runs}: {', '.join(parts)}"]
            found[0] += f"; no such run under {listed(self.unseen)}" if self.unseen else ""
        else:
            found = [f"typical error: no published run like this ({self.runs})"]
        found[0] += "".join(f"; {text}" for text in self.other_training)
        if self.bounded:
            found[0] += "; memory is a range between two predictions, not a figure with an error"
        return found + ([f"largest assumption: {self.assumption}"] if self.assumption else [])

    def as_json(self) -> dict[str, Any]:
        """The same as numbers."""
        figures = {name: known.as_json() if known else None for name, known in self._figures.items()}
        return figures | {
            "runs": self.runs, "unseen": list(self.unseen),
            "other_training": list(self.other_training), "bounded": self.bounded,
            "assumption": self.assumption,
        }  # fmt: skip


def trust_in(
    *scenarios: Scenario,
    speed: bool = True,
    bounded: bool = False,
    host_share: float | None = None,
    update_share: float | None = None,
) -> Trust:
    """Of runs with the same kind of training under the same families of strategies, offloaded or not, with
    the same checkpointing, compilation and length of samples where there are enough.

    On one GPU every family counts that runs on one. `scenarios`: of one job on one kind of device. `speed`:
    whether the answer predicts any. `bounded`: whether its memory is a range. `host_share`: of a step that
    waits for the host, at most; None: not known, so the length of a sample decides. `update_share`: of the
    first one's step, in which the host updates; None: not known, so offload decides.
    """
    first = scenarios[0]
    on_gpu, adapted = first.torch_device != "cpu", first.job.adapter.is_present
    kinds = tuple(dict.fromkeys(kind_of(one.strategy, one.options) for one in scenarios))
    axes = unpredicted_axes(first.job, (COMPILATION,))  # of which nobody published a run
    # Runs of one process are like those of a strategy that shares with no other rank.
    is_alone = first.world_size == 1 and not all(kind.endswith(OFFLOADED) for kind in kinds)
    counting = (*kinds, REFERENCE) if is_alone else kinds
    near = [] if axes else [
        run for run in measured_errors()
        if (run["statistic"] != CPU) == on_gpu and run["kind"] in counting
    ]  # fmt: skip
    alike = [run for run in near if run["adapted"] == adapted]
    seen = {run["kind"] for run in alike}
    short = first.job.data.sequence_length < SHORT_TOKENS
    speed = speed and first.device is not None
    of_memory: dict[str, tuple[str, ...]] = {
        "allocated": ("allocated", "not said") if on_gpu else (CPU,),
        "reserved": ("reserved", "device") if on_gpu else (),
    }
    memory = {
        name: None
        if bounded
        else _known([r for r in alike if r["statistic"] in counted], "memory", first, of=mean)
        for name, counted in of_memory.items()
    }
    speeds = [run for run in alike if (run["tokens"] < SHORT_TOKENS) == short] if speed else []
    known_speed = _known(speeds, "speed", first, of=median)
    if known_speed and first.device and _is_unseen(first):
        known_speed = replace(known_speed, unlike=(*known_speed.unlike, f"none on {first.device.name}"))
    own = [one for one in kinds if one in seen]
    unseen = [] if REFERENCE in seen and first.world_size == 1 else [one for one in kinds if one not in seen]
    words = ["adapters" if adapted else "full training", f"under {listed(_named(own or kinds))}"]
    words += ["or without a library"] if REFERENCE in seen and REFERENCE not in kinds else []
    return Trust(
        runs=" ".join(words + ([f"with {listed(axes)}"] if axes else [])),
        **memory,
        speed=known_speed,
        unseen=tuple(_named(unseen)),
        other_training=tuple(_other_training(near, adapted, unseen, () if known_speed or not speed else own)),
        bounded=bounded,
        is_timed=speed,
        assumption=largest_assumption(first, host_share, update_share) if speed else largest_of_memory(first),
    )


def _other_training(
    runs: list[dict[str, Any]], adapted: bool, unseen: Sequence[str], untimed: Sequence[str]
) -> Iterator[str]:
    """'ddp with adapters: memory ±12 % and speed ±23 % (4 published runs)', of strategies without a run like
    the question, or without the speed of one."""
    for kind in (*unseen, *untimed):
        of_kind = [run for run in runs if run["kind"] == kind and run["adapted"] != adapted]
        found = {
            name: [abs(run[name]) for run in of_kind if run[name] is not None]
            for name in (("memory", "speed") if kind in unseen else ("speed",))
        }
        figures = [
            f"{name} ±{_percent(median(errors) if name == 'speed' else mean(errors))}"
            for name, errors in found.items()
            if errors
        ]
        if figures:
            count = counted(max(map(len, found.values())), "published run")
            what = "where all is trained" if adapted else "with adapters"
            yield f"{_named([kind])[0]} {what}: {listed(figures)} ({count})".replace("%", " %")


OFFLOADED = "+offload"


def kind_of(strategy: StrategyKind, options: Mapping[str, Any]) -> str:
    """What of a strategy decides how well it is predicted: 'zero3', 'fsdp2-ring', 'zero12+offload'."""
    name = strategy.family if strategy.sequence is None else f"{strategy.family}-{strategy.sequence}"
    return name if options.get("offload", "none") == "none" else f"{name}{OFFLOADED}"


NAMES = {"zero12": "zero1/zero2", "fsdp2": "fsdp", "tensor": "tp", "pipeline": "pp"}
"""Of families whose own people do not write."""


def _named(kinds: Iterable[str]) -> list[str]:
    """'zero1/zero2 with offload' of 'zero12+offload'."""
    found = []
    for kind in kinds:
        family = kind.removesuffix(OFFLOADED)
        first, dash, divided = family.partition("-")
        name = NAMES.get(first, first) + dash + divided
        found.append(f"{name} with offload" if kind.endswith(OFFLOADED) else name)
    return found


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
        return "compiled code is as fast as eager code, which is the least: fused kernels read and write less"
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
    if _is_unseen(scenario):
        return f"training sustains {kept} of the best matmul rate, though no run on {device.name} shows it"
    if scenario.nodes > 1 and scenario.fabric is not None:
        joined = f"nodes are joined by {scenario.fabric.name}, which" if scenario.fabric.assumed else None
        line_rate = f"its line rate, {scenario.fabric.bandwidth_per_gpu / 1e9:.3g} GB/s for each GPU,"
        return f"{joined or scenario.fabric.name} gives {line_rate} to every node at once"
    return f"training sustains {kept} of the best matmul rate of {device.name}"


def _is_unseen(scenario: Scenario) -> bool:
    """Whether no run shows which share of its rates a GPU sustains."""
    is_fitted = scenario.constants is not None and scenario.constants.fitted
    device = scenario.device
    return device is not None and not is_fitted and not is_sustained_rate_known(device)


@cache
def measured_errors() -> tuple[dict[str, Any], ...]:
    """One entry a run: adapted, kind (`kind_of`), statistic, tokens, memory, speed; of published ones whether
    it was compiled and checkpointed, and had several GPUs with PCIe alone between them."""
    found: list[dict[str, Any]] = [
        one for file in (ERRORS, CPU_ERRORS) for one in json.loads(file.read_text())
    ]
    return tuple(found)


def _unlike(run: dict[str, Any], asked: Scenario) -> set[str]:
    """Of links, checkpointing, compilation and length of samples, what a run has unlike a question."""
    job = asked.job
    length = job.data.sequence_length / run["tokens"]
    return {
        name
        for name, differs in (
            (LINKED, asked.world_size > 1 and run["pcie"] != crosses_pcie(asked)),
            (LENGTH, not 1 / LIKE_LENGTH <= length <= LIKE_LENGTH),
            (COMPILED, run["compiled"] != (job.model.compile != "none")),
            (CHECKPOINTED, run["checkpointed"] != bool(job.training.activation_checkpointing)),
        )
        if differs
    }


LENGTH, COMPILED, CHECKPOINTED, LINKED = UNLIKE = ("length", "compiled", "checkpointed", "linked")
"""What decides an error; where there are few runs, it may differ in this order."""


def crosses_pcie(scenario: Scenario) -> bool:
    """Whether the GPUs of a node have nothing but PCIe between them."""
    return scenario.world_size > 1 and scenario.device is not None and scenario.device.link.startswith("PCIe")


def _checkpointing(asked: Scenario) -> str:
    return f"with{'' if asked.job.training.activation_checkpointing else 'out'} checkpointing"


def _like_most(runs: list[dict[str, Any]], asked: Scenario) -> tuple[list[dict[str, Any]], list[str]]:
    """Enough runs that differ in as little as can be, or all; and how many have each setting not all have."""
    if not any(COMPILED in run for run in runs):  # of CPU ranks, whose errors no setting decides
        return runs, []
    unlike = [(run, _unlike(run, asked)) for run in runs]
    allowed = (set(some) for n in range(len(UNLIKE)) for some in combinations(UNLIKE, n))
    for some in allowed:
        chosen = [(run, differs) for run, differs in unlike if differs <= some]
        if len(chosen) >= ENOUGH_RUNS:
            break
    else:
        chosen = unlike
    job = asked.job
    names = {
        CHECKPOINTED: _checkpointing(asked),
        COMPILED: "compiled" if job.model.compile != "none" else "eager",
        LENGTH: "of about this length",
        LINKED: f"with{'out' if crosses_pcie(asked) else ''} NVLink",
    }
    shared = {name: sum(name not in differs for _, differs in chosen) for name in names}
    said = [f"{count or 'none'} {names[name]}" for name, count in shared.items() if count < len(chosen)]
    return [run for run, _ in chosen], said


def _known(runs: list[dict[str, Any]], figure: str, asked: Scenario, *, of: Any) -> KnownErrors | None:
    runs = [run for run in runs if run[figure] is not None]
    not_of: str | None = None
    if figure == "memory":  # of which checkpointing leaves little
        same = [run for run in runs if CHECKPOINTED not in run or CHECKPOINTED not in _unlike(run, asked)]
        not_of = None if same else _checkpointing(asked)
        runs = same or runs
    shown, unlike = _like_most(runs, asked)
    if not shown:
        return None
    errors = [float(run[figure]) for run in shown]
    sizes = [abs(error) for error in errors]
    whose = {"whose": "runs on CPU ranks"} if shown[0]["statistic"] == CPU else {}
    return KnownErrors(
        runs=len(errors), typical=of(sizes), bias=of(errors), worst=max(sizes), not_of=not_of,
        unlike=tuple(text for text in unlike if text != f"none {not_of}"),
        listed=tuple(errors) if len(errors) <= FEW_RUNS else (), **whose,
    )  # fmt: skip
