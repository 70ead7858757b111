"""What the harness sees of a run without asking the backend: what was fed, built and updated.

It made the model and the optimizer that an adapter works with and the function that computes the loss,
so it can look at them whatever the adapter says of itself.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.backends.base import Batch, Engine, OptimizerKind, Unsupported
from harness.backends.model.blocks import places_of_tied
from harness.backends.model.precision import dtype_name
from harness.backends.optimizer.gradients import COUNTED_ELSEWHERE, COUNTED_RANGES, global_norm, local_shard
from harness.backends.optimizer.groups import group_constants, group_rate, rate_in_force
from harness.backends.optimizer.kinds import LOW_BIT
from harness.backends.piece import Piece
from harness.job.job import OptimizerSection, UpdateGroup
from harness.rank.accelerator import uses_tf32
from harness.rank.data import LABELS, SeenBatch, batch_hash_sum, content_digests, seed_generators
from harness.rank.factories import configuration
from harness.rank.live.model_watch import ModuleWatch, PassWatch, bare_name, largest_dropout, recomputes
from harness.rank.live.update_audit import HeldTensor, UpdateAudit
from harness.rank.models.changes import compiler_facts, is_compiled, narrow_layers
from harness.rank.models.losses import ComputeLoss, summed_cross_entropy
from harness.rank.models.optimizer import (
    MOMENTS,
    MOMENTUM_KEY,
    block_matrices,
    build_optimizer,
    orthogonalised_in_parts,
    stored_dtype,
    wide_bytes,
)
from harness.rank.process.environment import is_deterministic, random_state
from harness.rank.step_hooks import Step, StepHook
from harness.record.run import ModelLossPart
from harness.run_directory.rank_state import ModuleWriter

NO_GRADIENT = "does not require grad and does not have a grad_fn"
"""What torch says of a loss that nothing trains."""


class OptimizerWatch:
    """Looks on between `start` and `stop`, in the first steps only: what trains is at work at once."""

    def __init__(self, *, has_hook: bool = True) -> None:
        """has_hook: False: its owner calls `look` after each update."""
        self._has_hook = has_hook
        self.optimizers: list[torch.optim.Optimizer] = []
        """Those that stepped, in the order in which they first did."""
        self.phase = "setup"
        """What the loop is doing."""
        self.updates: Counter[str] = Counter()
        """How often an optimizer stepped, by phase."""
        self.groups: dict[int, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}
        """Optimizer and group in which each tensor was last seen, by its identity. ZeRO shows one group alone
        at a time while it steps."""
        self._handle: Any = None
        self.at_work = False
        self._squares: dict[int, float] = {}
        self._elements: dict[int, int] = {}
        self._shares: dict[int, float | None] = {}

    @property
    def with_gradient(self) -> int:
        """Tensors that had a gradient at their last use since `start`."""
        return len(self._squares)

    def start(self) -> None:
        """Look on from here."""
        self._squares.clear()
        self._elements.clear()
        self._shares.clear()
        self.at_work = True
        if self._handle is None and self._has_hook:
            self._handle = register_optimizer_step_post_hook(self._after_step)

    def leave(self) -> None:
        """See no further steps; until then those between two steps count."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def stop(self) -> tuple[float, float] | None:
        """Stop looking on; return (sum of squares, elements) of this rank's gradients at their last use.

        None: no torch optimizer stepped. Gradients that an optimizer was given twice count once. Of
        DTensors, what several ranks hold counts in part on each: some may be cut, others replicated.
        """
        self.at_work = False
        if not self._elements:
            return None
        known = None not in self._shares.values()
        share = {key: (value or 1.0) if known else 1.0 for key, value in self._shares.items()}
        squares = sum(size * share[key] for key, size in self._squares.items())
        return squares, sum(count * share[key] for key, count in self._elements.items())

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.updates[self.phase] += 1
        if self.at_work:
            self.look(optimizer)

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradients that it was given."""
        # After and not before: hooks of the optimizer itself may change gradients in between.
        if all(optimizer is not known for known in self.optimizers):
            self.optimizers.append(optimizer)
        self.note_groups(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, Tensor) and not getattr(parameter, COUNTED_ELSEWHERE, False):
                    self._look_at(parameter)

    def note_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember in which group each tensor lies."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.groups[id(parameter)] = optimizer, group

    def held(self, before_any: torch.optim.Optimizer | None = None) -> Iterator[HeldTensor]:
        """What the optimizers at work, or one before it is, update and have states of, with their groups."""
        known = [share is not None for share in self._shares.values()]
        unlike = any(known) and not all(known)  # of some tensors it is not known how many ranks hold them
        for optimizer in self.optimizers if before_any is None else [before_any]:
            for tensor, state in optimizer.state.items():
                owner, group = self.groups.get(id(tensor), (None, {}))
                if owner is optimizer:
                    elsewhere = getattr(tensor, COUNTED_ELSEWHERE, False)
                    share = 0.0 if elsewhere else self._shares.get(id(tensor)) or 1.0
                    yield HeldTensor(
                        tensor=tensor,
                        state=state,
                        group=group,
                        share=None if hasattr(tensor, COUNTED_RANGES) or unlike else share,
                    )

    def _look_at(self, parameter: Tensor) -> None:
        key = id(parameter)
        local = local_shard(parameter.detach())
        ranges = getattr(parameter, COUNTED_RANGES, [(0, local.numel())])
        self._elements[key] = sum(end - start for start, end in ranges)
        self._shares[key] = _share(parameter)
        if parameter.grad is None:
            return
        whole = ranges == [(0, local.numel())]
        if parameter.grad.is_sparse:
            parts = [parameter.grad.coalesce().values()]
        else:
            parts = [parameter.grad] if whole else [parameter.grad.view(-1)[slice(*part)] for part in ranges]
        self._squares[key] = global_norm(parts, None) ** 2


def _share(parameter: Tensor) -> float | None:
    """One over the ranks that hold the same part of a DTensor; None: another tensor."""
    placements, mesh = getattr(parameter, "placements", None), getattr(parameter, "device_mesh", None)
    if placements is None or mesh is None or not dist.is_initialized():
        return None
    cuts = (size for placed, size in zip(placements, mesh.shape, strict=True) if not placed.is_replicate())
    return math.prod(cuts) / dist.get_world_size()


OF_ADAM = ("adamw", "adam")
DIGESTED_STEPS = 2
"""First steps, looked at more closely: each sample and the optimizer's gradients are recorded, inside the
step. Later ones only note what is read after them."""


class Observer(StepHook):
    """Stands between the harness and one engine; its methods are what the engine is given."""

    def __init__(self, modules: ModuleWriter | None = None) -> None:
        """modules: where those that run in the first steps are noted."""
        self._writer = modules or ModuleWriter(None, 0)
        self._model: nn.Module | None = None
        self._loss: ComputeLoss = summed_cross_entropy
        self._elements: dict[str, int] = {}
        self._frozen: frozenset[str] = frozenset()
        self._matrices: dict[str, torch.Size] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._given: list[list[str]] = []
        self._whole: dict[int, int] = {}
        self._narrow = 0
        self._watch = OptimizerWatch()
        self._modules: ModuleWatch | None = None
        self._passes: PassWatch | None = None
        self._loss_gradients: list[float] | None = None
        """Of the step before."""
        self._digests: list[str] | None = None
        self._batches: list[SeenBatch] = []
        self._losses: list[Tensor] = []
        self._probing = False
        self._instead: Callable[[nn.Module, Batch], Tensor] | None = None
        self._wrapped_compiled = False
        self._kind: OptimizerKind = "adamw"
        self._targets_of_model_loss: Callable[[Batch], Tensor | int] | None = None
        self._model_loss: ModelLossPart | None = None
        self._audit = UpdateAudit()
        self.audits = False
        """Whether the job's optimizer is one whose updates can be computed again."""
        self._step = Step(number=0)
        self._share = 0.0
        self._rates: list[list[float | None]] = []
        self._constants: dict[int, list[dict[str, Any]]] = {}
        self._buffers: dict[str, str] = {}
        self._random_state = ""
        self._draws: bool | None = None

    @property
    def looks_closely(self) -> bool:
        """Whether this step is one of those looked at more closely."""
        return self._watch.at_work

    def built(
        self,
        model: nn.Module,
        loss: ComputeLoss = summed_cross_entropy,
        frozen: frozenset[str] = frozenset(),
        *,
        targets_of_model_loss: Callable[[Batch], Tensor | int] | None = None,
    ) -> None:
        """Remember the model that a backend received, the job's loss and what it does not train.

        targets_of_model_loss: over how many targets the loss is a mean that the model returns of labels;
        None: it returns none that can stand beside the job's.
        """
        self._model, self._loss = model, loss
        self._targets_of_model_loss = targets_of_model_loss
        self._elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self._frozen = frozen
        self._matrices = block_matrices(model)
        self._narrow = narrow_layers(model)
        self._modules = ModuleWatch(model, self._writer.note)
        self._passes = PassWatch(model)

    def build_optimizer(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        section: OptimizerSection,
        updated: Sequence[UpdateGroup],
    ) -> torch.optim.Optimizer:
        """Build the job's optimizer and remember which parameters it was given."""
        pairs = list(named)
        optimizer = build_optimizer(pairs, section, updated, self._frozen, self._matrices)
        names = {id(parameter): name for name, parameter in pairs}
        self._kind = section.kind
        self._audit.decoupled = section.kind == "adamw"
        self.audits = section.factory is None and section.kind in OF_ADAM
        self._given = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self._whole = {key: self._elements[name] for key, name in names.items() if name in self._elements}
        self._optimizer = optimizer
        return optimizer

    def compute_loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch, and a note of it and of the samples that it is of."""
        if self._instead is not None:
            return self._instead(module, batch)
        if torch.is_grad_enabled() or self._probing:
            self._batches.append(SeenBatch(batch))
        if torch.is_grad_enabled() and self._digests is not None:
            self._digests += content_digests(batch)
        if self._watch.at_work and not self._wrapped_compiled:
            # What wraps the model may be compiled while the model itself is left as it is.
            self._wrapped_compiled = is_compiled(module)
            if self._modules is not None and not self._wrapped_compiled and torch.is_grad_enabled():
                self._modules.start()
        if self._probing and self._targets_of_model_loss is not None and not self._wrapped_compiled:
            loss = self._beside_the_models_own(module, batch, int(self._targets_of_model_loss(batch)))
        else:
            loss = self._loss(module, batch)
        self._losses.append(loss.detach())
        if self._passes is not None and not self._wrapped_compiled:
            self._passes.computed(loss)
            self._passes.look(module)
        return loss

    def _beside_the_models_own(self, module: nn.Module, batch: Batch, targets: int) -> Tensor:
        """The job's loss of one forward pass in which the model computes its own too."""
        outputs: list[Any] = []

        def with_labels(**inputs: Any) -> Any:
            outputs.append(module(**inputs, labels=batch[LABELS]))
            return outputs[0]

        loss = self._loss(with_labels, batch)  # type: ignore[arg-type]
        own = getattr(outputs[0], "loss", None)
        if own is not None and targets and bool((own + loss).isfinite()):
            self._model_loss = ModelLossPart(model=float(own), job=float(loss) / targets, targets=targets)
        return loss

    @contextmanager
    def computing(self, instead: Callable[[nn.Module, Batch], Tensor]) -> Iterator[None]:
        """Let engines compute this in place of the loss, within their own forward pass."""
        self._instead = instead
        try:
            yield
        finally:
            self._instead = None

    def prepare(self, step: Step) -> None:
        """Forget the step before; look closer if this one is one of the first."""
        self._step = step
        is_close, is_first = step.since_first < DIGESTED_STEPS, step.since_first == 0
        self._digests = [] if is_close else None
        self._batches.clear()
        self._losses.clear()
        if self._passes is not None:
            self._passes.begin_step()
        if is_first and self._model is not None:
            self._buffers = dict(_buffer_digests(self._model))
        if is_first and self.audits and self._optimizer is not None and self._optimizer.state:
            # It continues: what its states were decides its first update.
            self._watch.note_groups(self._optimizer)
            self._audit.look(self._watch.held(self._optimizer), None, tuple)
        if is_close:
            self._watch.start()
            self._writer.begin_step()
        else:
            self._watch.leave()

    def enter(self, phase: str, last: bool = False) -> None:
        if self._model is not None and self._watch.at_work:
            state = random_state(next(self._model.parameters()).device.type)
            if self._watch.phase == "forward":
                self._draws = self._draws or state != self._random_state
            self._random_state = state
        self._watch.phase = phase

    def facts(self) -> dict[str, Any]:
        """What one optimizer step was seen to use: see `record.StepPart` and `record.RankPart`."""
        seen: dict[str, Any] = {"applied_learning_rate": rate_in_force(self._at_work, self._step.rate)}
        groups = [group for optimizer in self._at_work for group in optimizer.param_groups]
        self._rates.append(list(map(group_rate, groups)))
        constants = list(map(group_constants, groups))
        if constants and constants != next(reversed(self._constants.values()), None):
            self._constants[self._step.number] = constants
        if self._digests is not None:
            seen["batch_digests"] = self._digests
        if self._batches:
            total = batch_hash_sum(self._batches)
            seen["batch_hash_sum"] = None if total is None else f"{total:016x}"
            seen["computed_loss_sum"] = self._computed_loss()
            seen["passes"] = self._counted_passes()
            ends = self._passes.loss_gradients if self._passes is not None else None
            seen["loss_gradients"] = [] if ends is not None and ends == self._loss_gradients else ends
            self._loss_gradients = ends
        self._batches.clear()
        if self._modules is not None:
            seen["without_gradient"] = self._modules.end_step()
            seen["gradients_unknown"] = self._modules.is_over
            self._modules.stop()
        if self._watch.at_work:
            self._writer.end()
            applied = self._watch.stop()
            if applied is not None:
                squares, elements = applied
                assert self._model is not None
                frozen = {bare_name(n) for n, p in self._model.named_parameters() if not p.requires_grad}
                trained = sum(count for name, count in self._elements.items() if name not in frozen)
                self._share = elements / max(1, trained)
                seen["applied"] = {"squares": squares, "share": self._share}
        return seen

    def audit(self, engine: Engine, step: int) -> dict[str, Any]:
        """Look whether its update is what its optimizer should make of the gradient.

        Returns what is known of that, in the form of `StepEvent`.
        """
        if not self.audits:
            return {}

        def pieces() -> Iterator[Piece]:
            for listed in (engine.weight_pieces, engine.pieces):
                with suppress(Unsupported):
                    yield from listed()
                    return

        held = list(self._watch.held())
        self._audit.look(held, step, pieces, self._step.rate)
        squares = self._audit.squares(held)
        if squares is None or self._audit.odd is not None or not self._share:
            return {}
        return {"applied": {"squares": squares, "share": self._share}}

    def audited(self) -> dict[str, Any]:
        """What that found, in the form of `record.RankPart`."""
        if not self.audits:
            return {}
        return {"audited_updates": self._audit.updates, "odd_update": self._audit.odd}

    def probe_loss(self, engine: Engine, batch: Batch) -> float | None:
        """Loss of one batch that is equal on every rank: equal on all of them if they hold equal weights.

        As it was computed here, where the engine asks for that, since an engine may report another; None if
        it computed that of another batch, or takes gradients itself. A collective. For the end of a run: it
        leaves the engine in evaluation mode.
        """
        self._losses.clear()
        self._batches.clear()
        self._probing = True
        engine.train(False)
        seed_generators(0)  # what a loss draws is the same on every rank
        try:
            with torch.no_grad():
                reported = float(engine.forward(batch))
        except RuntimeError as error:
            if NO_GRADIENT not in str(error):
                raise
            return None
        finally:
            self._probing = False
        if not self._losses:
            return reported
        seen, given = batch_hash_sum(self._batches), batch_hash_sum([SeenBatch(batch)])
        return self._computed_loss() if seen == given else None

    def report(self) -> dict[str, Any]:
        """Everything seen by the end of the training, in the form of `record.ObservedPart`."""
        now = dict(_buffer_digests(self._model)) if self._buffers and self._model is not None else {}
        still = sorted(name for name, digest in self._buffers.items() if now.get(name) == digest)
        return {
            **self._optimizer_facts(),
            **self._model_facts(),
            "draws": self._draws,
            "tf32": uses_tf32(),
            "deterministic": is_deterministic(),
            "updates_by_phase": dict(self._watch.updates),
            "buffers": self._buffers,
            "still_buffers": still if self._buffers and self._model is not None else None,
            "compute_dtype": self._modules.compute_dtype if self._modules is not None else None,
            "products_otherwise": self._modules.products_otherwise if self._modules is not None else {},
            "model_loss": self._model_loss,
        }

    def _counted_passes(self) -> tuple[int, int] | None:
        """None: what the compiler made of the model cannot be counted."""
        if self._watch.at_work and self._passes is not None and is_compiled(self._passes.model):
            self._passes = None
        return None if self._passes is None or self._wrapped_compiled else self._passes.passes

    def _computed_loss(self) -> float:
        return float(torch.stack([loss.double() for loss in self._losses]).sum())

    @property
    def _at_work(self) -> list[torch.optim.Optimizer]:
        """The optimizers that train: those that were seen to step, else the job's if it has states."""
        if self._watch.optimizers:
            return self._watch.optimizers
        return [self._optimizer] if self._optimizer is not None and self._optimizer.state else []

    def _optimizer_facts(self) -> dict[str, Any]:
        at_work = self._at_work
        names = [self._group_names(optimizer) for optimizer in at_work]
        known = [group for of_one in names if of_one is not None for group in of_one]
        # As far as names can be known.
        given = {name for group in (known if names and None not in names else self._given) for name in group}
        facts: dict[str, Any] = {
            "parameters_left_out": sorted(set(self._elements) - self._frozen - given),
            "optimizer_used": any(optimizer is self._optimizer for optimizer in at_work),
        }
        if not at_work:
            return facts
        states = [state for optimizer in at_work for state in optimizer.state.values()]
        tensors = {
            key: [state[key] for state in states if isinstance(state.get(key), Tensor)]
            for key in (*MOMENTS, MOMENTUM_KEY)
        }
        moments = [tensor for of_key in tensors.values() for tensor in of_key]
        # Of each group by step; the steps tell what all groups have alike.
        differ = any(len(set(rates)) > 1 for rates in self._rates)
        steps = [float(state["step"]) for state in states if "step" in state]
        held = [p for optimizer in at_work for p in optimizer.state if isinstance(p, Tensor)]
        return facts | {
            "optimizer_steps": int(max(steps, default=0)) or None,
            "optimizer_groups": [
                group_constants(group) | ({"parameters": of_one[index]} if of_one is not None else {})
                for optimizer, of_one in zip(at_work, names, strict=True)
                for index, group in enumerate(optimizer.param_groups)
            ],
            "learning_rates": [list(one) for one in zip(*self._rates, strict=False)] if differ else [],
            "constants_by_step": self._constants if len(self._constants) > 1 else {},
            "master_dtypes": sorted({dtype_name(parameter.dtype) for parameter in held}),
            "optimizer_state_dtypes": sorted({dtype_name(stored_dtype(tensor)) for tensor in moments}),
            "wide_optimizer_bytes": wide_bytes(
                (self._whole.get(id(tensor), tensor.numel()), [state[key] for key in MOMENTS if key in state])
                for optimizer in at_work
                for tensor, state in optimizer.state.items()
            )
            if self._kind in LOW_BIT
            else None,
            "matrices_in_parts": orthogonalised_in_parts(self._matrices, at_work)
            if self._kind == "muon"
            else None,
        }

    def _group_names(self, optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
        """Names by group: of the model's own parameters, else as the job's groups were filled."""
        live: dict[int, str] = {}
        if self._model is not None:
            live = {id(parameter): bare_name(name) for name, parameter in self._model.named_parameters()}
        groups = [group["params"] for group in optimizer.param_groups]
        if any(groups) and all(id(parameter) in live for group in groups for parameter in group):
            return [[live[id(parameter)] for parameter in group] for group in groups]
        given = optimizer is self._optimizer and len(groups) == len(self._given)
        return self._given if given else None

    def _model_facts(self) -> dict[str, Any]:
        model: Any = self._model
        if model is None:
            return {}
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        compiled = self._wrapped_compiled or is_compiled(model)
        return {
            "tied_parameters": places_of_tied(model),
            "frozen_parameters": sorted({bare_name(name) for name in frozen} - self._frozen),
            "frozen_dtypes": sorted(
                {dtype_name(p.dtype) for n, p in frozen.items() if bare_name(n) in self._frozen}
            ),
            "attention": getattr(configuration(model), "_attn_implementation", None),
            "activation_checkpointing": recomputes(model),
            "compiled": compiled,
            **(compiler_facts() if compiled else {}),
            "dropout": largest_dropout(model, self._passes.never_trains() if self._passes else ()),
            "wide_linears": self._narrow - narrow_layers(model) if self._narrow else None,
            "evaluating_in_training": self._passes.in_other_mode(trains=True) if self._passes else None,
            "training_in_evaluation": self._passes.in_other_mode(trains=False) if self._passes else None,
        }


class Audit(StepHook):
    """Computes the update of each step again, which takes memory: outside of what reads it."""

    def __init__(self, observer: Observer, engine: Engine) -> None:
        self._observer, self._engine = observer, engine
        self._step = 0

    def prepare(self, step: Step) -> None:
        self._step = step.number

    def facts(self) -> dict[str, Any]:
        return self._observer.audit(self._engine, self._step)


def _buffer_digests(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Digests of buffers' values, whatever dtype holds them, so that only what rounding took away differs."""
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and not buffer.is_meta:
            values = local_shard(buffer.detach()).double().cpu().contiguous().numpy().tobytes()
            yield bare_name(name), hashlib.blake2b(values, digest_size=8).hexdigest()
