"""`inherits`: files that change others."""

from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.job.config import load_experiment
from tests.harness.job.refusals import refused_file


def files(folder: Path, **texts: str) -> Path:
    """Files of these names; the first one's path."""
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / f"{next(iter(texts))}.yaml"


def test_a_file_inherits_key_by_key(tmp_path: Path) -> None:
    path = files(
        tmp_path,
        job="inherits: base.yaml\ntraining: {steps: 7}\nmodel: {config: {n_layer: 2}}\n",
        base="training: {steps: 3, seed: 5}\nmodel: {config: {model_type: gpt2, n_layer: 9, n_head: 4}}\n"
        "compare: {backends: [ddp, fsdp]}\n",
    )
    found = load_experiment(path, ["training.seed=6"])
    assert (found.training.steps, found.training.seed) == (7, 6)
    assert found.model.config == {"model_type": "gpt2", "n_layer": 2, "n_head": 4}
    assert found.compare.backends == ["ddp", "fsdp"]


def test_values_of_another_model_type_do_not_mix(tmp_path: Path) -> None:
    base = "model: {config: {model_type: gpt2, n_embd: 64}}\n"
    path = files(tmp_path, job="inherits: base.yaml\nmodel: {config: {model_type: bloom}}\n", base=base)
    assert load_experiment(path).model.config == {"model_type": "bloom"}


def test_of_several_bases_the_later_one_goes_first(tmp_path: Path) -> None:
    path = files(
        tmp_path, job="inherits: [one.yaml, two.yaml]\n", one="training: {steps: 1, seed: 1}\n",
        two="inherits: deep/three.yaml\ntraining: {steps: 2}\n",
    )  # fmt: skip
    (tmp_path / "deep").mkdir()
    files(tmp_path / "deep", three="training: {seed: 3}\ndata: {source: text, path: ./corpus.txt}\n")
    (tmp_path / "deep" / "corpus.txt").write_text("text", encoding="utf-8")
    found = load_experiment(path)
    assert (found.training.steps, found.training.seed) == (2, 3)
    assert found.data.path == str(tmp_path / "deep" / "corpus.txt")


def test_a_shipped_file_is_inherited_by_its_name(tmp_path: Path) -> None:
    path = files(tmp_path, job='inherits: "@bloom-geometry"\ntraining: {seed: 4}\n')
    found = load_experiment(path)
    assert (found.model.config or {})["model_type"] == "bloom"
    assert found.training.seed == 4


def test_a_null_takes_an_inherited_value_away(tmp_path: Path) -> None:
    base = "model: {config: {model_type: gpt2}}\ntraining: {gradient_clipping: 2.0}\n"
    path = files(tmp_path, job="inherits: base.yaml\ntraining: {gradient_clipping: null}\n", base=base)
    assert load_experiment(path).training.gradient_clipping is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inherits: job.yaml", "inherits itself"),
        ("inherits: other.yaml", "other.yaml cannot be read"),
        ("inherits: '@no-such'", "'@no-such' is not shipped"),
        ("inherits: 3", "was given 3; give a file"),
        ('inherits: "a\\0b"', "was given 'a\\x00b'; give a file"),
    ],
)
def test_a_base_that_cannot_be_is_refused(text: str, message: str, tmp_path: Path) -> None:
    assert message in refused_file(tmp_path, text)


def test_a_file_that_is_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    with pytest.raises(HarnessError, match="cannot be read"):
        load_experiment(loop)
