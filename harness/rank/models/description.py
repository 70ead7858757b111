"""Describes the bare model for the record, as it is before a library touches it."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.backends.base import Batch
from harness.backends.model.blocks import names_by_id, parameter_count, places_of_tied, transformer_blocks
from harness.backends.model.precision import dtype_name
from harness.backends.optimizer.groups import tensors_in
from harness.errors import JobError
from harness.forms import layout as forms
from harness.forms.layout import READ_ELSEWHERE, RETURNED, Layout, UnitCall, Use
from harness.job.job import DEFAULT_TASK, Job, UpdateGroup
from harness.rank.factories import configuration, described_error
from harness.rank.models.changes import uses_checkpointing
from harness.rank.models.losses import ComputeLoss, loss_function
from harness.rank.models.model import add_adapters, from_config
from harness.rank.models.optimizer import frozen_names
from harness.record import GeometryPart, ModelPart, SplitPart

META = "meta"
TOKENS = 2
"""Of the one sample that is passed through."""
Uses = dict[str, list[Use]]


@dataclass(frozen=True, kw_only=True)
class ModuleUses:
    """What one step does, as `Layout` has it; None: not known."""

    uses: Uses | None = field(default_factory=dict)
    without_gradient: list[str] | None = field(default_factory=list)
    unreached: list[str] | None = field(default_factory=list)
    unit_calls: list[UnitCall] | None = field(default_factory=list)
    read_outside: list[str] | None = field(default_factory=list)
    changed_in_passes: list[str] | None = field(default_factory=list)
    evaluates_alike: bool | None = True
    depends_on_data: bool = False


REGULAR = ModuleUses()
"""Every module runs once, tied weights at each of their names, and every parameter gets a gradient."""
UNKNOWN = ModuleUses(
    uses=None, without_gradient=None, unreached=None, unit_calls=None, read_outside=None,
    changed_in_passes=None, evaluates_alike=None,
)  # fmt: skip
DEPENDS_ON_DATA = replace(UNKNOWN, depends_on_data=True)
"""Values or random numbers may decide what a step runs, or its code needs them."""


def find_module_uses(
    job: Job,
    model: nn.Module,
    config: Any,
    example: Batch | None,
    largest: Mapping[str, int] = MappingProxyType({}),
) -> ModuleUses:
    """Forward and backward pass of a loss of `example`, two samples or more, on a copy of the bare model.

    Causal language models of transformers whose every weight is trained are regular; those with adapters are
    asked for their gradients alone. Raises JobError for a loss that no batch could have, and for an embedding
    with fewer rows than the `largest` number of the field of the data that it looks up asks for.
    """
    if job.task == DEFAULT_TASK and job.model.factory is None and job.loss.factory is None:
        if job.adapter.is_present:
            return ModuleUses(without_gradient=_adapters_without_gradient(job, config))
        if all(parameter.requires_grad for parameter in model.parameters()):
            return REGULAR
    if example is None:
        return UNKNOWN
    try:
        with _own_draws():
            drawn, copied = _drawn(), _on_meta(model)
            traced = _trace(job, copied, example, largest)
            copied.train()
            copied.zero_grad(set_to_none=True)
            # A second step must do the same: a model may count its passes.
            is_steady = _trace(job, copied, example) == traced and _drawn() == drawn
            return traced if is_steady else DEPENDS_ON_DATA
    except JobError:
        raise
    except (KeyError, NameError) as error:  # no matter of values
        shown = f"loss.factory '{job.loss.factory}'" if job.loss.factory else "the loss of the model"
        raise JobError(f"{shown}: a batch of {', '.join(example)} raised {described_error(error)}") from error
    except Exception:  # whatever code of the user's own makes of tensors without values
        return DEPENDS_ON_DATA


@contextmanager
def _own_draws() -> Iterator[None]:
    """Leave generators as they were."""
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)


def _drawn() -> list[Any]:
    """The state of the generators that code of the user's own may draw from."""
    return [random.getstate(), torch.get_rng_state().tolist(), str(numpy.random.get_state())]


def _adapters_without_gradient(job: Job, config: Any) -> list[str] | None:
    """Names of the modules whose outputs need no gradient; None where the model cannot run on meta."""
    if config is None:
        return None  # a model of the user's own
    try:
        with torch.random.fork_rng(devices=[]):
            with torch.device("meta"):
                model = from_config(job, config, attn_implementation=job.model.attention_kernel)
            add_adapters(job, model)
            tokens = torch.zeros((1, TOKENS), dtype=torch.long, device="meta")
            decoder = {"decoder_input_ids": tokens} if job.task == "seq2seq" else {}
            with AnswersForMeta(), _Calls(model) as calls:
                model(input_ids=tokens, **decoder, use_cache=False)
            return sorted({call.name for call in calls.made if call.name and not call.outputs})
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return None  # an operator without an implementation on the meta device, or a loop over values


class AnswersForMeta(TorchDispatchMode):
    """Where code asks for a value of a tensor that has none, such as whether all of a mask is set: yes."""

    def __init__(self, *, trusts_yes: bool = True) -> None:
        """trusts_yes: whether a question of yes or no is one about a mask."""
        super().__init__()
        self.has_guessed = False
        """Whether an answer may have decided what runs."""
        self._trusts_yes = trusts_yes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            is_yes = args[0].dtype is torch.bool
            self.has_guessed |= not (is_yes and self._trusts_yes)
            return is_yes or 1
        return func(*args, **(kwargs or {}))


def tensors_with_gradient(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


@dataclass
class ModuleCall:
    name: str
    module: nn.Module
    inputs: bool = False
    """Whether its positional inputs need a gradient: DeepSpeed's hooks see no others."""
    any_inputs: bool = False
    """Whether any of its inputs does."""
    outputs: bool = False
    reached: bool = False
    """Whether a gradient came back to its outputs."""
    returned: dict[int, bool] = field(default_factory=dict)
    """Parameters that it returns as they are, by identity -> whether not in a container within another, into
    which DeepSpeed does not look (`_post_forward_module_hook`, parameter_offload.py)."""

    def use(self, inputs: bool) -> Use:
        """As ZeRO-3 sees it, of whether `inputs` need a gradient; as FSDP does, of `any_inputs`."""
        if not self.reached:
            return "forward only"
        return "inputs with gradient" if inputs else "inputs without gradient"


class _Calls:
    """Notes each run of each module of a model, in the order in which they begin."""

    def __init__(self, model: nn.Module) -> None:
        self.made: list[ModuleCall] = []
        self._model = model
        self._open: list[ModuleCall] = []

    @property
    def within(self) -> bool:
        """Whether a module runs."""
        return bool(self._open)

    def __enter__(self) -> _Calls:
        self._handles: list[Any] = []
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._begin(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._end, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, keywords: Mapping[str, Any]) -> None:
            positional = bool(tensors_with_gradient(inputs)) and torch.is_grad_enabled()
            named = bool(tensors_with_gradient(dict(keywords))) and torch.is_grad_enabled()
            call = ModuleCall(name, module, inputs=positional, any_inputs=positional or named)
            self.made.append(call)
            self._open.append(call)

        return hook

    def _end(self, module: nn.Module, inputs: Any, keywords: Mapping[str, Any], output: Any) -> None:
        call = self._open.pop()
        items = output.values() if isinstance(output, Mapping) else output
        seen = [id(one) for one in (items if isinstance(output, (Mapping, list, tuple)) else [output])]
        given = (tensor for tensor in tensors_in(output) if isinstance(tensor, nn.Parameter))
        call.returned = {id(parameter): id(parameter) in seen for parameter in given}
        for tensor in tensors_with_gradient(output):
            call.outputs = True
            tensor.register_hook(lambda _, call=call: setattr(call, "reached", True))


class _ReadsOutside(TorchFunctionMode):
    """Notes which parameters something with a gradient is computed from while no module runs."""

    def __init__(self, model: nn.Module, calls: _Calls) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._calls = calls
        self._known = names_by_id(model)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._calls.within and tensors_with_gradient(result):
            read = tensors_with_gradient([*args, *(kwargs or {}).values()])
            self.names.update(self._known[id(tensor)] for tensor in read if id(tensor) in self._known)
        return result


class _Writes(TorchDispatchMode):
    """Notes which parameters something writes to, by itself or through their `data`, and counted places."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._of_storage = {_storage(parameter): name for name, parameter in model.named_parameters()}
        self._model = model
        self._written: set[str] = set()
        self.places: dict[int, Tensor] = {}  # results of torch.arange, whose storage stays theirs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found = (self._of_storage.get(_storage(tensor)) for tensor in tensors_in(value))
                self._written.update(filter(None, found))
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.arange:
            self.places[_storage(result)] = result
        return result

    @property
    def names(self) -> list[str]:
        """Sorted; those that were given other data among them."""
        given = {n for n, p in self._model.named_parameters() if self._of_storage.get(_storage(p)) != n}
        return sorted(self._written | given)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy without memory: what its forward pass changes in the model is changed in the copy. Hooks on its
    tensors stay behind."""
    memo: dict[int, Any] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        held = torch.empty_like(tensor, device=META)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(held, requires_grad=tensor.requires_grad) if is_parameter else held
    return copy.deepcopy(model, memo)


def _within_tables(model: nn.Module, batch: Batch, largest: Mapping[str, int], writes: _Writes) -> None:
    """Have embeddings raise JobError where the data has a number, or more places, beyond their rows."""

    def hook(name: str, module: nn.Embedding, inputs: tuple[Tensor, ...]) -> None:
        for index in inputs[:1]:
            count = index.shape[-1] if index.dim() and index.stride(-1) else 0
            if _storage(index) in writes.places and count > module.num_embeddings:
                raise JobError(
                    f"a sample has {count} places, so '{name}' needs {count} rows and has "
                    f"{module.num_embeddings}; build the model with so many, or shorten the samples"
                )
        field = next((field for field, value in batch.items() if inputs and value is inputs[0]), "")
        if largest.get(field, -1) >= module.num_embeddings:
            raise JobError(
                f"the data has {field} up to {largest[field]}, so '{name}' needs {largest[field] + 1} rows "
                f"and has {module.num_embeddings}; build the model with so many, or change the data"
            )

    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(partial(hook, name))


def _trace(
    job: Job, model: nn.Module, example: Batch, largest: Mapping[str, int] = MappingProxyType({})
) -> ModuleUses:
    batch = {name: value.to(META) for name, value in example.items()}
    with AnswersForMeta(trusts_yes=job.model.factory is None and job.loss.factory is None) as answers:
        with _Calls(model) as calls, _ReadsOutside(model, calls) as outside, _Writes(model) as writes:
            if largest:
                _within_tables(model, batch, largest, writes)
            loss = loss_function(job, model)(model, batch)
        if answers.has_guessed:
            raise ValueError("what runs hangs on values, which tensors on the meta device lack")
        if not (isinstance(loss, Tensor) and loss.requires_grad):
            return UNKNOWN
        calls.made, forward = [], calls.made
        with calls:  # what the model recomputes by itself
            loss.sum().backward()
    recomputed = bool(calls.made) and not job.training.activation_checkpointing
    # Reentrant checkpoints run without gradients first.
    hidden = {call.name for call in calls.made if call.reached}.intersection(_without_backward(forward))
    names = names_by_id(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    return ModuleUses(
        uses=None if recomputed else _irregular_uses(model, forward, names),
        without_gradient=_without_backward([*forward, *calls.made]),
        unreached=[names[id(p)] for p in trained if p.grad is None],
        unit_calls=None if recomputed and hidden else _unit_calls(model, forward),
        read_outside=sorted(outside.names),
        changed_in_passes=writes.names,
        evaluates_alike=_evaluated(job, model, batch) == [call.name for call in forward],
    )


@torch.no_grad()
def _evaluated(job: Job, model: nn.Module, batch: Batch) -> list[str] | None:
    """The modules that a forward pass of an evaluation runs, in their order; None: it cannot be made."""
    model.eval()
    try:
        with AnswersForMeta() as answers, _Calls(model) as calls:
            loss_function(job, model)(model, batch)
    except Exception:  # as of a loss that takes gradients itself
        return None
    return None if answers.has_guessed else [call.name for call in calls.made]


def _without_backward(calls: Sequence[ModuleCall]) -> list[str]:
    """Modules that run and that no gradient comes back to."""
    reached = {call.name for call in calls if call.reached}
    return sorted({call.name for call in calls if call.name} - reached)


def _irregular_uses(model: nn.Module, calls: Sequence[ModuleCall], names: Mapping[int, str]) -> Uses:
    """Uses, in the order of a forward pass, of each parameter that several modules share, that one returns,
    or whose module does not run exactly once."""
    every = [names[id(p)] for module in model.modules() for p in module.parameters(recurse=False)]
    owners, runs = Counter(every), Counter(id(call.module) for call in calls)
    returned = {key for call in calls for key in call.returned if key in names}
    once = {
        names[id(p)]
        for module in model.modules()
        if runs[id(module)] == 1
        for p in module.parameters(recurse=False)
        if owners[names[id(p)]] == 1 and id(p) not in returned
    }
    found: Uses = {name: [] for name in every if name not in once}
    left = Counter(runs)
    for call in calls:
        left[id(call.module)] -= 1
        seen = call.use(call.inputs)
        earlier = seen == "inputs with gradient" and left[id(call.module)] > 0
        for parameter in call.module.parameters(recurse=False):
            if (name := names[id(parameter)]) in found:
                use: Use = "earlier run of its module" if earlier else seen
                found[name].append(RETURNED if call.returned.get(id(parameter)) else use)
    for name, parameter in model.named_parameters():
        if found.get(name) == [] and parameter.grad is not None:
            found[name] = [READ_ELSEWHERE]
    unseen = (names[key] for key in returned if RETURNED not in found[names[key]])
    return found | {name: [READ_ELSEWHERE] for name in unseen}


def _unit_calls(model: nn.Module, calls: Sequence[ModuleCall]) -> list[UnitCall] | None:
    """Runs of the blocks and of the whole model, '', in their order; empty where each trains and runs once
    with a backward pass; None where blocks lie within blocks."""
    blocks = transformer_blocks(model)
    if any(one != other and one.startswith(f"{other}.") for one in blocks for other in blocks):
        return None
    made: list[UnitCall] = [
        (call.name, call.use(call.any_inputs)) for call in calls if call.name in (*blocks, "")
    ]
    trains = all(any(p.requires_grad for p in block.parameters()) for block in blocks.values())
    once = sorted(name for name, _ in made) == sorted([*blocks, ""])
    return [] if once and trains and all(use != "forward only" for _, use in made) else made


@dataclass
class Built:
    """The model that a backend built; None until it did."""

    model: ModelPart | None = None
    layout: Layout | None = None
    split: SplitPart | None = None
    update_of_part: float | None = None

    def describe(
        self,
        model: nn.Module,
        updated: Sequence[UpdateGroup],
        traced: ModuleUses = REGULAR,
        whole_because: str | None = None,
    ) -> None:
        """Note a model as it was built."""
        self.model = describe_model(model).model_copy(update={"whole_because": whole_because})
        self.layout = describe_layout(model, updated, traced)


def describe_model(model: nn.Module) -> ModelPart:
    """Facts about a whole model for the record: what was really built."""
    config = configuration(model)
    return ModelPart(
        architecture=type(model).__name__,
        attention=getattr(config, "_attn_implementation", None),
        parameters=parameter_count(model),
        tied_parameters=places_of_tied(model),
        activation_checkpointing=uses_checkpointing(model),
        geometry=describe_geometry(model),
        config=config.to_diff_dict() if config is not None else {},
    )


def describe_geometry(model: Any) -> GeometryPart | None:
    """What `theory.flops` needs to know; None where its closed forms do not hold.

    They hold for decoders whose every token passes every parameter, so not for mixtures of experts, encoders
    or models of the user's own, and whose every parameter gets a gradient, so not for adapters.
    """
    attention = describe_attention(model)
    experts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    mixes = any((getattr(configuration(model), name, None) or 0) > 1 for name in experts)
    if attention is None or mixes or frozen_names(model):
        return None
    output = model.get_output_embeddings()
    looked_up = {
        id(module.weight): module.weight.numel()
        for module in model.modules()
        if isinstance(module, nn.Embedding) and (output is None or module.weight is not output.weight)
    }
    parameters = parameter_count(model)
    return GeometryPart(
        multiplying_parameters=parameters - sum(looked_up.values()),
        layers=attention.layers,
        attention_width=attention.heads * attention.head_size,
    )


def is_decoder(architecture: str) -> bool:
    """Whether a class of transformers predicts the next token from those before it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def describe_layout(model: nn.Module, updated: Sequence[UpdateGroup], traced: ModuleUses = REGULAR) -> Layout:
    """The tensors of a bare model and its blocks, and what one step does with them."""

    def describe(named: Iterable[tuple[str, Tensor]]) -> tuple[forms.Tensor, ...]:
        return tuple(
            forms.Tensor(name=name, shape=tensor.shape, dtype=dtype_name(tensor.dtype))
            for name, tensor in named
        )

    frozen = frozen_names(model)
    first_names = names_by_id(model)
    return Layout(
        parameters=describe(model.named_parameters()),
        decaying=frozenset(updated[0].names if updated else ()),
        groups=tuple(group.names for group in updated) if len(updated) > 2 else (),
        buffers=describe(model.named_buffers()),
        blocks=tuple(transformer_blocks(model)),
        tied={
            name: first_names[id(parameter)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name != first_names[id(parameter)]
        },
        frozen=frozenset(frozen),
        attention=describe_attention(model),
        **vars(traced) | ({} if frozen or traced.without_gradient else {"without_gradient": ()}),
    )


def describe_attention(model: nn.Module) -> forms.Attention | None:
    """Heads by the model's configuration; None where it does not say, or is no decoder."""
    config = configuration(model)
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    layers, heads, hidden = (getattr(config, name, None) for name in names)
    if not (is_decoder(type(model).__name__) and layers and heads and hidden):
        return None
    return forms.Attention(
        layers=layers,
        heads=heads,
        key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or hidden // heads,
    )


SAMPLES = 8
"""Of the batch that is cut in two."""
MOST_PARAMETERS, MOST_WITH_GRADIENTS = 500_000_000, 50_000_000
"""Of a model that is copied in double precision, on the CPU; of more than the second without gradients: only
losses are compared."""
BATCHES, MOST_FOR_ALL = 8, 5_000_000
"""So many first batches of a model with so many parameters are cut: where a value decides what runs, both
halves of one batch may agree by chance. Of a larger model the first."""
ROUNDING = 100 * 2.0**-23
"""Code of the user's own may cast to fp32 amid double precision: so many roundings of that."""
FP32_ROUNDING = 2.0**-10
"""Where the code takes fp32 only."""
NUDGE = 0.01
"""By which share each trained weight is moved before anything is measured."""
FAR = 1e9
"""Distance, relative, of gradients that are not finite, as where a half has one sample of a kind."""


def split_dependence(
    job: Job, model: nn.Module, batch_of: Callable[[Sequence[int]], Batch], steps: Sequence[Sequence[int]]
) -> SplitPart | None:
    """Compare gradients of batches with those of their halves, in double precision where the code takes it.

    steps: the samples of each. Of a large model losses are compared alone. None where the loss is a sum over
    samples by construction, and where it cannot be measured.
    """
    if job.task == DEFAULT_TASK and job.model.factory is None and job.loss.factory is None:
        return None
    parameters = list(model.parameters())
    count, half = sum(p.numel() for p in parameters), min(SAMPLES, len(steps[0])) // 2
    if not half or any(p.is_meta for p in parameters) or count > MOST_PARAMETERS:
        return None
    cuts = [
        [batch_of(some) for some in (ids[:SAMPLES], ids[:half], ids[half:SAMPLES])]
        for ids in steps[: BATCHES if count <= MOST_FOR_ALL else 1]
    ]
    for double, rounding in ((True, ROUNDING), (False, FP32_ROUNDING)):
        try:
            with torch.random.fork_rng(devices=[]), double_precision(on=double):
                found = [_measured(job, model, parts, rounding, double=double) for parts in cuts]
            known = [part for part in found if part is not None]
            return max(known, key=lambda one: (one.is_random, one.varies, one.difference), default=None)
        except Exception:  # code of the user's own: the run itself says what is wrong
            continue
    return None


@contextmanager
def double_precision(*, on: bool = True) -> Iterator[None]:
    before = torch.get_default_dtype()
    if on:
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def doubled(batch: Batch) -> Batch:
    """A batch whose floating numbers are float64."""
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def _measured(
    job: Job, model: nn.Module, parts: Sequence[Batch], rounding: float, *, double: bool
) -> SplitPart | None:
    batch, *halves = [doubled(part) for part in parts] if double else parts
    of = _gradient if parameter_count(model) <= MOST_WITH_GRADIENTS else _loss

    def passed(*passes: list[Batch]) -> list[Tensor]:
        """What a fresh copy gives for some batches, then for others."""
        own = copy.deepcopy(model)
        own = (own.double() if double else own.float()).train()
        _nudge(own)
        compute = loss_function(job, own)
        return [of(own, compute, batches) for batches in passes]

    whole, again, cut = passed([batch], [batch], halves)
    size = float(whole.norm())
    if not size or not torch.isfinite(whole).all():
        return None
    found = SplitPart(
        difference=_share(cut - whole, size), repetition=_share(again - whole, size), rounding=rounding
    )
    if not found.varies:
        return found
    first = [passed([half])[0] for half in halves]
    later = [passed([half], [batch])[1] for half in halves]
    apart = [torch.stack(first).sum(0) - whole, *(one - again for one in later)]
    return found.model_copy(update={"by_samples": max(_share(one, size) for one in apart)})


@torch.no_grad()
def _nudge(model: nn.Module) -> None:
    """Move what trains off its initial values: a copy that passes keep, such as a teacher, begins with these.

    Only then does a pass that follows them change the next one.
    """
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=draw)
            parameter.mul_((1 + NUDGE * noise).to(parameter))


def _share(difference: Tensor, size: float) -> float:
    """The length of a difference as a share of `size`; `FAR` where it is not finite, as records cannot be."""
    share = float(difference.norm()) / size
    return share if math.isfinite(share) else FAR


@torch.no_grad()
def _loss(model: nn.Module, compute: ComputeLoss, batches: Sequence[Batch]) -> Tensor:
    """Summed over the batches, of one element."""
    return torch.stack([compute(model, batch).sum() for batch in batches]).sum().reshape(1)


def _gradient(model: nn.Module, compute: ComputeLoss, batches: Sequence[Batch]) -> Tensor:
    """Gradient of the summed losses with respect to all that trains, as one vector."""
    model.zero_grad(set_to_none=True)
    for batch in batches:
        compute(model, batch).sum().backward()  # type: ignore[no-untyped-call]
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trained])
