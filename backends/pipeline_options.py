"""Options of pipeline parallelism. Importable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from harness.backends.base import BackendOptions
from harness.backends.mesh import Mesh

from .explain import Unsupported


class PipelineOptions(BackendOptions):
    """Pipeline parallelism of torch.distributed.pipelining."""

    schedule: Literal["1f1b", "gpipe", "interleaved"] = Field(
        "1f1b",
        description="1f1b: forward and backward passes alternate; gpipe: all forward passes first; "
        "interleaved: as 1f1b, with several stages per rank",
    )
    stages: int | None = Field(
        None, ge=2, description="ranks of one pipeline; default: all ranks. The others are data parallel"
    )
    micro_batches: PositiveInt | None = Field(
        None,
        description="parts into which a pipeline cuts the batch of a micro-step; default: as many as ranks",
    )
    stages_per_rank: int = Field(2, ge=2, description="stages that each rank holds, at schedule=interleaved")

    def mesh(self, world_size: int) -> Mesh:
        if world_size < 2:
            raise Unsupported("a pipeline needs at least 2 ranks")
        return Mesh.of(world_size, {"pipeline": self.stages or world_size, "data": None})

    def parts(self, world_size: int) -> int:
        """Micro-batches of a micro-step."""
        return self.micro_batches or self.mesh(world_size).size("pipeline")

    def stages_on(self, ranks: int) -> int:
        """Stages of a pipeline over so many ranks."""
        return ranks * (self.stages_per_rank if self.schedule == "interleaved" else 1)


def parts_of(options: BackendOptions, world_size: int) -> int:
    """Into how many equal parts the samples of a micro-step are cut: 1 unless the ranks are a pipeline."""
    return options.parts(world_size) if isinstance(options, PipelineOptions) else 1
