"""The backend 'pp': cuts the model, fills this rank's stages and puts an engine around their schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.backends import base
from harness.backends.model.blocks import parameter_count
from harness.backends.model.loading import this_device
from harness.backends.model_source import ModelSource, model_source
from harness.backends.optimizer.gradients import COUNTED_ELSEWHERE
from harness.backends.options import PipelineOptions
from harness.backends.pipeline import engine
from harness.backends.pipeline.cut import Cut, not_whole, why_not_cut, why_not_scheduled
from harness.backends.torch_engine import TorchStrategy


class PipelineBackend(base.Backend):
    """Stages on the ranks of a pipeline, data parallelism across pipelines."""

    Options = PipelineOptions

    def __init__(self, options: base.BackendOptions) -> None:
        super().__init__(options)
        assert isinstance(options, PipelineOptions)
        self.pipeline_options = options

    def unmet_requirements(self, world: base.World) -> list[str]:
        try:
            self.options.mesh(world.world_size)
        except base.Unsupported as misfit:
            return [str(misfit)]
        return []

    def prepare(
        self, build_model: base.BuildModel, build_optimizer: base.BuildOptimizer, context: base.SetupContext
    ) -> base.Engine:
        if context.precision == "fp16-mixed":
            raise base.Unsupported(
                f"torch {torch.__version__}: GradScaler finds overflow in the gradients of its own stages "
                "only, so ranks of a pipeline would skip different steps; use bf16-mixed"
            )
        source = model_source(build_model)
        model = source() if source.loading == "full" else source.skeleton()
        pipeline = self._pipeline(model, source, context)
        strategy = self._strategy(pipeline, model)
        for name, parameter in model.named_parameters():
            # The weights of other stages are freed though the caller may hold on to the model.
            if name not in pipeline.parameters and not parameter.is_meta:
                parameter.data = parameter.data.new_empty(0)
        optimizer = build_optimizer(pipeline.parameters.items())
        return engine.PipelineEngine(pipeline, optimizer, context, replace(strategy, loading=source.loading))

    def _pipeline(self, model: nn.Module, source: ModelSource, context: base.SetupContext) -> engine.Pipeline:
        """This rank's stages with their weights, and the groups that it communicates in."""
        world, options = context.world, self.pipeline_options
        ranks = world.mesh.size("pipeline")
        blocks = engine.require_cuttable(model)
        cut = Cut(ranks=ranks, stages=options.stages_on(ranks), blocks=blocks)
        if (reason := why_not_cut(blocks=len(blocks), ranks=ranks, stages=cut.stages)) is not None:
            raise base.Unsupported(reason)
        micro_batches = options.micro_batches or ranks
        unscheduled = why_not_scheduled(options.schedule, micro_batches=micro_batches, ranks=ranks)
        if unscheduled is not None:
            raise base.Unsupported(unscheduled)
        if context.micro_batch_size % micro_batches:
            raise base.Unsupported(not_whole(context.micro_batch_size, micro_batches))
        place = world.mesh.coordinates(world.rank).get("pipeline", 0)
        stages = engine.stages_of_parameters(model, cut)
        holders = {
            name: tuple(dict.fromkeys(stage % ranks for stage in of_name)) for name, of_name in stages.items()
        }
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        own = _own_parameters(model, source, {n for n, r in holders.items() if place in r}, context)
        for name, parameter in own.items():
            setattr(parameter, COUNTED_ELSEWHERE, holders[name][0] != place)
        config: Any = model.config
        return engine.Pipeline(
            cut=cut,
            schedule=options.schedule,
            micro_batches=micro_batches,
            rank=place,
            group=_group(context, "pipeline"),
            replicas=_group(context, "data"),
            modules={stage: engine.cut_stage(model, cut, stage, own) for stage in cut.of_rank(place)},
            parameters=own,
            holders=holders,
            shapes=shapes,
            hidden=config.hidden_size,
            output_width=config.hidden_size if engine.computes_loss(model.lm_head) else config.vocab_size,
        )

    def _strategy(self, pipeline: engine.Pipeline, model: nn.Module) -> TorchStrategy:
        cut = pipeline.cut
        dtype = next(iter(pipeline.parameters.values())).dtype
        settings = {
            "schedule": pipeline.schedule,
            "stages": cut.stages,
            "pipeline_ranks": cut.ranks,
            "micro_batches": pipeline.micro_batches,
            "scale_grads": pipeline.scale_grads,
        }
        return TorchStrategy(
            name=f"pipeline of {cut.stages} stages, {pipeline.schedule}",
            native_config=settings,
            wrap_units=[""],
            reduce_dtype=dtype if pipeline.replicas.size() > 1 else None,
            parameter_count=parameter_count(model),
            compute_dtype=dtype,
            autocast=True,
            offload=[],
            details={
                **settings,
                "blocks_by_stage": [len(cut.blocks_of(stage)) for stage in range(cut.stages)],
                "tied_across_stages": [name for name, ranks in pipeline.holders.items() if len(ranks) > 1],
            },
            norm_group=pipeline.group,
            gathers_anew=True,
        )


def _own_parameters(
    model: nn.Module, source: ModelSource, names: set[str], context: base.SetupContext
) -> dict[str, nn.Parameter]:
    """This rank's parameters on its device; those of a skeleton are filled."""
    device = this_device(context.world)
    own: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if source.loading == "full":
            if name in names:
                own[name] = nn.Parameter(parameter.detach().to(device))
            continue
        kept = parameter.shape if name in names else (0,)
        tensor = torch.empty(kept, dtype=parameter.dtype, device=device)
        source.fill(tensor.view(-1), name, 0)
        if name in names:
            own[name] = nn.Parameter(tensor)
    if source.loading != "full":
        source.filled()
    return own


def _group(context: base.SetupContext, role: str) -> dist.ProcessGroup:
    """This rank's group of a role; a collective, which makes those of all ranks in one order."""
    world, mesh = context.world, context.world.mesh
    every = sorted({tuple(mesh.group(role, rank)) for rank in range(world.world_size)})
    made = {ranks: dist.new_group(list(ranks)) for ranks in every}
    return made[tuple(mesh.group(role, world.rank))]
