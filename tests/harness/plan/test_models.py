"""The catalogue's models: published sizes, spellings, and what goes wrong around `--model`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.job.job import Job
from harness.plan.architectures import as_known_type
from harness.plan.catalogue import read_entries
from harness.plan.models import catalogue_names, find_entry, from_config, load_model, model_settings
from harness.plan.scenario import job_model
from harness.rank.data.documents import ByteTokenizer

UNITS = {"M": 1e6, "B": 1e9}


@pytest.mark.parametrize("name", catalogue_names())
def test_parameters_are_as_many_as_published(name: str) -> None:
    published = find_entry(name)[1]["published"]
    count = load_model(name).parameters
    if isinstance(published, int):
        assert count == published
    else:
        digits = len(published[:-1].partition(".")[2])
        assert round(count / UNITS[published[-1]], digits) == float(published[:-1])


def test_every_model_names_the_source_of_its_size() -> None:
    assert len(catalogue_names()) >= 40
    assert all(find_entry(name)[1]["source"] for name in catalogue_names())


def test_no_spelling_stands_for_two_models() -> None:
    spellings = [
        spelling.lower()
        for name, entry in read_entries("models").items()
        for spelling in {
            name.lower(),
            *(alias.lower() for alias in entry.get("aliases", ())),
            _hub(entry, name),
        }
    ]
    assert len(spellings) == len(set(spellings))


def _hub(entry: dict[str, str], name: str) -> str:
    return entry.get("hub", name).lower()


@pytest.mark.parametrize("text", ["meta-llama/Llama-3.1-8B", "LLAMA-3.1-8b", "llama3.1-8b", " Llama-3.1-8B "])
def test_a_model_has_a_name_aliases_and_a_hub_id(text: str) -> None:
    model = load_model(text)
    assert model.name == "Llama-3.1-8B"
    assert model.parameters == 8_030_261_248
    assert model.config["num_key_value_heads"] == 8


def test_settings_of_its_configuration_change_a_named_model_as_they_change_that_of_a_run() -> None:
    given = ("model.config.num_hidden_layers=4", "training.steps=8")
    run = load_experiment(None, (*model_settings("llama-3.1-8b"), *given)).job()
    assert load_model("llama-3.1-8b", assignments=given).layout == job_model(run).layout
    assert load_model("llama-3.1-8b", assignments=given).layers == 4
    assert load_model("llama-3.1-8b", assignments=given[1:]) == load_model("llama-3.1-8b")


def test_405_billion_parameters_need_no_torch() -> None:
    script = (
        "import sys; from harness.plan.models import load_model; m = load_model('llama-3.1-405b');"
        "print(m.parameters, len(m.layout.parameters), sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "405853388800 1137 []"


def test_unknown_name_shows_the_closest() -> None:
    with pytest.raises(HarnessError, match=r"model 'llama-3\.1-80b' is neither .* 'llama-3\.1-8b'"):
        load_model("llama-3.1-80b")


@pytest.mark.parametrize(
    ("text", "parameters", "active"),
    [
        ("mixtral", 46_702_792_704, 12_879_925_248),
        ("mistralai/Mixtral-8x22B-v0.1", 140_620_634_112, 39_152_031_744),
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
    ],
)
def test_a_token_passes_few_of_a_mixture_s_parameters(text: str, parameters: int, active: int) -> None:
    model = load_model(text)
    assert (model.parameters, model.active_parameters) == (parameters, active)
    assert model.counted == f"{parameters:,} parameters, {active:,} of them active"
    assert load_model("gpt2").counted == "124,439,808 parameters"


def test_other_mixtures_of_experts_are_not_covered(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "deepseek_v3", "n_routed_experts": 256}))
    with pytest.raises(HarnessError, match="of type deepseek_v3; of mixtures, types mixtral and qwen3_moe"):
        load_model(str(file))
    some = {"model_type": "qwen3_moe", "decoder_sparse_step": 2}
    with pytest.raises(HarnessError, match="blocks without experts among those with experts"):
        from_config(some, name="some", source="some", given_whole=False)


def small_llama() -> dict[str, object]:
    return {
        "model_type": "llama", "vocab_size": 97, "hidden_size": 16, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4,
    }  # fmt: skip


def test_a_folder_and_a_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_llama()))
    (tmp_path / "model.yaml").write_text("\n".join(f"{k}: {v}" for k, v in small_llama().items()))
    from_folder, from_file = load_model(str(tmp_path)), load_model(str(tmp_path / "model.yaml"))
    assert from_folder.name == tmp_path.name
    assert from_folder.layout == from_file.layout
    assert from_folder.parameters == 2 * 97 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 40 + 2 * 16) + 16


QWEN_7B = {
    "model_type": "qwen", "auto_map": {"AutoConfig": "configuration_qwen.QWenConfig"}, "hidden_size": 4096,
    "intermediate_size": 22016, "kv_channels": 128, "layer_norm_epsilon": 1e-06, "no_bias": True,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "seq_length": 8192,
    "tie_word_embeddings": False, "vocab_size": 151936,
}  # fmt: skip
INTERNLM2_7B = {
    "model_type": "internlm2", "auto_map": {}, "bias": False, "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "vocab_size": 92544,
}  # fmt: skip
BAICHUAN2_13B = {
    "model_type": "baichuan", "auto_map": {}, "hidden_size": 5120, "intermediate_size": 13696,
    "model_max_length": 4096, "num_attention_heads": 40, "num_hidden_layers": 40, "vocab_size": 125696,
}  # fmt: skip
CHATGLM3_6B = {
    "model_type": "chatglm", "auto_map": {}, "add_bias_linear": False, "add_qkv_bias": True, "rmsnorm": True,
    "ffn_hidden_size": 13696, "hidden_size": 4096, "kv_channels": 128, "multi_query_attention": True,
    "multi_query_group_num": 2, "num_attention_heads": 32, "num_layers": 28, "padded_vocab_size": 65024,
    "seq_length": 8192, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters", "context"),
    [
        (QWEN_7B, 7_721_324_544, 32768),
        (INTERNLM2_7B, 7_737_708_544, 32768),
        (BAICHUAN2_13B, 13_896_668_160, 4096),
        (CHATGLM3_6B, 6_243_584_000, 8192),
    ],
)
def test_a_model_with_its_own_code_is_read_as_the_known_type_with_its_tensors(
    config: dict[str, object], parameters: int, context: int, tmp_path: Path
) -> None:
    """Parameters of the published weights."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_model(str(tmp_path))
    assert (found.parameters, found.config["max_position_embeddings"]) == (parameters, context)
    assert f"{config['model_type']} with the code of {found.config['model_type']} in tr" in found.source
    run = dict(text.split("=", 1) for text in model_settings(str(tmp_path)))
    assert (run["model.name"], run["model.trust_remote_code"]) == ("null", "false")
    assert load_model_of(json.loads(run["model.config"])) == found.layout


def load_model_of(config: dict[str, object]) -> object:
    return from_config(config, name="run", source="model.config", given_whole=False).layout


def test_qwen_1_is_the_entry_of_the_catalogue(tmp_path: Path) -> None:
    file = tmp_path / "qwen.json"
    file.write_text(json.dumps(QWEN_7B))
    assert load_model(str(file)).layout == load_model("Qwen/Qwen-7B").layout


@pytest.mark.parametrize(
    "config",
    [QWEN_7B | {"no_bias": False}, QWEN_7B | {"kv_channels": 64}, CHATGLM3_6B | {"add_bias_linear": True}],
)
def test_own_code_without_a_counterpart_is_not_guessed(config: dict[str, object]) -> None:
    assert as_known_type(config) is None


def test_a_path_that_is_not_there_is_shown_with_the_folder_it_was_looked_up_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HarnessError, match=f"nor a folder or file in {tmp_path}"):
        load_model("models/mine")
    for text in ("/models/mine", "lama"):
        with pytest.raises(HarnessError, match=r"nor a folder or file\. "):
            load_model(text)


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"has no config\.json"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size', which a llama needs"),
        ({"model_type": None}, "lacks 'model_type'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' was given 0; it must be a whole number"),
        ({"vocab_size": "many"}, "'vocab_size' was given 'many'; it must be a whole number"),
    ],
)
def test_a_configuration_without_a_needed_value_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(HarnessError, match=message):
        from_config(small_llama() | change, name="mine", source="config.json")


def test_text_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(HarnessError, match=r"is not valid JSON, line 1"):
        load_model(str(file))
    file.write_text("[1]")
    with pytest.raises(HarnessError, match="holds no mapping"):
        load_model(str(file))


def test_a_type_without_a_closed_form_is_built_on_the_meta_device() -> None:
    config = {
        "model_type": "gptj", "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8,
        "n_positions": 64,
    }  # fmt: skip
    model = from_config(config, name="mine", source="config.json")
    assert model.architecture == "GPTJForCausalLM"
    assert (model.layers, model.attention_width) == (2, 32)
    assert model.parameters == sum(t.numel for t in model.layout.parameters) > 0


def test_a_type_that_transformers_does_not_know_is_named() -> None:
    with pytest.raises(
        HarnessError, match=r"model_type 'lama' is unknown to transformers\. Did you mean 'llama'"
    ):
        from_config({"model_type": "lama"}, name="mine", source="config.json")


def test_the_default_job_has_its_small_llama() -> None:
    rows = ByteTokenizer.vocabulary_size
    model = job_model(Job.model_validate({"model": {"config": {"num_hidden_layers": 2}}}))
    assert model.parameters == 2 * rows * 128 + 2 * (4 * 128**2 + 3 * 128 * 352 + 256) + 128


def test_a_tokenizer_whose_vocabulary_is_not_known_needs_one() -> None:
    with pytest.raises(
        HarnessError, match=r"model\.config needs vocab_size: only the tokenizer 'mine' knows it"
    ):
        job_model(Job.model_validate({"data": {"tokenizer": "mine"}}))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("meta-llama/Llama-2-7B", "llama-2-7b"),
        ("NousResearch/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("META-LLAMA/LLAMA-3.1-405B-INSTRUCT", "llama-3.1-405b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
    ],
)
def test_a_model_is_found_by_the_spellings_of_the_hub(text: str, name: str) -> None:
    assert find_entry(text)[0].lower() == name


def test_what_decides_shapes_is_no_other_spelling() -> None:
    for text in ("meta-llama/Llama-2-8b", "mistralai/Mistral-7B-v9.9", "meta-llama/Llama-Guard-3-8B"):
        with pytest.raises(HarnessError, match="neither in the catalogue"):
            find_entry(text)
