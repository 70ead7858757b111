import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from harness.errors import JobError
from harness.job.batch import BatchLayout, batch_layout
from harness.job.job import DataSection, EvaluationSection, Job, TrainingSection
from harness.rank.data import IGNORED, ByteTokenizer, Sampler, Samples, load_samples

END = ByteTokenizer.end_of_text


def text_job(tmp_path: Path, text: str, length: int = 8, **data: object) -> Job:
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    return Job(data=DataSection(source="text", path=str(path), sequence_length=length, **data))


def rows_job(tmp_path: Path, *rows: tuple[str, str], length: int = 8, **data: object) -> Job:
    """A jsonl job of (prompt, text) rows."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "text": t}) + "\n" for p, t in rows))
    values = {"prompt_field": "prompt"} | data
    return Job(data=DataSection(source="jsonl", path=str(path), sequence_length=length, **values))


def numbered(count: int) -> Samples:
    """Samples whose only difference is their first token."""
    tokens = torch.arange(count).reshape(-1, 1).repeat(1, 4)
    return Samples(
        fields={"tokens": tokens, "labels": tokens},
        lengths=torch.full((count,), 4),
        targets=torch.full((count,), 3),
    )


def sampler(count: int, batch: int, *, seed: int = 0, shuffle: bool = True, held_out: int = 0) -> Sampler:
    evaluation = EvaluationSection(every_steps=1, samples=held_out) if held_out else EvaluationSection()
    job = Job(
        data=DataSection(shuffle=shuffle),
        training=TrainingSection(global_batch_size=batch, seed=seed),
        evaluation=evaluation,
    )
    return Sampler(numbered(count), job)


def test_packed_samples_cut_one_stream_and_drop_its_rest(tmp_path: Path) -> None:
    samples = load_samples(text_job(tmp_path, "abcdefghijklmnopqrs", length=8))
    assert samples.fields["tokens"].tolist() == [list(b"abcdefgh"), list(b"ijklmnop")]
    assert samples.fields["labels"].tolist() == samples.fields["tokens"].tolist()
    assert samples.lengths.tolist() == [8, 8]
    assert samples.targets.tolist() == [7, 7]
    assert samples.facts.vocabulary_size == 257


def test_packed_documents_are_parted_by_the_end_of_text(tmp_path: Path) -> None:
    job = rows_job(tmp_path, ("", "abc"), ("", "defg"), length=3, packed=True, prompt_field=None)
    assert load_samples(job).fields["tokens"].tolist() == [[97, 98, 99], [END, 100, 101], [102, 103, END]]


NOT = IGNORED


@pytest.mark.parametrize(
    ("row", "tokens", "labels"),
    [
        (("", "abc"), [*b"abc", *[END] * 5], [*b"abc", END, *[NOT] * 4]),
        (("p", "abc"), [*b"pabc", *[END] * 4], [NOT, *b"abc", END, *[NOT] * 3]),
        (("0123456789", "abc"), [*b"6789abc", END], [*[NOT] * 4, *b"abc", END]),
        (("prompt", "abcdefghij"), [*b"abcdefgh"], [*b"abcdefgh"]),
    ],
    ids=["text alone", "prompt", "a prompt loses its left", "a text leaves no prompt"],
)
def test_padded_sample_holds_one_document_and_an_end(
    row: tuple[str, str], tokens: list[int], labels: list[int], tmp_path: Path
) -> None:
    samples = load_samples(rows_job(tmp_path, row))
    assert samples.fields["tokens"].tolist() == [tokens]
    assert samples.fields["labels"].tolist() == [labels]
    assert samples.lengths.tolist() == [max(i for i, label in enumerate(labels, start=1) if label != NOT)]
    assert samples.targets.tolist() == [sum(label != NOT for label in labels[1:])]


def test_targets_never_include_the_prompt(tmp_path: Path) -> None:
    rows = [("ask", "yes"), ("a longer question", "no"), ("x", "a long answer"), ("q", "")]
    samples = load_samples(rows_job(tmp_path, *rows))
    for (_, text), labels in zip(rows, samples.fields["labels"].tolist(), strict=True):
        kept = [label for label in labels if label != IGNORED]
        assert kept == [*text.encode(), END][:8]


def test_document_without_a_target_is_left_out(tmp_path: Path) -> None:
    samples = load_samples(rows_job(tmp_path, ("", ""), ("", "a")))
    assert samples.fields["tokens"][:, 0].tolist() == [97]


def test_limit_keeps_the_first_samples(tmp_path: Path) -> None:
    job = text_job(tmp_path, "abcdefghijkl", length=4, limit=2)
    assert load_samples(job).fields["tokens"].tolist() == [list(b"abcd"), list(b"efgh")]


def test_data_without_a_whole_sample_is_refused(tmp_path: Path) -> None:
    for text in ("", "short"):
        with pytest.raises(JobError, match="gives no sample of 8 tokens"):
            load_samples(text_job(tmp_path, text))
    with pytest.raises(JobError, match="gives no sample"):
        load_samples(rows_job(tmp_path))


def global_batch(source: Sampler, step: int, world_size: int, layout: BatchLayout) -> list[int]:
    return [
        sample
        for micro_step in range(layout.accumulation_steps)
        for rank in range(world_size)
        for sample in source.micro_batch_ids(step, micro_step, rank, world_size, layout)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_global_batch_is_the_same_samples_in_the_same_order(world_size: int, accumulation: int) -> None:
    training = TrainingSection(global_batch_size=16, accumulation_steps=accumulation)
    layout = batch_layout(training, world_size)
    source = sampler(50, 16)
    for step in (0, 1, 5):
        assert global_batch(source, step, world_size, layout) == sampler(50, 16).step_ids(step)


def ids(source: Sampler, steps: Sequence[int]) -> list[int]:
    return [sample for step in steps for sample in source.step_ids(step)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("count", "batch", "steps"), [(12, 4, 6), (10, 4, 5), (3, 9, 1)])
def test_every_sample_comes_once_in_an_epoch(count: int, batch: int, steps: int, shuffle: bool) -> None:
    consumed = ids(sampler(count, batch, shuffle=shuffle), range(steps))
    epochs = [consumed[first : first + count] for first in range(0, len(consumed), count)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(count))] * (steps * batch // count)


def test_epochs_are_permuted_differently() -> None:
    source = sampler(32, 32)
    assert source.step_ids(0) != source.step_ids(1)


def test_order_follows_the_seed_alone() -> None:
    order = ids(sampler(32, 8), range(8))
    assert order == ids(sampler(32, 8), range(8)) == ids(sampler(32, 16), range(4))
    assert order[:32] != ids(sampler(32, 8, seed=1), range(4))


def test_without_shuffling_samples_keep_their_order() -> None:
    assert sampler(10, 4, shuffle=False).step_ids(2) == [8, 9, 0, 1]


def test_steps_may_be_asked_in_any_order() -> None:
    forwards, backwards = sampler(10, 4), sampler(10, 4)
    expected = {step: forwards.step_ids(step) for step in range(8)}
    assert {step: backwards.step_ids(step) for step in reversed(range(8))} == expected


def test_held_out_samples_are_the_last_and_never_trained_on() -> None:
    source = sampler(12, 4, held_out=4)
    assert source.evaluation_ids == [8, 9, 10, 11]
    assert set(ids(source, range(10))) == set(range(8))


def test_nothing_is_held_out_without_evaluation() -> None:
    assert sampler(12, 4).evaluation_ids == []


@pytest.mark.parametrize("held_out", [12, 13])
def test_holding_out_everything_is_refused(held_out: int) -> None:
    with pytest.raises(JobError, match=f"holds out {held_out}"):
        sampler(12, 4, held_out=held_out)
