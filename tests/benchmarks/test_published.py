"""Published runs become scenarios, or a reason is given by name."""

import csv
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.published import collectives, losses
from benchmarks.published.__main__ import REPORT, main
from benchmarks.published.aims import aims_of, largest_bias
from benchmarks.published.collectives import read_measured
from benchmarks.published.judge import Judged, by_source, judge, order, pairs, summarize
from benchmarks.published.left_out import (
    FILES,
    HERE,
    PAGE,
    left_out,
    middle,
    own_shares,
    runs_of,
    share_of_others,
    text,
)
from benchmarks.published.mapping import Mapped, completed, map_row, program, said, unread
from benchmarks.published.page import render
from benchmarks.published.programs import joined_outputs, packed_head
from benchmarks.published.rows import COLUMNS, Row, read_rows
from harness.errors import HarnessError
from harness.plan import profiles
from harness.plan.hardware import default_constants, load_hardware
from harness.plan.profiles import activation_profile

DATA = Path(__file__).parents[2] / "benchmarks" / "published" / "published_runs.csv"
ROW = Row(
    **(
        dict.fromkeys(COLUMNS, "")
        | {
            "id": "run-1", "source": "somebody", "tier": "A", "model": "llama3-8b", "params": "8030261248",
            "seq_len": "8192", "micro_batch": "2", "grad_accum": "1", "method": "pretrain, full",
            "precision": "bf16 compute, fp32 masters and reduction (FSDP2)", "activation_ckpt": "full",
            "compile": "False", "attention": "sdpa", "optimizer": "AdamW", "strategy": "fsdp2", "tp": "1",
            "n_gpus": "8", "gpus_per_node": "8", "gpu": "H100-96GB HBM2e 500W", "status": "ok",
            "memory_gib_per_gpu": "40", "memory_statistic": "peak reserved", "tokens_per_s_per_gpu": "5000",
        }
    )
)  # fmt: skip
PEFT = {"precision": "bf16 mixed", "framework": "fms-acceleration"}


def test_a_row_becomes_a_scenario() -> None:
    scenario = map_row(ROW).scenario
    assert (scenario.label, scenario.world_size, scenario.micro_batch_size) == ("fsdp", 8, 2)
    assert scenario.job.training.precision == "bf16-mixed"
    assert scenario.job.training.activation_checkpointing
    assert scenario.device.name == "H100-96"


def test_memory_of_a_fused_kernel_that_the_model_s_code_lacks_is_not_covered() -> None:
    bloom = replace(ROW, model="bloom-560m", params="559214592", seq_len="2048")
    mapped = map_row(bloom)
    assert mapped.memory_not_covered == "fused attention, which transformers' BloomForCausalLM lacks"
    assert map_row(replace(bloom, attention="")).memory_not_covered is None
    assert map_row(ROW).memory_not_covered is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pp": "8"}, "pipeline parallelism"),
        (
            {"method": "finetune, lora with embedding and head trained"},
            "adapter with embedding and head trained",
        ),
        ({"seq_len": ""}, "data.sequence_length is not said"),
        ({"n_gpus": "128 to 512"}, "the number of GPUs is '128 to 512', which is not one number"),
        (
            {"activation_ckpt": "clever"},
            "training.activation_checkpointing is not known: 'clever' is none of its values",
        ),
        ({"strategy": "zero1", "tp": "2"}, "tensor parallelism under 'zero1' is no setting"),
        ({"optimizer": "PagedAdamW8bit"}, "optimizer.kind: in 8 bits or updated inside the backward pass"),
        ({"strategy": "alpa"}, "strategy 'alpa' is none of ours"),
        (
            {"model": "no-such-model"},
            "model 'no-such-model' is neither in the catalogue nor a folder or file",
        ),
        ({"gpu": "TPU-v9"}, "GPU 'TPU-v9' is unknown"),
        (
            {"params": "1e9"},
            "model.config: geometry unknown: 8,030,261,248 parameters, published 1,000,000,000",
        ),
        ({"n_gpus": "16", "gpu": "L40S"}, "--fabric: the network between its nodes is not known"),
        ({"precision": "int4"}, "training.precision is not known: 'int4' is none of its values"),
        ({"micro_batch": "two"}, "training.micro_batch_size is 'two', which is not one number"),
    ],
)
def test_what_a_job_cannot_say_is_a_reason(changes: dict[str, str], reason: str) -> None:
    mapped = map_row(replace(ROW, **changes))
    assert mapped.scenario is None
    assert mapped.not_covered == reason


def test_a_network_that_a_row_names_is_taken() -> None:
    scenario = map_row(replace(ROW, n_gpus="96", note="H100 96 GPUs with 800 Gbps")).scenario
    assert scenario.fabric.bandwidth_per_gpu == pytest.approx(12.5e9)


def test_an_old_kernel_reaches_a_part_of_what_today_s_does_on_the_same_gpu() -> None:
    rows = (replace(ROW, gpu=gpu, attention="triton") for gpu in ("A100-80GB", "H100-80GB"))
    assert [map_row(row).constants.attention_share for row in rows] == pytest.approx([0.33, 0.187])


def test_statistics_of_memory_are_told_apart() -> None:
    texts = (
        "max_memory_allocated", "peak reserved", "wandb GPU memory (device)", "allocated or reserved",
        "peak; alloc/active/reserved, which one is not said",
    )  # fmt: skip
    found = [replace(ROW, memory_statistic=text).statistic for text in texts]
    assert found == ["allocated", "reserved", "device", "not said", "not said"]


def test_what_the_allocator_keeps_is_no_more_than_the_device_and_no_need() -> None:
    """2 x 8,192 tokens under FSDP2: reduced and gathered tensors lie in blocks of their own streams."""
    row = replace(ROW, activation_ckpt="none", micro_batch="1")
    kept, peak = (
        judge(map_row(replace(row, memory_statistic=text)))
        for text in ("peak reserved", "max_memory_allocated")
    )
    assert kept.memory_bytes > peak.memory_bytes
    small = judge(map_row(replace(row, gpu="A100-80GB")))
    device = small.mapped.scenario.device
    assert peak.memory_bytes < small.memory_bytes <= device.memory_bytes


UNMEASURED = {"memory_gib_per_gpu": "", "tokens_per_s_per_gpu": ""}


def judged(name: str, *, memory: float, tokens: float, fits: bool = True, **changes: str) -> Judged:
    row = replace(ROW, id=name, **changes)
    return Judged(mapped=map_row(row), memory_bytes=memory * 2**30, tokens_per_second=tokens, fits=fits)


def test_errors_are_relative_and_have_no_sign() -> None:
    rows = [
        judged("a", memory=44, tokens=4000),
        judged("b", memory=38, tokens=5500),
        judged("c", memory=90, tokens=1, fits=False, status="oom", **UNMEASURED),
        judged("d", memory=90, tokens=1, fits=False, **UNMEASURED),
    ]
    summary = summarize(rows)
    assert summary.memory_mean == pytest.approx(0.075)
    assert summary.memory_worst == pytest.approx(0.1)
    assert summary.speed_median == pytest.approx(0.15)
    assert summary.fits == (True, True, True, False)


def test_order_compares_strategies_on_equal_gpus_and_batch() -> None:
    rows = [
        judged("a", memory=40, tokens=5000, tokens_per_s_per_gpu="5000"),
        judged("b", memory=44, tokens=4000, tokens_per_s_per_gpu="5100", strategy="zero3"),
        judged("c", memory=30, tokens=4500, tokens_per_s_per_gpu="6000", strategy="zero2"),
        judged("d", memory=40, tokens=1, tokens_per_s_per_gpu="9000", strategy="ddp", n_gpus="4"),
        judged("e", memory=40, tokens=1, tokens_per_s_per_gpu="9000", strategy="ddp", micro_batch="1"),
        judged("f", memory=40, tokens=1, tokens_per_s_per_gpu="9000", source="another"),
    ]
    # a and b are tied; c is faster than both, and predicted so only against b. No other shares a setting.
    assert order(rows) == {"somebody": (1, 2)}
    assert [(p.larger.id, p.smaller.id, p.is_right) for p in pairs(rows)] == [
        ("c", "a", False), ("c", "b", True),
    ]  # fmt: skip
    assert "c (zero2) to a (fsdp2): 1.20 published, 0.90 predicted" in render(rows, pictures=[])
    assert by_source({"one": (9, 9), "two": (0, 1)}) == 0.5


@pytest.mark.parametrize(
    ("published", "checkpointing"),
    [
        ("full", True), ("none", False), ("selective (op)", "selective"),
        ("selective (some blocks)", "every-2"), ("every 3rd layer", "every-3"),
        ("every other block", "every-2"),
    ],
)  # fmt: skip
def test_what_is_recomputed_in_part_is_not_taken_for_none(published: str, checkpointing: bool | str) -> None:
    scenario = map_row(replace(ROW, activation_ckpt=published)).scenario
    assert scenario.job.training.activation_checkpointing == checkpointing


def test_adapters_become_the_job_s() -> None:
    changes = {"method": "finetune, qlora (gptq int4)", "note": "LoRA rank 64", "framework": "qwen-finetune"}
    mapped = map_row(replace(ROW, **changes, strategy="zero2"))
    adapter = mapped.scenario.job.adapter
    assert (adapter.rank, adapter.base_dtype) == (64, "nf4")
    plain = map_row(replace(ROW, method="finetune, lora", strategy="fsdp1")).scenario
    assert (plain.label, plain.job.adapter.base_dtype, plain.job.adapter.targets) == ("fsdp", "bf16", None)


@pytest.mark.parametrize(
    ("strategy", "changes", "precision"),
    [
        ("zero3", {"precision": "bf16"}, "bf16-mixed"),  # DeepSpeed keeps fp32 masters whatever it is called
        ("single", {"precision": "bf16"}, "bf16"),
        ("fsdp1", {"precision": "bf16"}, "bf16"),
        ("single", {**PEFT, "method": "qlora (nf4)"}, "bf16-mixed"),  # peft widens what 4 bits do not hold
        ("single", {**PEFT, "method": "lora", "settings": "training.precision=bf16"}, "bf16"),
    ],
)
def test_libraries_decide_a_precision(strategy: str, changes: dict[str, str], precision: str) -> None:
    assert map_row(replace(ROW, strategy=strategy, **changes)).scenario.job.training.precision == precision


def test_selective_checkpointing_of_an_unread_program_has_bounds() -> None:
    row = replace(ROW, activation_ckpt="selective (op)")
    known, unknown = (judge(map_row(replace(row, framework=name))) for name in ("torchtitan", ""))
    assert known.least_bytes is None
    assert unknown.least_bytes < known.memory_bytes < unknown.memory_bytes
    assert unknown.memory_reason.startswith("which matrix products selective checkpointing keeps is not said")


def test_a_row_is_left_out_without_its_program_s_code() -> None:
    litgpt = map_row(replace(ROW, framework="litgpt", settings="training.precision=bf16"))
    assert unread(litgpt).scenario.other.loss is None
    assert unread(litgpt).scenario.job == litgpt.scenario.job
    assert unread(map_row(ROW)).scenario == map_row(ROW).scenario


def test_a_speed_is_a_range_where_checkpointing_is_not_said() -> None:
    plain, full, open_ = (
        judge(map_row(replace(ROW, activation_ckpt=text))) for text in ("none", "full", "not said")
    )
    assert (open_.has_no_rate, open_.speed_error) == (True, None)
    slow, fast = (f"{one.tokens_per_second:,.0f}" for one in (full, plain))
    assert (
        open_.speed_reason
        == f"training.activation_checkpointing is not said: between {slow} and {fast} tokens/s"
    )


def test_what_is_not_said_of_checkpointing_becomes_bounds() -> None:
    mapped = map_row(replace(ROW, activation_ckpt=""))
    assert mapped.bounded
    assert mapped.scenario.job.training.activation_checkpointing is False
    assert mapped.least.job.training.activation_checkpointing is True
    assert map_row(ROW).least is None


def test_tensor_parallelism_of_an_unknown_program_becomes_bounds() -> None:
    """Whether it divides norms, residuals and the loss by tokens."""
    row = replace(ROW, strategy="fsdp2+tp", tp="2", framework="somebody's")
    mapped = map_row(row)
    assert "is not said" in str(mapped.unsaid)
    assert mapped.least.job.data.sequence_length == int(row.seq_len) // 2
    assert map_row(replace(row, framework="torchtitan")).unsaid is None


def test_a_micro_batch_follows_from_the_global_one_where_accumulation_is_said() -> None:
    row = replace(ROW, micro_batch="", global_batch_seqs="64", grad_accum="2")
    assert completed(row).micro_batch == "4"
    assert completed(replace(row, tp="2")).micro_batch == "8"
    assert completed(replace(row, grad_accum="")).micro_batch == ""


@pytest.mark.parametrize(
    ("column", "text", "meant"),
    [
        ("precision", "bf16 parameters and reduction (FSDP MixedPrecision), fp32 shards", "bf16-mixed"),
        ("precision", "bf16 parameters", "bf16"),
        ("precision", "fp16 mixed", "fp16-mixed"),
        ("precision", "bf16 autocast, fp32 weights, gradients and AdamW states", "bf16-mixed"),
        *(("precision", text, "bf16") for text in ("bfloat16", "bf16 pure", "full bf16", "BF16-true")),
        ("precision", "TF32", "fp32"),
        ("precision", "posits", None),
        ("activation_ckpt", "none (fits without)", "false"),
        ("activation_ckpt", "full (reentrant)", "true"),
        ("activation_ckpt", "every block", "true"),
        ("activation_ckpt", "as the recipe", "not said"),
        ("activation_ckpt", "every 0 layers", None),
        ("activation_ckpt", "gradient checkpointing on", "true"),
        ("activation_ckpt", "disabled", "false"),
        ("compile", "torch.compile", "block"),
        ("compile", "", "none"),
        ("compile", "sometimes", None),
        ("adapter", "finetune, qlora (gptq int4) r=16 on q_proj", "nf4"),
        ("adapter", "finetune, lora", "bf16"),
        ("adapter", "pretrain, full", "none"),
        ("strategy", "accelerate-zero2", "accelerate-zero2"),
        ("strategy", "zero2 on one GPU", "zero2"),
        ("strategy", "own zero3", "zero3"),
        ("strategy", "zero2+tp", "autotp-zero2"),
        ("strategy", "fsdp2-hybrid", "fsdp-hybrid"),
        *(("strategy", text, "zero2") for text in ("DeepSpeed ZeRO-2", "ZeRO stage 2", "zero-2")),
        ("strategy", "FSDP SHARD_GRAD_OP", "fsdp1-grad-op"),
        ("strategy", "FSDP + TP", "fsdp-tp"),
        ("strategy", "DeepSpeed ZeRO-3 offload", None),
        ("attention", "flash (triton or FA2)", "old flash"),
        ("offload", "cpu (parameters and optimizer)", "cpu"),
        ("offload", "cpu optimizer", "optimizer"),
        ("network", "4 x 100 Gb RoCE between nodes", "4 x 100"),
        ("network", "two nodes with 8 x 80 GB", None),
        ("network", "two nodes with 8 x 80 GB, 400 Gbps", "1 x 400"),
        *(("adapter", text, "none") for text in ("full, no LoRA", "full finetune, not qlora")),
        ("optimizer", "AdamW (no 8-bit)", "adamw"),
        ("precision", "bf16 mixed, without fp8", "bf16-mixed"),
        *(("activation_ckpt", text, "false") for text in ("not enabled", "off (all kept)", "without")),
        *(("compile", text, "none") for text in ("without torch.compile", "torch.compile off", "n/a")),
        *(("attention", text, "eager") for text in ("no flash attention", "flash disabled")),
        *(("offload", text, "none") for text in ("no CPU offload", "not enabled", "CPU offload disabled")),
        ("precision", "bf16 weights, gradients and optimizer states", "bf16"),
        ("network", "4x200Gbps", "4 x 200"),
        ("speed_unknown", "bf16 FlashAttention-3", "model.attention: rates of FlashAttention 3"),
        (
            "speed_unknown",
            "bf16 compute + rowwise with bfloat16 all-gather",
            "training.precision: rates of float8",
        ),
    ],
)
def test_a_column_s_words_are_a_setting(column: str, text: str, meant: str | None) -> None:
    assert said(column, text) == meant


@pytest.mark.parametrize(
    ("column", "text", "setting"),
    [*(("adapter", text, "adapter.kind") for text in ("finetune, IA3", "(IA)^3", "prefix tuning")),
     ("adapter", "DPO with a reference model", "model"), ("optimizer", "Apollo", "optimizer.kind"),
     ("offload", "activations to CPU", "training.activation_checkpointing")],
)  # fmt: skip
def test_what_is_no_setting_is_refused_by_its_name(column: str, text: str, setting: str) -> None:
    with pytest.raises(HarnessError, match=f"^{setting}: "):
        said(column, text)


def test_an_adapter_is_what_its_method_says() -> None:
    method = "finetune, qlora (gptq int4) r=16.0 on q_proj k_proj v_proj o_proj"
    for changes in ({}, {"framework": "qwen-finetune"}):
        scenario = map_row(replace(ROW, method=method, strategy="zero3", **changes)).scenario
        adapter = scenario.job.adapter
        assert (adapter.rank, adapter.targets) == (16, ["q_proj", "k_proj", "v_proj", "o_proj"])
    for words, rank in (
        ("peak memory of rank 0", 8), ("allocated on rank 3", 8), ("adapters of rank 16", 16), ("r=32", 32),
    ):  # fmt: skip
        found = map_row(replace(ROW, method="finetune, lora", note=words)).scenario
        assert found.job.adapter.rank == rank
    for said_so, targets in (
        ("LoRA r=64 all-linear", ["all-linear"]), ("LoRA, r=64, target_modules=all-linear", ["all-linear"]),
        ("LoRA r=64 on all linear layers", ["all-linear"]),
        ("LoRA r=64, targets: q_proj k_proj", ["q_proj", "k_proj"]),
    ):  # fmt: skip
        adapter = map_row(replace(ROW, method=said_so)).scenario.job.adapter
        assert (adapter.rank, adapter.targets) == (64, targets)
    for other, setting in (("DoRA r=16", "adapter.kind"), ("LoRA on an int8 base", "adapter.base_dtype")):
        assert str(map_row(replace(ROW, method=other)).not_covered).startswith(setting)


def test_no_rule_is_of_a_source_s_name() -> None:
    """What a row becomes follows from its settings, whatever its source, repository and path."""
    for row in (row for name in FILES for row in read_rows(HERE / name)):
        unknown = replace(row, source="nobody", repo="somebody/else", commit="", path="a/page.md", line="")
        assert replace(map_row(unknown), row=row) == replace(map_row(row), row=row), row.id
    assert map_row(replace(ROW, framework="litgpt")).scenario != map_row(ROW).scenario


def test_what_a_program_s_configuration_sets_is_the_row_s() -> None:
    set_ = "adapter.rank=64 adapter.targets=[q_proj,v_proj] adapter.dropout=0.1 overlap_comm=true"
    row = replace(ROW, method="finetune, lora", strategy="zero2", activation_ckpt="", settings=set_)
    found = map_row(row)
    adapter = found.scenario.job.adapter
    assert (adapter.rank, adapter.targets, adapter.dropout) == (64, ["q_proj", "v_proj"], 0.1)
    assert (found.scenario.options, found.bounded) == ({"overlap_comm": True}, True)
    known = map_row(replace(row, settings="training.activation_checkpointing=true training.precision=bf16"))
    assert (known.scenario.job.training.activation_checkpointing, known.bounded) == (True, False)
    assert known.scenario.job.training.precision == "bf16"
    for settings, reason in (
        ("overlap_comm", "settings: 'overlap_comm' is not of the form name=value"),
        ("training.activation_checkpoint=true", "'training.activation_checkpoint' is unknown"),
        ("adapter.rank=4", "'adapter': `rank` would be ignored without an adapter"),
        ("overlap_comm=true", "option 'overlap_comm' of backend 'fsdp' is unknown"),
    ):
        assert str(map_row(replace(ROW, settings=settings)).not_covered).startswith(reason)


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({"framework": "torchtitan"}, True), ({"memory_statistic": "peak reserved (torchtitan log)"}, True),
        ({"framework": "somebody's", "note": "as torchtitan"}, False),
        ({"path": "torchtitan/page.md", "repo": "pytorch/torchtitan"}, False),
    ],
)  # fmt: skip
def test_a_row_names_its_program(changes: dict[str, str], known: bool) -> None:
    assert ("divides_sequence" in program(replace(ROW, **changes))) == known


@pytest.mark.parametrize(
    "text", ["", "-1", "two", "128 to 512", "nan", "1e9", "(", "[", "\u2028", "none", "8x H100"]
)
def test_no_value_of_a_column_is_an_error_of_the_program(text: str) -> None:
    for column in COLUMNS:
        row = replace(ROW, **{column: text})
        mapped = map_row(row)
        assert mapped.scenario or mapped.not_covered
        assert row.statistic
        assert row.gpus > 0 < (row.memory_bytes or 1)
        assert (row.rate or 1) > 0


def test_every_row_of_a_file_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        replace(ROW, n_gpus="8.0"), replace(ROW, id="run-2", n_gpus="128 to 512"),
        replace(ROW, id="run-3", activation_ckpt=""),
        *(replace(ROW, id=gpu, gpu=gpu) for gpu in ("MI300X", "MI355X", "B200")),
    ]  # fmt: skip
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(map(asdict, rows))
    main([str(path), "--json"])
    known, unasked, ranged, *unrated = json.loads(capsys.readouterr().out)["rows"]
    assert list(known) == [
        "id", "memory_bytes", "tokens_per_second", "fits", "memory_error", "speed_error", "reason",
    ]  # fmt: skip
    assert known["reason"] is None
    assert known["fits"] is True
    assert unasked == dict.fromkeys(known) | {
        "id": "run-2", "reason": "the number of GPUs is '128 to 512', which is not one number",
    }  # fmt: skip
    assert ranged["memory_bytes"] is None
    assert ranged["reason"].startswith("training.activation_checkpointing is not said")
    for one in unrated:
        assert (one["tokens_per_second"], one["speed_error"]) == (None, None)
        assert re.fullmatch(r"too few sources .* between [\d,]+ and [\d,]+ tokens/s", one["reason"])


def test_inputs_of_blocks_live_on_under_fsdp1_where_frozen_and_checkpointed() -> None:
    """Twice 2 bytes of the hidden states per block, but for the first, beside what the last block needs."""
    method = "finetune, lora r=16 on q_proj v_proj"
    row = replace(ROW, method=method, micro_batch="1", seq_len="4096", precision="bf16", model="llama3-8b")
    found = {}
    for strategy in ("accelerate-fsdp1", "fsdp1"):
        scenario = map_row(replace(row, strategy=strategy)).scenario
        found[strategy] = activation_profile(scenario).retained.bytes(1, 4096)
    assert found == {"accelerate-fsdp1": 2 * 2 * 4096 * 4096, "fsdp1": 0}


def test_a_program_s_code_completes_its_page() -> None:
    scenario = map_row(replace(ROW, framework="litgpt", method="finetune, lora")).scenario
    assert scenario.other.loss is losses.LOW_CHUNKS
    assert (scenario.other.keeps_packed_inputs, scenario.other.nested_scales) == (True, False)
    assert (scenario.other.keeps_graph, scenario.other.packs_head) == (True, True)
    assert scenario.other.unpacks_in_fp16
    one_rank = map_row(
        replace(ROW, framework="kempnerforge", strategy="fsdp2", n_gpus="1", gpus_per_node="1")
    )
    assert one_rank.scenario.label == "fsdp"
    options = one_rank.scenario.workload().options
    assert options == {
        "reduce_dtype": "fp32", "reshards_root": True, "copied_first": 2, "whole_gradients": {}
    }  # fmt: skip
    tied = replace(ROW, framework="litgpt", method="finetune, lora", model="llama-3.2-1b", params="")
    own, packed = (map_row(replace(tied, method=f"finetune, {kind}")).scenario for kind in ("lora", "qlora"))
    assert own.model.parameters == packed.model.parameters
    assert packed_head(packed.model.layout) == 128256 * 2048
    in_fp16, at_once = (
        activation_profile(replace(packed, other=replace(packed.other, unpacks_in_fp16=twice)))
        for twice in (True, False)
    )
    pairs = zip(in_fp16.head.forward, at_once.head.forward, strict=True)
    assert {(one.live - other.live).bytes(1, 1) for one, other in pairs} == {2 * 128256 * 2048}
    custom = map_row(replace(ROW, note="custom kernels: foak-fast-kernels")).scenario
    liger = map_row(replace(ROW, note="custom kernels: foak-fast-kernels-liger")).scenario
    assert custom.other.loss is losses.FAST
    assert liger.job.loss.chunk_tokens == 512  # of 16,384, where V / H is 31.3


def test_what_a_program_does_for_one_strategy_or_model_alone_is_theirs() -> None:
    for strategy, wraps in (("fsdp1-grad-op", True), ("fsdp2-grad-op", False)):
        scenario = map_row(replace(ROW, framework="thunder-benchmark-litgpt", strategy=strategy)).scenario
        assert scenario.other.wraps_layers is wraps
    changes = {
        "framework": "fms-acceleration", "params": "", "seq_len": "2048",
        "precision": "pure bfloat16",
    }  # fmt: skip
    for model, note, loss, caches in (
        ("bigcode/gpt_bigcode-santacoder", "", losses.LOW_SHIFTED, ("attn.c_attn",)),
        ("bigcode/gpt_bigcode-santacoder", "foak-fast-kernels", losses.FAST_LOW, ("attn.c_attn",)),
        ("mistral-7b", "", losses.WIDENED_SHIFTED, ()),
    ):
        scenario = map_row(replace(ROW, **changes, model=model, note=note)).scenario
        assert (scenario.other.loss, scenario.other.caches) == (loss, caches)


def test_one_product_for_queries_keys_and_values_has_one_adapter_and_lives_on_with_the_values() -> None:
    changes = {"framework": "litgpt", "method": "finetune, qlora", "params": "", "strategy": "single"}
    for model, config, targets, beside in (
        ("llama2-7b", {}, ["q_proj"], 2 * 4096),  # v is a view of what q, k and v share
        ("llama3-8b", {"num_key_value_heads": 32}, ["q_proj"], 0),  # copies of k and v stand for it
        ("falcon-7b", {"multi_query": False}, ["query_key_value"], 0),
        ("phi-2", {"hidden_act": "gelu_pytorch_tanh"}, ["q_proj", "dense", "fc1", "fc2"], 2 * 2560),
    ):
        settings = "adapter.targets=[all-linear]" if model == "phi-2" else ""
        scenario = map_row(replace(ROW, **changes, model=model, settings=settings)).scenario
        traced, adapter = scenario.other.traced(scenario)
        changed = {key: value for key, value in traced.items() if scenario.model.config.get(key) != value}
        assert (changed, adapter.targets) == (config, targets)
        kept = joined_outputs(scenario.model.layout) if "num_key_value_heads" not in config else {}
        assert sum(kept.values()) == beside


def test_weights_of_4_bits_stay_unpacked_where_no_function_of_their_own_unpacks_them() -> None:
    """Each of a block's: 4 x 2,048 x 2,048 and 3 x 2,048 x 5,504 in 2 bytes."""
    row = replace(
        ROW, framework="qwen-finetune", method="finetune, qlora (gptq int4)", model="qwen-1.8b", params=""
    )
    scenario = map_row(replace(row, strategy="zero2", precision="fp16", activation_ckpt="none")).scenario
    kept, again = (
        activation_profile(replace(scenario, other=replace(scenario.other, keeps_unpacked=keeps)))
        for keeps in (True, False)
    )
    more = kept.saved_bytes(1, 1, 1) - again.saved_bytes(1, 1, 1)
    assert more == 2 * (4 * 2048**2 + 3 * 2048 * 5504)


def test_keys_and_values_live_until_the_loss_is_computed() -> None:
    """Of 24 blocks, each token's 2,048 + 2 x 128 values in 2 bytes, at every moment of head and loss."""
    row = replace(
        ROW, framework="fms-acceleration", params="", seq_len="2048",
        model="bigcode/gpt_bigcode-santacoder", n_gpus="1", gpus_per_node="1", gpu="A100-80GB",
        strategy="single", precision="pure bfloat16",
    )  # fmt: skip
    scenario = map_row(row).scenario
    held, plain = (
        activation_profile(replace(scenario, other=replace(scenario.other, caches=caches)))
        for caches in (scenario.other.caches, ())
    )
    for segment in ("head", "loss"):
        pairs = zip(getattr(held, segment).forward, getattr(plain, segment).forward, strict=True)
        assert {(one.live - other.live).bytes(1, 1) for one, other in pairs} == {24 * 2 * (2048 + 2 * 128)}
    assert held.loss.backward == plain.loss.backward


def test_accelerate_widens_no_outputs_of_a_model_that_computed_its_loss_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def noted(*_: object, route: str, **__: object) -> None:
        asked.append(route)
        raise HarnessError("noted")

    monkeypatch.setattr(profiles, "find_profile", noted)
    scenario = map_row(replace(ROW, strategy="accelerate-fsdp1", framework="fms-acceleration")).scenario
    for one in (scenario, replace(scenario, other=replace(scenario.other, loss=None))):
        with pytest.raises(HarnessError, match="noted"):
            activation_profile(one)
    assert asked == ["cast+autocast", "cast+autocast+outputs"]


def test_a_source_is_predicted_by_what_the_others_sustain() -> None:
    def of(source: str, tokens: str, **changes: str) -> Mapped:
        return map_row(replace(ROW, source=source, tokens_per_s_per_gpu=tokens, **changes))

    rows = [
        of("slow", "4000"), of("fast", "5000"), of("fast", "5000"), of("middle", "4500"),
        of("short", "9000", seq_len="512"), of("alone", "4000", gpu="A100-80GB"),
    ]  # fmt: skip
    runs = runs_of(rows)
    assert [run.source for run in runs] == ["slow", "fast", "fast", "middle", "alone"]
    own = own_shares(runs)
    slow, between, fast = (own["H100", name] for name in ("slow", "middle", "fast"))
    assert slow < between < fast
    assert middle(own, "H100") == round(between, 2)  # a source counts once
    assert middle({one: share for one, share in own.items() if one[1] != "slow"}, "H100") is None
    assert share_of_others(own, rows[0]) == pytest.approx((between + fast) / 2, abs=0.005)
    assert share_of_others(own, rows[4]) == middle(own, "H100")
    assert share_of_others(own, rows[5]) is None
    of_slow = next(one for one in left_out(runs) if one.source == "slow")
    unseen, shipped = judge(rows[0], of_slow.others), judge(rows[0])
    assert of_slow.errors == (unseen.speed_error,)
    assert of_slow.shipped == (unseen.fitted_speed_error,) == (shipped.speed_error,)
    page = text(left_out(runs))
    assert f"- H100: {round(between, 2)}, the middle of 3 sources" in page
    assert "| alone" in page.partition("fewer than three")[2]


def test_what_ships_is_the_middle_of_the_sources_of_the_page() -> None:
    shares = {
        chip: (float(share), int(sources))
        for chip, share, sources in re.findall(
            r"^- (\S+): ([\d.]+), the middle of (\d+) sources", PAGE.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert set(shares) == {"A100", "H100"}
    for name, (share, sources) in shares.items():
        constants = default_constants(load_hardware().device(f"{name}-80"))
        assert constants.sustained_share == share
        assert f"middle of {sources} sources" in constants.matrix_source


def test_the_pages_of_predictions_and_of_planning_state_the_same_shares() -> None:
    found = (REPORT / "README.md").read_text()
    told = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    summary = re.search(r"\| all rows +\| (\d+) of (\d+).*?([\d.]+)% of (\d+)", found)
    orders = re.findall(
        r"^- (speed|memory): ([\d.]+)% right, mean of \d+ sources, (\d+) pairs", found, re.MULTILINE
    )
    assert summary is not None
    assert len(orders) == 2
    covered, rows = int(summary[1]), int(summary[2])
    assert covered / rows >= 0.85
    rows_told = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told.splitlines()]
    shown = {cells[0]: cells[2:] for cells in rows_told if len(cells) == 5}
    assert shown["a prediction is possible"] == [f"{covered}", f"{rows}", f"{100 * covered / rows:.0f}"]
    judged = int(summary[4])
    assert shown["fits or not"][:2] == [f"{float(summary[3]) / 100 * judged:.0f}", f"{judged}"]
    for name, share, of in orders:
        assert shown[f"order in {name}"] == ["", of, f"{float(share):.0f}"]


AIM = re.compile(r"^\| (.+?) +\| at (?:most|least) .*\| (yes|no) +\|$", re.MULTILINE)


def test_what_misses_an_aim_is_named() -> None:
    page = (REPORT / "README.md").read_text()
    reached = dict(AIM.findall(page))
    assert len(reached) == 10
    assert {name for name, is_reached in reached.items() if is_reached == "no"} == {
        "memory, mean", "memory, worst",
    }  # fmt: skip
    missed = page.partition("## Missed")[2].partition("## By source")[0]
    for source in ("torchao-e2e, memory", "minitrainbench, speed"):
        assert f"- {source}, " in missed


def test_an_aim_is_a_bound_from_below_or_above() -> None:
    rows = [judged("one", memory=44, tokens=4000), judged("other", memory=40, tokens=4000)]
    found = {one.name: one for one in aims_of(rows, (), {"GPU H100": rows}, [-0.2, 0.1, 0.3])}
    assert found["runs that can be asked"].is_reached
    assert found["memory, worst"].found == pytest.approx(0.1)
    assert found["collectives, median"].found == 0.2
    assert not found["collectives, median"].is_reached
    assert found["bias in speed of any group, most"].found is None  # under ten runs
    many = [judged(str(place), memory=40, tokens=3000) for place in range(10)]
    name, bias = largest_bias({"few": rows, "GPU H100": many})
    assert (name, bias) == ("GPU H100: 10 runs", pytest.approx(abs(many[0].speed_error or 0)))


def test_the_page_s_collectives_are_those_of_this_code() -> None:
    measured = read_measured()
    assert len(measured) == 63
    small = [
        one for one in measured if one.bytes == 2**20 and one.nodes > 1 and not one.source.startswith("boe")
    ]
    assert collectives.median_error(small) < 0.2  # of seven sources, none of which suggested a constant
    assert collectives.table(measured) in (REPORT / "README.md").read_text()
    told = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    assert f"the median error is {100 * collectives.median_error(measured):.0f} %" in told


@pytest.mark.exhaustive
def test_the_page_of_sources_left_out_is_that_of_this_code() -> None:
    runs = runs_of(map_row(row) for name in FILES for row in read_rows(HERE / name))
    assert PAGE.read_text(encoding="utf-8") == text(left_out(runs))


def test_the_page_names_rows_and_reasons() -> None:
    rows = [
        judged("here", memory=44, tokens=4000),
        Judged(mapped=map_row(replace(ROW, id="there", pp="2"))),
    ]
    page = render(rows, pictures=["somebody"])
    assert "| here" in page
    assert "+10.0%" in page
    assert "- pipeline parallelism (1): there" in page
    assert "![somebody](predicted.somebody.svg)" in page


def test_a_file_without_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("id,source\n")
    with pytest.raises(HarnessError, match="lacks the columns tier, model"):
        read_rows(path)


def test_every_published_row_is_mapped_or_has_a_reason() -> None:
    rows = read_rows(DATA)
    assert len(rows) == 427
    assert all(row.repo and row.commit and row.path for row in rows)
    mapped = [map_row(row) for row in rows]
    assert all((m.scenario is None) == bool(m.not_covered) for m in mapped)
    assert sum(m.scenario is not None for m in mapped) >= 0.85 * len(rows)


def test_states_that_a_source_states_replace_those_of_our_strategy() -> None:
    changes = {
        "model": "nanotron llama 1B", "params": "1342177280", "seq_len": "4096", "activation_ckpt": "none",
        "precision": "bf16 weights and compute, fp32 masters (20 bytes per parameter)", "gpu": "H100-80GB",
    }  # fmt: skip
    replicated, sharded = (map_row(replace(ROW, strategy=name, **changes)) for name in ("ddp", "zero1"))
    assert replicated.own_state_bytes == 20 * 1_342_244_864
    assert sharded.own_state_bytes == (8 + 12 / 8) * 1_342_244_864
    assert replicated.memory_scenario.label == "zero0"
    assert map_row(ROW).own_state_bytes is None
