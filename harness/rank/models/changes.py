"""What a job changes of its model's computing: recomputation, torch.compile, fp8, a loss in chunks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from harness.backends.base import Unsupported
from harness.backends.libraries.facts import require_installed
from harness.backends.model.blocks import needed_blocks
from harness.errors import JobError
from harness.forms.activations import SELECTIVE, blocks_between
from harness.rank.data import IGNORED

KEPT_OPERATORS = (
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
"""Of torch's `aten`: matrix products and attention, whose outputs selective checkpointing keeps."""


def enable_checkpointing(model: Any, checkpointing: bool | str = True) -> None:
    """Have blocks recompute, as `training.activation_checkpointing` says.

    Raises JobError for a model that cannot, or not in part.
    """
    name = type(model).__name__
    enable = getattr(model, "activation_checkpointing_enable", None)
    older = getattr(model, "gradient_checkpointing_enable", None)
    if not getattr(model, "supports_gradient_checkpointing", True) or older is None:
        raise JobError(
            f"training.activation_checkpointing: {name} has no gradient checkpointing; set it to false"
        )
    if checkpointing is True:
        enable() if enable is not None else older(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    keywords: dict[str, Any] = {"activation_checkpointing_kwargs": {"use_reentrant": False}}
    if checkpointing == SELECTIVE:
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        operators = (getattr(torch.ops.aten, name, None) for name in KEPT_OPERATORS)
        kept = [operator.default for operator in operators if operator is not None]
        # Makes the two contexts that `torch.utils.checkpoint` runs a block in, first and again.
        context_of = partial(create_selective_checkpoint_contexts, kept)
        keywords["activation_checkpointing_kwargs"]["context_fn"] = context_of
    else:
        keywords["every_n_layers"] = blocks_between(checkpointing)
    if enable is None or not keywords.keys() <= inspect.signature(enable).parameters.keys():
        raise JobError(
            f"training.activation_checkpointing={checkpointing}: {name} recomputes every block or none; its "
            f"activation_checkpointing_enable takes no {' and '.join(keywords)}. Set true or false"
        )
    enable(**keywords)


def uses_checkpointing(model: nn.Module) -> bool:
    """Whether blocks recompute their activations; transformers 5 renamed the property."""
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):
        if hasattr(type(model), name):
            return bool(getattr(model, name))
    return False


def compile_blocks(model: nn.Module) -> None:
    """Compile each block in place, which leaves names as they are. Raises Unsupported without blocks."""
    for block in needed_blocks(model).values():
        block.compile()


def pin_compiler(device: str) -> None:
    """On the CPU compile in this process: workers of the compiler's own would outlive a killed rank."""
    from torch._inductor import config

    if device == "cpu":
        config.compile_threads = 1


def is_compiled(module: nn.Module) -> bool:
    """Whether a module within is compiled, in place or by a wrapper."""
    return any(
        type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
    )


def compiler_facts() -> dict[str, Any]:
    """What the compiler did in this process: graphs, breaks between them, and frames compiled again."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    return {
        "compiled_graphs": int(counters["stats"]["unique_graphs"]),
        "graph_breaks": int(sum(counters["graph_break"].values())),
        "recompilations": sum(1 for metric in get_compilation_metrics() if metric.recompile_reason),
    }


def while_compiling(phase: Callable[[], AbstractContextManager[None]]) -> None:
    """Be within `phase` whenever this process compiles: for the first call, and again for other shapes."""
    if "torch._dynamo" not in sys.modules:
        return
    from torch._dynamo.callback import on_compile_end, on_compile_start

    entered = ExitStack()  # older versions of torch give the callbacks no argument
    on_compile_start(lambda *_: entered.enter_context(phase()))
    on_compile_end(lambda *_: entered.close())


PACKAGE = "torchao"


def narrow_products(model: nn.Module) -> None:
    """Have the linear layers of a model's blocks multiply in fp8, in place; weights stay as they are.

    A layer's class is changed, since a new layer in its place would lose its hooks and its place in tied
    weights. Emulated: operands are rounded to e4m3 and multiplied in the dtype that they had. Raises
    Unsupported without torchao or for a model without such layers.
    """
    blocks = needed_blocks(model).values()
    layers = [m for block in blocks for m in block.modules() if isinstance(m, nn.Linear)]
    if not layers:
        raise Unsupported("training.precision=fp8: the model's blocks have no plain linear layer")
    require_installed(PACKAGE, "training.precision=fp8")
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    example = vars(Float8Linear(1, 1, config=config, device="meta"))
    plain = vars(nn.Linear(1, 1, device="meta"))
    attributes = {name: value for name, value in example.items() if name not in plain}
    for layer in layers:
        layer.__class__ = Float8Linear
        vars(layer).update(attributes)


def narrow_layers(model: nn.Module) -> int:
    """Layers of a live model that multiply in fp8."""
    return sum("Float8Linear" in {base.__name__ for base in type(m).__mro__} for m in model.modules())


class ChunkedHead(nn.Linear):
    """A linear layer that computes logits and cross entropy of `chunk_tokens` tokens at once.

    The backward pass computes the logits of a chunk once more, so no two chunks' logits exist together.
    Without labels it is a linear layer.
    """

    chunk_tokens: int
    labels: Tensor | None = None
    returned: Tensor | None = None
    """What the last forward pass returned, to be known again."""

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: (samples, length, width). Return the losses, fp32 (samples, length, 1)."""
        if self.labels is None:
            return super().forward(hidden)
        if hidden.shape[:-1] != self.labels.shape:
            raise JobError(
                f"loss.chunk_tokens: the output layer was given {tuple(hidden.shape[:-1])} positions, the "
                f"batch has {tuple(self.labels.shape)}; leave loss.chunk_tokens out for this model"
            )
        flat, labels = hidden.flatten(0, -2), self.labels.flatten()
        losses = [
            checkpoint(self._losses, rows, targets, use_reentrant=False)
            for rows, targets in zip(
                flat.split(self.chunk_tokens), labels.split(self.chunk_tokens), strict=True
            )
        ]
        self.returned = torch.cat(losses).view(*self.labels.shape, 1)
        return self.returned

    def _losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = functional.linear(hidden, self.weight, self.bias)
        return functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")


def chunk_head(model: nn.Module, chunk_tokens: int) -> None:
    """Have the model's output layer compute the loss. Raises JobError for a model that has no linear one."""
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if type(head) is not nn.Linear:
        raise JobError(
            f"loss.chunk_tokens needs an output layer that is a plain nn.Linear; {type(model).__name__} has "
            f"{type(head).__name__ if head is not None else 'none'}. Leave it out"
        )
    head.__class__ = ChunkedHead
    head.chunk_tokens = chunk_tokens  # type: ignore[assignment]


def chunked_cross_entropy(module: nn.Module, inputs: dict[str, Any], targets: Tensor) -> Tensor:
    """Cross entropy in fp32, summed over the targets that are not IGNORED, of a model whose head is chunked.

    inputs: what the model is called with. targets: int64 (samples, length), the token after each of them.
    Raises JobError for a model that does more to its logits than return them.
    """
    head = next(part for part in module.modules() if isinstance(part, ChunkedHead))
    head.labels = targets
    try:
        losses = logits_of(module(**inputs, use_cache=False))
        returned = head.returned
    finally:
        head.labels = head.returned = None
    # Wrappers may return a view, or another object of the same memory.
    if returned is None or losses.data_ptr() != returned.data_ptr() or losses.shape != returned.shape:
        raise JobError(
            f"loss.chunk_tokens: {type(module).__name__} changes its logits after the output layer; leave it "
            "out"
        )
    return losses.sum()


def logits_of(output: Any) -> Tensor:
    """What a model returned, or the `logits` of it. Raises JobError where there are none."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None and isinstance(output, dict):
        logits = output.get("logits")
    if not isinstance(logits, Tensor):
        raise JobError(
            f"the model returned a {type(output).__name__} without logits; return logits or an object with "
            "`.logits`, or give loss.factory"
        )
    return logits
