import json
from pathlib import Path

import datasets
import pytest

from harness.errors import JobError
from harness.job.job import DataSection
from harness.rank.data import TextSample, read_documents


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


def write_squad(tmp_path: Path) -> Path:
    questions = [
        {"id": "1", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0},
                                                    {"text": "She", "answer_start": 0}]},
        {"id": "2", "question": "Never answered?", "answers": []},
        {"id": "3", "question": "When?", "answers": [{"text": "1843", "answer_start": 9}]},
    ]  # fmt: skip
    article = {"title": "Notes", "paragraphs": [{"context": "Ada, in 1843.", "qas": questions}]}
    path = tmp_path / "train-v1.1.json"
    path.write_text(json.dumps({"version": "1.1", "data": [article]}))
    return path


def test_prose_is_the_help_text_of_python_in_a_fixed_order() -> None:
    documents = read("prose")
    assert documents == read("prose")
    assert len(documents) > 50
    assert all(d.text and not d.prompt for d in documents)


def test_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("first line\nsecond line – ü\n", encoding="utf-8")
    assert read("text", path) == [TextSample("first line\nsecond line – ü\n")]


def test_json_lines_are_one_document_each_and_blank_lines_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n\n   \n{"text": "two", "other": 1}')
    assert read("jsonl", path) == [TextSample("one"), TextSample("two")]


def test_json_lines_have_prompts_where_a_field_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"question": "1 + 1?", "answer": "2"})
    assert read("jsonl", path, text_field="answer", prompt_field="question") == [
        TextSample(text="2", prompt="1 + 1?")
    ]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_json_lines_end_at_line_feeds_only(tmp_path: Path, separator: str) -> None:
    text = f"before{separator}after"
    assert read("jsonl", write_lines(tmp_path, {"text": text})) == [TextSample(text)]


def test_json_lines_of_windows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "one"}\r\n{"text": "two"}\r\n')
    assert read("jsonl", path) == [TextSample("one"), TextSample("two")]


def test_json_line_without_the_field_is_named_with_the_fields_it_has(tmp_path: Path) -> None:
    message = refused("jsonl", write_lines(tmp_path, {"text": "a"}, {"body": "b", "title": "c"}))
    assert "data.text_field is 'text'" in message
    assert "line 2" in message
    assert "body, title" in message


def test_json_line_without_the_prompt_is_named(tmp_path: Path) -> None:
    message = refused("jsonl", write_lines(tmp_path, {"text": "a"}), prompt_field="prompt")
    assert "data.prompt_field is 'prompt'" in message


def test_json_line_with_a_number_for_a_text_is_refused(tmp_path: Path) -> None:
    assert "has no text there" in refused("jsonl", write_lines(tmp_path, {"text": 3}))


@pytest.mark.parametrize(("line", "why"), [("{broken", "line 1: not JSON"), ("[1]", "not a JSON object")])
def test_line_that_is_no_json_object_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n")
    assert why in refused("jsonl", path)


def test_squad_asks_with_context_and_question_and_answers_with_the_first_answer(tmp_path: Path) -> None:
    assert read("squad", write_squad(tmp_path)) == [
        TextSample(prompt="Ada, in 1843.\nQuestion: Who?\nAnswer:", text=" Ada", answers=("Ada", "She")),
        TextSample(prompt="Ada, in 1843.\nQuestion: When?\nAnswer:", text=" 1843", answers=("1843",)),
    ]


@pytest.mark.parametrize("document", ["[]x", '{"data": [{"title": "a"}]}', "[1, 2]", "{}", '{"data": 3}'])
def test_file_that_is_not_squad_is_refused(tmp_path: Path, document: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(document)
    refused("squad", path)


def test_saved_dataset_is_read(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    datasets.Dataset.from_dict({"body": ["one", "two"], "ask": ["a", "b"]}).save_to_disk(path)
    assert read("datasets", path, text_field="body", prompt_field="ask") == [
        TextSample(text="one", prompt="a"),
        TextSample(text="two", prompt="b"),
    ]


def test_split_of_saved_datasets_is_chosen(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(path)
    assert read("datasets", path) == [TextSample("train")]
    assert read("datasets", path, split="test") == [TextSample("test")]
    assert "split 'validation'" in refused("datasets", path, split="validation")


def test_dataset_without_the_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    datasets.Dataset.from_dict({"body": ["one"]}).save_to_disk(path)
    assert "row 0" in refused("datasets", path)


def test_folder_that_is_no_dataset_is_refused(tmp_path: Path) -> None:
    message = refused("datasets", tmp_path)
    assert "cannot be loaded by datasets" in message
    assert "\n" not in message


@pytest.mark.parametrize("source", ["text", "jsonl", "squad"])
def test_missing_file_is_refused(tmp_path: Path, source: str) -> None:
    assert "No such file" in refused(source, tmp_path / "none")


@pytest.mark.parametrize("source", ["text", "jsonl", "squad"])
def test_file_that_is_not_utf8_is_refused(tmp_path: Path, source: str) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("größe".encode("latin-1"))
    assert "is not UTF-8 text (byte 2)" in refused(source, path)


def test_half_a_pair_of_surrogates_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"text": "fine"}\n{"text": "half \\ud83d"}\n')
    data = DataSection(source="jsonl", path=str(file))
    with pytest.raises(JobError, match=r"d\.jsonl', line 2: a lone surrogate, \\ud83d, is no character"):
        list(read_documents(data))
