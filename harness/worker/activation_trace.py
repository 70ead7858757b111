"""Traces one training step of a bare model without weights: what it keeps for the backward pass, and its
fullest moments, as a profile in micro-batch and sequence."""

from __future__ import annotations

import bisect
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import graph

from harness.backends.blocks import transformer_blocks
from harness.backends.precision import cast_parameters
from harness.forms.activations import ActivationProfile, to_json
from harness.worker.checkpointed import enable_checkpointing
from harness.worker.kernel_scratch import CudaAutocast, kernel_scratch
from harness.worker.losses import summed_cross_entropy
from harness.worker.model import set_dropout
from harness.worker.model_classes import in_fp32
from harness.worker.packed import unpacked_samples
from harness.worker.storage_events import Event, StorageEvents, autograd_sequence
from harness.worker.trace_profile import profile_of_events

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
    checkpointing: bool = False
    single_sample: bool = False
    """A micro-batch of one sample: some copies are views then."""
    dropout: float | None = 0.0
    """Written to every dropout; None: as the model has it."""
    device: str = "cuda"
    """'cuda' or 'cpu': what autocast leaves in low precision, and what kernels need inside."""


def trace_profile(config: Mapping[str, Any], variant: Variant) -> ActivationProfile:
    """Trace a training step of the model of a Hugging Face configuration (with `model_type`).

    Its widths are taken as they are, with BLOCKS blocks. Needs no weights and no memory to speak of.
    """
    with FakeTensorMode(), torch.device("cpu"):
        model = _model(config, variant)
        batch, sequence = _shape(config, variant)
        tokens = torch.zeros(batch, sequence, dtype=torch.int64)
        tracer = _Tracer(model, tokens, variant.device)
        with unpacked_samples():
            events = tracer.step({"tokens": tokens, "labels": tokens}, variant.route)
    return profile_of_events(events, batch=batch, sequence=sequence, blocks=BLOCKS)


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
    if variant.checkpointing:
        enable_checkpointing(model)
    if "cast" in variant.route.split("+"):
        cast_parameters(model, torch.bfloat16)
    model.train()
    return model


def _shape(config: Mapping[str, Any], variant: Variant) -> tuple[int, int]:
    """Micro-batch and sequence that divide no width of the model."""
    widths = [value for value in config.values() if isinstance(value, int) and value > 1]
    sequence = next(s for s in SEQUENCES if all(width % s for width in widths))
    batch = next(b for b in MICRO_BATCHES if all(width % b for width in widths))
    return (1 if variant.single_sample else batch), sequence


class _Tracer:
    """Names the module of every operator, forward and backward, and marks where segments begin."""

    def __init__(self, model: nn.Module, tokens: Tensor, device: str) -> None:
        self._model = model
        self._tokens = tokens
        self._stack: list[str] = []
        self._backward = False
        self._spans: list[tuple[int, str]] = []
        """(first number of a node, module that it belongs to), ascending."""
        self._blocks = list(transformer_blocks(model).items())
        self._events = StorageEvents(self._known(), self._module, kernel_scratch(device))
        self._device = device

    def step(self, batch: dict[str, Tensor], route: str) -> list[Event]:
        """Forward and backward pass of one step."""
        self._route = route.split("+")
        with ExitStack() as stack:
            for handle in self._hooks():
                stack.callback(handle.remove)
            stack.enter_context(self._events)
            if self._device == "cuda":
                stack.enter_context(CudaAutocast())
            self._events.note("mark", "forward embedding")
            with _autocast("autocast" in self._route):
                loss = summed_cross_entropy(self._model, batch)
            self._backward = True
            self._events.note("mark", f"backward {len(self._blocks) + 1}")
            scaled = loss * 1.5
            # `backward` itself would turn function modes off, and recomputation needs CudaAutocast.
            graph._engine_run_backward(
                (scaled,), (torch.ones_like(scaled),), False, False, (),
                allow_unreachable=True, accumulate_grad=True,
            )  # fmt: skip
            del scaled
            self._events.note("mark", "end")
            self._events.stop_watching()
        return self._events.events

    def _known(self) -> Iterator[Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()
        yield self._tokens

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
        for name, parameter in self._model.named_parameters():
            yield parameter.register_post_accumulate_grad_hook(self._ready(name))

    def _entered(self, name: str) -> Any:
        def hook(*_: Any) -> None:
            self._stack.append(name)
            self._spans.append((autograd_sequence(), name))

        return hook

    def _left(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._spans.append((autograd_sequence(), self._stack[-1] if self._stack else ""))

    def _block_begins(self, index: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._backward:
                return
            self._events.note("mark", f"forward {index}")
            hidden = args[0] if args else kwargs["hidden_states"]
            if index == 0:
                hidden.register_hook(lambda _: self._events.note("mark", "backward embedding"))

        return hook

    def _block_ends(self, index: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if self._backward:
                return
            hidden = output[0] if isinstance(output, tuple) else output
            hidden.register_hook(lambda _: self._events.note("mark", f"backward {index}"))
            if index == len(self._blocks) - 1:
                self._events.note("mark", f"forward {len(self._blocks)}")

        return hook

    def _model_ends(self, _: nn.Module, __: Any, output: Any) -> None:
        index = len(self._blocks)
        output.logits.register_hook(lambda _: self._events.note("mark", f"backward {index}"))
        self._events.note("mark", f"forward {index + 1}")

    def _ready(self, name: str) -> Any:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._events.note("ready", self._of_block(name), parameter.grad)

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


def _autocast(wanted: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if wanted else nullcontext()


def _widen_outputs(_: nn.Module, __: Any, output: Any) -> None:
    """`convert_outputs_to_fp32` (accelerate 1.15, utils/operations.py)."""
    output.logits = output.logits.float()


def profile_text(request_text: str) -> str:
    """The profile as JSON; the request is `{"config": ..., "variant": ...}`."""
    request = json.loads(request_text)
    return json.dumps(to_json(trace_profile(request["config"], Variant(**request["variant"]))))


def main() -> None:
    """Read a request from standard input, write the profile; of a list of requests a list of texts."""
    text = sys.stdin.read()
    requests = json.loads(text)
    if isinstance(requests, list):
        text = json.dumps([_text_or_none(json.dumps(request)) for request in requests])
    else:
        text = profile_text(text)
    sys.stdout.write(text)


def _text_or_none(request: str) -> str | None:
    """None for what cannot be traced, which must not cost the others."""
    try:
        return profile_text(request)
    except Exception:
        return None


if __name__ == "__main__":
    main()
