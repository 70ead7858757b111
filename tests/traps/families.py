"""Third-party backends of each family that run the model in another way, change settings or gradients while
they train, whose updates are not what Adam makes of gradients, or that err in jobs with adapters."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.backends.base import BackendOptions, Batch, SetupContext, World
from harness.backends.ddp import DdpBackend
from harness.backends.fsdp.fsdp1 import Fsdp1Backend
from harness.backends.fsdp.fsdp2 import Fsdp2Backend
from harness.backends.injected_faults import Spoiled, instead, scale_loss
from harness.backends.options import Fsdp2HybridOptions
from harness.backends.piece import Piece
from harness.backends.tensor.backend import TensorBackend
from harness.backends.zero.backend import ZeroBackend
from tests.memory.defects import Hoarding, OneUnit

from .adapters import LATE_STEP, Rebuilt, Spoil, after_each_step, asked, late, spoiled


class Stage(ZeroBackend):
    number = 0

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options, stage=self.number)


class Stage1(Stage):
    number = 1


class Stage2(Stage):
    number = 2


class Stage3(Stage):
    number = 3


class Hybrid(Fsdp2Backend):
    Options = Fsdp2HybridOptions

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options, sharding="hybrid")


class SoundTensor(TensorBackend):
    """Ours under another name: nothing is known of its bytes."""


class ReplicasNeverReduced(Hybrid):
    """Hybrid sharding whose mesh lacks the dimension of the replicas."""

    def _mesh(self, world: World) -> DeviceMesh:
        return super()._mesh(world)["shard"]


class OtherReplicas(Hybrid):
    """Hybrid sharding whose second row of ranks is turned round: each rank reduces with another replica."""

    def _mesh(self, world: World) -> DeviceMesh:
        return DeviceMesh(world.device, [[0, 1], [3, 2]], mesh_dim_names=("replicate", "shard"))


class WholeModelInOneUnit(OneUnit):
    pass


class HoardingRank(Hoarding):
    pass


FAMILIES = {
    "OfDdp": DdpBackend, "OfFsdp": Fsdp2Backend, "OfFsdp1": Fsdp1Backend, "OfHybrid": Hybrid,
    "AtStage1": Stage1, "AtStage2": Stage2, "AtStage3": Stage3,
}  # fmt: skip
"""By the ends of their backends' names."""


def planted(name: str, *ends: str, made: Callable[..., list[Any]] = spoiled) -> Callable[[Spoil], Spoil]:
    """Adds backends with a defect to this module: `name` with each end, of the families of these ends."""

    def plant(spoil: Spoil) -> Spoil:
        names = (name + end for end in ends)
        globals().update(zip(names, made(spoil, *(FAMILIES[end] for end in ends)), strict=True))
        return spoil

    return plant


def live_groups(engine: Any) -> list[dict[str, Any]]:
    """Groups of the optimizer that trains; a DeepSpeed engine holds its own."""
    return list(getattr(engine, "engine", engine).optimizer.param_groups)


class ForwardTwice(Spoiled, Stage2):
    """Runs each micro-batch once more to log its loss."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        @instead(engine)
        def forward(original: Any, batch: Batch) -> torch.Tensor:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    getattr(engine, "engine", engine).module(batch["points"])
            return original(batch)


class BackwardInHalves(Spoiled, Fsdp2Backend):
    """Each backward pass in two, of half the loss."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        @instead(engine)
        def backward(original: Any, loss: torch.Tensor, *, last_micro_step: bool) -> None:
            (loss / 2).backward(retain_graph=True)
            original(loss / 2, last_micro_step=last_micro_step)


class TrainsInEvaluationMode(Spoiled, Stage2):
    """Forgets to go back to training after the first evaluation."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.train
        engine.train = lambda mode=True: None if mode else original(mode)


class EvaluatesInTrainingMode(Spoiled, Fsdp2Backend):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        engine.train = lambda mode=True: None


class DecayOfOneRank(Spoiled, Fsdp1Backend):
    """Rank 1 decays its shards ten times as fast."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        if context.world.rank == 1:
            for group in live_groups(engine):
                group["weight_decay"] *= 10


class ClippedOnOneRank(Spoiled, DdpBackend):
    """Rank 1 clips once more, at 0.1."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        @instead(engine)
        def _update(original: Any) -> None:
            if context.world.rank == 1:
                nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
            original()


class RateOfOneRank(Spoiled, Stage1):
    """Rank 1 warms up once more."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.step
        engine.step = lambda lr: original(lr / 2 if context.world.rank == 1 else lr)


planted("ForwardTwice", "AtStage3", "OfHybrid")(ForwardTwice.spoil)
planted("BackwardInHalves", "OfHybrid")(BackwardInHalves.spoil)
planted("TrainsInEvaluationMode", "AtStage3", "OfHybrid")(TrainsInEvaluationMode.spoil)
planted("EvaluatesInTrainingMode", "AtStage3")(EvaluatesInTrainingMode.spoil)
planted("DecayOfOneRank", "AtStage3", "OfHybrid")(DecayOfOneRank.spoil)


class RotaryInBf16(Spoiled, Fsdp2Backend):
    """The frequencies of rotary positions pass through bf16, as where a model is cast and cast back."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        rotary = engine.module.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq.bfloat16().float()


class WeightsRounded(Spoiled, Fsdp1Backend):
    """Every update is rounded to bf16, in masters of fp32."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        def change(taken: int) -> None:
            for group in live_groups(engine):
                for parameter in group["params"]:
                    parameter.copy_(parameter.bfloat16().float())

        after_each_step(engine, change)


@planted("LateBeta", "OfDdp", "AtStage3", "OfFsdp", made=late)
def _lower_beta(_: Any, engine: Any, __: SetupContext) -> None:
    for group in live_groups(engine):
        group["betas"] = (group["betas"][0], 0.5)


@planted("LateClipping", "OfDdp", "AtStage3", "OfFsdp", made=late)
def _clip_lower(_: Any, engine: Any, __: SetupContext) -> None:
    if (library := getattr(engine, "engine", None)) is not None:
        library.optimizer.clip_grad = 0.01
    else:
        engine.context = replace(engine.context, gradient_clipping=0.01)


@planted("RateKeptOnOneRank", "OfDdp", "AtStage3", "OfFsdp", made=late)
def _keep_rate_of_one_rank(_: Any, engine: Any, context: SetupContext) -> None:
    if context.world.rank == 1:
        original, kept = engine.step, live_groups(engine)[0]["lr"]
        engine.step = lambda lr: original(kept)


@planted("DecayForAStep", "OfDdp", "AtStage3", "OfFsdp", made=late)
def _decay_for_a_step(_: Any, engine: Any, __: SetupContext) -> None:
    before, original = [group["weight_decay"] for group in live_groups(engine)], engine.step

    def step_after(lr: float) -> float:
        for group, decay in zip(live_groups(engine), before, strict=True):
            group["weight_decay"] = decay
        engine.step = original
        return float(original(lr))

    def step(lr: float) -> float:
        engine.step = step_after
        return float(original(lr))

    for group in live_groups(engine):
        group["weight_decay"] = 10.0
    engine.step = step


def bare(engine: Any) -> nn.Module:
    module = getattr(engine, "engine", engine).module
    return getattr(module, "module", module)


@planted("DecayAdded", "OfDdp", "OfFsdp", "OfFsdp1", "AtStage1", "AtStage3")
def _add_decay(_: Any, engine: Any, __: SetupContext) -> None:
    """As Adam has it: weight decay in the gradient, after it was clipped."""

    def add(live: torch.optim.Optimizer, *_: Any) -> None:
        for group in live.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach(), alpha=group["weight_decay"])

    optimizer = getattr(engine, "engine", engine).optimizer
    while hasattr(optimizer, "optimizer"):  # DeepSpeed's around torch's
        optimizer = optimizer.optimizer
    optimizer.register_step_pre_hook(add)


@planted("ClippedEachMicroStep", "OfDdp", "OfFsdp")
def _clip_each_micro_step(_: Any, engine: Any, __: SetupContext) -> None:
    @instead(engine)
    def backward(original: Any, loss: Tensor, *, last_micro_step: bool) -> None:
        original(loss, last_micro_step=last_micro_step)
        nn.utils.clip_grad_norm_(engine.module.parameters(), 0.3)


@planted("EmbeddingScaled", "OfDdp", "OfFsdp", "AtStage1", "AtStage3")
def _scale_by_frequency(_: Any, engine: Any, __: SetupContext) -> None:
    for module in bare(engine).modules():
        if isinstance(module, nn.Embedding):
            module.scale_grad_by_freq = True


@planted("NormOfTheShard", "OfFsdp1", "OfHybrid")
def _forget_other_shards(_: Any, engine: Any, __: SetupContext) -> None:
    engine.strategy = replace(engine.strategy, norm_group=None)


class NormOfTheShardAtStage1(Spoiled, Stage1):
    """Each rank divides its partition by that partition's norm; the norm that is told is the global one."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        @instead(engine.engine.optimizer)
        def unscale_and_clip_grads(original: Any, gradients: list[Tensor], _: Any, *rest: Any) -> Any:
            own = torch.stack([gradient.norm() for gradient in gradients]).norm()
            return original(gradients, own, *rest)


class NormOfTheShardAtStage3(Spoiled, Stage3):
    """The same of what a rank holds of a sub-group."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        optimizer = engine.engine.optimizer

        @instead(optimizer)
        def unscale_and_clip_grads(original: Any, sub_group: int, _: Any) -> Any:
            return original(sub_group, optimizer.fp32_partitioned_groups_flat[sub_group].grad.norm())


class NoDropoutOnOneRank(Spoiled, Fsdp2Backend):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        if context.world.rank == 1:
            for layer in bare(engine).model.layers:  # type: ignore[union-attr]
                layer.self_attn.attention_dropout = 0.0


@planted("StatisticsKept", "OfDdp", "OfFsdp", "AtStage2")
def _keep_statistics(_: Any, engine: Any, __: SetupContext) -> None:
    for module in bare(engine).modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 0.0


class StatisticsKeptOnOneRank(Spoiled, Fsdp1Backend):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        if context.world.rank == 1:
            _keep_statistics(self, engine, context)


class WeightsOneStepBehind(Spoiled, DdpBackend):
    """Passes use a copy of the weights that is renewed before each update, not after it."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        copies = {parameter: parameter.detach().clone() for parameter in bare(engine).parameters()}
        masters: dict[nn.Parameter, Tensor] = {}

        @instead(engine)
        def forward(original: Any, batch: Batch) -> Tensor:
            for parameter, copy in copies.items():
                masters.setdefault(parameter, parameter.data)
                parameter.data = copy
            return original(batch)

        @instead(engine)
        def step(original: Any, lr: float) -> float:
            for parameter, master in masters.items():
                parameter.data = master
                copies[parameter] = master.clone()
            masters.clear()
            return float(original(lr))


@planted("ClippedByParameter", "OfDdp", "OfFsdp")
def _clip_each_parameter(_: Any, engine: Any, __: SetupContext) -> None:
    @instead(engine)
    def _update(original: Any) -> None:
        for parameter in engine.module.parameters():
            nn.utils.clip_grad_norm_([parameter], 0.1)
        original()


@planted("NotUnscaled", "OfDdp", "AtStage2", "OfFsdp1")
def _scale_the_loss(_: Any, engine: Any, __: SetupContext) -> None:
    """As a loss scaler whose gradients nobody unscales."""
    scale_loss(engine, 128)


@planted("LossScaleLeft", "OfDdp")
def _leave_the_loss_scale(_: Any, engine: Any, __: SetupContext) -> None:
    @instead(engine)
    def _unscale(original: Any) -> None:
        original()
        for parameter in engine.module.parameters():
            parameter.grad.mul_(engine.scaler.get_scale())


@planted("OldScale", "OfDdp", "OfFsdp")
def _unscale_by_the_old_scale(_: Any, engine: Any, __: SetupContext) -> None:
    scales = [engine.scaler.get_scale()]

    @instead(engine)
    def _unscale(original: Any) -> None:
        original()
        scales.append(engine.scaler.get_scale())
        for parameter in engine.module.parameters():
            parameter.grad.mul_(scales[-1] / scales[-2])


@planted("ClippedBeforeTheSum", "OfDdp")
def _clip_before_the_sum(_: Any, engine: Any, context: SetupContext) -> None:
    def add_up(_, bucket):  # torch refuses other annotations than its own
        own = bucket.buffer()
        own.div_(max(1.0, float(own.norm())) * context.world.world_size)
        return dist.all_reduce(own, async_op=True).get_future().then(lambda done: done.value()[0])

    engine.module.register_comm_hook(None, add_up)


@planted("BeginsLarger", "OfDdp")
def _begin_larger(_: Any, engine: Any, context: SetupContext) -> None:
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1 + 0.01 * context.world.rank)


def optimizer_of(engine: Any) -> torch.optim.Optimizer:
    """The one of torch that updates; DeepSpeed keeps it within its own."""
    library = getattr(engine, "engine", None)
    return engine.optimizer if library is None else library.basic_optimizer  # type: ignore[no-any-return]


def _moments(engine: Any) -> list[Tensor]:
    states = optimizer_of(engine).state.values()
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq") if name in state]


@planted("MomentsLost", "OfDdp", "AtStage2", "OfFsdp1", made=late)
def _lose_moments(_: Any, engine: Any, __: SetupContext) -> None:
    for moment in _moments(engine):
        moment.zero_()


@planted("StatesAnew", "AtStage1", "OfFsdp", made=late)
def _begin_anew(_: Any, engine: Any, __: SetupContext) -> None:
    optimizer_of(engine).state.clear()


@planted("MomentsRounded", "OfDdp", "AtStage3", "OfFsdp")
def _round_moments(_: Any, engine: Any, __: SetupContext) -> None:
    def change(taken: int) -> None:
        for moment in _moments(engine):
            moment.copy_(moment.bfloat16())

    after_each_step(engine, change)


class HandWritten(torch.optim.AdamW):
    """AdamW by hand; each attribute is a way to get it wrong."""

    eps_in_root = False
    corrects = (True, True)
    moves = True
    forgets = False
    ahead = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        betas, state = group["betas"], self.state[parameter]
        if "exp_avg" not in state:
            state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            state["step"] = torch.zeros(())
        state["step"] += 1
        gradient, first, second = parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        first.mul_(not self.forgets).lerp_(gradient, 1 - betas[0])
        second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        first = torch.lerp(first, gradient, 1 - betas[0]) if self.ahead else first
        first, second = (
            moment / (1 - beta ** float(state["step"])) if corrects else moment
            for moment, beta, corrects in zip((first, second), betas, self.corrects, strict=True)
        )
        if self.moves:
            size = (second + group["eps"]).sqrt() if self.eps_in_root else second.sqrt() + group["eps"]
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(group["lr"] * first / size)


def _becoming(**wrong: Any) -> Spoil:
    """As where a library patches torch's own: class and constants look the same."""

    def spoil(_: Any, engine: Any, __: SetupContext) -> None:
        optimizer: Any = optimizer_of(engine)
        optimizer.__class__ = type(
            "AdamW", (HandWritten,), {"__module__": torch.optim.AdamW.__module__, **wrong}
        )
        optimizer._patch_step_function()

    return spoil


planted("EpsInRoot", "OfDdp", "AtStage1", "AtStage3", "OfFsdp")(_becoming(eps_in_root=True))
planted("BiasUncorrected", "AtStage2", "OfFsdp1")(_becoming(corrects=(False, False)))


Changing = Callable[[nn.Parameter, Tensor, dict[str, Any]], object]


def _within_update(engine: Any, change: Changing) -> None:
    """change: given each tensor after its update, its values before that, and its group."""
    before: list[tuple[nn.Parameter, Tensor, dict[str, Any]]] = []

    def keep(live: torch.optim.Optimizer, *_: Any) -> None:
        before[:] = [(p, p.detach().clone(), group) for group in live.param_groups for p in group["params"]]

    @torch.no_grad()
    def spoil(*_: Any) -> None:
        for kept in before:
            change(*kept)

    optimizer_of(engine).register_step_pre_hook(keep)
    optimizer_of(engine).register_step_post_hook(spoil)


@planted("PartLeft", "AtStage1", "AtStage2", "AtStage3", "OfFsdp", "OfFsdp1")
def _leave_part_of_one_rank(_: Any, engine: Any, context: SetupContext) -> None:
    if context.world.rank == 1:
        _within_update(engine, lambda parameter, before, _: parameter.copy_(before))


@planted("DecayUndone", "AtStage3", "OfFsdp")
def _undo_decay_of_one_rank(_: Any, engine: Any, context: SetupContext) -> None:
    if context.world.rank == 1:
        _within_update(
            engine,
            lambda parameter, before, group: parameter.add_(
                before, alpha=group["lr"] * group["weight_decay"]
            ),
        )


@planted("RateDoubledOnce", "AtStage1", "OfFsdp1")
def _double_one_rate(_: Any, engine: Any, __: SetupContext) -> None:
    """One update moves weights twice as far; the learning rate is back when it is over.

    DeepSpeed calls the optimizer once for each group, and doubles the rate of one.
    """
    taken = 0

    def double(live: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal taken
        taken += 1
        for group in live.param_groups if taken == LATE_STEP + 1 else ():
            group["lr"] *= 2

    def halve(live: torch.optim.Optimizer, *_: Any) -> None:
        for group in live.param_groups if taken == LATE_STEP + 1 else ():
            group["lr"] /= 2

    optimizer_of(engine).register_step_pre_hook(double)
    optimizer_of(engine).register_step_post_hook(halve)


@planted("PulledBack", "OfDdp", "OfFsdp")
def _pull_back(_: Any, engine: Any, __: SetupContext) -> None:
    """Each update is averaged with the weights of the beginning, as where an average lies in the weights."""
    first: dict[int, Tensor] = {}

    def pull(parameter: nn.Parameter, before: Tensor, _: dict[str, Any]) -> None:
        parameter.lerp_(first.setdefault(id(parameter), before), 0.05)

    _within_update(engine, pull)


class NotGathered(Spoiled, Stage3):
    """T37: peft's state dict under ZeRO-3, taken without gathering the parameters."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        @instead(engine)
        def weight_pieces(original: Any) -> Iterator[Piece]:
            live = dict(engine.engine.module.named_parameters())
            for piece in original():
                if ".lora_" not in piece.name:
                    yield piece
                    continue
                held = live[piece.name].detach().float()
                yield Piece(
                    name=piece.name, shape=tuple(held.shape), start=0, weight=held.view(-1), moments={}
                )


class Bf16Key(asked(Stage2, precision="bf16-mixed")):  # type: ignore[misc]
    """T39: DeepSpeed's `bf16` key on a model whose frozen weights are bf16: adapters become bf16 too."""


class OneRankInBf16(Rebuilt, DdpBackend):
    """T41: `bf16=True` on one GPU leaves adapters in bf16; on several FSDP makes fp32 masters of them."""

    def rebuilt(self, model: Any, context: SetupContext) -> nn.Module:
        return model.to(torch.bfloat16) if context.world.world_size == 1 else model


class Upcast(Rebuilt, Fsdp2Backend):
    """All parameters made fp32 before they are sharded, as Accelerate does at mixed precision."""

    def rebuilt(self, model: Any, context: SetupContext) -> nn.Module:
        return model.float()
