"""Engines with a defect each, which the contract must reject."""

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from harness.backends.base import SetupContext, World
from harness.backends.ddp import DdpBackend
from harness.backends.fsdp.fsdp2 import Fsdp2Backend
from harness.backends.injected_faults import GradientsSummed as GradientsSummed
from harness.backends.injected_faults import Spoiled, instead
from tests.traps.adapters import Bf16Reduction as Bf16Reduction
from tests.traps.adapters import asked, scaling, spoiled
from tests.traps.families import Hybrid

(LossScaledTwice,) = spoiled(scaling(lambda _: 1 / 2), DdpBackend)
NoClipping = asked(DdpBackend, gradient_clipping=None)
LibraryDefaultReduction = asked(Fsdp2Backend, preset="library-defaults")
"""Reduces in the compute dtype although the preset says fp32."""
WideReduction = asked(Fsdp2Backend, preset="like-for-like")
"""Reduces in fp32 although the job asks for the library's default, which is the compute dtype."""


class LastMicroStepOnly(Spoiled, DdpBackend):
    """Drops the gradients of every micro-step but the last."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        @instead(engine)
        def backward(original: Any, loss: Tensor, *, last_micro_step: bool) -> None:
            original(loss * float(last_micro_step), last_micro_step=last_micro_step)


class OtherReplicas(Hybrid):
    """Hybrid sharding whose second row of ranks is turned round: each rank reduces with another replica."""

    def _mesh(self, world: World) -> DeviceMesh:
        return DeviceMesh(world.device, [[0, 1], [3, 2]], mesh_dim_names=("replicate", "shard"))
