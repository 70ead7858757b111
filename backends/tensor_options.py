"""Options of the backends that cut layers. Importable without torch."""

from __future__ import annotations

from pydantic import Field

from harness.backends.base import BackendOptions
from harness.backends.mesh import Mesh
from harness.backends.options import Zero3Options, Zero12Options


class TensorOptions(BackendOptions):
    """Tensor parallelism."""

    tensor: int | None = Field(
        None, ge=2, description="ranks that cut each layer; default: all; groups of them are data parallel"
    )

    def mesh(self, world_size: int) -> Mesh:
        return Mesh.of(world_size, {"data": None, "tensor": self.tensor or world_size})


class FsdpTensorOptions(BackendOptions):
    """FSDP2 of a model whose layers are cut."""

    tensor: int = Field(2, ge=2, description="ranks that cut each layer; the others shard what these hold")

    def mesh(self, world_size: int) -> Mesh:
        return Mesh.of(world_size, {"shard": None, "tensor": self.tensor})


class AutoTpOptions(BackendOptions):
    """DeepSpeed AutoTP."""

    tensor: int = Field(
        2, ge=2, description="ranks that cut each layer; the others share states as ZeRO does"
    )

    def mesh(self, world_size: int) -> Mesh:
        return Mesh.of(world_size, {"data": None, "tensor": self.tensor})


class AutoTp12Options(AutoTpOptions, Zero12Options):
    """AutoTP under stages 1 and 2."""


class AutoTp3Options(AutoTpOptions, Zero3Options):
    """AutoTP under stage 3."""
