"""The closed forms that a third party's backend brings, evaluated for the run that is about to train."""

from __future__ import annotations

from dataclasses import replace

from harness.backends import registry
from harness.backends.base import Backend, World
from harness.forms.terms import OwnForms
from harness.forms.workload import Window
from harness.record.workload import NOT_CLAIMED, of_job
from harness.run_directory.request import RunRequest
from harness.worker.description import Built
from harness.worker.loop import Loop


def own_forms(
    backend: Backend, request: RunRequest, world: World, loop: Loop, built: Built, transport: str
) -> OwnForms | None:
    """Model states of every rank and the collectives of the run, from rank 0.

    None on other ranks, and where the backend brings no closed forms.
    `built` has the layout and the description of the bare model.
    """
    forms = backend.closed_form() if world.rank == 0 else None
    if forms is None:
        return None
    assert built.model is not None
    assert built.layout is not None
    workload = of_job(
        request.job,
        layout=built.layout,
        architecture=built.model.architecture,
        strategy=registry.claimed_strategy(backend) or NOT_CLAIMED,
        world_size=world.world_size,
        mesh=world.mesh,
        shard_size=loop.engine.effective().details.get("shard_size"),
        ranks_per_node=world.ranks_per_node,
        preset=request.preset,
        micro_batch_size=request.micro_batch_size,
        accumulation_steps=request.accumulation_steps,
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
        tuple(s for s in range(loop.first_step, loop.steps) if loop.window(s) == "probed"),
        every=every,
        evaluated=[s for s in range(every, loop.steps + 1, every) if s > loop.first_step] if every else (),
        batches=-(-held_out // (request.micro_batch_size * world.data_size)),
        digest=request.measure.weight_digests,
        checkpoint=request.measure.checkpoint == "native",
    )
