import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from harness.errors import HarnessError
from harness.imported.reading import KEYS, LIBRARY, SECTIONS, deepspeed_values, with_defaults
from harness.imported.rows import OF_THE_LAUNCHER, GivenRow, exactly_as_given, like_for_like, read_files
from harness.job.config import load_experiment
from harness.nested import leaves
from harness.tell.sections.job import summary
from tests.harness.imported.files import PLUGIN, accelerate, every_file

FILES = every_file()
PURE = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def write(folder: Path, name: str, kind: str, document: dict[str, Any]) -> Path:
    path = folder / f"{name}.{'json' if kind == 'deepspeed' else 'yaml'}"
    if kind == "deepspeed":
        path.write_text(json.dumps(document))
    else:
        YAML(typ="safe", pure=True).dump(document, path)
    return path


def rows_of(
    folder: Path, kind: str, document: dict[str, Any], *assignments: str, name: str = "file"
) -> tuple[GivenRow, GivenRow]:
    """The row like for like and the one exactly as given."""
    path = write(folder, name, kind, document)
    files = read_files([path], []) if kind == "accelerate" else read_files([], [path])
    experiment = load_experiment(None, assignments)
    return like_for_like(files, experiment)[1][0], exactly_as_given(files[0], experiment)


def handled(row: GivenRow) -> dict[str, tuple[str, Any]]:
    return {setting.key: (setting.handling, setting.used) for setting in row.part.settings}


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_accounted_for(name: str, tmp_path: Path) -> None:
    kind, document = FILES[name]
    keys = {".".join(parts) for parts, _ in leaves(document)}
    for row in rows_of(tmp_path, kind, document):
        assert keys <= set(handled(row))
        for setting in row.part.settings:
            assert setting.handling == "taken" or setting.reason


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("fsdp1-full-shard", "fsdp1"),
        ("fsdp1-number", "fsdp1-grad-op:backward_prefetch=post"),
        ("fsdp1-by-reshard", "fsdp1:backward_prefetch=none,forward_prefetch=True"),
        ("fsdp1-offload", "fsdp1-grad-op:backward_prefetch=none,offload=cpu"),
        ("fsdp1-hybrid", "fsdp1-hybrid-grad-op:backward_prefetch=none"),
        ("fsdp1-no-shard", "fsdp1-no-shard:backward_prefetch=none"),
        ("fsdp2-keep", "fsdp-grad-op"),
        ("fsdp2-offload", "fsdp:offload=cpu"),
        ("plugin-stage-2-offload", "zero2:offload=optimizer"),
        ("plugin-stage-3-offload", "zero3:offload=cpu"),
        ("plugin-default-stage", "zero2"),
        ("deepspeed-stage-1", "zero1:overlap_comm=True"),
        ("deepspeed-stage-3-offload", "zero3:memory_efficient_linear=False,offload=cpu"),
    ],
)
def test_backend_and_its_options(name: str, label: str, tmp_path: Path) -> None:
    row, _ = rows_of(tmp_path, *FILES[name], name="mine")
    backend, _, options = row.label.partition(":")
    given = [option for option in options.split(",") if not option.startswith("row=")]
    assert ":".join([backend, *filter(None, [",".join(given)])]) == label
    assert "row=mine" in options


@pytest.mark.parametrize(
    ("kind", "document", "keys"),
    [
        ("deepspeed", {"zero_optimization": {"stage": 0, "overlap_comm": True, "reduce_bucket_size": 7}},
         ["zero_optimization.overlap_comm", "zero_optimization.reduce_bucket_size"]),
        ("deepspeed", {"zero_optimization": {"stage": 3, "allgather_bucket_size": 7}},
         ["zero_optimization.allgather_bucket_size"]),
        ("deepspeed", {"zero_optimization": {"stage": 2, "zero_quantized_weights": True}},
         ["zero_optimization.zero_quantized_weights"]),
        ("deepspeed", {"zero_optimization": {"stage": 1}, "gradient_predivide_factor": 4},
         ["gradient_predivide_factor"]),
        ("deepspeed", {"zero_optimization": {"stage": 0}, "prescale_gradients": True,
                       "gradient_predivide_factor": 4}, ["gradient_predivide_factor"]),
        ("deepspeed", {"bf16": {"enabled": True}, "fp16": {"enabled": False, "hysteresis": 4}},
         ["fp16.hysteresis"]),
        ("deepspeed", {"fp16": {"enabled": True}, "bf16": {"enabled": False, "check_grad_overflow": False}},
         ["bf16.check_grad_overflow"]),
        ("accelerate", {"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_min_num_params": 5}},
         ["fsdp_config.fsdp_min_num_params"]),
        ("accelerate", {"distributed_type": "FSDP", "deepspeed_config": {"zero_stage": 3}},
         ["deepspeed_config.zero_stage"]),
        ("accelerate",
         accelerate("fsdp2", {"fsdp_sharding_strategy": "NO_SHARD", "fsdp_forward_prefetch": True}),
         ["fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_forward_prefetch"]),
    ],
)  # fmt: skip
def test_what_the_library_does_not_read_has_no_effect(
    kind: str, document: dict[str, Any], keys: list[str], tmp_path: Path
) -> None:
    for row in rows_of(tmp_path, kind, document):
        assert {handled(row)[key] for key in keys} == {("pinned", None)}
        assert not {key.rpartition(".")[2] for key in keys} & set(re.findall(r"\w+", row.label))


def test_dtypes_of_the_file_are_those_of_the_row_as_given(tmp_path: Path) -> None:
    dtypes = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "float32"}}
    document = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, **dtypes}
    like, exact = rows_of(tmp_path, "deepspeed", document)
    assert "communication_data_type=fp32,grad_accum_dtype=fp32" in exact.label
    assert handled(exact)["data_types.grad_accum_dtype"] == ("taken", "fp32")
    assert "dtype" not in like.label  # the preset's own
    document["communication_data_type"] = "bf16"
    like, exact = rows_of(tmp_path, "deepspeed", document)
    assert handled(like)["communication_data_type"] == ("pinned", "fp32")
    assert handled(exact)["communication_data_type"] == ("taken", "bf16")
    document["zero_optimization"] = {"stage": 1}
    exact = rows_of(tmp_path, "deepspeed", document)[1]
    assert handled(exact)["data_types.grad_accum_dtype"] == ("pinned", "bf16")
    document["zero_optimization"] = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    exact = rows_of(tmp_path, "deepspeed", document)[1]
    assert handled(exact)["data_types.grad_accum_dtype"] == ("taken", "fp32")
    document["bf16"] = {"enabled": True, **PURE}
    for stage, verdict in ((1, ("pinned", "bf16")), (2, ("taken", "fp32"))):
        document["zero_optimization"] = {"stage": stage}
        exact = rows_of(tmp_path, "deepspeed", document)[1]
        assert handled(exact)["data_types.grad_accum_dtype"] == verdict


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "given", [{"communication_data_type": None}, {"data_types": {"grad_accum_dtype": None}}]
)
def test_null_is_the_default_dtype(given: dict[str, Any], stage: int, tmp_path: Path) -> None:
    document = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}, **given}
    for row in rows_of(tmp_path, "deepspeed", document):
        (key,) = (key for key in handled(row) if key.endswith(("_type", "_dtype")))
        assert handled(row)[key][0] == "taken"
        assert key.rpartition(".")[2] not in row.label


@pytest.mark.parametrize("enabled", [True, False])
def test_bf16_states_without_bf16_masters_are_refused_once(enabled: bool, tmp_path: Path) -> None:
    section = {"enabled": enabled, "bf16_optimizer_states": True}
    text = refusal(tmp_path, "deepspeed", {"zero_optimization": {"stage": 1}, "bf16": section})
    assert "run only together" in text
    assert "(2)" not in text


def test_values_left_to_the_job_are_those_in_force(tmp_path: Path) -> None:
    left = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    document = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": left},
    }
    assignments = ["training.steps=8", "optimizer.learning_rate=0.002"]
    for row in rows_of(tmp_path, "deepspeed", document, *assignments):
        assert row.experiment.schedule.parameters | {"warmup_type": "log"} == {
            "warmup_min_lr": 0, "warmup_max_lr": 0.002, "warmup_num_steps": 2, "total_num_steps": 8,
            "warmup_type": "log",
        }  # fmt: skip
        given = [(s.key.rpartition(".")[2], s.used) for s in row.part.settings if s.given == "auto"]
        assert given == [
            ("lr", 0.002), ("betas", 0.9), ("betas", 0.95), ("warmup_min_lr", 0), ("warmup_max_lr", 0.002),
            ("warmup_num_steps", 2), ("total_num_steps", 8),
        ]  # fmt: skip
        assert "is row zero0: 8 keys taken, 0 pinned, 0 without" in summary("zero0", row.part)
    for nothing in (None, {}):
        for row in rows_of(tmp_path, "deepspeed", document | {"scheduler": nothing}):
            assert row.experiment.schedule.kind != "deepspeed"


def test_job_settings_are_taken_where_the_configuration_is_silent(tmp_path: Path) -> None:
    row, _ = rows_of(tmp_path, *FILES["deepspeed-stage-2-offload"])
    job = row.experiment
    assert (job.optimizer.learning_rate, job.optimizer.beta2, job.optimizer.epsilon) == (2e-5, 0.98, 1e-9)
    assert (job.schedule.scheduler, job.training.steps) == ("WarmupDecayLR", 12)
    assert job.schedule.parameters["warmup_num_steps"] == 3
    assert job.training.gradient_clipping is None  # DeepSpeed writes 0


def test_the_configuration_pins_job_settings_like_for_like_and_the_file_wins_as_given(tmp_path: Path) -> None:
    like, exact = rows_of(
        tmp_path, *FILES["deepspeed-stage-1"], "training.precision=fp32", "training.steps=3"
    )
    assert like.experiment.training.precision == "fp32"
    assert handled(like)["fp16.enabled"] == ("pinned", "fp32")
    assert handled(like)["fp16.initial_scale_power"] == ("pinned", None)
    assert exact.experiment.training.precision == "fp16-mixed"
    assert exact.experiment.training.initial_loss_scale == 4096
    assert handled(exact)["fp16.initial_scale_power"] == ("taken", 4096)
    assert exact.experiment.training.steps == 3  # the file does not say


def test_a_loss_scale_beyond_every_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"fp16": {"enabled": True, "initial_scale_power": 1_000_000}}))
    with pytest.raises(HarnessError, match="at most 2\\^1023"):
        read_files([], [path])


def test_the_preset_pins_sizes_like_for_like_and_not_as_given(tmp_path: Path) -> None:
    like, exact = rows_of(tmp_path, *FILES["deepspeed-stage-3"])
    assert handled(like)["zero_optimization.stage3_max_live_parameters"] == ("pinned", 0)
    assert "stage3_max_live_parameters" not in like.label
    assert handled(exact)["zero_optimization.stage3_max_live_parameters"] == ("taken", 10**8)
    assert "preset=library-defaults" in exact.label
    assert "stage3_max_live_parameters=100000000" in exact.label


def test_a_batch_of_the_file_is_the_whole_cut_as_given_and_pinned_like_for_like(tmp_path: Path) -> None:
    batch = ("training.global_batch_size=8", "training.accumulation_steps=4")
    training = rows_of(tmp_path, *FILES["deepspeed-stage-3-offload"], *batch)[1].experiment.training
    assert (training.global_batch_size, training.micro_batch_size, training.accumulation_steps) == (16, 4, 2)
    like, _ = rows_of(tmp_path, *FILES["deepspeed-stage-1-offload"], batch[0])
    assert like.experiment.training.micro_batch_size is None
    pinned = handled(like)["train_micro_batch_size_per_gpu"]
    assert pinned == ("pinned", "follows from the rest of the batch")


def test_files_that_disagree_leave_the_job_as_it_is(tmp_path: Path) -> None:
    paths = [
        write(tmp_path, f"f{n}", "accelerate", accelerate("fsdp2", {}, mixed_precision=precision))
        for n, precision in enumerate(["bf16", "no"])
    ]
    job, rows = like_for_like(read_files(paths, []), load_experiment(None, ["training.steps=2"]))
    assert job.training.precision == "fp32"
    assert [handled(row)["mixed_precision"] for row in rows] == [("pinned", "fp32"), ("taken", "fp32")]


@pytest.mark.parametrize("name", ["none", "3", "True", "1e5", "99999999999999999999", "null"])
def test_a_file_whose_name_is_a_value_is_a_row(name: str, tmp_path: Path) -> None:
    row, _ = rows_of(tmp_path, "deepspeed", {"zero_optimization": {"stage": 2}}, name=name)
    assert row.label == f"zero2:row=file-{name}"


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        ({"type": "Adam"}, "adamw"),
        ({"type": "Adam", "params": {"adam_w_mode": False, "lr": 1e-3}}, "adam"),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, "adamw"),
        ({"type": "Adam", "params": {"adam_w_mode": "no", "torch_adam": True}}, "adam"),
        ({"type": "SGD", "params": {"momentum": 0.9, "nesterov": False}}, "sgd"),
    ],
)
def test_the_optimizer_is_the_one_that_deepspeed_makes(
    optimizer: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    for row in rows_of(tmp_path, "deepspeed", {"zero_optimization": {"stage": 1}, "optimizer": optimizer}):
        assert row.experiment.optimizer.kind == kind
        assert handled(row)["optimizer.type"] == ("taken", kind)


def test_each_optimizer_brings_its_own_constants_alone(tmp_path: Path) -> None:
    documents = {
        "sgd": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "adamw": {"type": "AdamW", "params": {"betas": [0.8, 0.9]}},
    }
    paths = [
        write(tmp_path, name, "deepspeed", {"zero_optimization": {"stage": 1}, "optimizer": optimizer})
        for name, optimizer in documents.items()
    ]
    files = read_files([], paths)
    own = exactly_as_given(files[0], load_experiment(None, ["optimizer.beta2=0.99"])).experiment.optimizer
    assert (own.kind, own.learning_rate, own.momentum, own.weight_decay) == ("sgd", 0.1, 0.9, 0)
    job, rows = like_for_like(files, load_experiment(None))
    assert (job.optimizer.kind, job.optimizer.momentum, job.optimizer.beta2) == ("adamw", 0, 0.9)
    assert handled(rows[0])["optimizer.params.momentum"] == ("pinned", 0)


def test_two_files_of_one_name_are_two_rows(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    paths = [write(tmp_path / where, "same", "accelerate", accelerate("fsdp2", {})) for where in ("", "a")]
    _, rows = like_for_like(read_files(paths, []), load_experiment(None))
    assert [row.label for row in rows] == ["fsdp:row=same", "fsdp:row=same-2"]


def test_the_plugin_reads_a_deepspeed_file_next_to_it(tmp_path: Path) -> None:
    write(tmp_path, "ds", "deepspeed", FILES["deepspeed-stage-1-offload"][1])
    document = accelerate("plugin", {"deepspeed_config_file": "ds.json"})
    del document["mixed_precision"]
    row, _ = rows_of(tmp_path, "accelerate", document)
    assert row.label == "zero1:offload=optimizer,row=file"
    assert row.experiment.training.precision == "bf16-mixed"
    assert "ds.json: zero_optimization.stage" in handled(row)


def refusal(folder: Path, kind: str, document: dict[str, Any]) -> str:
    with pytest.raises(HarnessError) as error:
        rows_of(folder, kind, document)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "document", "says"),
    [
        ("deepspeed", {"zero_optimization": {"stage": 2, "overlap_com": True}}, "mean 'overlap_comm'"),
        ("deepspeed", {"zero_optimisation": {"stage": 2}}, "Did you mean 'zero_optimization'"),
        ("deepspeed", {"zero_optimization": {"stage": 2}, "optimizr": {}}, "Did you mean 'optimizer'"),
        ("deepspeed", {"fp16": {"enabled": False, "los_scale": {}}}, "Did you mean 'loss_scale'"),
        ("deepspeed", {"zero_optimization": {"stage": 4}}, "give 0, 1, 2 or 3"),
        ("deepspeed", {"zero_optimization": 5}, "give a section with 'stage'"),
        ("deepspeed", {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
         "use offload=optimizer"),
        ("deepspeed", {"zero_optimization": {"stage": 3, "cpu_offload_param": True}}, "offload both"),
        ("deepspeed", {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "ZeRO++"),
        ("deepspeed", {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "ZenFlow"),
        ("deepspeed", {"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "only one can be enabled"),
        ("deepspeed", {"optimizer": {"type": "OneBitAdam"}}, "'OneBitAdam'"),
        ("deepspeed", {"optimizer": {"type": "Adam", "params": {"adam_w_mode": 0}}}, "mode' was given 0"),
        ("deepspeed", {"compile": True, "bf16": True}, "'bf16' is a section of keys such as 'bf16.bf16_"),
        ("deepspeed", {"scheduler": {"type": "LambdaLR"}}, "was given 'LambdaLR': give StepLR"),
        ("deepspeed", {"scheduler": {"type": "OneCycle"}}, "needs cycle_min_lr, cycle_max_lr"),
        ("deepspeed", {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}},
         "moves AdamW's betas"),
        ("deepspeed", {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}, "warmup_num_steps"),
        ("deepspeed", {"scheduler": {"type": "Warmup"}}, "Did you mean 'WarmupLR'"),
        ("deepspeed", {"optimizer": {"type": "Lion"}}, "`optimizer.kind` has adamw, adam, sgd"),
        ("deepspeed", {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2},
                       "sequence_parallel_size": 2}, "no backend of this version combines"),
        ("deepspeed", {"zero_optimization": {"stage": 0}, "sequence_parallel_size": 2},
         "this version has ulysses-zero1, ulysses-zero2, ulysses-zero3"),
        ("deepspeed", {"zero_optimization": {"stage": 3}, "compile": {"deepcompile": True}}, "DeepCompile"),
        ("deepspeed", {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"},
                                             "offload_param": {"device": "cpu"}}},
         "weights are offloaded at stage 3 only"),
        ("deepspeed", {"compile": {"disable": False, "backend": "cudagraphs"}}, "inductor"),
        ("deepspeed", {"gradient_clipping": "much"}, "give a number"),
        ("accelerate", {"distributed_type": "NO"}, "'single'"),
        ("accelerate", {"zero_optimization": {"stage": 2}}, "give it with --from-deepspeed"),
        ("deepspeed", {"distributed_type": "FSDP", "fsdp_config": {}}, "give it with --from-accelerate"),
        ("accelerate", {"distributed_type": "MULTI_GPU", "fsdp_confg": {}}, "Did you mean 'fsdp_config'"),
        ("accelerate", {"distributed_type": "MEGATRON_LM"}, "DEEPSPEED"),
        ("accelerate", {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 20}}, "give 1 or 2"),
        ("accelerate", {"distributed_type": "MULTI_GPU", "mixed_precison": "bf16"}, "'mixed_precision'"),
        ("accelerate", {"distributed_type": "MULTI_GPU", "mixed_precision": "fp8"}, "`training.precision"),
        ("accelerate", {"distributed_type": "MULTI_GPU", "dynamo_config": {"dynamo_backend": "EAGER"}},
         "inductor"),
        ("accelerate", {"distributed_type": "FSDP", "fsdp_config": {"fsdp_backward_prefetch_policy": "X"}},
         "Did you mean 'fsdp_backward_prefetch'"),
        ("accelerate",
         {"distributed_type": "FSDP", "fsdp_config": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}},
         "unsupported: "),
        ("accelerate", {"distributed_type": "FSDP",
                        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "FULL_SHARD"}},
         "give true or false"),
        ("accelerate", {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sync_module_states": False}},
         "by default; set it to true, or both to false"),
        ("deepspeed", {"sparse_gradients": False}, "DeepSpeed itself refuses it, also switched off"),
        ("deepspeed", {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "MiCS"),
        ("deepspeed", {"zero_optimization": {"stage": 3}, "prescale_gradients": True}, "with reduce_scatter"),
        ("deepspeed", {"zero_optimization": {"stage": 2}, "gradient_predivide_factor": 4}, "itself refuses"),
        ("deepspeed", {"zero_optimization": {"stage": 3, "compute_grad_norm": False}}, "stages 1 and 2"),
        ("deepspeed", {"communication_data_type": "float32"}, "give fp32, fp16 or bf16"),
        ("deepspeed", {"data_types": {"grad_accum_dtype": "fp64"}}, "give fp16, float16, half"),
        ("deepspeed", {"data_types": {"grad_accum_dtype": ["fp32"]}}, "give fp16, float16, half"),
        ("deepspeed", {"communication_data_type": ["fp32"]}, "give fp32, fp16 or bf16"),
        ("deepspeed", {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True, **PURE}}, "at stage 0"),
        ("accelerate", {"distributed_type": "FSDP", "parallelism_config": {"tp_size": 2}},
         "no backend of this version"),
    ],
)  # fmt: skip
def test_what_no_row_can_have_is_refused_by_name(
    kind: str, document: dict[str, Any], says: str, tmp_path: Path
) -> None:
    assert says in refusal(tmp_path, kind, document)


def test_all_refusals_come_at_once(tmp_path: Path) -> None:
    document = {
        "zero_optimization": {"stage": 3, "zero_quantized_weights": True},
        "typo": 1,
        "amp": {"enabled": 1},
    }
    text = refusal(tmp_path, "deepspeed", document)
    assert "(1)" in text
    assert "(3)" in text
    assert all(key in text for key in ("zero_quantized_weights", "'typo'", "amp"))


def test_keys_next_to_a_deepspeed_file_stop_accelerate(tmp_path: Path) -> None:
    write(tmp_path, "ds", "deepspeed", {"zero_optimization": {"stage": 1}})
    section = {"deepspeed_config_file": "ds.json", **PLUGIN["stage-1"]}
    text = refusal(tmp_path, "accelerate", accelerate("plugin", section))
    assert "'mixed_precision'" in text
    assert "'deepspeed_config.zero_stage'" in text


def test_a_value_that_the_job_does_not_allow_names_the_file(tmp_path: Path) -> None:
    text = refusal(tmp_path, "deepspeed", {"gradient_accumulation_steps": -1})
    assert text.startswith("file.json: 'training.accumulation_steps' was given -1")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "a": 2}', "gives 'a' twice"), ('{"a": {"b": NaN}}', r"odd has NaN in 'a\.b'"),
        ('{"a": 1} / why', "not valid JSON"),
        ("[1]", "must be a mapping"), ("[" * 100_000, "nested too deeply"),
        ('{"zero_optimization": ' * 300 + "1" + "}" * 300, "nested too deeply"),
        ('{"a": "' + "x" * 2**20 + '"}', "at most"),
        ("!!python/object/apply:os.system [id]", "not valid YAML"),
        ("a: &a [*a, *a]", "an alias that contains itself"), ("- 1", "must be a mapping"),
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_odd_json_and_yaml_is_one_line(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "odd"
    path.write_text(text)
    with pytest.raises(HarnessError, match=says) as error:
        read_files(*(([], [path]) if text[0] in "{[" else ([path], [])))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300 + len(str(path))
    with pytest.raises(HarnessError, match="not a plain file"):
        read_files([], [Path("/dev/zero")])


def job_of(folder: Path, kind: str, document: dict[str, Any], *assignments: str) -> Any:
    return rows_of(folder, kind, document, *assignments)[1].experiment


def test_no_key_of_the_installed_deepspeed_is_unknown() -> None:
    """Those that its constants name and give a default."""
    spec = find_spec("deepspeed")
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "runtime" / "constants.py").read_text(encoding="utf-8")
    names = dict(re.findall(r"^([A-Z0-9_]+) = [\"']([a-z0-9_]+)[\"']", source, re.MULTILINE))
    given = {key for name, key in names.items() if f"\n{name}_DEFAULT = " in source}
    known = {part for name in (*KEYS["deepspeed"], *SECTIONS["deepspeed"]) for part in name.split(".")}
    of_checkpoints = {"tag_validation", "load_universal", "use_node_local_storage", "pipeline_stage"}
    assert len(given) > 30
    assert given - known == of_checkpoints  # which is a section as a whole


def test_an_absent_key_has_the_default_of_the_installed_deepspeed(tmp_path: Path) -> None:
    document = {"optimizer": {"type": "Adam"}, "train_micro_batch_size_per_gpu": 4, "fp16": {"enabled": True}}
    job = job_of(tmp_path, "deepspeed", document)
    adam = job.optimizer
    assert (adam.learning_rate, adam.beta1, adam.beta2, adam.epsilon) == (1e-3, 0.9, 0.999, 1e-8)
    assert adam.weight_decay == 0  # FusedAdam's
    assert job.training.gradient_clipping == 1
    assert (job.training.micro_batch_size, job.training.accumulation_steps) == (4, 1)
    assert (job.training.initial_loss_scale, job.training.loss_scale_growth_interval) == (65536, 1000)
    document["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}
    assert job_of(tmp_path, "deepspeed", document).optimizer.weight_decay == 0.01  # torch.optim.AdamW's


def test_a_given_key_and_a_setting_of_the_configuration_go_before_the_defaults(tmp_path: Path) -> None:
    document = {"optimizer": {"type": "Adam", "params": {"lr": 5e-4}}, "gradient_clipping": 0.5}
    job = job_of(tmp_path, "deepspeed", document)
    assert (job.optimizer.learning_rate, job.training.gradient_clipping) == (5e-4, 0.5)
    job = job_of(tmp_path, "deepspeed", {"zero_optimization": {"stage": 2}}, "training.precision=bf16-mixed",
                 "training.gradient_clipping=null")  # fmt: skip
    assert (job.training.precision, job.training.gradient_clipping) == ("bf16-mixed", None)


def test_what_the_table_calls_a_default_is_the_library_s() -> None:
    for stage in range(4):
        for key, rule in with_defaults(KEYS["deepspeed"], deepspeed_values(stage)).items():
            if rule.kind == "fixed" and rule.reason == "DeepSpeed's default, which no run changes":
                assert rule.default is not None, key
            assert rule.kind != "option" or rule.default != LIBRARY


def test_accelerate_prefetches_nothing_backwards_and_names_a_missing_wrap_policy(tmp_path: Path) -> None:
    like, exact = rows_of(tmp_path, "accelerate", {"distributed_type": "FSDP", "fsdp_config": {}})
    assert like.label == "fsdp1:backward_prefetch=none,row=file"
    assert handled(like)["fsdp_config.fsdp_auto_wrap_policy"] == ("pinned", "TRANSFORMER_BASED_WRAP")
    assert "auto_wrap=none" in exact.label  # NO_WRAP is Accelerate's default
    assert exact.experiment.training.precision == "fp32"
    document = accelerate("fsdp2", {})
    del document["fsdp_config"]["fsdp_auto_wrap_policy"]
    row, _ = rows_of(tmp_path, "accelerate", document)
    assert handled(row)["fsdp_config.fsdp_auto_wrap_policy"] == ("pinned", "TRANSFORMER_BASED_WRAP")


@pytest.mark.parametrize(
    ("kind", "document", "label"),
    [
        ("deepspeed", {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}},
         "autotp-zero1:row=file,tensor=2"),
        ("deepspeed", {"zero_optimization": {"stage": 3}, "sequence_parallel_size": 2},
         "ulysses-zero3:row=file,sequence=2"),
        ("deepspeed", {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["Block"]}}},
         "zero3:leaf_module=blocks,row=file"),
        ("deepspeed", {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
         "zero3:hpz=8,row=file"),
        ("accelerate", {"distributed_type": "MULTI_GPU", "mixed_precision": "no", "num_processes": 2},
         "ddp:row=file"),
        ("deepspeed", {"zero_optimization": True}, "zero1:row=file"),
        ("deepspeed", {"zero_optimization": {"stage": "2", "reduce_bucket_size": "5e8"}}, "zero2:row=file"),
        ("accelerate", {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2},
                        "parallelism_config": {"parallelism_config_tp_size": 2}},
         "fsdp-tp:row=file,tensor=2"),
        ("accelerate", {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2},
                        "parallelism_config": {"cp_size": 2, "cp_comm_strategy": "alltoall"}},
         "fsdp-cp:rotation=all-to-all,row=file,sequence=2"),
        ("accelerate", {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2},
                        "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 4}},
         "fsdp-hybrid:row=file,shard_size=4"),
    ],
)  # fmt: skip
def test_what_this_version_has_is_run(
    kind: str, document: dict[str, Any], label: str, tmp_path: Path
) -> None:
    assert rows_of(tmp_path, kind, document)[0].label == label


def test_compiling_is_a_setting_of_the_job(tmp_path: Path) -> None:
    compiled = {"compile": {"disable": False, "backend": "inductor"}}
    assert job_of(tmp_path, "deepspeed", compiled).model.compile == "model"
    regional = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    document = {"distributed_type": "MULTI_GPU", "dynamo_config": regional}
    assert job_of(tmp_path, "accelerate", document).model.compile == "block"


@pytest.mark.parametrize(
    "text",
    [
        '\ufeff{"zero_optimization": {"stage": 2}}',
        '{\n// "//"\n"zero_optimization": {"stage": 2,}, # end\n "wandb": {"project": "a//b, }"},}',
    ],
)
def test_json_as_deepspeed_itself_reads_it(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    (file,) = read_files([], [path])
    assert file.imported.backend == "zero2"
    if "wandb" in text:
        assert file.file.document["wandb"]["project"] == "a//b, }"


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"base_model": "m", "deepspeed": "zero3.json", "sequence_len": 8},
         "3 of its 3 keys are another tool's"),
        ({"pipe_parallel_size": 1, "num_layers": 12, "hidden_size": 64, "norm": "rms", "pos_emb": "rotary",
          "gradient_clipping": 1.0}, " of its 6 keys are another tool's"),
        ({"model_name_or_path": "m", "dataset_name": "d"}, "2 of its 2 keys are another tool's"),
    ],
)  # fmt: skip
def test_a_file_of_another_tool_is_refused_with_what_to_give(
    document: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = write(tmp_path, "trainer", "accelerate", document)
    for given in (([path], []), ([], [path])):
        with pytest.raises(HarnessError) as error:
            read_files(*given)
        assert said in str(error.value)
        assert error.value.__notes__ == [OF_THE_LAUNCHER]


@pytest.mark.parametrize("kind", ["accelerate", "deepspeed"])
def test_a_file_in_toml_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "llama3_8b.toml"
    path.write_text("[training]\nlocal_batch_size = 1\n")
    files = {"accelerate": (), "deepspeed": ()} | {kind: (path,)}
    with pytest.raises(
        HarnessError, match="DeepSpeed and Accelerate read no TOML; give the file that your launcher uses"
    ):
        read_files(**files)
