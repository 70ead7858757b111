"""Scores of answers by SQuAD's definition, and greedy generation against transformers' own."""

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from harness.rank import answers
from harness.rank.answers import NextTokens, squad_scores
from harness.rank.data import ByteTokenizer, TextSample
from tests.docs.markdown import ROOT

MOST = 8
LENGTH = 40


@pytest.mark.parametrize(
    ("text", "right", "exact_match", "f1"),
    [
        ("red", ["red"], True, 1.0), ("The Red, Key!", ["red key"], True, 1.0),
        ("red", ["blue", "red"], True, 1.0), ("a red key", ["red"], False, 2 / 3),
        ("red red", ["red"], False, 2 / 3), ("green", ["red"], False, 0.0), ("", ["red"], False, 0.0),
    ],
)  # fmt: skip
def test_scores_are_those_of_the_official_script(
    text: str, right: list[str], exact_match: bool, f1: float
) -> None:
    found = squad_scores(text, right)
    assert found[0] is exact_match
    assert found[1] == pytest.approx(f1)


def test_generation_equals_that_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=256, pad_token_id=256,
        initializer_range=0.4,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    tokenizer = ByteTokenizer()
    prompts = [
        "What colour is the key?",
        "Why?",
        "A question that is longer than the room for it here?",
    ]
    monkeypatch.setattr(answers.dist, "all_reduce", lambda *_, **__: None)
    with torch.no_grad():
        given = answers._generate(
            one_rank(model), [TextSample(text="", prompt=prompt) for prompt in prompts], tokenizer, MOST
        )
        for prompt, text in zip(prompts, given, strict=True):
            tokens = torch.tensor([tokenizer.encode(prompt)[-(LENGTH - MOST) :]])
            whole = model.generate(tokens, max_new_tokens=MOST, do_sample=False)[0, tokens.shape[1] :]
            assert text == tokenizer.decode(whole.tolist())
    assert len(set(given)) > 1


def one_rank(model: torch.nn.Module) -> Any:
    """What `_generate` uses of a loop, on one process without a strategy."""
    current: list[NextTokens] = []

    def computing(predictor: NextTokens) -> Any:
        current[:] = [predictor]
        return nullcontext()

    job = SimpleNamespace(data=SimpleNamespace(sequence_length=LENGTH))
    engine = SimpleNamespace(forward=lambda batch: current[0](model, batch))
    return SimpleNamespace(
        job=job, engine=engine, instruments=SimpleNamespace(observer=SimpleNamespace(computing=computing)),
        rank=SimpleNamespace(world=SimpleNamespace(device="cpu")),
    )  # fmt: skip


def test_the_shipped_questions_have_their_answers_in_the_text() -> None:
    document = json.loads((ROOT / "configs" / "labs" / "questions.json").read_text(encoding="utf-8"))
    for article in document["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                for answer in question["answers"]:
                    assert paragraph["context"][answer["answer_start"] :].startswith(answer["text"])
