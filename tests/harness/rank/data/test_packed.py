import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from harness.errors import JobError
from harness.job.job import Job
from harness.rank.data import IGNORED, LABELS, POSITIONS, DataFacts, load_samples
from harness.rank.models.losses import KEEP_APART, loss_function
from harness.rank.models.model import build_model, model_config
from tests.harness.rank.models.test_model import SMALL, SMALL_GPT2

TEXTS = ["abc", "defghij", "k", "lmnopqrstu"]
LENGTH = 8


def job(path: Path, config: dict[str, object] = SMALL, attention: str = "auto", **data: object) -> Job:
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS), encoding="utf-8")
    return Job.model_validate(
        {
            "model": {"config": config, "attention": attention},
            "data": {
                "source": "jsonl", "path": str(path), "packed": True, "sequence_length": LENGTH,
                "document_attention": "within", **data,
            },
        }
    )  # fmt: skip


def test_positions_restart_and_first_tokens_are_no_targets(tmp_path: Path) -> None:
    samples = load_samples(job(tmp_path / "texts"))
    plain = load_samples(job(tmp_path / "texts", document_attention="across"))
    assert torch.equal(samples.fields["tokens"], plain.fields["tokens"])
    # abc. defg | hij. k. lm | nopqrstu: a document that goes on in the next sample begins anew there.
    assert samples.fields[POSITIONS].tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7],
    ]  # fmt: skip
    assert (samples.fields[LABELS] == IGNORED).tolist() == (samples.fields[POSITIONS] == 0).tolist()
    assert samples.targets.tolist() == [6, 5, 7]
    assert samples.lengths.tolist() == [LENGTH] * 3


CONFIGS = {name: SMALL | {"model_type": name, "max_position_embeddings": 32} for name in KEEP_APART}
CONFIGS["gpt2"] = SMALL_GPT2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KEEP_APART)
def test_the_loss_is_that_of_each_document_alone(kind: str, attention: str, tmp_path: Path) -> None:
    asked = job(tmp_path / "texts", CONFIGS[kind], attention)
    model = build_model(asked, model_config(asked, DataFacts(vocabulary_size=257)))
    samples = load_samples(asked)
    loss = loss_function(asked, model)(model, samples.batch([0, 1, 2]))
    alone = 0.0
    for row, starts in enumerate(samples.fields[POSITIONS] == 0):
        begins = [*starts.nonzero().flatten().tolist(), LENGTH]
        for begin, end in pairwise(begins):
            tokens = samples.fields["tokens"][row : row + 1, begin:end]
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
            alone += torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
    assert loss.item() == pytest.approx(alone, rel=1e-6)


def test_a_model_that_was_not_looked_up_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 2}
    asked = job(tmp_path / "texts", config)
    model = build_model(asked, model_config(asked, DataFacts(vocabulary_size=257)))
    with pytest.raises(JobError, match="whether BloomForCausalLM keeps documents apart is not known"):
        loss_function(asked, model)


def test_documents_of_their_own_samples_have_nothing_to_keep_apart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is of packed samples"):
        job(tmp_path / "texts", packed=False)
