from dataclasses import replace

import torch

from harness.rank.data import IGNORED, Samples
from harness.rank.loop import sample_facts, sample_hash

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])
LABELS = torch.tensor([[IGNORED, 2, 3], [4, 5, 6]])
SAMPLES = Samples(
    fields={"tokens": TOKENS, "labels": LABELS},
    lengths=torch.tensor([3, 2]),
    targets=torch.tensor([2, 1]),
)


def test_totals_are_over_the_micro_batches_of_a_step() -> None:
    totals = sample_facts(SAMPLES, [0, 1])
    assert (totals["samples"], totals["tokens"], totals["target_tokens"]) == (2, 5, 3)
    assert totals["sample_hashes"] == sample_facts(SAMPLES, [1, 0])["sample_hashes"]
    assert totals["sample_hashes"] != sample_facts(SAMPLES, [0, 0])["sample_hashes"]


def test_another_content_under_the_same_id_has_another_hash() -> None:
    other = replace(SAMPLES, fields={"tokens": TOKENS.flip(0), "labels": LABELS})
    assert sample_facts(other, [0])["sample_hashes"] != sample_facts(SAMPLES, [0])["sample_hashes"]


def test_an_entry_changes_with_a_token_a_label_and_the_sample() -> None:
    tokens, labels = TOKENS[0], LABELS[0]
    other_tokens, other_labels = tokens.clone(), labels.clone()
    other_tokens[2] += 1
    other_labels[2] = IGNORED
    entries = {
        sample_hash(0, [tokens, labels]),
        sample_hash(1, [tokens, labels]),
        sample_hash(0, [other_tokens, labels]),
        sample_hash(0, [tokens, other_labels]),
    }
    assert len(entries) == 4
    assert sample_hash(0, [tokens.clone(), labels.clone()]) in entries
    assert all(0 <= entry < 2**64 for entry in entries)
