"""Traces one training step of a bare model without weights: what it keeps for the backward pass, and its
fullest moments, as a profile in micro-batch and sequence."""

from __future__ import annotations

import bisect
import json
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import graph
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.backends.model.blocks import needed_blocks
from harness.backends.model.precision import cast_parameters
from harness.errors import HarnessError
from harness.forms import activations
from harness.job.job import ADAPTER_NAME, AdapterSection
from harness.rank.models.changes import enable_checkpointing
from harness.rank.models.losses import summed_cross_entropy, unpacked_samples
from harness.rank.models.model import BASE_DTYPES, in_fp32, is_adapter, peft_config, set_dropout
from harness.safe_text import first_line

_aten = torch.ops.aten
PRODUCTS = {_aten.mm.default, _aten.addmm.default}
ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FP32_UNDER_CUDA_AUTOCAST = {
    torch.nn.functional.layer_norm, torch.nn.functional.group_norm, torch.nn.functional.softmax,
    torch.nn.functional.log_softmax, torch.softmax, torch.log_softmax, torch.Tensor.softmax, torch.exp,
    torch.rsqrt, torch.Tensor.rsqrt, torch.pow, torch.Tensor.pow, torch.cumsum, torch.Tensor.cumsum,
}  # fmt: skip
"""Of torch 2.13, `ATen/autocast_mode.h`, AT_FORALL_FP32: what language models call of it, and what CPU
autocast leaves in low precision."""

Scratch = Callable[[Any, tuple[Any, ...], Any], int]
"""(operator, arguments, result) -> bytes."""


def _cpu(operator: Any, args: tuple[Any, ...], result: Any) -> int:
    """oneDNN adds products of bf16 up in an fp32 copy of the result where the processor has no bf16 products;
    the flash kernel's backward pass has a copy of the output's gradient."""
    if operator in PRODUCTS and result.dtype == torch.bfloat16 and not _multiplies_bf16():
        return 4 * int(result.numel())
    if operator is ATTENTION_BACKWARD:
        return _bytes(args[0])
    return 0


def _cuda(operator: Any, args: tuple[Any, ...], result: Any) -> int:
    """Flash attention's backward pass adds the query's gradient up in fp32, and with fewer key heads than
    query heads makes the gradients of keys and values for every query head (torch 2.13,
    flash_attn/flash_api.cpp, mha_bwd)."""
    if operator is not ATTENTION_BACKWARD:
        return 0
    query, key = args[1], args[2]
    expanded = 2 * _bytes(query) if key.shape[1] != query.shape[1] else 0
    return 4 * int(query.numel()) + expanded


def _bytes(tensor: Tensor) -> int:
    return int(tensor.numel()) * tensor.element_size()


def _multiplies_bf16() -> bool:
    """Whether the processor multiplies matrices of bf16 (AVX512-BF16, AMX)."""
    capable: Any = torch.cpu
    return any(
        getattr(capable, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )


class CudaAutocast(TorchFunctionMode):
    """Lets CPU autocast do what CUDA's does: some functions compute in fp32."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in FP32_UNDER_CUDA_AUTOCAST and torch.is_autocast_enabled("cpu"):
            args = tuple(_widened(value) for value in args)
            kwargs = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return function(*args, **(kwargs or {}))


def _widened(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value


class Storages(TorchDispatchMode):
    """A dispatch mode that tells a replay what is allocated and freed; storages that exist when it begins are
    not its business unless they are freed."""

    def __init__(
        self, replay: Replay, known: Iterator[Tensor], module: Callable[[], str], scratch: Scratch
    ) -> None:
        super().__init__()
        self._replay, self._module, self._scratch = replay, module, scratch
        self._numbers: dict[int, int] = {}
        self._watches: list[weakref.finalize[Any, Any]] = []
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        scratch = self._scratch(function, args, result)
        if scratch:
            self._replay.scratch(scratch, self._module())
        return result

    def number(self, tensor: Tensor) -> int:
        """Number of a tensor's storage; 0: it is not watched."""
        return self._numbers.get(tensor.untyped_storage()._cdata, 0)

    def stop_watching(self) -> None:
        """What is freed from here on is not told."""
        for watch in self._watches:
            watch.detach()

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._numbers or not storage.nbytes():
            return
        number = len(self._watches) + 1
        self._numbers[key] = number
        self._replay.allocate(number, storage.nbytes(), self._module())
        self._watches.append(weakref.finalize(storage, self._freed, key, number))

    def _freed(self, key: int, number: int) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key]
        self._replay.free(number)


def size_of(count: int, batch: int, sequence: int) -> activations.Size:
    """The bytes of a storage as a polynomial, from how often batch and sequence divide them."""
    powers_of_b = 0
    if batch > 1 and count % batch == 0:
        count, powers_of_b = count // batch, 1
    coefficients = [0] * len(activations.MONOMIALS)
    shifted = count % (sequence - 1) == 0
    if shifted:  # tokens that have a next one
        count //= sequence - 1
    powers_of_s = 0
    while count % sequence == 0:
        count, powers_of_s = count // sequence, powers_of_s + 1
    # batch 1: everything that has a sequence is of one sample
    for power, factor in (
        ((powers_of_s + 1, count), (powers_of_s, -count)) if shifted else ((powers_of_s, count),)
    ):
        place = {(0, 0): 0, (1, 0): 1, (0, 1): 2, (1, 1): 3, (0, 2): 4, (1, 2): 5}[powers_of_b, power]
        coefficients[place] += factor
    return activations.Size(tuple(coefficients))


@dataclass
class _Pass:
    """One pass over one segment."""

    base: activations.Size
    points: list[list[tuple[str, activations.Size]]] = field(default_factory=lambda: [[]])
    """By number of gradients handed over: the non-dominated (module, live) in absolute terms."""
    ready: list[tuple[str, activations.Size]] = field(default_factory=list)


class Replay:
    """What a step keeps: segment 0 is the embedding, then come the blocks, the head and the loss."""

    def __init__(self, batch: int, sequence: int, blocks: int) -> None:
        self._batch, self._sequence, self._blocks = batch, sequence, blocks
        self._live = activations.Size()
        self._storages: dict[int, tuple[int, str, activations.Size]] = {}
        self._gone: list[int] = []
        """Freed since the last event: a collection of garbage may free within a sum of ours."""
        self._saved: dict[int, dict[str, activations.Size]] = {}
        self._passes: dict[tuple[str, int], _Pass] = {}
        self._current: _Pass | None = None
        self._segment = 0
        self._ends: dict[int, activations.Size] = {}
        """Live as the backward pass of each segment ends."""

    def profile(self) -> activations.ActivationProfile:
        """Activation profile of all that was told."""
        self._settle()
        self._ends[0] = self._live
        middle, head = self._blocks // 2, self._blocks + 1
        return activations.ActivationProfile(
            embedding=self._segment_of(0), block=self._segment_of(1 + middle), head=self._segment_of(head),
            loss=self._segment_of(head + 1), kept=self._live,
        )  # fmt: skip

    def allocate(self, storage: int, count: int, module: str) -> None:
        """A storage of so many bytes, by an operator of this module."""
        self._settle()
        size = size_of(count, self._batch, self._sequence)
        self._storages[storage] = (self._segment, module, size)
        self._live += size
        self._point(module)

    def scratch(self, count: int, module: str) -> None:
        """Bytes that a kernel allocates and frees."""
        self._settle()
        size = size_of(count, self._batch, self._sequence)
        self._live += size
        self._point(module)
        self._live -= size

    def free(self, storage: int) -> None:
        """A storage is gone."""
        self._gone.append(storage)

    def _settle(self) -> None:
        while self._gone:
            if (one := self._storages.pop(self._gone.pop(), None)) is not None:
                self._live -= one[2]

    def ready(self, name: str, storage: int) -> None:
        """The gradient of a parameter is complete, and none of the activations."""
        assert self._current is not None
        self.free(storage)
        self._settle()
        self._current.ready.append((name, self._live))
        self._current.points.append([])

    def _segment_of(self, index: int) -> activations.Segment:
        forward, backward = self._passes["forward", index], self._passes["backward", index]
        following = self._passes.get(("forward", index + 1))
        below = self._ends.get(index + 1, None)
        growth = following.base - forward.base if following else activations.Size()
        return activations.Segment(
            saved=tuple(
                activations.Saved(module=m, size=s) for m, s in sorted(self._saved.get(index, {}).items())
            ),
            forward=tuple(_points(forward, forward.base)),
            backward=tuple(_points(backward, self._ends[index])),
            gradients=tuple(
                activations.Gradient(parameter=n, live=live - self._ends[index]) for n, live in backward.ready
            ),
            forward_growth=growth,
            held=below - self._ends[index] if below is not None else activations.Size(),
        )

    def mark(self, kind: str, index: int) -> None:
        """The 'forward' or 'backward' pass of a segment begins."""
        self._settle()
        if kind == "backward":
            if index == self._blocks + 2:
                for segment, module, size in self._storages.values():
                    saved = self._saved.setdefault(segment, {})
                    saved[module] = saved.get(module, activations.Size()) + size
            self._ends[index + 1] = self._live
        self._segment = index
        self._current = self._passes[kind, index] = _Pass(base=self._live)

    def _point(self, module: str) -> None:
        if self._current is not None:
            front = self._current.points[-1]
            if not any(m == module and self._live.at_most(live) for m, live in front):
                front[:] = [(m, live) for m, live in front if m != module or not live.at_most(self._live)]
                front.append((module, self._live))


def _points(one: _Pass, base: activations.Size) -> Iterator[activations.Point]:
    for ready, front in enumerate(one.points):
        for module, live in front:
            yield activations.Point(module=module, live=live - base, ready=ready)


BLOCKS = 3
"""Of the traced model: the middle one stands for all."""
SEQUENCES = (503, 479, 467, 383, 263)
"""Primes: a storage's size shows how often the sequence is a factor of it."""
MICRO_BATCHES = (1021, 1031, 1033)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What besides the model decides a profile."""

    route: str = "fp32"
    """'fp32'; 'autocast': low precision on fp32 weights; 'cast': weights in low precision; with '+outputs'
    the model returns fp32, as Accelerate's wrapped forward does."""
    attention: str | None = None
    """'sdpa' or 'eager'; None: as transformers chooses."""
    checkpointing: bool | str = False
    """As `training.activation_checkpointing`, of every block."""
    adapter: Mapping[str, Any] | None = None
    """The job's `adapter` where it has one: all other weights are frozen."""
    single_sample: bool = False
    """A micro-batch of one sample: some copies are views then."""
    dropout: float | None = 0.0
    """Written to every dropout; None: as the model has it."""
    device: str = "cuda"
    """'cuda' or 'cpu': what autocast leaves in low precision, and what kernels need inside."""


def trace_profile(config: Mapping[str, Any], variant: Variant) -> activations.ActivationProfile:
    """Trace a training step of the model of a Hugging Face configuration (with `model_type`).

    Its widths are taken as they are, with BLOCKS blocks. Needs no weights and no memory to speak of.
    """
    with FakeTensorMode(), torch.device("cpu"):
        model = _model(config, variant)
        batch, sequence = _shape(config, variant)
        tokens = torch.zeros(batch, sequence, dtype=torch.int64)
        replay = Replay(batch, sequence, BLOCKS)
        with unpacked_samples():
            _Tracer(model, tokens, variant, replay).step({"tokens": tokens, "labels": tokens})
    return replay.profile()


def _model(config: Mapping[str, Any], variant: Variant) -> nn.Module:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    of_model = CONFIG_MAPPING[config["model_type"]](**values)
    of_model.num_hidden_layers = BLOCKS
    if variant.dropout is not None:
        set_dropout(of_model, variant.dropout)
    model: nn.Module = AutoModelForCausalLM.from_config(
        of_model, attn_implementation=variant.attention, trust_remote_code=False, **in_fp32()
    )
    route = variant.route.split("+")
    if variant.adapter is not None:
        _adapt(model, AdapterSection(**variant.adapter), torch.float32 if "fp32" in route else torch.bfloat16)
    if variant.checkpointing:
        enable_checkpointing(model, variant.checkpointing)
    if "cast" in route:
        cast_parameters(model, torch.bfloat16)
    model.train()
    return model


def _adapt(model: nn.Module, adapter: AdapterSection, compute: torch.dtype) -> None:
    """Freeze the model and put peft's layers in, as `models.model.add_adapters` does."""
    from peft import inject_adapter_in_model

    if adapter.is_quantised:
        for block in needed_blocks(model).values():
            for layer in [m for m in block.modules() if type(m) is nn.Linear]:
                layer.__class__ = _Unpacked
                layer.compute = compute  # type: ignore[assignment]
    # Fake parameters cannot be moved (`torch.utils.swap_tensors`), and lie where they should.
    stay = patch.object(nn.Module, "to", lambda module, *_, **__: module)
    with warnings.catch_warnings(), stay:
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        inject_adapter_in_model(peft_config(adapter), model, ADAPTER_NAME)
    dtype = BASE_DTYPES.get(adapter.base_dtype or "")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if dtype is not None and not is_adapter(name):
            parameter.data = parameter.data.to(dtype)


class _Unpacked(nn.Linear):
    """Stands for bitsandbytes' Linear4bit: each pass unpacks the whole weight, and none saves its input."""

    compute: torch.dtype

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = _UnpackedProduct.apply(hidden.to(self.compute), self.weight)
        return (output if self.bias is None else output + self.bias).to(hidden.dtype)


class _UnpackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(weight)
        return functional.linear(hidden, torch.empty_like(weight, dtype=hidden.dtype))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight,) = context.saved_tensors
        return gradients[0] @ torch.empty_like(weight, dtype=gradients[0].dtype), None


def _shape(config: Mapping[str, Any], variant: Variant) -> tuple[int, int]:
    """Micro-batch and sequence that divide no width of the model."""
    widths = [value for value in config.values() if isinstance(value, int) and value > 1]
    sequence = next(s for s in SEQUENCES if all(width % s for width in widths))
    batch = next(b for b in MICRO_BATCHES if all(width % b for width in widths))
    return (1 if variant.single_sample else batch), sequence


class _Tracer:
    """Names the module of every operator, forward and backward, and marks where segments begin."""

    def __init__(self, model: nn.Module, tokens: Tensor, variant: Variant, replay: Replay) -> None:
        self._model, self._replay = model, replay
        self._route, self._device = variant.route.split("+"), variant.device
        self._stack: list[str] = []
        self._backward = False
        self._reaches_embedding = True
        """Whether the backward pass goes on below the blocks."""
        self._spans: list[tuple[int, str]] = []
        """(first number of a node, module that it belongs to), ascending."""
        self._blocks = list(needed_blocks(model).items())
        known = chain(model.parameters(), model.buffers(), [tokens])
        scratch = _cuda if self._device == "cuda" else _cpu
        self._storages = Storages(replay, known, self._module, scratch)

    def step(self, batch: dict[str, Tensor]) -> None:
        """Forward and backward pass of one step."""
        with ExitStack() as stack:
            for handle in self._hooks():
                stack.callback(handle.remove)
            stack.enter_context(self._storages)
            if self._device == "cuda":
                stack.enter_context(CudaAutocast())
            self._replay.mark("forward", 0)
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in self._route):
                loss = summed_cross_entropy(self._model, batch)
            self._backward = True
            self._replay.mark("backward", len(self._blocks) + 2)
            scaled = loss * 1.5
            # `backward` itself would turn function modes off, and recomputation needs CudaAutocast.
            graph._engine_run_backward(
                (scaled,), (torch.ones_like(scaled),), False, False, (),
                allow_unreachable=True, accumulate_grad=True,
            )  # fmt: skip
            del scaled
            if not self._reaches_embedding:
                self._replay.mark("backward", 0)
            self._storages.stop_watching()

    def _hooks(self) -> Iterator[Any]:
        for name, module in self._model.named_modules():
            yield module.register_forward_pre_hook(self._entered(name))
            yield module.register_forward_hook(self._left, always_call=True)
        if "outputs" in self._route:
            yield self._model.register_forward_hook(_widen_outputs)
        yield self._model.register_forward_hook(self._model_ends)
        for index, (_, block) in enumerate(self._blocks):
            yield block.register_forward_pre_hook(self._block_begins(index), with_kwargs=True)
            yield block.register_forward_hook(self._block_ends(index))
        trained = (item for item in self._model.named_parameters() if item[1].requires_grad)
        for name, parameter in trained:
            yield parameter.register_post_accumulate_grad_hook(self._ready(name))

    def _entered(self, name: str) -> Any:
        def hook(*_: Any) -> None:
            self._stack.append(name)
            self._spans.append((torch._C._autograd._get_sequence_nr(), name))

        return hook

    def _left(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._spans.append((torch._C._autograd._get_sequence_nr(), self._stack[-1] if self._stack else ""))

    def _block_begins(self, index: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._backward:
                return
            self._replay.mark("forward", index + 1)
            hidden = args[0] if args else kwargs["hidden_states"]
            if index == 0:
                self._reaches_embedding = hidden.requires_grad
            if index == 0 and hidden.requires_grad:
                hidden.register_hook(lambda _: self._replay.mark("backward", 0))

        return hook

    def _block_ends(self, index: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if self._backward:
                return
            hidden = output[0] if isinstance(output, tuple) else output
            hidden.register_hook(lambda _: self._replay.mark("backward", index + 1))
            if index == len(self._blocks) - 1:
                self._replay.mark("forward", index + 2)

        return hook

    def _model_ends(self, _: nn.Module, __: Any, output: Any) -> None:
        head = len(self._blocks) + 1
        output.logits.register_hook(lambda _: self._replay.mark("backward", head))
        self._replay.mark("forward", head + 1)

    def _ready(self, name: str) -> Any:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._replay.ready(self._of_block(name), self._storages.number(parameter.grad))

        return hook

    def _module(self) -> str:
        """Whose operator runs: of the forward pass or of a recomputation, else of the graph's node."""
        if self._stack:
            return self._of_block(self._stack[-1])
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        at = bisect.bisect_right([first for first, _ in self._spans], node._sequence_nr()) - 1
        return self._of_block(self._spans[at][1]) if at >= 0 else ""

    def _of_block(self, name: str) -> str:
        for block, _ in self._blocks:
            if name == block or name.startswith(f"{block}."):
                return name[len(block) + 1 :]
        return name


def _widen_outputs(_: nn.Module, __: Any, output: Any) -> None:
    """`convert_outputs_to_fp32` (accelerate 1.15, utils/operations.py)."""
    output.logits = output.logits.float()


def profile_text(request_text: str) -> str:
    """The profile as JSON; the request is `{"config": ..., "variant": ...}`.

    Raises HarnessError for a model that does not run without data: some kernels of experts do not.
    """
    request = json.loads(request_text)
    try:
        profile = trace_profile(request["config"], Variant(**request["variant"]))
    except Exception as error:
        raise HarnessError(
            f"activations of a {request['config'].get('model_type')} cannot be traced without data "
            f"({first_line(error)})"
        ) from error
    return json.dumps(activations.to_json(profile))


def serve() -> None:
    """Answer a request a line until standard input ends: with its profile, or why it cannot be traced."""
    for request in sys.stdin:
        try:
            answer = {"profile": profile_text(request)}
        except HarnessError as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
