"""Rows of a text and a class, or of two texts, as samples; tokenizers of named models; images."""

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path

import datasets
import huggingface_hub.constants
import numpy
import pytest
import torch
from PIL import Image

from harness.errors import JobError
from harness.job.batch import BatchLayout, batch_layout
from harness.job.job import DataSection, EvaluationSection, Job, TrainingSection
from harness.rank import data
from harness.rank.data import (
    IGNORED,
    LABELS,
    POSITIONS,
    ByteTokenizer,
    DataFacts,
    Sampler,
    Samples,
    TextSample,
    load_samples,
    read_documents,
    tokenizer_of,
)
from harness.rank.loop import sample_facts, sample_hash
from harness.rank.models.losses import KEEP_APART, loss_function
from harness.rank.models.model import build_model, model_config
from tests.harness.rank.small_models import SMALL, SMALL_GPT2


def read(source: str, path: Path | None = None, **values: object) -> list[TextSample]:
    return list(read_documents(DataSection(source=source, path=path and str(path), **values)))


def refused(source: str, path: Path, **values: object) -> str:
    with pytest.raises(JobError) as caught:
        read(source, path, **values)
    assert str(path) in str(caught.value)
    return str(caught.value)


def write_lines(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


SQUAD = json.dumps({"version": "1.1", "data": [{"title": "Notes", "paragraphs": [{
    "context": "Ada, in 1843.",
    "qas": [
        {"id": "1", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0},
                                                    {"text": "She", "answer_start": 0}]},
        {"id": "2", "question": "Never answered?", "answers": []},
        {"id": "3", "question": "When?", "answers": [{"text": "1843", "answer_start": 9}]},
    ],
}]}]})  # fmt: skip
TWO = [TextSample("one"), TextSample("two")]
OWN_FIELDS = {"text_field": "answer", "prompt_field": "question"}


def test_prose_is_the_help_text_of_python_in_a_fixed_order() -> None:
    documents = read("prose")
    assert documents == read("prose")
    assert len(documents) > 50
    assert all(d.text and not d.prompt for d in documents)


@pytest.mark.parametrize(
    ("source", "content", "fields", "documents"),
    [
        ("text", "first line\nsecond – ü\n", {}, [TextSample("first line\nsecond – ü\n")]),
        ("jsonl", '{"text": "one"}\n\n   \n{"text": "two", "other": 1}', {}, TWO),
        ("jsonl", '{"text": "one"}\r\n{"text": "two"}\r\n', {}, TWO),
        *(
            ("jsonl", f'{{"text": "before{separator}after"}}\n', {}, [TextSample(f"before{separator}after")])
            for separator in ("\u2028", "\u2029", "\u0085")
        ),
        ("jsonl", '{"question": "1 + 1?", "answer": "2"}', OWN_FIELDS, [TextSample("2", prompt="1 + 1?")]),
        (
            "squad", SQUAD, {},
            [
                TextSample(
                    prompt="Ada, in 1843.\nQuestion: Who?\nAnswer:", text=" Ada", answers=("Ada", "She")
                ),
                TextSample(prompt="Ada, in 1843.\nQuestion: When?\nAnswer:", text=" 1843", answers=("1843",)),
            ],
        ),
    ],
)  # fmt: skip
def test_documents_of_a_file(
    source: str, content: str, fields: dict[str, str], documents: list[TextSample], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content.encode())
    assert read(source, path, **fields) == documents


@pytest.mark.parametrize(
    ("source", "content", "words"),
    [
        ("jsonl", '{"text": "a"}\n{"body": "b", "title": "c"}', ["is 'text'", "line 2", "body, title"]),
        ("jsonl", '{"text": 3}', ["has no text there"]),
        ("jsonl", "{broken\n", ["line 1: not JSON"]),
        ("jsonl", "[1]\n", ["not a JSON object"]),
        (
            "jsonl", '{"text": "fine"}\n{"text": "half \\ud83d"}\n',
            ["', line 2: a lone surrogate, \\ud83d, is no character"],
        ),
        *(("squad", text, []) for text in ("[]x", '{"data": [{"title": 1}]}', "[1, 2]", "{}", '{"data": 3}')),
        *((source, None, ["No such file"]) for source in ("text", "jsonl", "squad")),
        *((source, "größe", ["is not UTF-8 text (byte 2)"]) for source in ("text", "jsonl", "squad")),
        ("prompted", '{"text": "a"}', ["data.prompt_field is 'prompt'"]),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_refused(
    source: str, content: str | None, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    fields = {"prompt_field": "prompt"} if source == "prompted" else {}
    message = refused("jsonl" if fields else source, path, **fields)
    assert all(word in message for word in words), message


def test_saved_datasets_are_read_by_split_and_field(tmp_path: Path) -> None:
    one, several = tmp_path / "saved", tmp_path / "splits"
    datasets.Dataset.from_dict({"body": ["one", "two"], "ask": ["a", "b"]}).save_to_disk(one)
    assert read("datasets", one, text_field="body", prompt_field="ask") == [
        TextSample(text="one", prompt="a"),
        TextSample(text="two", prompt="b"),
    ]
    assert "row 0" in refused("datasets", one)
    splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(several)
    assert read("datasets", several) == [TextSample("train")]
    assert read("datasets", several, split="test") == [TextSample("test")]
    assert "split 'validation'" in refused("datasets", several, split="validation")
    (tmp_path / "empty").mkdir()
    message = refused("datasets", tmp_path / "empty")
    assert "cannot be loaded by datasets" in message
    assert "\n" not in message


END = ByteTokenizer.end_of_text


def text_job(tmp_path: Path, text: str, length: int = 8, **data: object) -> Job:
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    return Job(data=DataSection(source="text", path=str(path), sequence_length=length, **data))


def rows_job(tmp_path: Path, *rows: tuple[str, str], length: int = 8, **data: object) -> Job:
    """A jsonl job of (prompt, text) rows."""
    path = write_lines(tmp_path, *({"prompt": p, "text": t} for p, t in rows))
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


def test_packed_documents_are_parted_by_the_end_of_text_and_a_limit_keeps_the_first(tmp_path: Path) -> None:
    cut = {"length": 3, "packed": True, "prompt_field": None}
    for more, kept in (({}, 3), ({"limit": 2}, 2)):
        job = rows_job(tmp_path, ("", "abc"), ("", "defg"), **cut, **more)
        every = [[97, 98, 99], [END, 100, 101], [102, 103, END]]
        assert load_samples(job).fields["tokens"].tolist() == every[:kept]


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


def test_targets_never_include_the_prompt_and_documents_without_one_are_left_out(tmp_path: Path) -> None:
    rows = [("ask", "yes"), ("a longer question", "no"), ("x", "a long answer"), ("q", "")]
    samples = load_samples(rows_job(tmp_path, *rows, ("", "")))
    for (_, text), labels in zip(rows, samples.fields["labels"].tolist(), strict=True):
        kept = [label for label in labels if label != IGNORED]
        assert kept == [*text.encode(), END][:8]


def test_data_without_a_whole_sample_is_refused(tmp_path: Path) -> None:
    for job in (text_job(tmp_path, ""), text_job(tmp_path, "short"), rows_job(tmp_path)):
        with pytest.raises(JobError, match=r"gives no sample( of 8 tokens)?;"):
            load_samples(job)


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
    assert shuffle or epochs[0] == list(range(count))


def test_order_follows_the_seed_alone_and_differs_by_epoch() -> None:
    order = ids(sampler(32, 8), range(8))
    assert order == ids(sampler(32, 8), range(8)) == ids(sampler(32, 16), range(4))
    assert order[:32] != order[32:]
    assert order[:32] != ids(sampler(32, 8, seed=1), range(4))


def test_held_out_samples_are_the_last_and_never_trained_on() -> None:
    source = sampler(12, 4, held_out=4)
    assert source.evaluation_ids == [8, 9, 10, 11]
    assert set(ids(source, range(10))) == set(range(8))
    assert sampler(12, 4).evaluation_ids == []
    for everything in (12, 13):
        with pytest.raises(JobError, match=f"holds out {everything}"):
            sampler(12, 4, held_out=everything)


TEXTS = ["abc", "defghij", "k", "lmnopqrstu"]
LENGTH = 8


def packed_job(path: Path, config: dict[str, object] = SMALL, attention: str = "auto", **data: object) -> Job:
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
    samples = load_samples(packed_job(tmp_path / "texts"))
    plain = load_samples(packed_job(tmp_path / "texts", document_attention="across"))
    assert torch.equal(samples.fields["tokens"], plain.fields["tokens"])
    # abc. defg | hij. k. lm | nopqrstu: a document that goes on in the next sample begins anew there.
    assert samples.fields[POSITIONS].tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7],
    ]  # fmt: skip
    assert (samples.fields[LABELS] == IGNORED).tolist() == (samples.fields[POSITIONS] == 0).tolist()
    assert samples.targets.tolist() == [6, 5, 7]
    assert samples.lengths.tolist() == [LENGTH] * 3


CONFIGS = {
    name: SMALL_GPT2 if name == "gpt2" else SMALL | {"model_type": name, "max_position_embeddings": 32}
    for name in KEEP_APART
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KEEP_APART)
def test_the_loss_is_that_of_each_document_alone(kind: str, attention: str, tmp_path: Path) -> None:
    asked = packed_job(tmp_path / "texts", CONFIGS[kind], attention)
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


def test_a_model_that_was_not_looked_up_and_samples_of_one_document_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 2}
    asked = packed_job(tmp_path / "texts", config)
    model = build_model(asked, model_config(asked, DataFacts(vocabulary_size=257)))
    with pytest.raises(JobError, match="whether BloomForCausalLM keeps documents apart is not known"):
        loss_function(asked, model)
    with pytest.raises(ValueError, match="is of packed samples"):
        packed_job(tmp_path / "texts", packed=False)


def seq2seq(path: Path, **data: object) -> Job:
    values = {
        "source": "jsonl", "path": str(path), "prompt_field": "q", "text_field": "a", "sequence_length": 4,
    }  # fmt: skip
    return Job.model_validate({"task": "seq2seq", "data": values | data})


def test_pairs_are_padded_and_cut_apart(tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"q": "ab", "a": "x"}, {"q": "abcdef", "a": "wxyz"})
    samples = load_samples(seq2seq(path, target_length=3))
    assert samples.fields["input_ids"].tolist() == [[97, 98, END, END], [97, 98, 99, END]]
    assert samples.fields["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert samples.fields["labels"].tolist() == [[120, END, IGNORED], [119, 120, END]]
    assert samples.targets.tolist() == [2, 3]
    assert samples.lengths.tolist() == [5, 7]


def classification(path: Path, **data: object) -> Job:
    values = {"source": "jsonl", "path": str(path), "sequence_length": 4}
    return Job.model_validate({"task": "classification", "data": values | data})


def test_classes_are_numbers_or_names(tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"text": "a", "label": "no"}, {"text": "b", "label": "yes"})
    samples = load_samples(classification(path))
    assert samples.fields["labels"].tolist() == [0, 1]
    assert samples.facts.classes == 2
    path = write_lines(tmp_path, {"text": "a", "kind": 4}, {"text": "b", "kind": 0})
    assert load_samples(classification(path, label_field="kind", limit=1)).facts.classes == 5
    for rows, said in (
        ([{"text": "a"}], r"data.label_field is 'label', but line 1 .* one of its fields: text"),
        ([{"text": "a", "label": 1}, {"text": "b", "label": "x"}], "all numbers from 0 or all names"),
    ):
        with pytest.raises(JobError, match=said):
            load_samples(classification(write_lines(tmp_path, *rows)))


def test_csv_columns_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "rows.csv"
    path.write_text("first,second,kind\nab,c,1\nd,e,0\n")
    job = classification(path, source="csv", prompt_field="first", text_field="second", label_field="kind")
    samples = load_samples(job)
    assert samples.fields["labels"].tolist() == [1, 0]
    assert samples.fields["input_ids"][1].tolist() == [100, END, 101, END]


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    job = Job.model_validate({"model": {"name": str(tmp_path)}})
    assert job.data.tokenizer == str(tmp_path)
    with pytest.raises(JobError, match=r"is a folder without a tokenizer .* data.tokenizer"):
        tokenizer_of(job)
    fed_bytes = Job.model_validate({"model": {"name": str(tmp_path)}, "data": {"tokenizer": "bytes"}})
    assert tokenizer_of(fed_bytes).vocabulary_size == 257


def images_job(**data: object) -> Job:
    return Job.model_validate({"task": "classification", "data": {"image_size": 4, **data}})


def test_made_up_images_follow_from_the_seed() -> None:
    job = images_job(source="synthetic-images", classes=3, limit=7)
    samples = load_samples(job)
    assert samples.fields["pixel_values"].shape == (7, 3, 4, 4)
    assert samples.fields["labels"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert samples.fields["pixel_values"].equal(load_samples(job).fields["pixel_values"])
    assert len(samples.batch([1, 2])["labels"]) == 2


def test_pictures_are_read_by_class(tmp_path: Path) -> None:
    for name, shade in (("cat", 0), ("dog", 255)):
        (tmp_path / name).mkdir()
        for number in range(2):
            pixels = numpy.full((6, 5, 3), shade, dtype=numpy.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    samples = load_samples(images_job(source="images", path=str(tmp_path)))
    assert samples.fields["labels"].tolist() == [0, 0, 1, 1]
    assert samples.fields["pixel_values"][0].unique().tolist() == [-1.0]
    assert samples.fields["pixel_values"][3].unique().tolist() == [1.0]
    with pytest.raises(JobError, match="has no pictures"):
        load_samples(images_job(source="images", path=str(tmp_path / "cat")))


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    data._answers.cache_clear()


@pytest.mark.usefixtures("online")
def test_silence_is_settled_once() -> None:
    data.settle_hub("somebody/some-model")
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    assert data._answers.cache_info().misses == 1
    data.settle_hub("somebody/another")
    assert data._answers.cache_info().misses == 1


@pytest.mark.usefixtures("online")
def test_a_hub_that_answers_is_asked_for_files_and_nobody_for_a_local_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data.settle_hub(str(tmp_path))
    assert data._answers.cache_info().misses == 0
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # says 501: an answer
    threading.Thread(target=server.handle_request, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    data.settle_hub("somebody/some-model")
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])
OWN_LABELS = torch.tensor([[IGNORED, 2, 3], [4, 5, 6]])
SAMPLES = Samples(
    fields={"tokens": TOKENS, "labels": OWN_LABELS},
    lengths=torch.tensor([3, 2]),
    targets=torch.tensor([2, 1]),
)


def test_totals_are_over_the_micro_batches_of_a_step() -> None:
    totals = sample_facts(SAMPLES, [0, 1])
    assert (totals["samples"], totals["tokens"], totals["target_tokens"]) == (2, 5, 3)
    assert totals["sample_hashes"] == sample_facts(SAMPLES, [1, 0])["sample_hashes"]
    assert totals["sample_hashes"] != sample_facts(SAMPLES, [0, 0])["sample_hashes"]
    other = replace(SAMPLES, fields={"tokens": TOKENS + 1, "labels": OWN_LABELS})
    assert totals["sample_hashes"] != sample_facts(other, [0, 1])["sample_hashes"]


def test_an_entry_changes_with_a_token_a_label_and_the_sample() -> None:
    tokens, labels = TOKENS[0], OWN_LABELS[0]
    other_tokens, other_labels = tokens.clone(), labels.clone()
    other_tokens[2] += 1
    other_labels[2] = IGNORED
    entries = {
        sample_hash(0, [tokens, labels]), sample_hash(1, [tokens, labels]),
        sample_hash(0, [other_tokens, labels]), sample_hash(0, [tokens, other_labels]),
    }  # fmt: skip
    assert len(entries) == 4
    assert sample_hash(0, [tokens.clone(), labels.clone()]) in entries
    assert all(0 <= entry < 2**64 for entry in entries)
