"""Layouts of models for closed forms, without building any."""

from dataclasses import replace
from typing import Any

from harness.backends.registry import BUILT_IN
from harness.backends.strategy import StrategyKind
from harness.forms.families import collectives
from harness.forms.layout import Layout, Tensor
from harness.forms.terms import Volume
from harness.forms.workload import Workload

LAYOUT = ("tied", "buffers", "blocks")


def bloom_560m() -> list[Tensor]:
    """bigscience/bloom-560m: 559,214,592 parameters, tied embedding."""
    hidden, vocabulary = 1024, 250_880
    found = [_matrix("transformer.word_embeddings.weight", vocabulary, hidden)]
    found += _norm("transformer.word_embeddings_layernorm", hidden)
    for layer in range(24):
        block = f"transformer.h.{layer}"
        found += _norm(f"{block}.input_layernorm", hidden)
        found += _linear(f"{block}.self_attention.query_key_value", 3 * hidden, hidden)
        found += _linear(f"{block}.self_attention.dense", hidden, hidden)
        found += _norm(f"{block}.post_attention_layernorm", hidden)
        found += _linear(f"{block}.mlp.dense_h_to_4h", 4 * hidden, hidden)
        found += _linear(f"{block}.mlp.dense_4h_to_h", hidden, 4 * hidden)
    return found + _norm("transformer.ln_f", hidden)


def workload(parameters: list[Tensor], block_count: int, prefix: str, **changes: Any) -> Workload:
    """One probed step of a job on these parameters, like for like, fp32, on 2 ranks, not yet of a backend.

    `changes` may name fields of the layout too.
    """
    if changes.get("precision") == "bf16":
        parameters = [replace(tensor, dtype="bfloat16") for tensor in parameters]
    of_layout = {name: changes.pop(name) for name in LAYOUT if name in changes}
    layout = Layout(
        parameters=tuple(parameters),
        decaying=frozenset(t.name for t in parameters if len(t.shape) > 1),
        **({"blocks": tuple(f"{prefix}.{index}" for index in range(block_count))} | of_layout),
    )
    return Workload(
        layout=layout,
        strategy=StrategyKind(family="not chosen"),
        **({"world_size": 2, "steps": (4,)} | changes),
    )


def volume_of(backend: str, workload: Workload) -> Volume:
    """What a built-in backend is expected to communicate."""
    return collectives(under(backend, workload))


def under(backend: str, workload: Workload) -> Workload:
    """The workload under a built-in backend."""
    strategy = BUILT_IN[backend].strategy
    assert strategy is not None
    return replace(workload, strategy=strategy)


def bloom_workload(**changes: Any) -> Workload:
    return workload(bloom_560m(), 24, "transformer.h", **changes)


def small(*shapes: tuple[int, ...]) -> list[Tensor]:
    """A root parameter, then one per block."""
    names = ["embedding.weight", *(f"blocks.{index}.weight" for index in range(len(shapes) - 1))]
    return [Tensor(name, shape, "float32") for name, shape in zip(names, shapes, strict=True)]


def small_workload(*shapes: tuple[int, ...], **changes: Any) -> Workload:
    return workload(small(*shapes), len(shapes) - 1, "blocks", **changes)


def _matrix(name: str, rows: int, columns: int) -> Tensor:
    return Tensor(name, (rows, columns), "float32")


def _linear(name: str, rows: int, columns: int) -> list[Tensor]:
    return [_matrix(f"{name}.weight", rows, columns), Tensor(f"{name}.bias", (rows,), "float32")]


def _norm(name: str, size: int) -> list[Tensor]:
    return [Tensor(f"{name}.weight", (size,), "float32"), Tensor(f"{name}.bias", (size,), "float32")]
