"""The job's optimizer with its groups, and its learning rate at every step."""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from harness.backends.base import OptimizerImplementation
from harness.backends.libraries.facts import require_installed
from harness.backends.model.blocks import transformer_blocks
from harness.backends.optimizer.groups import LR_SCALE
from harness.backends.optimizer.kinds import BLOCK_ELEMENTS, LEAST_ELEMENTS, LOW_BIT
from harness.backends.strategy import StrategyKind
from harness.errors import JobError
from harness.job.job import OptimizerSection, ScheduleSection, UpdateGroup
from harness.rank.factories import call_factory

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
LEAST_NORM = 1e-7
"""Defaults of torch.optim.Muon, which are K. Jordan's ('Muon: an optimizer for hidden layers in neural
networks', 2024)."""
RMS_OF_ADAMW = 0.2
"""Scale at which updates are as large as AdamW's (`match_rms_adamw`; J. Liu et al., arXiv 2502.16982)."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FLAG = "muon"
"""Key of the groups that Muon updates."""
MOMENTUM_KEY = "momentum_buffer"
"""As torch.optim.Muon names it in its state."""


class MuonAndAdamW(torch.optim.AdamW):
    """The update of torch.optim.Muon for the flagged groups, of torch.optim.AdamW for the others.

    A matrix that ranks share is gathered first: its parts orthogonalised one by one are not the matrix
    orthogonalised. torch's Muon computes on DTensors as they are, which adds partial products up in bf16.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            for parameter in group["params"] if group.get(FLAG) else ():
                if parameter.grad is not None:
                    self._update(parameter, group)
        self.param_groups = [group for group in groups if not group.get(FLAG)]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if MOMENTUM_KEY not in state:
            state[MOMENTUM_KEY] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        buffer = state[MOMENTUM_KEY]
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]).to(DTYPES[group["newton_schulz"]])
        rate = group["lr"]
        if isinstance(update, DTensor):
            # A collective. Offloaded rows lie on the CPU while NCCL gathers device memory only.
            here: Any = update.to(update.device_mesh.device_type)
            update = here.full_tensor()
        own, held = orthogonalised(update), _local(parameter)
        if isinstance(parameter, DTensor):  # what this rank holds of it; nothing is sent
            cut = distribute_tensor(own, parameter.device_mesh, parameter.placements, src_data_rank=None)
            own = cut.to_local().to(held.device)
        held.mul_(1 - rate * group["weight_decay"])
        held.add_(own, alpha=-rate * RMS_OF_ADAMW * math.sqrt(max(parameter.shape)))


def orthogonalised(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, roughly: five Newton-Schulz iterations.

    matrix: two dimensions, computed on in its own dtype. As `_zeropower_via_newtonschulz` of torch 2.13
    (`optim/_muon.py`), which always computes in bf16.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


def adam_constants(section: OptimizerSection) -> dict[str, Any]:
    return {
        "lr": section.learning_rate, "betas": (section.beta1, section.beta2), "eps": section.epsilon,
    }  # fmt: skip


def build_muon(
    matrices: list[nn.Parameter], groups: list[dict[str, Any]], section: OptimizerSection
) -> torch.optim.Optimizer:
    """matrices: those of blocks, which all decay. groups: the rest, as AdamW takes them."""
    flagged = {
        "params": matrices, FLAG: True, "momentum": MOMENTUM, "newton_schulz": section.newton_schulz,
        "weight_decay": section.weight_decay,
    }  # fmt: skip
    optimizer = MuonAndAdamW(
        [*([flagged] if matrices else []), *groups], amsgrad=False, **adam_constants(section)
    )
    for group in optimizer.param_groups:
        for key in ("betas", "eps") if group.get(FLAG) else ():
            del group[key]  # AdamW's, which it gives to every group
    return optimizer


def block_matrices(model: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the trained parameters of two dimensions within blocks; none where no blocks are known."""
    blocks = tuple(f"{name}." for name in transformer_blocks(model))
    return {
        name: parameter.shape
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.ndim == 2 and name.startswith(blocks)
    }


def orthogonalised_in_parts(
    matrices: Mapping[str, torch.Size], optimizers: Iterable[torch.optim.Optimizer]
) -> int:
    """Matrices of which no optimizer keeps the momentum whole, and so orthogonalises parts or nothing."""
    momenta = [state.get(MOMENTUM_KEY) for optimizer in optimizers for state in optimizer.state.values()]
    held = Counter(tuple(momentum.shape) for momentum in momenta if isinstance(momentum, Tensor))
    return (Counter(map(tuple, matrices.values())) - held).total()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


LIBRARIES = {"adamw-8bit": "torchao", "adamw-8bit-bnb": "bitsandbytes"}
MOMENTS = ("exp_avg", "exp_avg_sq", "state1", "state2")
"""As the two name them in their states."""


def build_low_bit(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW8bit with every constant explicit. Raises Unsupported where its library is missing."""
    library = LIBRARIES[section.kind]
    require_installed(library, f"optimizer.kind={section.kind}")
    if library == "torchao":
        return _of_torchao(groups, section)
    return import_module("bitsandbytes.optim").AdamW8bit(
        groups, weight_decay=section.weight_decay, min_8bit_size=LEAST_ELEMENTS, **adam_constants(section)
    )


def _of_torchao(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    class LowBitAdamW(AdamW8bit):  # type: ignore[misc]
        """torchao 0.18 takes the learning rate as a tensor only."""

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            rates = [group["lr"] for group in self.param_groups]
            # torchao compiles its update for each shape, minutes on the CPU; eagerly it is the same.
            on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = torch.as_tensor(rate, dtype=torch.float32)
            try:
                with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                    return super().step(closure)
            finally:
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = rate

    return LowBitAdamW(groups, amsgrad=False, block_size=BLOCK_ELEMENTS, **adam_constants(section))


def stored_dtype(moment: torch.Tensor) -> torch.dtype:
    """Dtype of the elements that lie in memory: a quantised tensor shows the dtype that it stands for."""
    local = _local(moment)
    return getattr(local, "codes", local).dtype


def wide_bytes(states: Iterable[tuple[int, Sequence[torch.Tensor]]]) -> int:
    """Bytes of this rank's moments that are not in 8 bits although the whole parameter is large enough.

    states: elements of the whole parameter, and the moments of what the rank updates of it.
    """
    large = [moment for elements, moments in states if elements >= LEAST_ELEMENTS for moment in moments]
    wide = [moment for moment in large if stored_dtype(moment).itemsize > 1]
    return sum(_local(moment).numel() * moment.element_size() for moment in wide)


FOREACH_AND_FUSED: dict[OptimizerImplementation, tuple[bool | None, bool | None]] = {
    "default": (None, None),
    "for-loop": (False, False),
    "foreach": (True, False),
    "fused": (False, True),
}
"""Arguments of torch's optimizers."""


def update_groups(model: nn.Module, optimizer: OptimizerSection) -> tuple[UpdateGroup, ...]:
    """The optimizer's groups of the whole model that is to be trained."""
    return optimizer.update_groups({n: p.ndim for n, p in model.named_parameters() if p.requires_grad})


def freeze(model: nn.Module, optimizer: OptimizerSection) -> None:
    """Freeze what the optimizer's groups freeze. Raises JobError for a group that would have no effect."""
    named = dict(model.named_parameters())
    for name in optimizer.frozen_among(named):
        named[name].requires_grad_(False)
    place = optimizer.places(named)
    trained = {place.get(name) for name, parameter in named.items() if parameter.requires_grad}
    for index, group in enumerate(optimizer.groups):
        if not group.frozen and index not in trained:
            raise JobError(
                f"optimizer.groups: '{group.parameters}' names only parameters that are not trained"
            )
    if not trained:
        raise JobError("optimizer.groups: every parameter is frozen; leave some to be trained")


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that are not trained."""
    return frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)


def build_optimizer(
    named: Iterable[tuple[str, nn.Parameter]],
    section: OptimizerSection,
    updated: Sequence[UpdateGroup],
    frozen: frozenset[str] = frozenset(),
    matrices: Collection[str] = (),
) -> torch.optim.Optimizer:
    """The job's optimizer with every constant explicit; the loop sets the learning rate before each step.

    updated: its groups; of other names than theirs nothing decays. frozen: names of parameters that it is
    not given. matrices: names of those that Muon updates.
    """
    of_muon = matrices if section.kind == "muon" else ()
    # A rate where that of any group differs, since libraries want the same keys in all.
    has_rates = any(group.rate != 1 for group in updated)
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": group.weight_decay, **({LR_SCALE: group.rate} if has_rates else {})}
        for group in updated
    ]
    rest: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    orthogonal: list[nn.Parameter] = []
    place = {name: group for group, of_group in zip(groups, updated, strict=True) for name in of_group.names}
    for name, parameter in named:
        if name not in frozen:
            (orthogonal if name in of_muon else place.get(name, rest)["params"]).append(parameter)
    groups = [group for group in (*groups, rest) if group["params"]]
    if section.factory is not None:
        return _own_optimizer(section.factory, groups, section)
    if section.kind in LOW_BIT:
        return build_low_bit(groups, section)
    if section.kind == "muon":
        return build_muon(orthogonal, groups, section)
    foreach, fused = FOREACH_AND_FUSED[section.implementation]
    how: dict[str, Any] = {"foreach": foreach, "fused": fused}
    if section.kind == "sgd":
        how |= {"lr": section.learning_rate, "momentum": section.momentum}
        return torch.optim.SGD(groups, dampening=0.0, nesterov=False, **how)
    adam = torch.optim.Adam if section.kind == "adam" else torch.optim.AdamW
    return adam(groups, amsgrad=False, **adam_constants(section), **how)


class _Groups(list[dict[str, Any]]):
    """Told by name in an error."""

    def __repr__(self) -> str:
        return "(those of the job)"


def _own_optimizer(
    factory: str, groups: list[dict[str, Any]], section: OptimizerSection
) -> torch.optim.Optimizer:
    """Raises JobError for what is no optimizer of these tensors."""
    given = _Groups({"lr": section.learning_rate, **group} for group in groups)
    tensors = {id(parameter) for group in groups for parameter in group["params"]}
    made = call_factory("optimizer.factory", factory, {"groups": given, **section.arguments})
    if not isinstance(made, torch.optim.Optimizer):
        raise JobError(
            f"optimizer.factory '{factory}' returned a {type(made).__name__}; return an optimizer of torch"
        )
    if {id(parameter) for group in made.param_groups for parameter in group["params"]} != tensors:
        raise JobError(
            f"optimizer.factory '{factory}' returned an optimizer of other tensors than those of `groups`; "
            "hand it all of them"
        )
    return made


ROWS, TRIAL_STEPS = 256, 3
"""Of the square matrix of a trial, large enough for optimizers that treat small ones otherwise; updates."""


@dataclass(frozen=True, kw_only=True)
class OwnUpdate:
    """What a trial shows of an optimizer of the user's own."""

    name: str
    needs_closure: bool
    """Whether its step wants the loss computed again."""
    begins_with_states: bool
    """Whether it makes states for the tensors that it is built with."""
    of_part: float | None
    """Distance between the updates of half a matrix, in the matrix and flattened alone, over their size.

    0 where each element is updated on its own; None: it could not be tried, or it draws random numbers, which
    are others for a part.
    """

    def why_not(self, strategy: StrategyKind | None) -> str | None:
        """Why it does not run under a strategy; None: it does."""
        if self.needs_closure:
            return (
                f"optimizer.factory: the step of {self.name} needs a closure that computes the loss again; "
                "the job computes it once for each micro-batch"
            )
        flat = strategy is not None and strategy.zero_stage is not None and strategy.family != "zero0"
        if self.begins_with_states and flat:
            return (
                f"optimizer.factory: {self.name} makes states of the tensors that it is built with; these "
                "DeepSpeed replaces by flat parts (torch's Adagrad it makes anew, without the job's groups)"
            )
        return None


def try_own(section: OptimizerSection) -> OwnUpdate | None:
    """Let the job's own optimizer update a random matrix, then half of it; None where it does not take one.

    In double precision, with random states as they were before.
    """
    if section.factory is None:
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            whole, part = (_TrialUpdate(section, rows) for rows in (ROWS, ROWS // 2))
            drawn = torch.get_rng_state()
            moved = None if whole.needs_closure else (whole.moved(), part.moved())
            if not torch.equal(torch.get_rng_state(), drawn):
                moved = None
    except Exception:  # code of the user's own: the run itself says what is wrong
        return None
    apart = None
    if moved is not None and (size := float(moved[1].norm())) > 0:
        apart = float((moved[0][: moved[1].numel()] - moved[1]).norm()) / size
    return OwnUpdate(
        name=type(whole.optimizer).__name__, needs_closure=whole.needs_closure, of_part=apart,
        begins_with_states=whole.begins_with_states,
    )  # fmt: skip


class _TrialUpdate:
    """An optimizer of the first rows of a random matrix: of the whole one as it is, of fewer flattened."""

    def __init__(self, section: OptimizerSection, rows: int) -> None:
        self._scale = torch.linspace(0.1, 2.0, ROWS, dtype=torch.float64)[:, None]
        self._rows, self._draw = rows, torch.Generator().manual_seed(0)
        self._given = self._cut()
        self._parameter = nn.Parameter(self._given.clone())
        groups = [{"params": [self._parameter], "weight_decay": section.weight_decay}]
        self.optimizer = _own_optimizer(section.factory or "", groups, section)
        self.begins_with_states = any(self.optimizer.state.values())
        closure = inspect.signature(self.optimizer.step).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is closure.empty

    def _cut(self) -> Tensor:
        matrix = self._scale * torch.randn(ROWS, ROWS, dtype=torch.float64, generator=self._draw)
        return matrix if self._rows == ROWS else matrix[: self._rows].flatten()

    def moved(self) -> Tensor:
        """What some updates change, flattened."""
        for _ in range(TRIAL_STEPS):
            self._parameter.grad = self._cut()
            self.optimizer.step()
        return (self._parameter.detach() - self._given).flatten()


@lru_cache(maxsize=1)
def scheduled_rates(
    steps: int, peak: float, warmup_steps: int, scheduler: str, parameters: str
) -> tuple[float, ...]:
    """The rate of each step from DeepSpeed's own scheduler, or torch's. `parameters`: JSON.

    Raises JobError for arguments that it does not take.
    """
    from deepspeed.runtime import lr_schedules

    left_to_the_job = {"warmup_min_lr": 0.0, "warmup_max_lr": peak, "warmup_num_steps": warmup_steps,
                       "total_num_steps": steps}  # fmt: skip
    given = {name: left_to_the_job.get(name, value) if value == "auto" else value
             for name, value in json.loads(parameters).items()}  # fmt: skip
    is_deepspeed = hasattr(lr_schedules, scheduler)
    made = getattr(lr_schedules if is_deepspeed else torch.optim.lr_scheduler, scheduler, None)
    if made is None:
        raise JobError(f"schedule.scheduler: neither DeepSpeed nor torch has '{scheduler}'")
    update = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    rates = []
    try:
        steered = made(update, **given)
        if is_deepspeed:  # its first step leads to iteration 0
            steered.step()
        for _ in range(steps):
            rates.append(float(update.param_groups[0]["lr"]))
            update.step()  # torch warns of a scheduler that steps before its optimizer
            steered.step()
    except (TypeError, ValueError, ArithmeticError) as error:
        raise JobError(f"schedule.parameters: {scheduler} refuses {given}: {error}") from error
    return tuple(rates)


def learning_rate(step: int, steps: int, optimizer: OptimizerSection, schedule: ScheduleSection) -> float:
    """Learning rate of optimizer step `step` (from 0) of `steps`.

    Warm-up: peak x (step + 1) / warmup_steps. Then linear or half a cosine from the peak down to
    peak x final_fraction at the last step. Of kind deepspeed: what the scheduler gives for iteration `step`.
    """
    peak = optimizer.learning_rate
    if schedule.scheduler is not None:
        return scheduled_rates(steps, peak, schedule.warmup_steps, schedule.scheduler,
                               json.dumps(schedule.parameters))[step]  # fmt: skip
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    remaining = max(1, steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / remaining)
    shape = 1 - progress if schedule.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * shape)
