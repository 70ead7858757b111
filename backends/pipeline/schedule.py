"""The stages of a rank under one of torch's schedules, for one shape of micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from harness.backends.pipeline.stage_module import Stage
from harness.backends.pipeline.tags import ACTIVATIONS, GRADIENTS

ScheduleName = Literal["gpipe", "1f1b", "interleaved"]
COMPUTING = ("forward", "backward")
WAITING = "waiting"
EnterPhase = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What crosses from stage to stage in one micro-batch."""

    samples: int
    length: int
    hidden: int
    output_width: int
    """Of the last stage: the vocabulary, or `hidden` where the loss computes logits."""
    dtype: torch.dtype

    def hidden_states(self) -> Tensor:
        """An example without memory, of what the last stage alone does not send."""
        return torch.empty(
            self.samples, self.length, self.hidden, dtype=self.dtype, device="meta", requires_grad=True
        )

    def tokens(self) -> Tensor:
        """The same of what the first stage is given."""
        return torch.empty(self.samples, self.length, dtype=torch.int64, device="meta")

    def output(self) -> Tensor:
        """The same of what the last stage gives to the loss."""
        size = (self.samples, self.length, self.output_width)
        return torch.empty(*size, dtype=self.dtype, device="meta", requires_grad=True)


class TaggedStage(PipelineStage):
    """Says when it computes, and tags what it sends and receives."""

    def __init__(self, *arguments: Any, enter: EnterPhase, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._enter = enter

    def forward_one_chunk(self, *arguments: Any, **keywords: Any) -> Any:
        self._enter("forward")
        output = super().forward_one_chunk(*arguments, **keywords)
        self._enter(WAITING)
        return output

    def backward_one_chunk(self, *arguments: Any, **keywords: Any) -> None:
        self._enter("backward")
        super().backward_one_chunk(*arguments, **keywords)
        self._enter(WAITING)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _tagged(super().get_fwd_recv_ops(fwd_chunk_id), ACTIVATIONS)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _tagged(super().get_fwd_send_ops(fwd_chunk_id), ACTIVATIONS)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _tagged(super().get_bwd_recv_ops(bwd_chunk_id), GRADIENTS)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _tagged(super().get_bwd_send_ops(bwd_chunk_id), GRADIENTS)

    def received(self) -> list[Tensor]:
        """Where messages arrive: allocated once, for every micro-batch."""
        infos = [*self.args_recv_info.values(), *self.grad_recv_info.values()]
        return [info.buffer for of_chunk in infos for info in of_chunk if info.buffer is not None]


def _tagged(operations: list[dist.P2POp], tag: int) -> list[dist.P2POp]:
    for operation in operations:
        operation.tag = tag
    return operations


def torch_stages(
    modules: Mapping[int, Stage],
    *,
    stages: int,
    shape: Shape,
    device: torch.device,
    group: dist.ProcessGroup,
    enter: EnterPhase,
) -> list[TaggedStage]:
    """This rank's stages; shapes are given, so that no stage runs once to find them out."""
    return [
        TaggedStage(
            module,
            index,
            stages,
            device,
            input_args=shape.hidden_states() if index else shape.tokens(),
            output_args=shape.hidden_states() if index < stages - 1 else shape.output(),
            group=group,
            enter=enter,
        )
        for index, module in modules.items()
    ]


def torch_schedule(
    name: ScheduleName,
    stages: list[TaggedStage],
    *,
    micro_batches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    scale_grads: bool = False,
) -> Any:
    """torch's schedule.

    scale_grads: torch's default divides the gradients by the number of micro-batches, as fits losses that are
    means; those of the harness are sums.
    """
    arguments: dict[str, Any] = {"loss_fn": loss, "scale_grads": scale_grads}
    if name == "interleaved":
        return ScheduleInterleaved1F1B(stages, micro_batches, **arguments)  # type: ignore[arg-type]
    kind = ScheduleGPipe if name == "gpipe" else Schedule1F1B
    return kind(stages[0], micro_batches, **arguments)
