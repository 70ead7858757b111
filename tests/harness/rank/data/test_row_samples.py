"""Rows of a text and a class, or of two texts, as samples; tokenizers of named models; images."""

import json
from pathlib import Path

import numpy
import pytest
from PIL import Image

from harness.errors import JobError
from harness.job.job import Job
from harness.rank.data import IGNORED, load_samples, tokenizer_of

END = 256


def rows_file(tmp_path: Path, *rows: dict[str, object]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def seq2seq(path: str, **data: object) -> Job:
    values = {"source": "jsonl", "path": path, "prompt_field": "q", "text_field": "a", "sequence_length": 4}
    return Job.model_validate({"task": "seq2seq", "data": values | data})


def test_pairs_are_padded_and_cut_apart(tmp_path: Path) -> None:
    path = rows_file(tmp_path, {"q": "ab", "a": "x"}, {"q": "abcdef", "a": "wxyz"})
    samples = load_samples(seq2seq(path, target_length=3))
    assert samples.fields["input_ids"].tolist() == [[97, 98, END, END], [97, 98, 99, END]]
    assert samples.fields["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert samples.fields["labels"].tolist() == [[120, END, IGNORED], [119, 120, END]]
    assert samples.targets.tolist() == [2, 3]
    assert samples.lengths.tolist() == [5, 7]


def classification(path: str, **data: object) -> Job:
    values = {"source": "jsonl", "path": path, "sequence_length": 4}
    return Job.model_validate({"task": "classification", "data": values | data})


def test_classes_are_numbers_or_names(tmp_path: Path) -> None:
    path = rows_file(tmp_path, {"text": "a", "label": "no"}, {"text": "b", "label": "yes"})
    samples = load_samples(classification(path))
    assert samples.fields["labels"].tolist() == [0, 1]
    assert samples.facts.classes == 2
    path = rows_file(tmp_path, {"text": "a", "kind": 4}, {"text": "b", "kind": 0})
    assert load_samples(classification(path, label_field="kind", limit=1)).facts.classes == 5


def test_rows_without_a_class_and_mixed_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"data.label_field is 'label', but line 1 .* its fields: text"):
        load_samples(classification(rows_file(tmp_path, {"text": "a"})))
    path = rows_file(tmp_path, {"text": "a", "label": 1}, {"text": "b", "label": "x"})
    with pytest.raises(JobError, match="all numbers from 0 or all names"):
        load_samples(classification(path))


def test_csv_columns_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "rows.csv"
    path.write_text("first,second,kind\nab,c,1\nd,e,0\n")
    job = classification(
        str(path), source="csv", prompt_field="first", text_field="second", label_field="kind"
    )
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
