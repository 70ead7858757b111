"""Describes the bare model for the record, as it is before a library touches it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.backends.base import Batch, Unsupported
from harness.backends.blocks import transformer_blocks
from harness.backends.precision import dtype_name
from harness.errors import JobError
from harness.forms.layout import Use
from harness.job.job import DEFAULT_TASK, Job
from harness.rank.factories import configuration, described_error
from harness.rank.models.adapter import add_adapters
from harness.rank.models.changes import uses_checkpointing
from harness.rank.models.losses import loss_function
from harness.rank.models.model_classes import from_config
from harness.rank.models.optimizer import frozen_names
from harness.record import AttentionPart, GeometryPart, LayoutPart, ModelPart, TensorPart

TOKENS = 2
"""Of the one sample that is passed through."""


def modules_without_gradient(job: Job, config: Any) -> list[str] | None:
    """Names of the modules whose outputs need no gradient, from a forward pass on the meta device.

    Empty where all weights are trained. None where the model cannot run there.
    """
    if not job.adapter.is_present:
        return []
    if config is None:
        return None  # a model of the user's own

    try:
        with torch.random.fork_rng(devices=[]):
            with torch.device("meta"):
                model = from_config(job, config, attn_implementation=job.model.attention_kernel)
            add_adapters(job, model)
            tokens = torch.zeros((1, TOKENS), dtype=torch.long, device="meta")
            decoder = {"decoder_input_ids": tokens} if job.task == "seq2seq" else {}
            return outputs_without_gradient(model, input_ids=tokens, **decoder)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError):
        return None  # an operator without an implementation on the meta device, or a loop over values


def outputs_without_gradient(model: nn.Module, **inputs: Tensor) -> list[str]:
    """The same of a model on the meta device."""
    without: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not needs_gradient(output):
                without.append(name)

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        with AnswersForMeta():
            model(**inputs, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return sorted(set(without))


class AnswersForMeta(TorchDispatchMode):
    """Where code asks for a value of a tensor that has none, such as whether all of a mask is set: yes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype is torch.bool or 1
        return func(*args, **(kwargs or {}))


def needs_gradient(output: Any) -> bool:
    """Whether any tensor in what a module takes or returns needs one."""
    if isinstance(output, torch.Tensor):
        return output.requires_grad
    if isinstance(output, dict):
        return any(map(needs_gradient, output.values()))
    return isinstance(output, tuple | list) and any(map(needs_gradient, output))


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


@dataclass
class Built:
    """The model that a backend built; None until it did."""

    model: ModelPart | None = None
    layout: LayoutPart | None = None

    def describe(
        self,
        model: nn.Module,
        decaying: frozenset[str],
        without_gradient: list[str] | None = None,
        uses: Uses | None = REGULAR,
        whole_because: str | None = None,
    ) -> None:
        """Note a model as it was built."""
        self.model = describe_model(model).model_copy(update={"whole_because": whole_because})
        self.layout = describe_layout(model, decaying, without_gradient, uses)


def describe_model(model: nn.Module) -> ModelPart:
    """Facts about a whole model for the record: what was really built."""
    config = configuration(model)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return ModelPart(
        architecture=type(model).__name__,
        attention=getattr(config, "_attn_implementation", None),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tied_parameters=len(names) - len(list(model.parameters())),
        activation_checkpointing=uses_checkpointing(model),
        geometry=describe_geometry(model),
        config=config.to_diff_dict() if config is not None else {},
    )


def describe_geometry(model: Any) -> GeometryPart | None:
    """What `theory.flops` needs to know; None where its closed forms do not hold.

    They hold for decoders whose every token passes every parameter, so not for mixtures of experts, encoders
    or models of the user's own, and whose every parameter gets a gradient, so not for adapters.
    """
    config = configuration(model)
    if config is None or not is_decoder(type(model).__name__) or frozen_names(model):
        return None
    experts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if any((getattr(config, name, None) or 0) > 1 for name in experts):
        return None
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    hidden = getattr(config, "hidden_size", None)
    if not layers or not heads or not hidden:
        return None
    output = model.get_output_embeddings()
    looked_up = {
        id(module.weight): module.weight.numel()
        for module in model.modules()
        if isinstance(module, nn.Embedding) and (output is None or module.weight is not output.weight)
    }
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return GeometryPart(
        multiplying_parameters=parameters - sum(looked_up.values()),
        layers=layers,
        attention_width=heads * (getattr(config, "head_dim", None) or hidden // heads),
    )


def is_decoder(architecture: str) -> bool:
    """Whether a class of transformers predicts the next token from those before it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def describe_layout(
    model: nn.Module,
    decaying: frozenset[str],
    without_gradient: list[str] | None = None,
    uses: Uses | None = REGULAR,
) -> LayoutPart:
    """The tensors of a bare model and its blocks.

    without_gradient: names of the modules whose outputs need no gradient, if that is known.
    uses: see `module_uses.irregular_uses`.
    """

    def describe(named: Iterable[tuple[str, Tensor]]) -> list[TensorPart]:
        return [
            TensorPart(name=name, shape=list(tensor.shape), dtype=dtype_name(tensor.dtype))
            for name, tensor in named
        ]

    try:
        blocks = list(transformer_blocks(model))
    except Unsupported:  # only some backends need blocks; those say so themselves
        blocks = []
    frozen = frozen_names(model)
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    return LayoutPart(
        parameters=describe(model.named_parameters()),
        decaying=sorted(decaying),
        buffers=describe(model.named_buffers()),
        blocks=blocks,
        tied={
            name: first_names[id(parameter)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name != first_names[id(parameter)]
        },
        frozen=sorted(frozen),
        without_gradient=without_gradient if frozen else [],
        attention=describe_attention(model),
        uses=uses,
    )


def describe_attention(model: nn.Module) -> AttentionPart | None:
    """Heads by the model's configuration; None where it does not say, or is no decoder."""
    config = configuration(model)
    if config is None or not is_decoder(type(model).__name__):
        return None
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    hidden = getattr(config, "hidden_size", None)
    if not layers or not heads or not hidden:
        return None
    return AttentionPart(
        layers=layers,
        heads=heads,
        key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or hidden // heads,
    )
