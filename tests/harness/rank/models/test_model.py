"""Code that a model's folder brings runs where the job says so, and nowhere else."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from harness.backends.base import Unsupported
from harness.backends.model.blocks import needed_blocks, transformer_blocks
from harness.errors import HarnessError, JobError
from harness.job.job import DataSection, Job, ModelSection
from harness.plan.profiles import workload_profile
from harness.plan.scenario import job_model
from harness.rank.data import DataFacts, tokenizer_of
from harness.rank.models.losses import summed_cross_entropy
from harness.rank.models.model import build_model, build_own_model, declare_blocks, draw_model, model_config
from tests.harness.rank.small_models import SMALL, SMALL_GPT2, built, job_of

FACTS = DataFacts(vocabulary_size=257)


def refused(config: dict[str, object], length: int = 32) -> str:
    with pytest.raises(JobError) as caught:
        model_config(job_of(config, length), FACTS)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Logits(nn.Module):
    """Gives the same logits whatever it is asked."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_sums_the_cross_entropy_of_the_next_token_over_targets_only(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 4, 5, dtype=dtype)
    logits[0, 1, 3] = 2.0
    labels = torch.tensor([[2, -100, 3, -100]])
    loss = summed_cross_entropy(Logits(logits), {"tokens": labels.abs(), "labels": labels})
    expected = torch.log(torch.exp(torch.tensor(2.0)) + 4) - 2.0
    assert loss.item() == pytest.approx(expected.item())
    assert loss.dtype is torch.float32


def test_padding_does_not_change_the_loss() -> None:
    model = built(job_of(SMALL)).eval()
    tokens = torch.arange(8).reshape(1, 8)
    labels = tokens.clone()
    padded = torch.cat([tokens, torch.full((1, 8), 256)], dim=1)
    ignored = torch.cat([labels, torch.full((1, 8), -100)], dim=1)
    with torch.no_grad():
        short = summed_cross_entropy(model, {"tokens": tokens, "labels": labels})
        long = summed_cross_entropy(model, {"tokens": padded, "labels": ignored})
    assert long.item() == pytest.approx(short.item(), rel=1e-6)


def test_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    states = [built(job_of(SMALL, seed=seed)).state_dict() for seed in (0, 0, 1)]
    name = "model.layers.0.mlp.up_proj.weight"
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not torch.equal(states[0][name], states[2][name])


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed", "bf16"])
def test_mixed_precision_starts_from_fp32_masters_that_the_compute_dtype_holds(precision: str) -> None:
    weights = torch.bfloat16 if precision == "bf16" else torch.float32
    compute = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(precision, weights)
    for parameter in built(job_of(SMALL, precision=precision)).parameters():
        assert parameter.dtype is weights
        assert torch.equal(parameter, parameter.to(compute).to(weights))


def test_vocabulary_is_that_of_the_tokenizer_unless_given_and_dropout_is_off_unless_left_alone() -> None:
    assert model_config(job_of(SMALL), FACTS).vocab_size == 257
    assert model_config(job_of(SMALL | {"vocab_size": 300}), FACTS).vocab_size == 300
    off = model_config(job_of(SMALL_GPT2), FACTS)
    assert (off.attn_pdrop, off.embd_pdrop, off.resid_pdrop) == (0.0, 0.0, 0.0)
    asked = Job(model=ModelSection(config=SMALL_GPT2, dropout=None), data=DataSection(sequence_length=32))
    assert model_config(asked, FACTS).resid_pdrop == 0.1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "lama"}, ["'lama' is unknown to transformers", "'llama'"]),
        (
            {"hidden_sise": 32},
            ["model.config.hidden_sise is not a setting of llama", "Did you mean 'hidden_size'?"],
        ),
        *(({"model_type": kind}, ["is not a causal language model"]) for kind in ("bert", "t5", "vit")),
        (SMALL | {"max_position_embeddings": 16}, ["data.sequence_length 32 is longer", "context of 16"]),
        (SMALL_GPT2 | {"n_positions": 16}, ["data.sequence_length 32 is longer", "context of 16"]),
        (SMALL | {"vocab_size": 100}, ["257 ids but the model's vocab_size is 100"]),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(config: dict[str, object], said: list[str]) -> None:
    message = refused(config)
    assert all(words in message for words in said), message


def test_impossible_values_of_a_model_and_a_folder_without_one_are_refused(tmp_path: Path) -> None:
    for width in ("big", 33):
        asked = job_of(SMALL | {"hidden_size": width})
        with pytest.raises(JobError):
            build_model(asked, model_config(asked, FACTS))
    with pytest.raises(JobError, match="cannot be loaded"):
        model_config(Job(model=ModelSection(name=str(tmp_path))), FACTS)


def test_saved_model_starts_from_its_weights_or_from_random_ones(tmp_path: Path) -> None:
    saved = built(job_of(SMALL, seed=7))
    saved.save_pretrained(tmp_path)
    data = DataSection(sequence_length=32)
    name = "model.layers.0.mlp.up_proj.weight"
    loaded = built(Job(model=ModelSection(name=str(tmp_path)), data=data))
    assert torch.equal(loaded.state_dict()[name], saved.state_dict()[name])
    random = built(Job(model=ModelSection(name=str(tmp_path), weights="random"), data=data))
    assert not torch.equal(random.state_dict()[name], saved.state_dict()[name])


class Stages(nn.Module):
    """A list of layers of two kinds, and one of blocks."""

    def __init__(self, *, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(blocks)])


def blocks_of(model: nn.Module, block_class: str | None = None) -> list[str]:
    declare_blocks(model, ModelSection(factory="mine:model", block_class=block_class))
    return list(transformer_blocks(model))


def test_a_model_without_a_list_of_equal_modules_has_no_blocks() -> None:
    assert blocks_of(Stages(blocks=2)) == ["stem", "layers.0", "layers.1"]
    assert blocks_of(Stages(blocks=1)) == blocks_of(nn.LSTM(2, 2)) == []
    with pytest.raises(Unsupported, match=r"Stages has no blocks: .*model\.block_class"):
        needed_blocks(Stages(blocks=1))


def test_a_block_that_fsdp2_has_sharded_is_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model._no_split_modules = ["Linear"]
    model[0].__class__ = type("FSDPLinear", (nn.Linear,), {})
    assert list(transformer_blocks(model)) == ["0"]


def test_neither_the_whole_model_nor_a_list_of_lists_is_a_block() -> None:
    stages = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2)])
    declare_blocks(stages, ModelSection())
    assert stages._no_split_modules == ["Linear"]
    assert blocks_of(Stages(blocks=2), "Stages") == []
    assert blocks_of(Stages(blocks=2), "Stages,ModuleList") == ["layers"]


def test_a_model_of_transformers_that_declares_what_it_has_not_gets_the_class_it_repeats() -> None:
    model = built(job_of(SMALL))
    for declared in (None, [], ["OfAnother"]):
        model._no_split_modules = declared
        assert blocks_of(model) == ["model.layers.0", "model.layers.1"]
    model._no_split_modules = ["LlamaMLP"]
    assert blocks_of(model) == ["model.layers.0.mlp", "model.layers.1.mlp"]


class Rotary(nn.Linear):
    """A layer of a dtype with frequencies as complex numbers and a transposed weight."""

    def __init__(self, dtype: str = "bfloat16") -> None:
        super().__init__(2, 2, dtype=getattr(torch, dtype))
        self.register_buffer("rotary", torch.polar(torch.ones(2), torch.ones(2)))
        self.mix = nn.Parameter(torch.arange(6.0).view(2, 3).t())


def test_own_models_are_cast_to_fp32_made_contiguous_and_keep_complex_buffers_or_are_refused() -> None:
    model = build_own_model(Job(model=ModelSection(factory=f"{__name__}:Rotary")))
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.rotary, torch.polar(torch.ones(2), torch.ones(2)))
    assert model.mix.is_contiguous()
    assert model.mix.tolist() == [[0, 3], [1, 4], [2, 5]]
    section = ModelSection(factory=f"{__name__}:Rotary", arguments={"dtype": "float64"})
    with pytest.raises(JobError, match="parameter 'weight' is float64, which no strategy is compared in"):
        build_own_model(Job(model=section))


CONFIGURATION = """
from transformers import PreTrainedConfig


class ToyConfig(PreTrainedConfig):
    model_type = "toy_of_a_test"

    def __init__(self, vocab_size=257, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                 max_position_embeddings=64, **rest):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**rest)
"""

MODELING = """
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_toy import ToyConfig


class ToyBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class ToyForCausalLM(PreTrainedModel):
    config_class = ToyConfig
    base_model_prefix = "model"
    _no_split_modules = ["ToyBlock"]

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(ToyBlock(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, use_cache=None, **rest):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.lm_head(x))
"""


def write_model_with_code(folder: Path) -> Path:
    """The folder, without weights: a job takes `model.weights: random`."""
    folder.mkdir(parents=True)
    (folder / "configuration_toy.py").write_text(CONFIGURATION, encoding="utf-8")
    (folder / "modeling_toy.py").write_text(MODELING, encoding="utf-8")
    document = {
        "model_type": "toy_of_a_test",
        "architectures": ["ToyForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_toy.ToyConfig",
            "AutoModelForCausalLM": "modeling_toy.ToyForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


RAN = "ran.txt"


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of the module: Python keeps the place of the package that transformers makes there."""
    folder = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        patch.syspath_prepend(folder)
        yield


@pytest.fixture
def folder(tmp_path: Path, own_cache: None) -> Path:
    """A model with code that leaves a file where it runs."""
    folder = write_model_with_code(tmp_path / "toy")
    for source in folder.glob("*.py"):
        mark = f"\nfrom pathlib import Path\nPath({str(tmp_path / RAN)!r}).touch()\n"
        source.write_text(mark + source.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def code_job(folder: Path, *, weights: str = "random", **model: object) -> Job:
    section = ModelSection(name=str(folder), weights=weights, **model)
    return Job(model=section, data=DataSection(tokenizer="bytes", sequence_length=16))


def test_without_the_switch_one_line_names_it_and_with_it_alone_the_folders_code_runs(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(JobError) as caught:
        model_config(code_job(folder), FACTS)
    assert "\n" not in str(caught.value)
    assert "contains custom code" in str(caught.value)
    assert "model.trust_remote_code: true" in str(caught.value)
    assert not (tmp_path / RAN).exists()
    asked = code_job(folder, trust_remote_code=True)
    assert type(build_model(asked, model_config(asked, FACTS))).__name__ == "ToyForCausalLM"
    assert (tmp_path / RAN).exists()
    with pytest.raises(JobError, match="no encoder and decoder"):
        model_config(asked.model_copy(update={"task": "seq2seq"}), FACTS)


def test_weights_of_the_folder_are_read_by_its_own_class(folder: Path) -> None:
    drawn = code_job(folder, trust_remote_code=True)
    expected = draw_model(drawn, model_config(drawn, FACTS)).state_dict()
    save_file({n: t * 2 for n, t in expected.items()}, folder / "model.safetensors", {"format": "pt"})
    asked = code_job(folder, weights="pretrained", trust_remote_code=True)
    read = draw_model(asked, model_config(asked, FACTS)).state_dict()
    assert all(bool((read[name] == expected[name] * 2).all()) for name in expected)


def test_estimates_obey_the_switch(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"model\.trust_remote_code: true"):
        job_model(code_job(folder))
    with pytest.raises(HarnessError, match="does not run for --model"):
        job_model(code_job(folder, trust_remote_code=True), named=str(folder))
    assert not (tmp_path / RAN).exists()
    planned = job_model(code_job(folder, trust_remote_code=True))
    assert planned.architecture == "ToyForCausalLM"
    with pytest.raises(HarnessError, match="code of the model's folder"):
        workload_profile(None, planned.config, code_job(folder, trust_remote_code=True).model)  # type: ignore[arg-type]
    assert planned.layout.parameter_count == 257 * 16 * 2 + 2 * (2 * 16 * 32 + 48)


def test_the_switch_is_part_of_the_job_only_where_it_is_on_and_needs_a_name(folder: Path) -> None:
    off, on = code_job(folder), code_job(folder, trust_remote_code=True)
    assert off.job_id() != on.job_id()
    assert "trust_remote_code" not in off.model_dump_json()
    assert Job.model_validate_json(on.model_dump_json()).model.trust_remote_code
    with pytest.raises(ValueError, match="needs a `name`"):
        ModelSection(trust_remote_code=True)


def test_a_tokenizer_with_code_is_refused_without_a_question(folder: Path, tmp_path: Path) -> None:
    mapped = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["modeling_toy.T", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(mapped), encoding="utf-8")
    own = Job(model=ModelSection(name=str(folder)))
    with pytest.raises(JobError, match=r"model\.trust_remote_code: true"):
        tokenizer_of(own)
    other = Job(data=DataSection(tokenizer=str(folder)))
    with pytest.raises(JobError, match=r"^data\.tokenizer '.*model's own tokenizer only"):
        tokenizer_of(other)
    assert not (tmp_path / RAN).exists()
