from pathlib import Path

import pytest

from harness.judge.comparison import Comparison
from harness.safe_text import by_name, inside, without_passwords
from harness.tell.document import Code, Folded, Paragraph
from harness.tell.sections.job import reproduce_section
from tests.records import make_record


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"]])
def test_a_configuration_file_loses_the_folders_of_its_machine(form: list[str]) -> None:
    def line(path: str) -> list[str]:
        return ["harness", "run", *(word.format(path) for word in form), "--runs", "/shared/runs"]

    assert inside(Path("/home/me"), line("/home/me/configs/a.yaml")) == line("configs/a.yaml")
    assert inside(Path("/home/me"), line("/tmp/a.yaml")) == line("/tmp/a.yaml")
    assert by_name(line("/tmp/a.yaml")) == line("a.yaml")
    assert by_name(line("configs/a.yaml")) == line("configs/a.yaml")


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("harness observe -- login.sh -u me -p hunter", "harness observe -- login.sh -u me -p ***"),
        ("harness observe -- srun -p gpu train.py", "harness observe -- srun -p gpu train.py"),
        ("docker run -p 8080:80 image", "docker run -p 8080:80 image"),
        ("train.py -p", "train.py -p"),
    ],
)
def test_a_word_after_p_is_a_password_unless_it_is_a_port_or_a_partition(words: str, kept: str) -> None:
    assert without_passwords(words.split()) == kept.split()
    assert make_record(command=words.split()).command == kept.split()


def test_the_report_says_where_the_content_of_such_a_file_is() -> None:
    command = ["harness", "compare", "--config", "/tmp/x/my job.yaml"]
    _, code, text, configuration = reproduce_section(Comparison([make_record(command=command)])).blocks
    assert isinstance(code, Code)
    assert isinstance(text, Paragraph)
    assert isinstance(configuration, Folded)
    assert code.text.endswith("\nharness compare --config 'my job.yaml'")
    assert "a file for --config" in text.text


def test_other_commands_stand_as_they_were_given() -> None:
    command = ["harness", "compare", "--config", "configs/default.yaml"]
    code = reproduce_section(Comparison([make_record(command=command)])).blocks[1]
    assert isinstance(code, Code)
    assert code.text.endswith("\nharness compare --config configs/default.yaml")
