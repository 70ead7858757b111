"""What the harness sees of a run without asking the backend: what was fed, built and updated.

It made the model and the optimizer that an adapter works with and the function that computes the loss,
so it can look at them whatever the adapter says of itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from backends.base import Batch, Engine
from backends.precision import dtype_name
from harness.spec import OptimizerSection
from harness.worker.model import summed_cross_entropy
from harness.worker.optimizer import build_adamw

FED_STEPS = 2
"""First steps of which each sample that reached the model is recorded: a wrong loader is wrong at once."""
CONSTANTS = ("betas", "eps", "weight_decay", "amsgrad", "maximize")


class Observer:
    """Stands between the harness and one engine; its methods are what the engine is given."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._names: list[str] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._given: list[list[str]] = []
        self._fed: list[str] | None = None

    def built(self, model: nn.Module) -> None:
        """Remember the model that an adapter received."""
        self._model = model
        self._names = [name for name, _ in model.named_parameters()]

    def build_optimizer(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        section: OptimizerSection,
        decaying: frozenset[str],
    ) -> torch.optim.AdamW:
        """Build the job's optimizer and remember which parameters it was given."""
        pairs = list(named)
        optimizer = build_adamw(pairs, section, decaying)
        names = {id(parameter): name for name, parameter in pairs}
        self._given = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self._optimizer = optimizer
        return optimizer

    def compute_loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch; in the first steps also a note of the samples that it holds."""
        if self._fed is not None and torch.is_grad_enabled():
            tokens, labels = batch["tokens"].cpu(), batch["labels"].cpu()
            self._fed += [_content(*pair) for pair in zip(tokens, labels, strict=True)]
        return summed_cross_entropy(module, batch)

    def begin_step(self, step: int) -> None:
        """Note the samples of this step if it is one of the first."""
        self._fed = [] if step < FED_STEPS else None

    def end_step(self, rate: float) -> dict[str, Any]:
        """What one optimizer step was seen to use: learning rate, and samples if they were noted."""
        seen: dict[str, Any] = {"applied_learning_rate": self._learning_rate(rate)}
        if self._fed is not None:
            seen["fed"] = self._fed
        return seen

    def report(self) -> dict[str, Any]:
        """Everything seen by the end of the training, in the form of `record.ObservedPart`."""
        return {**self._optimizer_facts(), **self._model_facts(), **_process_facts()}

    def _learning_rate(self, asked: float) -> float | None:
        """Of the rates in force the one farthest from what was asked; None: this optimizer is not used."""
        if self._optimizer is None or not self._optimizer.state:
            return None
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        return max(rates, key=lambda rate: abs(rate - asked))

    def _optimizer_facts(self) -> dict[str, Any]:
        given = {name for names in self._given for name in names}
        facts: dict[str, Any] = {
            "parameters_left_out": sorted(set(self._names) - given),
            "optimizer_used": False,
        }
        optimizer = self._optimizer
        if optimizer is None or not optimizer.state:
            return facts
        tensors = {
            key: [state[key] for state in optimizer.state.values() if isinstance(state.get(key), Tensor)]
            for key in ("exp_avg", "exp_avg_sq", "step")
        }
        moments = tensors["exp_avg"] + tensors["exp_avg_sq"]
        groups = optimizer.param_groups
        return facts | {
            "optimizer_used": True,
            "optimizer_steps": int(max(map(float, tensors["step"]), default=0)) or None,
            "optimizer_groups": [
                {key: list(v) if isinstance(v := group[key], tuple) else v for key in CONSTANTS}
                | ({"parameters": self._given[index]} if len(groups) == len(self._given) else {})
                for index, group in enumerate(groups)
            ],
            "master_dtypes": sorted({dtype_name(p.dtype) for p in optimizer.state if isinstance(p, Tensor)}),
            "optimizer_state_dtypes": sorted({dtype_name(tensor.dtype) for tensor in moments}),
        }

    def _model_facts(self) -> dict[str, Any]:
        model: Any = self._model
        if model is None:
            return {}
        every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        return {
            "tied_parameters": len(every) - len(list(model.named_parameters())),
            "frozen_parameters": sorted(n for n, p in model.named_parameters() if not p.requires_grad),
            "attention": getattr(model.config, "_attn_implementation", None),
            "activation_checkpointing": any(
                getattr(module, "gradient_checkpointing", False) for module in model.modules()
            ),
            "compiled": any(
                getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()
            ),
            "dropout": _largest_dropout(model),
        }


def probe_loss(engine: Engine, batch: Batch) -> float:
    """Loss of one batch that is equal on every rank: equal on all of them if they hold equal weights.

    A collective. For the end of a run: it leaves the engine in evaluation mode.
    """
    engine.train(False)
    with torch.no_grad():
        return float(engine.forward(batch))


def _content(tokens: Tensor, labels: Tensor) -> str:
    digest = hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8)
    digest.update(labels.numpy().tobytes())
    return digest.hexdigest()


def _largest_dropout(model: Any) -> float:
    """Largest probability of a dropout module, or of one that the configuration names."""
    modules = [m.p for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    configured = [
        float(value)
        for key, value in model.config.to_dict().items()
        if ("dropout" in key or key.endswith("pdrop"))
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    ]
    return max([*modules, *configured], default=0.0)


def _process_facts() -> dict[str, Any]:
    return {
        "tf32": bool(torch.backends.cuda.matmul.allow_tf32),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
