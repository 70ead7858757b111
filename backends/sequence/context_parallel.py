"""Context parallelism: each sample is divided among ranks whose attention meets in a ring."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..base import Backend, BuildModel, BuildOptimizer, Engine, SetupContext, Unsupported
from ..ddp import DdpBackend, DdpEngine
from ..fsdp.fsdp2 import Fsdp2Backend, Fsdp2Engine
from ..options import ContextParallelOptions, FsdpContextParallelOptions, Rotation
from ..torch_engine import TorchEngine

ROTATIONS: dict[Rotation, Any] = {
    "all-gather": ring._RotateMethod.ALL_GATHER,
    "all-to-all": ring._RotateMethod.ALL_TO_ALL,
}
ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop")
"""What configurations of transformers call the probability of dropping attention."""
SEQUENCE_DIMENSION = 2
"""Of queries, keys and values: (samples, heads, tokens, size of a head)."""
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class RingAttention:
    """`context_parallel` in force from here until `close`, for every attention of the process.

    It has to last from the forward to the backward pass, whose kernels it replaces too. Ranks hold
    consecutive parts of the samples: torch's load balancing would reorder them, and transformers takes
    reordered positions for packed samples and builds a mask, which no ring takes.
    """

    def __init__(self, group: DeviceMesh, rotation: Rotation) -> None:
        self._stack = ExitStack()
        options = ring._cp_options
        for name, value in (("enable_load_balance", False), ("rotate_method", ROTATIONS[rotation])):
            self._stack.callback(setattr, options, name, getattr(options, name))
            setattr(options, name, value)
        if group.device_type == "cpu":
            # Rules for the CPU's kernel as torch has them for CUDA's (`_sdpa_handler`, torch 2.13).
            rules: dict[Any, Any] = ring.custom_ops
            rules |= {FLASH.default: _forward, FLASH_BACKWARD.default: _backward}
        # It cuts the buffers that it is given, and takes the size and device of the first: there are none.
        nothing = torch.zeros(group.size(), device=group.device_type)
        self._stack.enter_context(context_parallel(group, buffers=[nothing], buffer_seq_dims=[0]))
        # Without a kernel of its own attention would fall apart into operators that a ring does not know.
        self._stack.enter_context(
            sdpa_kernel(
                [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
            )
        )

    def close(self) -> None:
        """Give attention back as it was."""
        self._stack.close()


def require_ring_attention(model: nn.Module) -> None:
    """Raises Unsupported for a model whose attention a ring would leave within each rank's part."""
    kernel = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if kernel != "sdpa":
        raise Unsupported(
            f"torch {torch.__version__}: context_parallel replaces scaled_dot_product_attention only; "
            f"attention '{kernel}' of {type(model).__name__} would see each rank's own part of a sample and "
            "nothing before it; use model.attention=sdpa"
        )
    config = getattr(model, "config", None)
    drops = max((getattr(config, name, None) or 0.0 for name in ATTENTION_DROPOUTS), default=0.0)
    if drops > 0 and next(model.parameters()).device.type == "cpu":
        raise Unsupported(
            f"torch {torch.__version__}: attention drops out with probability {drops:g}, and of the CPU's "
            "kernels the one that context_parallel divides does not; use model.dropout=0"
        )


def _forward(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """(query, key, value, dropout_p=0, is_causal=False, *, attn_mask=None, scale=None)."""
    query, key, value = arguments[:3]
    dropout = arguments[3] if len(arguments) > 3 else 0.0
    causal = arguments[4] if len(arguments) > 4 else keywords.get("is_causal", False)
    if keywords.get("attn_mask") is not None:
        raise Unsupported(f"torch {torch.__version__}: context_parallel takes no attention mask")
    results = ring._templated_ring_attention(
        query.device_mesh.get_group(), SEQUENCE_DIMENSION, FLASH, query=_local(query), key=_local(key),
        value=_local(value), is_causal=causal, dropout_p=dropout, scale=keywords.get("scale"),
    )  # fmt: skip
    return _distributed(results[:2], query.device_mesh)


def _backward(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None)."""
    gradient, query, key, value, out, logsumexp, dropout, causal = arguments
    results = ring._templated_ring_attention_backward(
        query.device_mesh.get_group(), SEQUENCE_DIMENSION, FLASH_BACKWARD.default,
        grad_out=_local(gradient).contiguous(), grad_out_name="grad_out", query=_local(query),
        key=_local(key), value=_local(value), out=_local(out), logsumexp=_local(logsumexp),
        is_causal=causal, dropout_p=dropout, scale=keywords.get("scale"),
    )  # fmt: skip
    return _distributed(results[:3], query.device_mesh)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _distributed(tensors: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    cut = [Shard(SEQUENCE_DIMENSION)]
    return tuple(DTensor.from_local(tensor, mesh, cut, run_check=False) for tensor in tensors)


class RingEngine(TorchEngine):
    """Adds up what ranks that share samples compute of them, where the library averages over all ranks."""

    ring: RingAttention

    def backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        shared = self.context.world.mesh.size("sequence")
        super().backward(loss * shared, last_micro_step=last_micro_step)

    def close(self) -> None:
        self.ring.close()
        super().close()

    def join_ring(self, rotation: Rotation) -> None:
        """Let attention meet from here on. Raises Unsupported where it would stay within each rank's part."""
        require_ring_attention(self._bare_module())
        world = self.context.world
        sizes = dict(world.mesh.sizes)
        mesh = init_device_mesh(world.device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        details = {"sequence": sizes["sequence"], "rotation": rotation}
        self.strategy = replace(
            self.strategy,
            name=f"context_parallel with {self.strategy.name}",
            native_config=self.strategy.native_config | {"context_parallel": details},
            details=self.strategy.details | details,
        )
        self.ring = RingAttention(mesh["sequence"], rotation)


class RingDdpEngine(RingEngine, DdpEngine):
    """DDP whose ranks divide samples."""


class RingFsdp2Engine(RingEngine, Fsdp2Engine):
    """FSDP2 whose ranks divide samples."""


class RingBackend(Backend):
    """Of neighbours that share samples, whatever reduces gradients over all ranks."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        assert isinstance(self.options, ContextParallelOptions)
        engine = super().prepare(build_model, build_optimizer, context)  # type: ignore[safe-super]
        assert isinstance(engine, RingEngine)
        engine.join_ring(self.options.rotation)
        return engine


class ContextParallelBackend(RingBackend, DdpBackend):
    """`context_parallel` within groups of neighbours, DDP over all ranks."""

    Options = ContextParallelOptions
    engine_class = RingDdpEngine


class FsdpContextParallelBackend(RingBackend, Fsdp2Backend):
    """`context_parallel` within groups of neighbours, FSDP2 over all ranks."""

    Options = FsdpContextParallelOptions
    engine_class = RingFsdp2Engine
