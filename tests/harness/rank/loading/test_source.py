from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.errors import HarnessError
from harness.job.job import ModelSection
from harness.rank import initial_weights
from harness.rank.data import DataFacts
from harness.rank.models.description import describe_layout, describe_model
from harness.rank.models.model import draw_model, model_config
from tests.harness.rank.loading.models import (
    CONFIGS,
    LLAMA,
    MAMBA,
    VOCABULARY,
    assert_equal,
    checkpoint,
    filled,
    job_of,
    source_of,
)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed", "bf16"])
@pytest.mark.parametrize("architecture", ["tied llama", "gpt2"])
def test_parts_of_weights_equal_the_whole_model(architecture: str, precision: str, tmp_path: Path) -> None:
    source = source_of(job_of(CONFIGS[architecture], precision=precision), tmp_path)
    assert_equal(filled(source), source())


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.costly
def test_a_model_that_cannot_be_streamed_is_built_in_another_process_unless_it_is_small(
    small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    build = initial_weights._build_in_another_process
    monkeypatch.setattr(
        initial_weights, "_build_in_another_process", lambda *asked: started.append(build(*asked))
    )
    monkeypatch.setattr(initial_weights, "SMALL_ELEMENTS", 2**26 if small else 0)
    source = source_of(job_of(MAMBA), tmp_path)
    assert_equal(filled(source), source())
    assert len(started) == (not small)


@pytest.mark.parametrize("architecture", list(CONFIGS))
def test_the_skeleton_is_the_model_without_its_weights(architecture: str, tmp_path: Path) -> None:
    source = source_of(job_of(CONFIGS[architecture], activation_checkpointing=True), tmp_path)
    skeleton, model = source.skeleton(), source()
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert describe_model(skeleton) == describe_model(model)
    assert describe_layout(skeleton, ()) == describe_layout(model, ())
    buffers = dict(skeleton.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    assert skeleton.training == model.training


def test_random_weights_need_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    filled(source_of(job_of(LLAMA), folder))
    assert not folder.exists()


def test_what_a_rank_broadcasts_lies_in_a_file_in_the_compute_dtype_and_is_written_once(
    tmp_path: Path,
) -> None:
    job = job_of(LLAMA, precision="bf16-mixed")
    source_of(job, tmp_path, loading="broadcast").skeleton()
    (file,) = tmp_path.glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}
    written = file.stat().st_mtime_ns
    source_of(job, tmp_path, loading="broadcast").skeleton()
    assert file.stat().st_mtime_ns == written


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_a_sharded_checkpoint_is_read_where_it_lies(precision: str, tmp_path: Path) -> None:
    job = checkpoint(tmp_path / "model", precision=precision)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    source = source_of(job, tmp_path / "weights")
    assert_equal(filled(source), source())
    assert not list((tmp_path / "weights").glob("*.safetensors"))


def test_names_of_a_checkpoint_without_the_head_are_found(tmp_path: Path) -> None:
    job = job_of(CONFIGS["bloom"], seed=5)
    model = draw_model(job, model_config(job, DataFacts(vocabulary_size=VOCABULARY)))
    model.transformer.save_pretrained(tmp_path / "model")  # type: ignore[union-attr,operator]
    named = job.model_copy(update={"model": ModelSection(name=str(tmp_path / "model"))})
    source = source_of(named, tmp_path / "weights")
    assert_equal(filled(source), source())
    assert not list((tmp_path / "weights").glob("*.safetensors"))


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    with pytest.raises(HarnessError, match=r"runtime\.loading=full"):
        source_of(job_of(LLAMA), taken / "weights", loading="broadcast").skeleton()
