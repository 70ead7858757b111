"""The harness's default job, written again for the bare loops: model, text, optimizer, output.

Imports nothing of the harness, so that a bare loop is what a user of the plain library would write.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

SEQUENCE_LENGTH = 128
GLOBAL_BATCH_SIZE = 8
END_OF_TEXT = 256
WARMUP_STEPS = 2
FINAL_FRACTION = 0.1
GRADIENT_CLIPPING = 1.0


@dataclass
class Measured:
    """Measurements of one rank during training."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def parser() -> argparse.ArgumentParser:
    """Parser with the options of every bare loop."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--hidden-size", type=int, default=128)
    options.add_argument("--intermediate-size", type=int, default=352)
    options.add_argument("--layers", type=int, default=4)
    return options


def start() -> None:
    """Set the threads and start the process group, before anything is built."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("gloo")


def build_model(options: argparse.Namespace) -> LlamaForCausalLM:
    """The small Llama with random weights, equal on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=END_OF_TEXT + 1,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def build_optimizer(model: nn.Module, decaying: set[str]) -> torch.optim.AdamW:
    """AdamW with weight decay on the parameters in `decaying` only."""
    named = [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in model.named_parameters()]
    groups = [
        {"params": [p for name, p in named if name in decaying], "weight_decay": 0.1},
        {"params": [p for name, p in named if name not in decaying], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)


def decaying_names(model: nn.Module) -> set[str]:
    """Names of the matrices; call this before a library shards them."""
    return {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}


def build_schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Two steps of warm-up, then half a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        progress = min(1.0, (step - WARMUP_STEPS) / max(1, steps - 1 - WARMUP_STEPS))
        return FINAL_FRACTION + (1 - FINAL_FRACTION) * (1 + math.cos(math.pi * progress)) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Batches:
    """This rank's part of every global batch, from Python's own help texts as bytes."""

    def __init__(self) -> None:
        stream: list[int] = []
        for name in sorted(topics):
            stream += [*topics[name].encode(), END_OF_TEXT]
        count = len(stream) // SEQUENCE_LENGTH
        self.samples = torch.tensor(stream[: count * SEQUENCE_LENGTH]).view(count, SEQUENCE_LENGTH)
        self.order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        self.size = GLOBAL_BATCH_SIZE // dist.get_world_size()

    def __getitem__(self, step: int) -> Tensor:
        first = step * GLOBAL_BATCH_SIZE + dist.get_rank() * self.size
        positions = torch.arange(first, first + self.size) % len(self.order)
        return self.samples[self.order[positions]]


def finish(measured: Measured) -> NoReturn:
    """Print the slowest rank's seconds and the mean loss of every step from rank 0, and exit.

    Skips static destructors, in which a process that used DeepSpeed over gloo sometimes crashes.
    """
    everyone: list[Measured | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, measured)
    ranks = [rank for rank in everyone if rank is not None]
    if dist.get_rank() == 0:
        seconds = [max(step) for step in zip(*(rank.seconds for rank in ranks), strict=True)]
        losses = [sum(step) / len(step) for step in zip(*(rank.losses for rank in ranks), strict=True)]
        print(json.dumps({"step_seconds": seconds, "losses": losses}))
    sys.stdout.flush()
    sys.stderr.flush()
    dist.barrier()
    os._exit(0)
