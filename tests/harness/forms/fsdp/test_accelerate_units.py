"""The units of Accelerate's FSDP2 by name, as `fsdp2_prepare_model` makes them of Hugging Face models."""

from __future__ import annotations

import pytest

from harness.forms.fsdp.fsdp2 import units_around_blocks
from harness.forms.layout import Layout, Tensor

LLAMA = ("model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.norm.weight", "lm_head.weight")
GPT2 = ("transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.attn.weight",
        "transformer.ln_f.weight", "transformer.ln_f.bias")  # fmt: skip
BLOOM = ("transformer.word_embeddings.weight", "transformer.word_embeddings_layernorm.weight",
         "transformer.h.0.mlp.weight", "transformer.ln_f.weight")  # fmt: skip


def layout(names: tuple[str, ...], block: str, tied: dict[str, str]) -> Layout:
    shapes = {name: (4,) if "norm" in name or "ln_f" in name else (8, 4) for name in names}
    tensors = tuple(Tensor(name, shape, "float32") for name, shape in shapes.items())
    return Layout(parameters=tensors, decaying=frozenset(), blocks=(block,), tied=tied)


@pytest.mark.parametrize(
    ("names", "block", "tied", "units"),
    [
        (LLAMA, "model.layers.0", {}, [(["embed_tokens"], False), (["norm", "lm_head"], True)]),
        (
            LLAMA[:3], "model.layers.0", {"lm_head.weight": LLAMA[0]}, [(["norm", "embed_tokens"], True)],
        ),
        (
            GPT2, "transformer.h.0", {"lm_head.weight": GPT2[0]},
            [(["ln_f", "ln_f", "wte"], True), (["wpe"], True)],
        ),
        (
            BLOOM, "transformer.h.0", {"lm_head.weight": BLOOM[0]},
            [(["ln_f", "word_embeddings"], True), (["word_embeddings_layernorm"], True)],
        ),
    ],
)  # fmt: skip
def test_embedding_and_tail_are_units_of_their_own(
    names: tuple[str, ...], block: str, tied: dict[str, str], units: list[tuple[list[str], bool]]
) -> None:
    found = units_around_blocks(layout(names, block, tied))
    assert [([t.name.split(".")[-2] for t in tensors], kept) for tensors, kept, _ in found] == units


def test_only_the_untied_last_unit_is_taken_for_the_next_micro_step() -> None:
    untied = units_around_blocks(layout(LLAMA, "model.layers.0", {}))
    assert [astray for _, _, astray in untied] == [False, True]
    tied = units_around_blocks(layout(GPT2, "transformer.h.0", {"lm_head.weight": GPT2[0]}))
    assert [astray for _, _, astray in tied] == [False, False]
