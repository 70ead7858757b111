"""The closed forms that a third party's backend brings, evaluated for the run that is about to train."""

from __future__ import annotations

from dataclasses import replace

from harness.backends import registry
from harness.backends.base import Backend, World
from harness.record.workload import NOT_CLAIMED, layout_of
from harness.run_directory.request import RunRequest
from harness.theory.recomputation import recomputed_until
from harness.theory.terms import OwnForms
from harness.theory.workload import Window, Workload
from harness.worker.description import Built
from harness.worker.loop import Loop


def own_forms(
    backend: Backend, request: RunRequest, world: World, loop: Loop, built: Built, transport: str
) -> OwnForms | None:
    """Model states of every rank and the collectives of the run; None: the backend brings none.

    `built` has the layout and the description of the bare model.
    """
    forms = backend.closed_form()
    if forms is None:
        return None
    assert built.model is not None
    assert built.layout is not None
    training = request.job.training
    details = loop.engine.effective().details
    workload = Workload(
        layout=layout_of(built.layout),
        strategy=registry.claimed_strategy(backend) or NOT_CLAIMED,
        world_size=world.world_size,
        shard_size=details.get("shard_size"),
        ranks_per_node=world.ranks_per_node,
        precision=training.precision,
        preset=request.preset,  # type: ignore[arg-type]
        micro_batch_size=request.micro_batch_size,
        accumulation_steps=request.accumulation_steps,
        sequence_length=request.job.data.sequence_length,
        gradient_clipping=training.gradient_clipping,
        activation_checkpointing=training.activation_checkpointing,
        recomputed_until=recomputed_until(built.model.architecture),
        device=world.device,
        transport=transport,
        options=backend.options.model_dump(mode="json"),
        window=_window(request, world, loop),
    )
    ranks = (replace(workload, rank=rank) for rank in range(world.world_size))
    return OwnForms(
        states=tuple(forms.model_states(of_rank) for of_rank in ranks),
        volume=forms.collectives(workload),
        steps=workload.window.steps,
    )


def _window(request: RunRequest, world: World, loop: Loop) -> Window:
    """What will be counted if the run reaches its end."""
    every = request.job.evaluation.every_steps
    held_out = len(loop.sampler.evaluation_ids)
    return Window.of_run(
        tuple(s for s in range(loop.steps) if loop.measure.window(s, loop.steps) == "probed"),
        every=every,
        evaluated=range(every, loop.steps + 1, every) if every else (),
        batches=-(-held_out // (request.micro_batch_size * world.world_size)),
        digest=request.measure.weight_digests,
        checkpoint=request.measure.checkpoint,
    )
