"""Generates answers to held-out questions on the weights as they are sharded, and scores them as SQuAD does.

Each token is one forward pass of the engine, on all ranks at once, so every strategy gathers what it shards
as it does in training. Without a cache of keys and values: answers are short.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.backends.base import Batch
from harness.errors import JobError
from harness.rank.data import TextSample, Tokenizer, read_documents, to_device, tokenizer_of
from harness.rank.loop import Loop
from harness.record.measured import AnswerPart
from harness.run_directory.events import RankAnswers


class NextTokens:
    """Stands in for the loss while an engine computes: notes the likeliest next token of each sample."""

    def __init__(self) -> None:
        self.found: Tensor | None = None

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        """A loss of zero. batch: `tokens`, int64 (samples, length), and `last`, the last position of each."""
        logits = module(input_ids=batch["tokens"], use_cache=False).logits
        rows = torch.arange(len(logits), device=logits.device)
        self.found = logits[rows, batch["last"]].float().argmax(dim=-1)
        return torch.zeros((), device=logits.device)


@torch.no_grad()
def answer_questions(loop: Loop, most: int) -> RankAnswers:
    """This rank's answers, of at most so many tokens, to its share of the held-out questions.

    A collective: every rank runs the same number of forward passes. It leaves the engine in evaluation mode.
    Raises JobError where questions cannot be told apart.
    """
    tokenizer = tokenizer_of(loop.job)
    known = list(islice(read_documents(loop.job.data), len(loop.samples)))
    if len(known) < len(loop.samples):
        raise JobError(
            f"the data has {len(known)} questions for {len(loop.samples)} samples; "
            "set evaluation.answer_tokens=null"
        )
    questions = [(sample, known[sample]) for sample in loop.sampler.evaluation_ids]
    mine = questions[loop.rank.world.data_rank :: loop.rank.world.data_size]
    size = loop.layout.micro_batch_size
    batches = -(-len(questions) // (size * loop.rank.world.data_size))
    loop.engine.train(False)
    began = time.perf_counter()
    given = []
    for number in range(batches):
        loop.rank.position.enter(f"answers, batch {number} of {batches}")
        part = mine[number * size :][:size]
        documents = [document for _, document in part] or [questions[0][1]]
        texts = _generate(loop, documents, tokenizer, most)
        for (sample, document), text in zip(part, texts, strict=False):
            exact_match, f1 = squad_scores(text.strip(), document.answers)
            given.append(AnswerPart(sample=sample, text=text.strip(), exact_match=exact_match, f1=f1))
    return RankAnswers(given=given, seconds=time.perf_counter() - began)


def _generate(loop: Loop, documents: Sequence[TextSample], tokenizer: Tokenizer, most: int) -> list[str]:
    """The likeliest text after each prompt, until its end or `most` tokens."""
    room = loop.job.data.sequence_length - most
    prompts = [tokenizer.encode(document.prompt)[-room:] for document in documents]
    written: list[list[int]] = [[] for _ in prompts]
    ended = [False for _ in prompts]
    for _ in range(most):
        found = _next_tokens(
            loop, [p + w for p, w in zip(prompts, written, strict=True)], tokenizer.end_of_text
        )
        for place, token in enumerate(found):
            ended[place] = ended[place] or token == tokenizer.end_of_text
            if not ended[place]:
                written[place].append(token)
        # All ranks must run the same number of forward passes.
        go_on = torch.tensor([int(not all(ended))], device=loop.rank.world.device)
        dist.all_reduce(go_on, op=dist.ReduceOp.MAX)
        if not go_on.item():
            break
    return [tokenizer.decode(tokens) for tokens in written]


def _next_tokens(loop: Loop, texts: Sequence[list[int]], padding: int) -> list[int]:
    """One forward pass. Padding stands on the right, where causal attention does not look."""
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [padding] * (longest - len(text)) for text in texts], dtype=torch.int64)
    last = torch.tensor([len(text) - 1 for text in texts])
    predictor = NextTokens()
    with loop.instruments.observer.computing(predictor):
        loop.engine.forward(to_device({"tokens": tokens, "last": last}, loop.rank.world.device))
    assert predictor.found is not None
    found: list[int] = predictor.found.tolist()
    return found


def squad_scores(text: str, answers: Sequence[str]) -> tuple[bool, float]:
    """Exact match and F1 of an answer by the definition of SQuAD v1.1, against the nearest right answer."""
    from torchmetrics.functional.text import squad

    right: dict[str, list[str] | list[int]] = {"text": list(answers), "answer_start": [0] * len(answers)}
    found = squad({"prediction_text": text, "id": "0"}, {"answers": right, "id": "0"})
    return bool(found["exact_match"] > 0), float(found["f1"]) / 100
