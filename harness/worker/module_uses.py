"""How often the modules of a model run in a forward pass, where that is not once each."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from harness.backends.base import Batch
from harness.errors import JobError
from harness.forms.layout import Use
from harness.spec import Job
from harness.spec.task import DEFAULT_TASK
from harness.worker.factories import described_error
from harness.worker.gradient_flow import AnswersForMeta, needs_gradient
from harness.worker.losses import loss_function

Uses = dict[str, list[Use]]
REGULAR: Uses = {}
"""Every module runs once, tied weights at each of their names."""
Call = tuple[nn.Module, bool, bool]
"""A module, and whether its inputs and its outputs need a gradient."""


def irregular_uses(job: Job, model: nn.Module, example: Batch | None) -> Uses | None:
    """Of each parameter that several modules share, or whose module does not run exactly once: its uses in
    the order of a forward pass. None: it could not be found out.

    Found by a loss of `example`, two samples or more, on a copy of the model on the meta device. Causal
    language models of transformers are not looked at: each module runs once, a tied weight at both its names.
    Raises JobError for a loss that no batch could have.
    """
    if job.task == DEFAULT_TASK and job.model.factory is None and job.loss.factory is None:
        return REGULAR
    if example is None:
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            return _uses(job, _on_meta(model), example)
    except JobError:
        raise
    except (KeyError, NameError) as error:  # no matter of values
        shown = f"loss.factory '{job.loss.factory}'" if job.loss.factory else "the loss of the model"
        raise JobError(f"{shown}: a batch of {', '.join(example)} raised {described_error(error)}") from error
    except Exception:  # whatever code of the user's own makes of tensors without values
        return None


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy without memory, so that what its forward pass changes in the model is changed in the copy."""
    memo: dict[int, Any] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


def _uses(job: Job, model: nn.Module, example: Batch) -> Uses:
    calls: list[Call] = []
    handles = [
        module.register_forward_hook(_noting(calls), with_kwargs=True)
        for module in model.modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    try:
        with AnswersForMeta():
            loss_function(job, model)(model, {name: field.to("meta") for name, field in example.items()})
    finally:
        for handle in handles:
            handle.remove()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    every = [names[id(p)] for p in _own_parameters(model)]
    owners, runs = Counter(every), Counter(id(module) for module, _, _ in calls)
    once = {
        names[id(p)]
        for module in model.modules()
        if runs[id(module)] == 1
        for p in module.parameters(recurse=False)
        if owners[names[id(p)]] == 1
    }
    found: Uses = {name: [] for name in every if name not in once}
    for module, inputs, outputs in calls:
        for parameter in module.parameters(recurse=False):
            if (name := names[id(parameter)]) in found:
                found[name].append(_use(inputs, outputs))
    return found


def _own_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Each parameter once for every module that has it."""
    return [p for module in model.modules() for p in module.parameters(recurse=False)]


def _noting(calls: list[Call]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, keywords: Mapping[str, Any], output: Any) -> None:
        # DeepSpeed's hooks, whose traffic this is for, see positional inputs alone.
        calls.append((module, needs_gradient(inputs), needs_gradient(output)))

    return hook


def _use(inputs: bool, outputs: bool) -> Use:
    if not outputs:
        return "forward only"
    return "inputs with gradient" if inputs else "inputs without gradient"
