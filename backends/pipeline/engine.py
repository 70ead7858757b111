"""The engine around a schedule: both passes of all micro-batches run when `backward` is called."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from harness.backends.base import Batch, SetupContext, TensorKind, Unsupported
from harness.backends.checkpoints.torch_pieces import flat, make_states
from harness.backends.model.blocks import names_by_id, needed_blocks
from harness.backends.optimizer.gradients import COUNTED_ELSEWHERE
from harness.backends.piece import MOMENTS, Piece
from harness.backends.pipeline.cut import ACTIVATIONS, GRADIENTS, PIPELINED_MODELS, Cut, not_whole
from harness.backends.torch_engine import TorchEngine, TorchStrategy


class PassThrough(nn.Module):
    """In place of a module that another stage holds."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class Stage(nn.Module):
    """Token ids in, on the first stage; hidden states in and out between stages; logits out, on the last.

    An output layer that computes the loss is left to the loss, which knows the labels: hidden states out.
    """

    def __init__(self, model: nn.Module, *, is_first: bool) -> None:
        super().__init__()
        self.model = model
        self.is_first = is_first
        self.loss_head: nn.Module | None = None
        head: Any = model.lm_head
        if computes_loss(head):
            self.loss_head, model.lm_head = head, PassThrough()
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self, inputs: Tensor) -> Tensor:
        name = "input_ids" if self.is_first else "inputs_embeds"
        # Here and not around the schedule, which runs backward passes too.
        with self.autocast():
            logits: Tensor = self.model(**{name: inputs}, use_cache=False).logits
        return logits


def computes_loss(head: Any) -> bool:
    """Whether an output layer does more than multiply: it computes the loss, for which it is given labels."""
    return isinstance(head, nn.Linear) and type(head) is not nn.Linear


def require_cuttable(model: nn.Module) -> tuple[str, ...]:
    """Names of the blocks, in order. Raises Unsupported for a model that this cannot cut."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in PIPELINED_MODELS or getattr(model, "lm_head", None) is None:
        raise Unsupported(
            f"stages are cut by hand, for causal language models of type {', '.join(PIPELINED_MODELS)}; "
            f"this is a {type(model).__name__} ({kind})"
        )
    if any(not parameter.requires_grad for parameter in model.parameters()):
        raise Unsupported("pipeline stages are cut for models that train all parameters, not for adapters")
    if not isinstance(model.lm_head, nn.Linear):
        raise Unsupported(f"the last stage needs a linear output layer, not {type(model.lm_head).__name__}")
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
        raise Unsupported(
            "stages are copies of the model's modules, which are not compiled; leave compile out"
        )
    return tuple(needed_blocks(model))


def stages_of_parameters(model: nn.Module, cut: Cut) -> dict[str, tuple[int, ...]]:
    """The stages that hold each parameter, by its first name; a tied one may lie in several."""
    by_name = cut.stage_by_name([name for name, _ in model.named_parameters(remove_duplicate=False)])
    firsts = names_by_id(model)
    holders: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = firsts[id(parameter)]
        holders[first] = tuple(sorted({*holders.get(first, ()), by_name[name]}))
    return holders


def cut_stage(model: nn.Module, cut: Cut, stage: int, tensors: Mapping[str, nn.Parameter]) -> Stage:
    """A stage of `model`, which stays as it is.

    tensors: this rank's parameters, by first name; they take the places of those of `model`, which may lie
    on the meta device. Modules that other stages hold are passed through.
    """
    of_name = cut.stage_by_name([name for name, _ in model.named_parameters(remove_duplicate=False)])
    firsts = names_by_id(model)
    # What deepcopy finds here it does not copy: only the tree of modules is new.
    taken: dict[int, Any] = {}
    for parameter in model.parameters():
        taken[id(parameter)] = tensors.get(firsts[id(parameter)], parameter)
    taken |= {id(buffer): buffer for buffer in model.buffers()}
    tree = copy.deepcopy(model, taken)
    held = {name.rpartition(".")[0] for name, of_stage in of_name.items() if of_stage == stage}
    absent = {name.rpartition(".")[0] for name, of_stage in of_name.items() if of_stage != stage}
    in_blocks = {block for index in range(cut.stages) if index != stage for block in cut.blocks_of(index)}
    outside = {
        name for name in absent - held if not f"{name}.".startswith(tuple(f"{b}." for b in cut.blocks))
    }
    for name in [*in_blocks, *outside]:
        tree.set_submodule(name, PassThrough())
    return Stage(tree, is_first=stage == 0)


ScheduleName = Literal["gpipe", "1f1b", "interleaved"]
SCHEDULES: dict[ScheduleName, Any] = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B,
}  # fmt: skip
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

    def states(self, width: int) -> Tensor:
        """An example without memory of what a stage gives: hidden states, or what the loss is given."""
        size = (self.samples, self.length, width)
        return torch.empty(*size, dtype=self.dtype, device="meta", requires_grad=True)

    def tokens(self) -> Tensor:
        """An example without memory of what the first stage is given: (samples, length)."""
        return torch.empty(self.samples, self.length, dtype=torch.int64, device="meta")


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


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """This rank's place in its pipeline."""

    cut: Cut
    schedule: ScheduleName
    micro_batches: int
    rank: int
    """Among the ranks of the pipeline."""
    group: dist.ProcessGroup
    """Ranks of the pipeline."""
    replicas: dist.ProcessGroup
    """Ranks that hold the same stages."""
    modules: Mapping[int, Stage]
    """This rank's stages."""
    parameters: Mapping[str, nn.Parameter]
    """This rank's parameters by their names in the bare model."""
    holders: Mapping[str, tuple[int, ...]]
    """Of every parameter of the model, in its order: the ranks of the pipeline that hold it."""
    shapes: Mapping[str, torch.Size]
    hidden: int
    output_width: int
    scale_grads: bool = False
    """torch's default divides gradients by the number of micro-batches, as fits losses that are means; those
    of the harness are sums."""


class _Given(nn.Module):
    """In place of the model, for a loss of what the last stage gave: logits, or what `head` reads."""

    def __init__(self, given: Tensor, head: nn.Module | None) -> None:
        super().__init__()
        self._given = given
        self._head = head

    def forward(self, **_: Any) -> Tensor:
        return self._given if self._head is None else self._head(self._given)


class PipelineEngine(TorchEngine):
    """A rank without the last stage reports a loss of zero: the losses of a pipeline's ranks add up."""

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        context: SetupContext,
        strategy: TorchStrategy,
    ) -> None:
        modules = nn.ModuleDict({str(index): stage for index, stage in pipeline.modules.items()})
        super().__init__(modules, optimizer, context, strategy)
        for stage in pipeline.modules.values():
            stage.autocast = self._autocast
        self.pipeline = pipeline
        self._schedules: dict[tuple[int, ...], tuple[Any, list[TaggedStage]]] = {}
        self._batch: Batch = {}
        self._pending = torch.zeros(())
        self._factor: Tensor | float = 1.0
        self._losses: list[Tensor] = []

    def forward(self, batch: Batch) -> Tensor:
        """The passes of a schedule interleave: the loss is in what this returns once `backward` has run."""
        device = batch["tokens"].device
        if set(batch) != {"tokens", "labels"}:
            raise Unsupported(f"stages take tokens alone; this batch has {', '.join(sorted(batch))} too")
        if not torch.is_grad_enabled():
            return self._without_gradient(batch)
        self._batch = batch
        self._pending = torch.zeros((), device=device, requires_grad=True)
        return self._pending

    def backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        (self._factor,) = torch.autograd.grad(loss, self._pending)
        schedule = self._schedule(self._batch)
        arguments = (self._batch["tokens"],) if self.pipeline.rank == 0 else ()
        is_last = self.pipeline.rank == self.pipeline.cut.ranks - 1
        target = torch.stack([self._batch["tokens"], self._batch["labels"]], 1) if is_last else None
        self.enter_phase(WAITING)
        schedule.step(*arguments, target=target, return_outputs=False)
        self.enter_phase("backward")
        with torch.no_grad():
            self._pending += sum(self._losses, torch.zeros_like(self._pending))
        self._losses.clear()
        self._batch = {}
        self._micro_steps = 0 if last_micro_step else self._micro_steps + 1
        if last_micro_step:
            self._reduce()

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self._from_all(self.pipeline.parameters)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        found = {name: p.grad for name, p in self.pipeline.parameters.items() if p.grad is not None}
        return self._from_all(found)

    def pieces(self) -> Iterator[Piece]:
        make_states(self.optimizer)
        return self._pieces(with_moments=True)

    def weight_pieces(self) -> Iterator[Piece]:
        return self._pieces(with_moments=False)

    def native_format(self) -> str:
        return "torch.distributed.checkpoint, by parameter"

    def load(self, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        load(self._state(), checkpoint_id=directory)

    def state_tensors(self) -> Iterator[tuple[TensorKind, Tensor]]:
        yield from super().state_tensors()
        for _, stages in self._schedules.values():
            for stage in stages:
                for tensor in stage.received():
                    yield "communication", tensor

    def _counted_gradients(self) -> list[Tensor]:
        return [
            parameter.grad
            for parameter in self.pipeline.parameters.values()
            if parameter.grad is not None and not getattr(parameter, COUNTED_ELSEWHERE)
        ]

    def _schedule(self, batch: Batch) -> Any:
        """torch's for this shape of batch, for which is allocated where messages arrive."""
        size = tuple(batch["tokens"].shape)
        if size in self._schedules:
            return self._schedules[size][0]
        pipeline, shape = self.pipeline, self._shape(size)
        # Shapes are given, so that no stage runs once to find them out.
        stages = [
            TaggedStage(
                module,
                index,
                pipeline.cut.stages,
                batch["tokens"].device,
                input_args=shape.states(shape.hidden) if index else shape.tokens(),
                output_args=shape.states(
                    shape.hidden if index < pipeline.cut.stages - 1 else shape.output_width
                ),
                group=pipeline.group,
                enter=lambda phase: self.enter_phase(phase),
            )
            for index, module in pipeline.modules.items()
        ]
        several, kind = pipeline.schedule == "interleaved", SCHEDULES[pipeline.schedule]
        schedule = kind(
            stages if several else stages[0],
            pipeline.micro_batches,
            loss_fn=self._loss,
            scale_grads=pipeline.scale_grads,
        )
        self._schedules[size] = schedule, stages
        return schedule

    def _shape(self, size: tuple[int, ...]) -> Shape:
        samples, rest = divmod(size[0], self.pipeline.micro_batches)
        if rest:
            raise Unsupported(not_whole(size[0], self.pipeline.micro_batches))
        return Shape(
            samples=samples,
            length=size[1],
            hidden=self.pipeline.hidden,
            output_width=self.pipeline.output_width,
            dtype=self.strategy.compute_dtype,
        )

    def _loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Scaled loss of one micro-batch, from which `backward` starts."""
        self.enter_phase("forward")
        loss = self._summed_loss(logits, {"tokens": target[:, 0], "labels": target[:, 1]})
        self._losses.append(loss.detach())
        scaled = loss * self._factor
        self.enter_phase(WAITING)
        return scaled

    def _summed_loss(self, given: Tensor, batch: Batch) -> Tensor:
        last = self.pipeline.modules.get(self.pipeline.cut.stages - 1)
        with self._autocast():
            return self.context.compute_loss(_Given(given, None if last is None else last.loss_head), batch)

    def _without_gradient(self, batch: Batch) -> Tensor:
        """Micro-batch by micro-batch through the stages, without a schedule."""
        pipeline, total = self.pipeline, torch.zeros((), device=batch["tokens"].device)
        shape = self._shape(tuple(batch["tokens"].shape))
        for start in range(0, len(batch["tokens"]), shape.samples):
            part = {name: tensor[start : start + shape.samples] for name, tensor in batch.items()}
            for index, stage in pipeline.modules.items():
                inputs = part["tokens"]
                if index:
                    inputs = torch.empty_like(
                        shape.states(shape.hidden), device=total.device, requires_grad=False
                    )
                    source = (index - 1) % pipeline.cut.ranks
                    dist.recv(inputs, group=pipeline.group, group_src=source, tag=ACTIVATIONS)
                output = stage(inputs)
                if index < pipeline.cut.stages - 1:
                    target = (index + 1) % pipeline.cut.ranks
                    dist.send(output.contiguous(), group=pipeline.group, group_dst=target, tag=ACTIVATIONS)
                else:
                    total += self._summed_loss(output, part)
        return total

    def _reduce(self) -> None:
        """The ends of the pipeline add up their gradients of what both hold, then replicas average all."""
        for name, parameter in self.pipeline.parameters.items():
            holders = self.pipeline.holders[name]
            if len(holders) < 2:
                continue
            # Both ends swap and add: the sum of two is the same on both.
            (other,) = (rank for rank in holders if rank != self.pipeline.rank)
            gradient, group = parameter.grad, self.pipeline.group
            assert gradient is not None
            arrived = torch.empty_like(gradient)
            swap = [
                dist.P2POp(dist.isend, gradient, group=group, group_peer=other),
                dist.P2POp(dist.irecv, arrived, group=group, group_peer=other),
            ]
            for work in dist.batch_isend_irecv(swap):
                work.wait()
            gradient += arrived
        copies = self.pipeline.replicas.size()
        if copies > 1:
            for gradient in self._gradients():
                dist.all_reduce(gradient, group=self.pipeline.replicas)
                gradient /= copies

    def _from_all(self, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Every rank of the pipeline is sent what one of them holds, tensor by tensor, as fp32."""
        device = self.context.world.device
        for name, holders in self.pipeline.holders.items():
            if holders[0] == self.pipeline.rank:
                tensor = own[name].detach().to(dtype=torch.float32, copy=True)
            else:
                tensor = torch.empty(self.pipeline.shapes[name], dtype=torch.float32, device=device)
            dist.broadcast(tensor, group=self.pipeline.group, group_src=holders[0])
            yield name, tensor.cpu()
            del tensor

    def _pieces(self, *, with_moments: bool) -> Iterator[Piece]:
        replica, replicas = dist.get_rank(self.pipeline.replicas), self.pipeline.replicas.size()
        nothing = torch.empty(0, dtype=self.strategy.compute_dtype)
        for name, holders in self.pipeline.holders.items():
            parameter = self.pipeline.parameters.get(name)
            weight = nothing if parameter is None else flat(parameter)
            state = self.optimizer.state[parameter] if with_moments and parameter is not None else {}
            yield Piece(
                name=name,
                shape=tuple(self.pipeline.shapes[name]),
                start=0,
                weight=weight,
                moments={
                    moment: flat(state[moment]) if state else nothing
                    for moment in (MOMENTS if with_moments else ())
                },
                copies=replicas * len(holders) if parameter is not None else 1,
                copy=replica * len(holders) + holders.index(self.pipeline.rank)
                if parameter is not None
                else 0,
            )

    def _state(self) -> dict[str, Any]:
        make_states(self.optimizer)
        return {
            "model": {name: parameter.detach() for name, parameter in self.pipeline.parameters.items()},
            "optimizer": {
                name: self.optimizer.state[parameter] for name, parameter in self.pipeline.parameters.items()
            },
        }
