"""The catalogue's models: published sizes, spellings, and what goes wrong around `--model`."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.cli.options import load_job
from harness.errors import HarnessError
from harness.forms.layout import Attention
from harness.forms.pipeline import bubble_share
from harness.job.config import load_experiment
from harness.job.job import Job, OptimizerSection
from harness.plan.catalogue import read_entries
from harness.plan.model import PlannedModel, decoder, heads_of, local_config, part_of
from harness.plan.models import (
    ARCHITECTURES,
    as_known_type,
    catalogue_names,
    find_entry,
    from_config,
    load_model,
    model_settings,
)
from harness.plan.prediction import predict_memory
from harness.plan.scenario import job_model
from harness.plan.step_time import predict_speed
from harness.rank.data import ByteTokenizer
from harness.rank.models.description import describe_geometry, describe_layout, is_decoder
from harness.rank.models.optimizer import update_groups
from harness.record import GeometryPart
from tests.harness.plan.plans import llama, scenario

pytestmark = pytest.mark.long(seconds=12)
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


def test_every_model_names_the_source_of_its_size_and_no_spelling_stands_for_two() -> None:
    assert len(catalogue_names()) >= 40
    assert all(find_entry(name)[1]["source"] for name in catalogue_names())
    spellings = [
        spelling
        for name, entry in read_entries("models").items()
        for spelling in {one.lower() for one in (name, *entry.get("aliases", ()), entry.get("hub", name))}
    ]
    assert len(spellings) == len(set(spellings))
    model = load_model(" Llama-3.1-8B ")
    assert (model.name, model.parameters) == ("Llama-3.1-8B", 8_030_261_248)
    assert model.config["num_key_value_heads"] == 8


def test_settings_of_its_configuration_change_a_named_model_as_they_change_that_of_a_run() -> None:
    given = ("model.config.num_hidden_layers=4", "training.steps=8")
    run = load_experiment(None, (*model_settings("llama-3.1-8b"), *given)).job()
    assert load_model("llama-3.1-8b", assignments=given).layout == job_model(run).layout
    assert load_model("llama-3.1-8b", assignments=given).layers == 4
    assert load_model("llama-3.1-8b", assignments=given[1:]) == load_model("llama-3.1-8b")


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


def small_llama() -> dict[str, object]:
    return {
        "model_type": "llama", "vocab_size": 97, "hidden_size": 16, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4,
    }  # fmt: skip


def test_a_folder_and_a_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_llama()))
    (tmp_path / "model.yaml").write_text("\n".join(f"{k}: {v}" for k, v in small_llama().items()))
    from_folder, from_file = load_model(str(tmp_path)), load_model(str(tmp_path / "model.yaml"))
    assert (from_folder.name, from_folder.layout) == (tmp_path.name, from_file.layout)
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
        (QWEN_7B, 7_721_324_544, 32768), (INTERNLM2_7B, 7_737_708_544, 32768),
        (BAICHUAN2_13B, 13_896_668_160, 4096), (CHATGLM3_6B, 6_243_584_000, 8192),
    ],
)  # fmt: skip
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
    again = from_config(json.loads(run["model.config"]), name="run", source="model.config", given_whole=False)
    assert again.layout == found.layout


@pytest.mark.parametrize(
    "config",
    [QWEN_7B | {"no_bias": False}, QWEN_7B | {"kv_channels": 64}, CHATGLM3_6B | {"add_bias_linear": True}],
)
def test_own_code_without_a_counterpart_is_not_guessed(config: dict[str, object]) -> None:
    assert as_known_type(config) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama-3.1-80b", r"model 'llama-3\.1-80b' is neither .* 'llama-3\.1-8b'"),
        ("models/mine", "nor a folder or file in HERE"), ("/models/mine", r"nor a folder or file\. "),
        ("lama", r"nor a folder or file\. "), (".", r"has no config\.json"),
        ("mixture.json", "of type deepseek_v3; of mixtures, types mixtral and qwen3_moe"),
        ("cut.json", "is not valid JSON, line 1"), ("list.json", "holds no mapping"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_refused_with_what_is_near_or_wrong(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mixture = json.dumps({"model_type": "deepseek_v3", "n_routed_experts": 256})
    for name, content in (("mixture", mixture), ("cut", "{"), ("list", "[1]")):
        Path(f"{name}.json").write_text(content)
    with pytest.raises(HarnessError, match=message.replace("HERE", str(tmp_path))):
        load_model(text)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (small_llama() | {"hidden_size": None}, "lacks 'hidden_size', which a llama needs"),
        (small_llama() | {"model_type": None}, "lacks 'model_type'"),
        (small_llama() | {"num_hidden_layers": 0}, "'num_hidden_layers' was given 0; it must be a whole"),
        (small_llama() | {"vocab_size": "many"}, "'vocab_size' was given 'many'; it must be a whole number"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2, "num_experts": 4},
         "blocks without experts among those with experts"),
        ({"model_type": "lama"}, r"'lama' is unknown to transformers\. Did you mean 'llama'"),
    ],
)  # fmt: skip
def test_a_configuration_that_is_none_is_refused(config: dict[str, object], message: str) -> None:
    whole = config.get("model_type") != "qwen3_moe"
    with pytest.raises(HarnessError, match=message):
        from_config(config, name="mine", source="config.json", given_whole=whole)


def test_a_type_without_a_closed_form_is_built_on_the_meta_device() -> None:
    config = {
        "model_type": "gptj", "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8,
        "n_positions": 64,
    }  # fmt: skip
    model = from_config(config, name="mine", source="config.json")
    assert (model.architecture, model.layers, model.attention_width) == ("GPTJForCausalLM", 2, 32)
    assert model.parameters == sum(t.numel for t in model.layout.parameters) > 0


def test_the_default_job_has_its_small_llama_and_an_own_tokenizer_needs_a_vocabulary() -> None:
    rows = ByteTokenizer.vocabulary_size
    model = job_model(Job.model_validate({"model": {"config": {"num_hidden_layers": 2}}}))
    assert model.parameters == 2 * rows * 128 + 2 * (4 * 128**2 + 3 * 128 * 352 + 256) + 128
    with pytest.raises(HarnessError, match=r"needs vocab_size: only the tokenizer 'mine' knows it"):
        job_model(Job.model_validate({"data": {"tokenizer": "mine"}}))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("meta-llama/Llama-2-7B", "llama-2-7b"), ("LLAMA-3.1-8b", "llama-3.1-8b"),
        ("llama3.1-8b", "llama-3.1-8b"), ("NousResearch/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("META-LLAMA/LLAMA-3.1-405B-INSTRUCT", "llama-3.1-405b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        # What decides shapes is no other spelling.
        ("meta-llama/Llama-2-8b", None), ("mistralai/Mistral-7B-v9.9", None),
        ("meta-llama/Llama-Guard-3-8B", None), ("7B", None),
    ],
)  # fmt: skip
def test_a_model_is_found_by_the_spellings_of_the_hub(text: str, name: str | None) -> None:
    if name is None:
        with pytest.raises(HarnessError, match=r"neither in the catalogue.*Did you mean"):
            find_entry(text)
    else:
        assert find_entry(text)[0].lower() == name


def test_every_weight_of_the_blocks_is_a_product() -> None:
    model = decoder(llama(4096, 2, 11008))
    assert sum(m.rows * m.columns * m.count for m in model.matrices) == 2 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert [(m.rows, m.columns, m.count) for m in model.last] == [(4096, 11008, 2)]
    # The last norm counts among what multiplies.
    assert model.head_rows == 32000 + 1


@pytest.mark.parametrize("name", ["gpt2", "bloom-560m", "llama-2-7b", "qwen2.5-7b", "opt-1.3b", "pythia-1b"])
def test_models_of_the_catalogue_have_a_geometry(name: str) -> None:
    planned = load_model(name)
    model = decoder(planned)
    multiplied = sum(m.rows * m.columns * m.count for m in model.matrices) + model.head_rows * model.hidden
    assert multiplied == pytest.approx(planned.multiplying_parameters, rel=0.01)
    assert model.layers == len(planned.layout.blocks)


def test_rms_norms_move_more_than_layer_norms_and_a_gelu_in_several_kernels_more_than_one() -> None:
    opt, llama_like = decoder(load_model("opt-1.3b")), decoder(load_model("llama-2-7b"))
    assert opt.traffic.forward / opt.hidden < 20 < llama_like.traffic.forward / llama_like.hidden
    model = load_model("gpt2")
    fused = replace(model, config={**model.config, "activation_function": "gelu"})
    difference = decoder(model).traffic.forward - decoder(fused).traffic.forward
    assert difference == (19 - 2) * 4 * 768


def test_compiled_code_reads_and_writes_between_products_what_it_must() -> None:
    fused = decoder(llama(4096, 2, 11008)).compiled_traffic
    assert fused.forward == 8 * 4096 + 2 * (2 * 4096) + 3 * 11008
    assert fused.backward == 11 * 4096 + 2 * (2 * 4096) + 5 * 11008
    plain = decoder(load_model("opt-1.3b")).compiled_traffic
    assert plain.forward == (8 + 2 * 4) * 2048


def test_a_run_takes_a_configuration_without_the_hub_or_a_folder_with_random_weights(tmp_path: Path) -> None:
    named = load_experiment(None, model_settings("llama-3.1-8b")).model
    assert named.name is None
    assert (named.config["model_type"], named.config["hidden_size"]) == ("llama", 4096)
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(small_llama()))
    of_file = load_experiment(None, model_settings(str(file))).model
    assert small_llama().items() <= of_file.config.items()
    folder = load_experiment(None, model_settings(str(tmp_path))).model
    assert (folder.name, folder.weights) == (str(tmp_path), "random")


def test_the_model_replaces_the_one_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: {name: gpt2, attention: eager}\ndata: {sequence_length: 64}\n")
    job = load_job(file, ("data.limit=8",), "llama-3.2-1b")
    assert job.model.name is None
    assert (job.model.config["hidden_size"], job.model.attention) == (2048, "eager")
    assert (job.data.sequence_length, job.data.limit) == (64, 8)
    assert load_job(file, (), None).model.name == "gpt2"


@pytest.mark.parametrize(
    "own",
    [
        "{name: gpt2, weights: pretrained, revision: main}",
        "{name: gpt2, trust_remote_code: true}",
        "{factory: 'own_model:model', arguments: {width: 32}, block_class: Block}",
    ],
)
def test_nothing_of_where_the_replaced_model_came_from_is_left(own: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"model: {own}\n")
    assert load_job(file, (), "gpt2").model == load_job(None, (), "gpt2").model
    assert load_job(file, (), str(tmp_path)).model == load_job(None, (), str(tmp_path)).model


def test_cut_layers_have_a_part_of_every_product_and_whole_hidden_states() -> None:
    given = scenario("tp", 4)
    part = decoder(part_of(given.model, given.workload()))
    whole = decoder(given.model)
    assert part.hidden == whole.hidden
    assert part.attention_width == whole.attention_width // 4
    assert part.head_rows == pytest.approx(whole.head_rows / 4, rel=1e-3)
    products = sum(m.rows * m.columns * m.count for m in part.matrices)
    assert products == sum(m.rows * m.columns * m.count for m in whole.matrices) // 4


def test_the_stages_of_a_pipeline_make_the_model() -> None:
    given = scenario("pp", 4, micro_batch_size=4)
    parts = [part_of(given.model, given.workload(rank)) for rank in given.unlike_ranks]
    assert sum(part.layers for part in parts) == given.model.layers
    assert sum(part.parameters for part in parts) == given.model.parameters
    assert sum(part.multiplying_parameters for part in parts) == given.model.multiplying_parameters


def test_a_configuration_is_cut_by_heads_and_channels() -> None:
    config = local_config(load_model("llama-3.1-8b").config, 8)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 1, 128)
    assert (config["hidden_size"], config["intermediate_size"]) == (4096, 1792)
    with pytest.raises(HarnessError, match="llama, mistral, qwen2, not for gpt2"):
        local_config(load_model("gpt2").config, 2)


def test_the_bubble_is_a_share_of_the_passes() -> None:
    speed = predict_speed(scenario("pp", 4, micro_batch_size=8, options={"micro_batches": 8}))
    bubble = next(term.seconds for term in speed.computing if term.name == "bubble")
    updated = ("optimizer step", "bubble")
    passes = sum(term.seconds for term in speed.computing if term.name not in updated)
    assert bubble / (bubble + passes) == pytest.approx(bubble_share(ranks=4, micro_batches=8), rel=1e-6)


def test_a_pipeline_waits_for_its_messages_between_nodes_although_its_first_stages_share_one() -> None:
    given = scenario("pp", 64, micro_batch_size=16, options={"stages": 16, "micro_batches": 16})
    given = replace(given, label="pp:micro_batches=16,stages=16")
    assert [rank // 8 for rank in given.mesh.group("pipeline", 0)][:3] == [0, 0, 1]
    slow = replace(given, fabric=replace(given.fabric, bandwidth_per_gpu=1e9))
    sent = [t for t in predict_speed(slow).communication if t.name.startswith("activations sent")]
    assert all("between nodes" in term.name for term in sent)
    assert predict_speed(slow).step_seconds > predict_speed(given).step_seconds


def test_ranks_that_share_samples_wait_for_each_other_and_count_tokens_once() -> None:
    speed = predict_speed(scenario("tp", 4))
    assert speed.tokens_per_second_per_gpu * speed.step_seconds == pytest.approx(2 * 4096 / 4)
    assert speed.exposed_seconds == pytest.approx(speed.communication_seconds)


def test_autotp_cuts_no_embedding_and_halves_an_output_layer_of_its_own() -> None:
    given = scenario("autotp-zero1", 4)
    part, whole = part_of(given.model, given.workload()), given.model
    sizes = {t.name: t.numel for t in part.layout.parameters}
    before = {t.name: t.numel for t in whole.layout.parameters}
    assert sizes["model.embed_tokens.weight"] == before["model.embed_tokens.weight"]
    assert 2 * sizes["lm_head.weight"] == before["lm_head.weight"]
    assert decoder(part).head_rows == pytest.approx(decoder(whole).head_rows / 2, rel=1e-3)
    assert part.layout.parameter_count - part.multiplying_parameters == sizes["model.embed_tokens.weight"]


def test_autotp_under_stage_3_keeps_what_it_gathers_for_cut_layers_until_the_backward_pass() -> None:
    def kept(**changes: bool) -> int:
        of_public = replace(
            scenario("autotp-zero3", 8, preset="like-for-like", **changes), model=load_model("llama-3.1-8b")
        )
        (forward, *_) = predict_memory(of_public).moments
        return sum(term.bytes for term in forward.terms if "of cut layers" in term.name)

    model = load_model("llama-3.1-8b").layout
    cut = model.parameter_count - sum(
        t.numel for t in model.parameters if "norm" in t.name or "embed_tokens" in t.name
    )
    assert kept() == pytest.approx(2 * cut / 2, rel=0.07)
    (head,) = (t for t in model.parameters if t.name == "lm_head.weight")
    assert kept(activation_checkpointing=True) == 2 * head.numel // 2


VARIANTS: list[dict[str, Any]] = [
    {"model_type": "llama", "mlp_bias": True, "attention_bias": True, "num_key_value_heads": 2},
    {"model_type": "mistral", "tie_word_embeddings": True, "num_key_value_heads": 2},
    {"model_type": "qwen3", "attention_bias": True, "num_key_value_heads": 2},
    {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 1, "num_key_value_heads": 2},
    {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    {"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window_pattern": 2},
    {"model_type": "phi", "qk_layernorm": True},
    {"model_type": "phi3", "num_key_value_heads": 2, "pad_token_id": 0},
    {"model_type": "stablelm", "use_qkv_bias": True, "use_parallel_residual": True},
    {"model_type": "falcon", "ffn_hidden_size": 80, "new_decoder_architecture": True, "num_kv_heads": 2},
    {"model_type": "gpt2", "n_inner": 100, "tie_word_embeddings": False},
    {"model_type": "gpt_bigcode", "multi_query": False},
    {"model_type": "opt", "enable_bias": False, "word_embed_proj_dim": 32},
    {"model_type": "falcon", "parallel_attn": False, "bias": True, "multi_query": False},
    {"model_type": "falcon", "num_ln_in_parallel_attn": 1, "new_decoder_architecture": True},
    {"model_type": "gpt_neox", "attention_bias": False, "rotary_pct": 0.5},
    {"model_type": "t5", "feed_forward_proj": "gated-gelu", "num_decoder_layers": 1},
]  # fmt: skip
SMALL = {
    "vocab_size": 64, "hidden_size": 64, "d_model": 64, "n_embd": 64, "intermediate_size": 96, "ffn_dim": 96,
    "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "num_attention_heads": 4, "n_head": 4,
    "num_heads": 4, "d_ff": 96, "d_kv": 16, "n_positions": 32, "max_position_embeddings": 32,
}  # fmt: skip
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def built(config: Mapping[str, Any]) -> Any:
    """The model that transformers makes of a configuration."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, BertModel, T5ForConditionalGeneration

    values = dict(config)
    model_type = values.pop("model_type")
    of_type = {"bert": BertModel, "t5": T5ForConditionalGeneration}.get(model_type)
    with torch.device("meta"):
        settings = CONFIG_MAPPING[model_type](**values)
        return of_type(settings) if of_type else AutoModelForCausalLM.from_config(settings)


def assert_equal(planned: PlannedModel, model: Any) -> None:
    layout = describe_layout(model, update_groups(model, OptimizerSection()))
    ours, geometry = planned.layout, describe_geometry(model)
    assert planned.architecture == type(model).__name__
    assert ours.parameters == layout.parameters
    assert {*ours.buffers} == {*layout.buffers}
    assert ours.blocks == layout.blocks
    assert ours.tied == layout.tied
    assert ours.decaying == layout.decaying
    if geometry is None and planned.idle_parameters:
        geometry = geometry_of_mixture(model)
    if geometry is None:  # an encoder, whose floating-point operations have no closed form
        assert not is_decoder(type(model).__name__)
        geometry = geometry_of_encoder(model)
    assert planned.multiplying_parameters == geometry.multiplying_parameters
    assert (planned.layers, planned.attention_width) == (geometry.layers, geometry.attention_width)


def geometry_of_mixture(model: Any) -> GeometryPart:
    """From its modules: what a token passes, the width of what its queries make."""
    config = model.config
    experts = {id(p): p for m in model.modules() if hasattr(m, "gate_up_proj") for p in m.parameters()}
    idle = sum(p.numel() * (p.shape[0] - config.num_experts_per_tok) // p.shape[0] for p in experts.values())
    looked_up = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    queries = (m for name, m in model.named_modules() if name.endswith(".q_proj"))
    return GeometryPart(
        multiplying_parameters=sum(p.numel() for p in model.parameters()) - looked_up - idle,
        layers=config.num_hidden_layers,
        attention_width=next(queries).out_features,
    )


def geometry_of_encoder(model: Any) -> GeometryPart:
    """From its modules: the layers of its encoder, the width of what their queries make.

    An embedding multiplies if the output has its weight, too.
    """
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    looked_up = sum(weight.numel() for key, weight in tables.items() if key not in linear)
    encoder = model.get_encoder() if hasattr(model, "shared") else model.encoder
    (layers,) = (child for child in encoder.children() if isinstance(child, nn.ModuleList) and len(child))
    queries = (m for name, m in layers.named_modules() if name.endswith((".query", ".SelfAttention.q")))
    return GeometryPart(
        multiplying_parameters=sum(p.numel() for p in model.parameters()) - looked_up,
        layers=len(layers),
        attention_width=next(queries).out_features,
    )


@pytest.mark.parametrize("name", catalogue_names())
def test_a_model_of_the_catalogue_has_the_tensors_that_transformers_builds(name: str) -> None:
    """With up to seven layers, which Gemma 3 needs to have both kinds of attention; the rest repeat."""
    config = dict(find_entry(name)[1]["config"])
    for key in LAYERS:
        if key in config:
            config[key] = min(config[key], 7)
    assert_equal(from_config(config, name=name, source=name), built(config))


@pytest.mark.parametrize("config", VARIANTS, ids=lambda config: f"{config['model_type']}-{list(config)[1]}")
def test_variants_have_the_tensors_that_transformers_builds(config: dict[str, Any]) -> None:
    allowed = ARCHITECTURES[config["model_type"]]
    sizes = {key: value for key, value in SMALL.items() if key in allowed.required}
    complete = sizes | config
    assert_equal(from_config(complete, name="variant", source="variant", given_whole=False), built(complete))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    config = {"model_type": model_type}
    assert_equal(from_config(config, name="default", source="default", given_whole=False), built(config))


def test_heads_are_read_from_a_configuration() -> None:
    config = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    assert heads_of(config) == Attention(layers=3, heads=8, key_value_heads=2, head_size=8)
    equal = Attention(layers=2, heads=4, key_value_heads=4, head_size=8)
    assert heads_of({"n_layer": 2, "n_head": 4, "n_embd": 32}) == equal
    assert heads_of({"n_layer": 2}) is None
