"""Small models of several architectures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.backends.base import Engine, SetupContext, World
from harness.backends.model_source import AskedLoading
from harness.backends.options import SingleOptions
from harness.backends.single import SingleBackend
from harness.job.job import DataSection, Job, ModelSection, TrainingSection
from harness.rank.data import DataFacts
from harness.rank.initial_weights import JobModelSource
from harness.rank.models.model import build_model, draw_model, model_config

VOCABULARY = 257
SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
LLAMA = SMALL | {"model_type": "llama", "vocab_size": VOCABULARY}
SMALL_GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied llama": LLAMA | {"tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY},
    "bloom": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "mistral": LLAMA | {"model_type": "mistral"},
    "opt": {
        "model_type": "opt", "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY,
    },
}  # fmt: skip
MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
"""Its blocks initialise weights of their parts twice over."""


def job_of(config: dict[str, Any], length: int = 32, **training: Any) -> Job:
    return Job(
        model=ModelSection(config=config),
        data=DataSection(sequence_length=length),
        training=TrainingSection(**training),
    )


def alone(
    build: Callable[[], nn.Module], compute_loss: Callable[..., Tensor], precision: str | None, **how: Any
) -> Engine:
    """`single` in bf16-mixed, with this option."""
    context = SetupContext(
        world=World(rank=0, world_size=1, local_rank=0, ranks_per_node=1, device="cpu"),
        precision="bf16-mixed", gradient_clipping=None, micro_batch_size=1, accumulation_steps=1,
        preset="like-for-like", compute_loss=compute_loss, **how,
    )  # fmt: skip
    return SingleBackend(SingleOptions(precision=precision)).prepare(
        build, lambda named: torch.optim.AdamW([parameter for _, parameter in named]), context
    )


def built(job: Job) -> nn.Module:
    return build_model(job, model_config(job, DataFacts(vocabulary_size=VOCABULARY)))


def source_of(
    job: Job, folder: Path, built: list[nn.Module] | None = None, loading: AskedLoading = "slices"
) -> JobModelSource:
    """The source of the only rank of a world."""
    return JobModelSource(
        job,
        model_config(job, DataFacts(vocabulary_size=VOCABULARY)),
        World(rank=0, world_size=1, local_rank=0, ranks_per_node=1, device="cpu"),
        loading=loading,
        folder=folder,
        on_built=(built if built is not None else []).append,
    )


def filled(source: JobModelSource) -> dict[str, Tensor]:
    """Every parameter, in two parts that divide no row."""
    weights = {}
    for name, parameter in source.skeleton().named_parameters():
        flat = torch.empty(parameter.numel(), dtype=parameter.dtype)
        middle = len(flat) // 3 + 1
        source.fill(flat[:middle], name, 0)
        source.fill(flat[middle:], name, middle)
        weights[name] = flat.view(parameter.shape)
    source.filled()
    return weights


def assert_equal(weights: dict[str, Tensor], model: nn.Module) -> None:
    expected = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    for name, parameter in expected.items():
        assert weights[name].dtype == parameter.dtype
        assert torch.equal(weights[name], parameter), name


def checkpoint(
    folder: Path, config: dict[str, Any] = LLAMA, largest_file: str = "20KB", **training: object
) -> Job:
    """A job on a checkpoint in bf16, in several files unless they may be large."""
    job = job_of(config, seed=5)
    model = draw_model(job, model_config(job, DataFacts(vocabulary_size=VOCABULARY))).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=largest_file)  # type: ignore[operator]
    return Job(
        model=ModelSection(name=str(folder)),
        data=DataSection(sequence_length=32),
        training=TrainingSection(**training),  # type: ignore[arg-type]
    )
