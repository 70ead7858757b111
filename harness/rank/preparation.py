"""Hands the job to a backend: its model, its optimizer and what every engine is asked alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch import nn

from harness.backends.base import Backend, Batch, Engine, LossScale, SetupContext, Unsupported, World
from harness.backends.model_source import AskedLoading
from harness.backends.registry import strategy_of
from harness.forms.optimizers import why_not
from harness.job.job import OptimizerSection, UpdateGroup
from harness.rank.data import DataFacts
from harness.rank.failure_words import note_parameters
from harness.rank.initial_weights import JobModelSource, why_whole
from harness.rank.live.observer import Observer
from harness.rank.models.changes import narrow_products
from harness.rank.models.description import Built, find_module_uses, split_dependence
from harness.rank.models.losses import divide_sequence, loss_function, returns_loss, targets_of
from harness.rank.models.model import model_config
from harness.rank.models.optimizer import frozen_names, try_own, update_groups
from harness.run_directory.request import RunRequest


def prepare_engine(
    request: RunRequest,
    world: World,
    backend: Backend,
    facts: DataFacts,
    observer: Observer,
    weights_folder: Path,
    example: Batch | None = None,
    first_batches: tuple[Callable[[Sequence[int]], Batch], Sequence[Sequence[int]]] | None = None,
) -> tuple[Engine, Built]:
    """The engine, and what the record says of the bare model that it was given.

    weights_folder: for files of initial weights, shared by the ranks of a machine. example: two samples.
    first_batches: of the reference, what makes a batch of samples, and those of its first steps.
    """
    built = Built()
    job = request.job
    config = model_config(job, facts)
    updated: list[tuple[UpdateGroup, ...]] = []

    def note(model: nn.Module) -> None:
        note_parameters(model)
        updated.append(update_groups(model, job.optimizer))
        traced = find_module_uses(job, model, config, example)
        built.describe(model, updated[-1], traced, whole)
        if first_batches is not None:
            built.split = split_dependence(job, model, *first_batches)
        whole_loss = loss_function(job, model)
        loss = divide_sequence(job, model, world, whole_loss)
        # The reference widens products to measure what fp8 changes.
        if job.training.precision == "fp8" and getattr(backend.options, "precision", None) != "fp32":
            narrow_products(model)
        in_one_piece = loss is whole_loss and job.model.compile == "none" and world.mesh.model_parts == 1
        beside = partial(targets_of, job=job) if in_one_piece and returns_loss(job, model) else None
        observer.built(model, loss, frozen_names(model), targets_of_model_loss=beside)

    whole = why_whole(job, request.loading)
    loading: AskedLoading = "full" if whole else request.loading
    source = JobModelSource(job, config, world, loading=loading, folder=weights_folder, on_built=note)
    optimizer, built.update_of_part = _optimizer(request, backend)
    context = SetupContext(
        world=world,
        precision=job.training.held_precision,
        gradient_clipping=job.training.gradient_clipping,
        micro_batch_size=request.micro_batch_size,
        accumulation_steps=request.accumulation_steps,
        preset=request.preset,  # type: ignore[arg-type]
        compute_loss=observer.compute_loss,
        loss_scale=LossScale(
            initial=job.training.initial_loss_scale,
            growth_interval=job.training.loss_scale_growth_interval,
        ),
        optimizer=optimizer.kind,
        compile=job.model.compile,
    )
    engine = backend.prepare(
        source, lambda named: observer.build_optimizer(named, optimizer, updated[-1]), context
    )
    return engine, built


def _optimizer(request: RunRequest, backend: Backend) -> tuple[OptimizerSection, float | None]:
    """The optimizer that runs, and what `OwnUpdate.of_part` says of the user's own.

    Raises Unsupported where the strategy cannot have it.
    """
    optimizer = request.job.optimizer
    strategy = strategy_of(request.backend)
    precision = request.job.training.precision
    if strategy is not None and (reason := why_not(optimizer.kind, strategy, precision)) is not None:
        raise Unsupported(reason)
    own = try_own(optimizer)
    if own is not None and (reason := own.why_not(strategy)) is not None:
        raise Unsupported(reason)
    at_full_width = getattr(backend.options, "states", None) == "fp32"
    of_part = own.of_part if own is not None else None
    return optimizer.at_full_width() if at_full_width else optimizer, of_part
