"""What FSDP2 of torch 2.13 gathers where units run more than once, not at all, or without a backward pass.

Follows `_fully_shard/_fsdp_param_group.py` unit by unit; `harness.forms.fsdp.units` has the ordinary case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from harness.forms.fsdp.units import GatherUnit, gathers
from harness.forms.model.layout import UnitCall
from harness.forms.terms import (
    BACKWARD,
    FORWARD,
    FURTHER_BACKWARD,
    FURTHER_FORWARD,
    Collective,
)
from harness.forms.workload import Workload


class Order:
    """The units of one rank as they are gathered and given back; each pass returns how often each was."""

    def __init__(self, calls: Sequence[UnitCall], kept: Mapping[str, bool]) -> None:
        """kept: by unit, whether it stays gathered after a forward pass."""
        self._moments = [moment for moment in _moments(calls) if moment[0] in kept]
        self._kept = kept
        self._there: set[str] = set()
        self._not_waited_for: set[str] = set()
        """Gathered ahead, which giving back leaves alone (`_all_gather_result`)."""
        self._ran: list[str] = []
        """`post_forward_order`, which lasts until the last backward pass of a step."""

    def forward(self) -> Counter[str]:
        gathered: Counter[str] = Counter()
        for name, _, begins in self._moments:
            if begins:
                self._need(name, gathered)
            else:
                self._ran.append(name)
                if not self._kept[name]:
                    self._there.discard(name)
        return gathered

    def backward(self, *, last: bool) -> Counter[str]:
        """`pre_backward` gathers a unit and, ahead, the one that ran before it; `post_backward`, which hangs
        on its inputs, gives it back, at the latest at the end (`_root_post_backward_final_callback`)."""
        gathered: Counter[str] = Counter()
        indices = {name: [n for n, ran in enumerate(self._ran) if ran == name] for name in self._kept}
        at_work: dict[str, bool] = {}
        for name, use, begins in reversed(self._moments):
            if use == "forward only" or (not begins and at_work.get(name)):
                continue
            if not begins:
                at_work[name] = True
                self._need(name, gathered)
                before = indices[name].pop() - 1
                if before >= 0 and (target := self._ran[before]) not in self._there:
                    self._need(target, gathered)
                    self._not_waited_for.add(target)
            elif use == "inputs with gradient":
                at_work[name] = False
                self._there -= {name} - self._not_waited_for
        self._there -= {name for name in self._kept if at_work.get(name) is not False} - self._not_waited_for
        if last:
            self._there -= self._not_waited_for
            self._not_waited_for.clear()
            self._ran.clear()
        return gathered

    def _need(self, name: str, gathered: Counter[str]) -> None:
        if name not in self._there:
            gathered[name] += 1
            self._there.add(name)
        self._not_waited_for.discard(name)


def _moments(calls: Sequence[UnitCall]) -> Iterator[tuple[str, str, bool]]:
    """(unit, use, whether it begins): a run of the whole model ends before the next begins."""
    whole: str | None = None
    for name, use in calls:
        if name == "":
            if whole is not None:
                yield "", whole, False
            whole = use
        yield name, use, True
        if name:
            yield name, use, False
    if whole is not None:
        yield "", whole, False


def in_order(workload: Workload, units: Mapping[str, GatherUnit], step: int) -> list[Collective]:
    """What one step gathers. units: by name, '' for what no block holds."""
    order = _order(workload, units)
    if workload.follows_evaluation(step):
        order.forward()
    found: list[Collective] = []
    for micro_step in range(workload.accumulation_steps):
        last = workload.reduces_each or micro_step == workload.accumulation_steps - 1
        forward, backward = (FURTHER_FORWARD, FURTHER_BACKWARD) if micro_step else (FORWARD, BACKWARD)
        found += _gathers(workload, "forward", forward, units, order.forward())
        found += _gathers(workload, "backward", backward, units, order.backward(last=last))
    return found


def _order(workload: Workload, units: Mapping[str, GatherUnit]) -> Order:
    return Order(workload.layout.unit_calls or (), {name: unit.kept for name, unit in units.items()})


def _gathers(
    workload: Workload, phase: str, term: str, units: Mapping[str, GatherUnit], gathered: Counter[str]
) -> list[Collective]:
    return gathers(workload, phase, term, [units[name] for name in gathered.elements()])
