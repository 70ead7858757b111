"""Checkpoints of a user's: tied, quantised, damaged, missing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.errors import JobError
from harness.job.job import Job
from tests.harness.rank.loading.models import CONFIGS, assert_equal, checkpoint, filled, source_of


def altered(folder: Path, change: Callable[[dict[str, Tensor]], object], config: str = "llama") -> Job:
    """A job on a checkpoint in one file whose tensors were changed."""
    job = checkpoint(folder, CONFIGS[config], largest_file="1GB")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return job


def test_tied_weights_that_a_checkpoint_has_twice_are_read_if_they_are_equal(tmp_path: Path) -> None:
    def twice(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    source = source_of(altered(tmp_path / "model", twice, "tied llama"), tmp_path / "weights")
    assert_equal(filled(source), source())


def test_tied_weights_that_differ_in_a_checkpoint_are_refused(tmp_path: Path) -> None:
    def other(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    job = altered(tmp_path / "model", other, "tied llama")
    with pytest.raises(JobError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight.*other values"):
        source_of(job, tmp_path / "weights").skeleton()


def test_quantised_weights_are_left_to_transformers(tmp_path: Path) -> None:
    def quantise(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(64, 32, dtype=torch.int8)

    source = source_of(altered(tmp_path / "model", quantise), tmp_path / "weights")
    assert_equal(filled(source), source())
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) == 1  # converted


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"model-00002-of-00005\.safetensors' is damaged or incomplete .*copy or download it again"),
        (Path.unlink, r"index\.json' names the file model-00002-of-00005\.safetensors, which is missing"),
    ],
)
def test_a_damaged_or_missing_file_of_a_checkpoint_is_named(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    job = checkpoint(tmp_path / "model")
    damage(tmp_path / "model" / "model-00002-of-00005.safetensors")
    source = source_of(job, tmp_path / "weights")
    with pytest.raises(JobError, match=message):
        source.skeleton()
    with pytest.raises(JobError, match=r"model '.*'"):
        source()  # as backends do that hold all weights on every rank


def test_a_damaged_index_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    job = checkpoint(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").write_text("{")
    with pytest.raises(JobError, match=r"model\.safetensors\.index\.json' is damaged"):
        source_of(job, tmp_path / "weights").skeleton()


def test_a_hub_that_is_out_of_reach_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'")

    job = checkpoint(tmp_path / "model")
    monkeypatch.setattr("transformers.utils.hub.cached_file", unreachable)
    with pytest.raises(JobError, match=r"cannot be read: We couldn't connect"):
        source_of(job, tmp_path / "weights").skeleton()
