"""Weights in parts, as skeletons and from checkpoints: those of the whole model, or why not."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from harness.errors import HarnessError, JobError
from harness.job.job import Job, ModelSection
from harness.rank import initial_weights
from harness.rank.data import DataFacts
from harness.rank.initial_weights import CannotStream, parameter_numbers, stream_weights, why_whole
from harness.rank.models.description import describe_layout, describe_model
from harness.rank.models.model import draw_model, model_config
from tests.harness.rank.small_models import (
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


def draw(job: Job) -> nn.Module:
    return draw_model(job, model_config(job, DataFacts(vocabulary_size=VOCABULARY)))


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed", "bf16"])
@pytest.mark.parametrize("architecture", ["tied llama", "gpt2"])
def test_parts_of_weights_equal_the_whole_model(architecture: str, precision: str, tmp_path: Path) -> None:
    source = source_of(job_of(CONFIGS[architecture], precision=precision), tmp_path)
    assert_equal(filled(source), source())


@pytest.mark.costly
@pytest.mark.parametrize("small", [True, False])
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


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_a_sharded_checkpoint_is_read_where_it_lies(precision: str, tmp_path: Path) -> None:
    job = checkpoint(tmp_path / "model", precision=precision)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    source = source_of(job, tmp_path / "weights")
    assert_equal(filled(source), source())
    assert not list((tmp_path / "weights").glob("*.safetensors"))


def test_names_of_a_checkpoint_without_the_head_are_found(tmp_path: Path) -> None:
    job = job_of(CONFIGS["bloom"], seed=5)
    model = draw(job)
    model.transformer.save_pretrained(tmp_path / "model")  # type: ignore[union-attr,operator]
    named = job.model_copy(update={"model": ModelSection(name=str(tmp_path / "model"))})
    source = source_of(named, tmp_path / "weights")
    assert_equal(filled(source), source())
    assert not list((tmp_path / "weights").glob("*.safetensors"))


def streamed(job: Job, *, by_block: bool = True) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    _, numbers = parameter_numbers(lambda: draw(job))
    stream_weights(
        lambda: draw(job),
        numbers,
        lambda name, tensor: kept.update({name: tensor.clone()}),
        by_block=by_block,
    )
    return kept


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("architecture", list(CONFIGS))
def test_streamed_weights_equal_those_of_a_plain_build_to_the_bit(architecture: str, by_block: bool) -> None:
    job = job_of(CONFIGS[architecture], seed=3)
    plain = dict(draw(job).named_parameters())
    if architecture == "gpt2" and not by_block:
        with pytest.raises(CannotStream):
            streamed(job, by_block=False)
        return
    weights = streamed(job, by_block=by_block)
    assert_equal(weights, draw(job))  # plain builds are as before
    assert all(torch.equal(weights[name], parameter) for name, parameter in plain.items())


def test_a_model_that_initialises_across_modules_is_refused() -> None:
    with pytest.raises(CannotStream):
        streamed(job_of(MAMBA))


def test_at_most_one_block_is_in_memory() -> None:
    job = job_of(CONFIGS["gpt2"])
    _, numbers = parameter_numbers(lambda: draw(job))
    held: list[int] = []
    living: list[nn.Module] = []
    plain = nn.Module.__init__

    def note(name: str, tensor: Tensor) -> None:
        modules = {id(module): module for module in living}.values()
        parameters = {id(p): p for module in modules for p in module.parameters(recurse=False)}
        held.append(sum(p.nbytes for p in parameters.values() if not p.is_meta))

    def construct(module: nn.Module, *arguments: object, **keywords: object) -> None:
        plain(module, *arguments, **keywords)
        living.append(module)

    nn.Module.__init__ = construct  # type: ignore[method-assign]
    try:
        stream_weights(lambda: draw(job), numbers, note)
    finally:
        nn.Module.__init__ = plain  # type: ignore[method-assign]
    model = draw(job)
    block = sum(p.nbytes for p in model.transformer.h[0].parameters())  # type: ignore[union-attr,index,operator]
    norms = sum(p.nbytes for name, p in model.named_parameters() if "ln_" in name)
    largest = max(block, max(p.nbytes for p in model.parameters()))
    assert 0 < max(held) <= largest + norms


OWN_MODELS = """\
import torch
from torch import nn


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.register_buffer("drawn", torch.rand(2))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("doubled", self.first.weight.detach() * 2, persistent=False)
        self.second = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.second.weight
        with torch.no_grad():
            self.second.bias.copy_(torch.arange(3.0))
        self.scale = nn.Parameter(torch.tensor(2.0))


class Derived(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.double = self.weight.detach() * 2


class Reading(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.largest = float(self.weight.max())


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.turns = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))


class Fickle(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        if self.weight.is_meta:
            self.more = nn.Linear(1, 1)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("own") / "own_skeletons.py"
    path.write_text(OWN_MODELS)
    known = [*sys.path]
    yield path
    sys.path[:] = known


def own_job(file: Path, kind: str, precision: str = "fp32") -> Job:
    return Job.model_validate({
        "task": "custom", "model": {"factory": f"{file}:{kind}"}, "data": {"factory": "mine:data"},
        "training": {"precision": precision},
    })  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "bf16"])
def test_weights_and_buffers_are_those_of_the_whole_model(file: Path, precision: str, tmp_path: Path) -> None:
    asked = own_job(file, "Plain", precision)
    assert why_whole(asked, "slices") is None
    source = source_of(asked, tmp_path)
    whole, skeleton = source(), source.skeleton()
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert_equal(filled(source), whole)
    buffers = dict(skeleton.named_buffers())
    for name, buffer in whole.named_buffers():
        assert buffers[name].dtype == buffer.dtype
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Derived", "'double' is made of its weights and no buffer"),
        ("Reading", "cannot be built without memory"),
        ("Turned", "parameter 'turns' is complex, and files of weights hold real numbers"),
    ],
)
def test_what_weights_decide_needs_the_whole_model(file: Path, kind: str, reason: str) -> None:
    assert reason in str(why_whole(own_job(file, kind), "slices"))
    assert why_whole(own_job(file, kind), "full") is None


def test_a_folder_that_cannot_be_written_says_what_to_do(file: Path) -> None:
    with pytest.raises(HarnessError, match=r"runtime\.loading=full"):
        source_of(own_job(file, "Plain"), file / "weights").skeleton()


def test_a_function_that_builds_something_else_without_memory_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"builds other parameters .* runtime\.loading=full"):
        source_of(own_job(file, "Fickle"), tmp_path).skeleton()


def with_tensor(folder: Path, name: str, make: Callable[[Tensor], Tensor]) -> Job:
    """A job on a checkpoint of a tied model in one file, with a tensor made of its embedding."""
    job = checkpoint(folder, CONFIGS["tied llama"], largest_file="1GB")
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = make(tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return job


@pytest.mark.parametrize(
    ("name", "make", "converted"),
    [
        ("lm_head.weight", torch.clone, 0),  # twice, and equal
        ("model.layers.0.mlp.up_proj.weight", lambda _: torch.ones(64, 32, dtype=torch.int8), 1),
    ],
)
def test_tied_weights_are_read_and_quantised_ones_left_to_transformers(
    name: str, make: Callable[[Tensor], Tensor], converted: int, tmp_path: Path
) -> None:
    source = source_of(with_tensor(tmp_path / "model", name, make), tmp_path / "weights")
    assert_equal(filled(source), source())
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) == converted


def test_tied_weights_that_differ_in_a_checkpoint_are_refused(tmp_path: Path) -> None:
    job = with_tensor(tmp_path / "model", "lm_head.weight", lambda weight: weight + 1)
    with pytest.raises(JobError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight.*other values"):
        source_of(job, tmp_path / "weights").skeleton()


SECOND = "model-00002-of-00005.safetensors"


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (
            SECOND, lambda file: file.write_bytes(file.read_bytes()[:-100]),
            r"model-00002-of-00005\.safetensors' is damaged or incomplete .*copy or download it again",
        ),
        (
            SECOND, Path.unlink,
            r"index\.json' names the file model-00002-of-00005\.safetensors, which is missing",
        ),
        (
            "model.safetensors.index.json", lambda file: file.write_text("{"),
            r"model\.safetensors\.index\.json' is damaged",
        ),
    ],
)  # fmt: skip
def test_a_damaged_or_missing_file_of_a_checkpoint_is_named(
    file: str, damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    job = checkpoint(tmp_path / "model")
    damage(tmp_path / "model" / file)
    source = source_of(job, tmp_path / "weights")
    with pytest.raises(JobError, match=message):
        source.skeleton()
    if file == SECOND:
        with pytest.raises(JobError, match=r"model '.*'"):
            source()  # as backends do that hold all weights on every rank


def test_a_hub_that_is_out_of_reach_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'")

    job = checkpoint(tmp_path / "model")
    monkeypatch.setattr("transformers.utils.hub.cached_file", unreachable)
    with pytest.raises(JobError, match=r"cannot be read: We couldn't connect"):
        source_of(job, tmp_path / "weights").skeleton()
