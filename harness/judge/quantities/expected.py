"""The closed forms that a run is held to: of its family, of the strategy it claims, or its own."""

from __future__ import annotations

from harness.forms import families
from harness.forms.terms import ModelStates, Volume
from harness.forms.workload import ORDINARY_STEP, Workload
from harness.record import Record
from harness.record.workload import known_strategy, of_record

ADAM_CLASSES = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
"""Optimizers whose states the closed forms know, whatever library they are of."""


def unjudged_amounts(record: Record) -> tuple[str, ...]:
    """'bytes' and 'memory' of a run that succeeded under a strategy without a closed form; else nothing.

    A third party's backend that claims no strategy and brings no form, or a script whose strategy is unknown.
    """
    strategy = known_strategy(record)
    known = strategy is not None and strategy.family in families.FAMILIES
    unjudged = record.status == "ok" and not known and record.backend.own_forms is None
    return ("bytes", "memory") if unjudged else ()


def expected_states(record: Record, rank: int) -> ModelStates | None:
    """The closed form for one rank: of its family, or its own; None: there is none of all that it holds."""
    found = derived_states(record, rank)
    return None if found is None or found.unknown is not None else found


def derived_states(record: Record, rank: int) -> ModelStates | None:
    """The same, also where the optimizer's states are not known: then without them."""
    if record.backend.own_forms is not None:
        return record.backend.own_forms.states[rank]
    workload = of_record(record, rank)
    if workload is None or workload.strategy.family not in families.FAMILIES or _keeps_other_states(record):
        return None
    if families.underived(workload) is not None:
        return None
    return families.model_states(workload)


def _keeps_other_states(record: Record) -> bool:
    """Whether an observed script steps an optimizer whose states are not Adam's two moments."""
    effective = record.backend.effective
    if record.observation is None or effective is None:
        return False
    seen = [name.rpartition(".")[2] for name in effective.optimizer.split(" and ")]
    others = any(name not in ADAM_CLASSES for name in seen)
    return others or any(group.get("amsgrad") for group in effective.optimizer_groups or ())


def expected_volume(record: Record, workload: Workload) -> Volume | None:
    """What the run should communicate by its family, or by its own closed form; None: there is none.

    Own forms were evaluated before the run: they say nothing of one that ended before its probed steps.
    """
    own = record.backend.own_forms
    if own is not None:
        return own.volume if own.steps == workload.steps else None
    if workload.strategy.family not in families.FAMILIES or _resumed_into_probed_steps(record, workload):
        return None
    return families.collectives(workload)


def _resumed_into_probed_steps(record: Record, workload: Workload) -> bool:
    """The closed forms know the first steps of a training, not those of a run that continues one."""
    if record.resumed is None:
        return False
    return min(workload.steps, default=0) - record.resumed.step < ORDINARY_STEP
