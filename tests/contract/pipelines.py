"""On real ranks: pipelines of every schedule train one model; what they lose, hold and send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from harness.backends import registry
from harness.backends.base import Backend, Effective, Engine, World
from harness.rank.data import IGNORED
from harness.rank.probes.communication import CommunicationCounter
from harness.rank.probes.memory import AllocatorProbe, live_bytes_by_kind
from harness.record import LayoutPart, ModelPart
from tests.contract.cases import GLOBAL_BATCH, LEARNING_RATE, global_batches
from tests.contract.communication import PROBED_STEP, VolumeCase, prepare

PIPELINES = {
    1: ("single",),
    2: ("pp", "pp:schedule=gpipe,micro_batches=1", "pp:schedule=interleaved"),
    4: ("pp", "pp:stages=2,schedule=gpipe", "pp:stages=2,schedule=interleaved"),
}
"""By ranks; the model has four blocks."""


def _case(accumulation_steps: int, precision: str, *, tied: bool) -> VolumeCase:
    return VolumeCase(accumulation_steps, precision, "like-for-like", tied=tied, clipping=1.0, family="deep")


CASES = (_case(1, "fp32", tied=True), _case(1, "bf16-mixed", tied=False), _case(2, "fp32", tied=False))


@dataclass
class Trained:
    """What one rank of one case left behind."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    kinds: dict[str, int]
    rows: list[dict[str, Any]]
    effective: Effective
    layout: LayoutPart
    model: ModelPart


def train_pipelines(_: Backend, world: World) -> dict[tuple[str, int], Trained]:
    """By label and number of the case, where a micro-step has a sample for each micro-batch."""
    found = {}
    for label in PIPELINES[world.world_size]:
        placed = registry.placed(label, world)
        for number, case in enumerate(CASES):
            if GLOBAL_BATCH // placed.data_size // case.accumulation_steps >= placed.mesh.size("pipeline"):
                found[label, number] = _train(registry.create(label), placed, case)
    return found


def _train(backend: Backend, world: World, case: VolumeCase) -> Trained:
    engine, layout, model = prepare(backend, world, case)
    counter = CommunicationCounter(world.layout)
    losses, norms, kinds = [], [], dict[str, int]()
    for step, batch in enumerate(global_batches()):
        if step in (0, PROBED_STEP):
            counter.start()
        losses.append(_micro_steps(engine, batch, world, case, counter))
        if step == PROBED_STEP:
            live = live_bytes_by_kind(engine.state_tensors(), AllocatorProbe())
            kinds = live.inside or {}
        counter.phase = "step"
        norms.append(engine.step(LEARNING_RATE))
        counter.stop()
    weights = dict(engine.full_parameters())
    effective = engine.effective()
    engine.close()
    return Trained(losses, norms, weights, kinds, counter.rows(), effective, layout, model)


def _micro_steps(
    engine: Engine,
    batch: tuple[torch.Tensor, torch.Tensor],
    world: World,
    case: VolumeCase,
    counter: CommunicationCounter,
) -> float:
    """This rank's part of the mean loss per target token."""
    tokens, labels = batch
    targets = int((labels[:, 1:] != IGNORED).sum())
    micro, total = GLOBAL_BATCH // world.data_size // case.accumulation_steps, 0.0
    for micro_step in range(case.accumulation_steps):
        first = (micro_step * world.data_size + world.data_rank) * micro
        part = slice(first, first + micro)
        counter.phase = "forward"
        loss = engine.forward({"tokens": tokens[part], "labels": labels[part]})
        counter.phase = "backward"
        last = micro_step == case.accumulation_steps - 1
        engine.backward(loss * (world.data_size / targets), last_micro_step=last)
        total += float(loss.detach()) / targets
    return total
