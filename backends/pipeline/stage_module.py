"""One stage as a module: the whole model's own forward pass, with what other stages hold passed through."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from harness.backends.base import Unsupported
from harness.backends.model.blocks import needed_blocks
from harness.backends.pipeline.cut import PIPELINED_MODELS, Cut


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
    firsts = {id(parameter): name for name, parameter in model.named_parameters()}
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
    firsts = {id(parameter): name for name, parameter in model.named_parameters()}
    # What deepcopy finds here it does not copy: only the tree of modules is new.
    taken: dict[int, Any] = {}
    for parameter in model.parameters():
        taken[id(parameter)] = tensors.get(firsts[id(parameter)], parameter)
    taken |= {id(buffer): buffer for buffer in model.buffers()}
    tree = copy.deepcopy(model, taken)
    held = {name.rpartition(".")[0] for name, of_stage in of_name.items() if of_stage == stage}
    absent = {name.rpartition(".")[0] for name, of_stage in of_name.items() if of_stage != stage}
    in_blocks = {block for index in range(cut.stages) if index != stage for block in cut.blocks_of(index)}
    for name in [*in_blocks, *(name for name in absent - held if not _inside(name, cut.blocks))]:
        tree.set_submodule(name, PassThrough())
    return Stage(tree, is_first=stage == 0)


def _inside(module: str, blocks: tuple[str, ...]) -> bool:
    return any(module == block or module.startswith(f"{block}.") for block in blocks)
