"""What of a step's communication hides behind computing, by what each library starts ahead and waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.forms import sequence, tensor
from harness.forms.part import within
from harness.forms.terms import FURTHER_FORWARD, FURTHER_GRADIENTS
from harness.forms.workload import Workload
from harness.forms.zero3.states import fetching
from harness.planning.communicating import Transfer
from harness.planning.computing import ComputingTime
from harness.planning.work import Work

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
OF_ACTIVATIONS = frozenset({
    tensor.AGAIN, tensor.FORWARD, tensor.BACKWARD, tensor.LOGITS, sequence.KEYS, sequence.ROTATED,
    sequence.GRADIENTS_OF_KEYS, sequence.EXCHANGED, sequence.POSITIONS,
})  # fmt: skip
"""What the next operator of a pass needs: every rank waits for it."""


@dataclass(frozen=True, kw_only=True)
class OverlapRule:
    """What runs at the same time."""

    gathers_ahead: bool
    """Weights of the next unit are gathered while this one computes."""
    reduces_beside: bool
    """Gradients are reduced while the backward pass goes on."""
    source: str


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One unit in one direction: its weights arrive, it computes, its gradients leave."""

    compute: float
    gather: float = 0.0
    reduce: float = 0.0


def overlap_rule(workload: Workload) -> OverlapRule:
    """What the library of a strategy overlaps with these options and this preset."""
    family, on_gpu = within(workload).strategy.family, workload.device != "cpu"
    match family:
        case "ddp":
            source = "DDP reduces a bucket once it is full (torch, reducer.cpp)"
            return OverlapRule(gathers_ahead=False, reduces_beside=True, source=source)
        case "fsdp1" | "fsdp2":
            ahead = on_gpu and workload.options.get("backward_prefetch") != "none"
            source = "FSDP gathers the next unit and reduces the last one on streams of their own" + (
                "" if on_gpu else "; a CPU has no streams, so it waits for each collective"
            )
            return OverlapRule(gathers_ahead=ahead, reduces_beside=on_gpu, source=source)
        case "zero3":
            how = fetching(workload)
            source = "DeepSpeed 0.19.8, zero/config.py: overlap_comm is true by default at stage 3" + (
                "; like for like sets stage3_max_live_parameters to 0: nothing is gathered ahead"
                if not how.live
                else ""
            )
            ahead = on_gpu and how.live > 0 and how.ahead > 0
            return OverlapRule(gathers_ahead=ahead, reduces_beside=on_gpu, source=source)
        case "single" | "pipeline":
            source = "what layers or stages hand on is waited for, and replicas are averaged after the passes"
            return OverlapRule(gathers_ahead=False, reduces_beside=False, source=source)
        case _:
            source = "DeepSpeed 0.19.8, zero/config.py: overlap_comm is false by default below stage 3"
            return OverlapRule(gathers_ahead=False, reduces_beside=False, source=source)


@dataclass(frozen=True, kw_only=True)
class StepCommunication:
    """Seconds of a step's communication by what it could hide behind."""

    always: float
    """What no library overlaps."""
    forward: float
    """Weights gathered in the forward pass of the first micro-step."""
    gathers_each: bool
    """Whether every micro-step gathers them in its forward pass."""
    backward: float
    """Weights gathered in the backward pass of each micro-step."""
    reduced: float
    """Gradients reduced in the last micro-step."""
    reduces_each: bool
    """Whether every micro-step reduces them."""


def step_communication(work: Work, found: Sequence[Transfer]) -> StepCommunication:
    """Sort the collectives of a step."""
    of_states = [t for t in found if t.collective.term not in OF_ACTIVATIONS]
    gathers = [t for t in of_states if t.collective.op == "all_gather" and t.collective.phase != "step"]
    reductions = [t for t in of_states if t.collective.op in REDUCTIONS and t.collective.phase == "backward"]
    hideable = {id(t) for t in (*gathers, *reductions)}
    count = work.workload.accumulation_steps
    gathers_each = any(t.collective.term == FURTHER_FORWARD for t in gathers)
    reduces_each = any(t.collective.term == FURTHER_GRADIENTS for t in reductions)
    forward = sum(t.seconds for t in gathers if t.collective.phase == "forward")
    backward = sum(t.seconds for t in gathers if t.collective.phase == "backward")
    reduced = sum(t.seconds for t in reductions)
    return StepCommunication(
        always=sum(t.seconds for t in found if id(t) not in hideable),
        # Where the weights stay gathered between micro-steps, only the first one gathers in its forward pass.
        forward=forward / count if gathers_each else forward,
        gathers_each=gathers_each,
        backward=backward / count,
        reduced=reduced / count if reduces_each else reduced,
        reduces_each=reduces_each,
    )


def exposed_seconds(
    work: Work, computing: ComputingTime, found: Sequence[Transfer], rule: OverlapRule
) -> float:
    """Seconds per step in which a rank communicates and does not compute, if hiding costs nothing."""
    sent = step_communication(work, found)
    count = work.workload.accumulation_steps

    def micro_step(*, first: bool, last: bool) -> float:
        stages = _stages(
            work,
            computing,
            forward=sent.forward if first or sent.gathers_each else 0.0,
            backward=sent.backward,
            reduced=sent.reduced if last or sent.reduces_each else 0.0,
        )
        return max(0.0, run_time(stages, rule) - computing.micro_step)

    if count == 1:
        return sent.always + micro_step(first=True, last=True)
    ends = micro_step(first=True, last=False) + micro_step(first=False, last=True)
    return sent.always + ends + (count - 2) * (micro_step(first=False, last=False) if count > 2 else 0.0)


def run_time(stages: Sequence[Stage], rule: OverlapRule) -> float:
    """Seconds of stages in order on one device and one network, each of which does one thing at a time.

    Ahead: the gather of a stage begins when the stage before begins to compute, after the network is free.
    """
    computed = network = begun = 0.0
    waiting = 0.0
    for stage in stages:
        if stage.gather:
            start = max(network, begun if rule.gathers_ahead else computed)
            arrived = network = start + stage.gather
        else:
            arrived = 0.0
        if waiting:
            # The reduction of the stage before was started after this gather.
            network = max(network, computed) + waiting
            waiting = 0.0
            if not rule.reduces_beside:
                arrived = max(arrived, network)
        begun = max(computed, arrived)
        computed = begun + stage.compute
        waiting = stage.reduce
    return max(computed, (max(network, computed) + waiting) if waiting else network)


def reduction_shares(work: Work) -> tuple[float, tuple[float, ...], float]:
    """Shares of the parameters: the root unit's, each block's, and what of the root is reduced early."""
    root, blocks, behind = work.unit_shares
    return (
        root,
        blocks,
        behind if within(work.workload).strategy.family in ("ddp", "zero0", "zero12") else 0.0,
    )


def _stages(
    work: Work, computing: ComputingTime, *, forward: float, backward: float, reduced: float
) -> list[Stage]:
    """A micro-step as stages; seconds of communication are divided by the units' elements.

    Buckets of DDP and DeepSpeed hold what is ready: the output projection first, the embedding last. A unit
    of FSDP and ZeRO-3 that holds both is reduced last.
    """
    root, blocks, early = reduction_shares(work)
    count = max(1, len(blocks))
    each = [Stage(compute=computing.block_forward / count, gather=share * forward) for share in blocks]
    found = [Stage(compute=0.0, gather=root * forward), *each, Stage(compute=computing.head_forward)]
    head = Stage(compute=computing.head_backward, gather=root * backward, reduce=early * reduced)
    back = [
        replace(head, compute=computing.block_backward / count, gather=s * backward, reduce=s * reduced)
        for s in reversed(blocks)
    ]
    if not blocks:
        found.append(Stage(compute=computing.block_forward))
        back = [Stage(compute=computing.block_backward)]
    return [*found, head, *back, Stage(compute=0.0, reduce=(root - early) * reduced)]
