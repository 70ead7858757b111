"""Functions of the user's own: found, called, and refused in one line."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from harness.errors import HarnessError, JobError
from harness.job.config import load_experiment
from harness.job.job import Job
from harness.rank.data import load_samples
from harness.rank.factories import call_factory
from harness.rank.models.losses import loss_function
from harness.rank.models.model import build_own_model

SOURCE = """\
import torch
from torch import nn

NUMBER = 3


def linear(width=4):
    return nn.Linear(width, 1)


def nothing():
    return nn.ReLU()


def text():
    return "text"


def broken():
    raise RuntimeError("no luck")


def rows(count=4, length=2):
    return [{"x": torch.ones(length), "labels": i % 2} for i in range(count)]


def endless():
    while True:
        yield {"x": torch.ones(2), "labels": 0}


def uneven():
    return [{"x": torch.ones(2)}, {"x": torch.ones(3)}]


def other_fields():
    return [{"x": 1.0}, {"y": 1.0}]


def leaving():
    raise SystemExit(4)


def one_argument():
    return lambda batch: batch
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose name no other test's module has."""
    path = tmp_path / f"own_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return path


def job(**sections: dict[str, object]) -> Job:
    return Job.model_validate(sections | {"task": "custom"})


def test_arguments_reach_the_function(module: Path) -> None:
    assert call_factory("model.factory", f"{module}:linear", {"width": 7}).in_features == 7


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("missing", {}, "the module has no 'missing'"),
        ("NUMBER", {}, "is a int; give a function"),
        (
            "linear",
            {"depth": 2},
            "got an unexpected keyword argument 'depth'; its signature is linear(width=4)",
        ),
        ("broken", {}, "raised RuntimeError: no luck ("),
        ("leaving", {}, ":leaving' called sys.exit(4); return what it makes instead"),
    ],
)
def test_what_cannot_be_called_is_refused(
    module: Path, function: str, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(JobError) as error:
        call_factory("model.factory", f"{module}:{function}", arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "source", "spelling", "message"),
    [
        (
            "none.py", "", "no_such_module:build",
            "module 'no_such_module' is neither in the folder of the job's file",
        ),
        (
            "needs_more.py", "import no_such_library\n", "{file}:build",
            "needs 'no_such_library', which is not installed",
        ),
        ("json.py", SOURCE, "{file}:linear", "the name 'json' belongs to"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_imported_is_refused(
    file: str, source: str, spelling: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / file).write_text(source)
    with pytest.raises(JobError, match=message):
        call_factory("model.factory", spelling.format(file=tmp_path / file), {})


@pytest.mark.parametrize(
    ("section", "function", "message"),
    [
        ("model", "text", "returned a str; it must return a torch.nn.Module"),
        ("model", "nothing", "returned a ReLU without parameters"),
        ("data", "text", "returned a str; it must return a sequence of samples"),
        ("data", "uneven", r"field 'x' has shapes \(2,\) and \(3,\); pad samples"),
        ("data", "other_fields", "sample 1 has y, the first x; give all samples the same fields"),
        ("loss", "one_argument", r"returned a function of \(batch\); it must take \(model, batch\)"),
    ],
)
def test_what_is_no_model_no_data_and_no_loss_is_refused(
    module: Path, section: str, function: str, message: str
) -> None:
    names = {"model": "linear", "data": "rows"} | {section: function}
    asked = job(**{name: {"factory": f"{module}:{own}"} for name, own in names.items()})
    read: dict[str, Callable[[Job], object]] = {
        "model": build_own_model, "data": load_samples, "loss": lambda of: loss_function(of, nn.Module())
    }  # fmt: skip
    with pytest.raises(JobError, match=message):
        read[section](asked)


def test_samples_are_stacked_by_field(module: Path) -> None:
    data = {"factory": f"{module}:rows", "arguments": {"count": 6}, "limit": 5}
    samples = load_samples(job(model={"factory": f"{module}:linear"}, data=data))
    assert {name: [*tensor.shape] for name, tensor in samples.fields.items()} == {"x": [5, 2], "labels": [5]}
    assert samples.targets.tolist() == [1] * 5


def test_of_an_endless_stream_it_is_told_what_was_read_and_what_ends_it(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("harness.rank.data.SILENT_SECONDS", -1.0)
    monkeypatch.setattr("harness.rank.data.tell", told.append)
    data = {"factory": f"{module}:endless", "limit": 3}
    samples = load_samples(job(model={"factory": f"{module}:linear"}, data=data))
    assert samples.targets.tolist() == [1] * 3
    (line,) = told
    assert f"data.factory '{module}:endless': 0 samples read so far; all are read before training" in line
    assert line.endswith("stop this with Ctrl-C and set data.limit")


def test_modules_are_found_beside_the_file_of_the_job(module: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"task: custom\nmodel: {{factory: '{module.stem}:linear'}}\ndata: {{factory: '{module.stem}:rows'}}\n"
    )
    assert load_experiment(path).model.factory == f"{module}:linear"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.factory=build"], "write module:function"),
        (["model.factory=a:b", "model.name=gpt2"], "give either `factory` or `name` or `config`"),
        (["model.arguments={width: 2}"], "`arguments` need a `factory`"),
        (["data.factory=a:b", "data.source=text", "data.path=x"], "give either `factory` or `source`"),
        (["task=custom"], "task custom needs `data.factory`"),
        (["task=seq2seq"], "task seq2seq needs an input for each text"),
        (["task=classification"], "needs labels, which data.source 'prose' has not"),
        (["loss.reduction=sum"], "`loss` of task causal-lm is the task's own"),
        (["data.source=synthetic-images"], "has no text; set task to classification"),
        (["data.target_length=3"], "is of task seq2seq; it would be ignored"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(HarnessError) as error:
        load_experiment(None, settings)
    assert message in str(error.value)
