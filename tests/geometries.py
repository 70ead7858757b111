"""Layouts of models for closed forms, without building any."""

from __future__ import annotations

from dataclasses import replace

from harness.theory.expected.setting import Setting, Tensor


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


def setting(parameters: list[Tensor], block_count: int, prefix: str, **changes: object) -> Setting:
    """One counted step of a job on these parameters, like for like, fp32, on 2 ranks."""
    world_size = changes.get("world_size", 2)
    values: dict[str, object] = {
        "tied": {},
        "decaying": frozenset(t.name for t in parameters if len(t.shape) > 1),
        "buffers": (),
        "blocks": tuple(f"{prefix}.{index}" for index in range(block_count)),
        "precision": "fp32",
        "preset": "like-for-like",
        "world_size": world_size,
        "shard_size": world_size,
        "accumulation_steps": 1,
        "clipping": True,
        "offload": "none",
        "steps": (4,),
    }
    if changes.get("precision") == "bf16":
        values["master_dtype"] = "bfloat16"
        parameters = [replace(tensor, dtype="bfloat16") for tensor in parameters]
    return Setting(**(values | changes | {"parameters": tuple(parameters)}))  # type: ignore[arg-type]


def bloom_setting(**changes: object) -> Setting:
    return setting(bloom_560m(), 24, "transformer.h", **changes)


def small(*shapes: tuple[int, ...]) -> list[Tensor]:
    """A root parameter, then one per block."""
    names = ["embedding.weight", *(f"blocks.{index}.weight" for index in range(len(shapes) - 1))]
    return [Tensor(name, shape, "float32") for name, shape in zip(names, shapes, strict=True)]


def small_setting(*shapes: tuple[int, ...], **changes: object) -> Setting:
    return setting(small(*shapes), len(shapes) - 1, "blocks", **changes)


def _matrix(name: str, rows: int, columns: int) -> Tensor:
    return Tensor(name, (rows, columns), "float32")


def _linear(name: str, rows: int, columns: int) -> list[Tensor]:
    return [_matrix(f"{name}.weight", rows, columns), Tensor(f"{name}.bias", (rows,), "float32")]


def _norm(name: str, size: int) -> list[Tensor]:
    return [Tensor(f"{name}.weight", (size,), "float32"), Tensor(f"{name}.bias", (size,), "float32")]
