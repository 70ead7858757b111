"""The jobs of public scripts as factories of the harness: their own model classes, weights and samples."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]
WEIGHTS = "weights.pt"


def model(build: str, source: str, kept: str, arguments: dict[str, Any] | None = None) -> nn.Module:
    """`build` names a function below; `source`: folder of the script; `kept`: what a run of it left."""
    sys.path.insert(0, source)
    made: nn.Module = globals()[build](**(arguments or {}))
    made.load_state_dict(torch.load(Path(kept) / WEIGHTS))
    return made.train()


def samples(kept: str, ranks: int, accumulation: int, fields: dict[str, str]) -> list[dict[str, Tensor]]:
    """Samples in the harness's order: steps, micro-steps, ranks. `fields`: names here -> of the script."""
    per_rank = [torch.load(Path(kept) / f"batches-{rank}.pt") for rank in range(ranks)]
    size = len(next(iter(per_rank[0][0].values())))
    complete = min(
        sum(1 for _ in itertools.takewhile(lambda batch: len(next(iter(batch.values()))) == size, batches))
        for batches in per_rank
    )
    return [
        {name: _of_samples(batch[theirs], size)[row] for name, theirs in fields.items()}
        for micro in range(complete // accumulation * accumulation)
        for batch in (batches[micro] for batches in per_rank)
        for row in range(size)
    ]


def _of_samples(tensor: Tensor, size: int) -> Tensor:
    """Split by samples; a loss may have been given the labels of all of them in one row."""
    return tensor if len(tensor) == size else tensor.reshape(size, -1)


def loss(kind: str) -> Loss:
    """`kind` names a function below."""
    compute: Loss = globals()[kind]
    return compute


def mingpt(**sizes: Any) -> nn.Module:
    gpt = importlib.import_module("model")
    return gpt.GPT(gpt.GPTConfig(**sizes))  # type: ignore[no-any-return]


def second_output(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return module(batch["tokens"], batch["targets"])[1]  # type: ignore[no-any-return]


def fsdp2_transformer(**sizes: Any) -> nn.Module:
    theirs = importlib.import_module("model")
    return theirs.Transformer(theirs.ModelArgs(**sizes))  # type: ignore[no-any-return]


def sum_of_outputs(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return module(batch["tokens"]).sum()  # type: ignore[no-any-return]


def deepspeed_transformer(**sizes: Any) -> nn.Module:
    return importlib.import_module("train").SimpleTransformerModel(**sizes)  # type: ignore[no-any-return]


def cross_entropy_of_labels(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = module(batch["tokens"])
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]), batch["targets"].view(-1))


def autoencoder(**sizes: Any) -> nn.Module:
    return importlib.import_module("autoencoder").LitAutoEncoder(**sizes)  # type: ignore[no-any-return]


def reconstruction(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    flat = batch["pixels"].view(batch["pixels"].size(0), -1)
    return functional.mse_loss(flat, module(flat))


def classifier(folder: str) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder)  # type: ignore[no-any-return]


def language_model(folder: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)  # type: ignore[no-any-return]


def own_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return module(**batch).loss  # type: ignore[no-any-return]
