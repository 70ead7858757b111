"""A published run as a scenario, or the reason why the model does not cover it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from benchmarks.published import losses
from benchmarks.published.losses import LogitBytes
from benchmarks.published.programs import Program
from benchmarks.published.rows import Row
from harness.backends.registry import BUILT_IN
from harness.backends.strategy import StrategyKind
from harness.errors import HarnessError
from harness.job.job import Job
from harness.plan.hardware import Fabric, Hardware, TimeConstants, default_constants, load_hardware
from harness.plan.model import PlannedModel, decoder
from harness.plan.models import from_config, load_model
from harness.plan.scenario import Scenario
from harness.plan.step_time import EAGER_ONLY

STRATEGIES = {
    "fsdp2": "fsdp", "fsdp2-grad-op": "fsdp-grad-op", "fsdp2-hybrid": "fsdp-hybrid", "megatron ddp": "ddp",
    "fairscale-sharded-ddp (zero2-like)": "zero2", "fairscale-fsdp": "fsdp1",
    "fairscale-fsdp (auto wrap)": "fsdp1", "own zero1": "zero1", "own zero2": "zero2", "own zero3": "zero3",
}  # fmt: skip
"""Names of the published runs -> ours, where they differ."""
OWN_IMPLEMENTATIONS = {"colossal": "Colossal-AI's own ZeRO"}
"""A word in a row's source -> why memory is that of other code. Its speed is still of interest."""
STATED_STATES = "20 bytes per parameter"
"""In the precision of nanotron's runs: weights and gradients in bf16 and gradients in fp32 on every rank, 8
bytes, masters and moments, 12 bytes, divided by ZeRO-1."""
OWN_STATES = (
    "states as the source states them, activations of our job under DeepSpeed, which casts weights as it does"
)
OLD_ATTENTION_SHARE = 0.33
"""FlashAttention 1 and its triton version: 25 to 40 % of the peak (T. Dao, arXiv 2307.08691, section 1)."""
GUESSED_FABRICS = {"A100": "HDR200", "H100": "NDR400", "H200": "NDR400"}
"""Networks of runs on several nodes that do not name theirs: as NVIDIA builds such nodes."""
SOURCE_FABRICS = {"ultrascale-playbook": "EFA-3200"}
"""Source -> network that its text names."""
REDUCED_EVERY_MICRO_STEP = {
    "llm-foundry": "gradients reduced in every micro-step (composer/distributed, ddp_sync_context: "
    "no_sync is for DDP alone)"
}
"""Source -> why accumulation keeps no unsharded gradients, as it does with FSDP1 under our job's no_sync."""
GPUS_PER_NODE = 8
LONGEST = {"n_positions": 65536, "max_position_embeddings": 65536}


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """A row and what can be predicted for it."""

    row: Row
    scenario: Scenario | None = None
    constants: TimeConstants | None = None
    """Where the run used kernels that the defaults do not describe."""
    not_covered: str | None = None
    """Why nothing is predicted."""
    memory_not_covered: str | None = None
    """Why only the speed is."""
    speed_not_covered: str | None = None
    """Why only the memory is."""
    bounded: bool = False
    """Whether the page does not say what is recomputed: the scenario keeps all, and memory may be less."""
    assumptions: tuple[str, ...] = ()

    @property
    def own_state_bytes(self) -> float | None:
        """Model states where the source says what its own code holds; None: those of our strategy."""
        if self.scenario is None or STATED_STATES not in self.row.precision:
            return None
        pieces = self.scenario.world_size if self.scenario.strategy.stage == 1 else 1
        return (8 + 12 / pieces) * self.scenario.model.parameters

    @property
    def least(self) -> Scenario | None:
        """Of a bounded run the scenario that recomputes every block."""
        whole = self.memory_scenario
        if whole is None or not self.bounded:
            return None
        training = whole.job.training.model_copy(update={"activation_checkpointing": True})
        return replace(whole, job=whole.job.model_copy(update={"training": training}))

    @property
    def memory_scenario(self) -> Scenario | None:
        """The scenario whose memory is that of the run."""
        if self.scenario is not None and self.own_state_bytes is not None:
            label = "zero1" if self.scenario.strategy.stage == 1 else "zero0"
            return replace(self.scenario, label=label, strategy=_strategy(label))
        if self.scenario is None or self.row.source not in REDUCED_EVERY_MICRO_STEP:
            return self.scenario
        return replace(self.scenario, accumulation_steps=1)


def map_row(row: Row, hardware: Hardware | None = None) -> Mapped:
    """The scenario of a row, or the first reason against it."""
    row = completed(row)
    reason = _not_covered(row)
    if reason is not None:
        return Mapped(row=row, not_covered=reason)
    try:
        return _scenario(row, hardware or _hardware())
    except (HarnessError, ValueError) as error:
        return Mapped(row=row, not_covered=str(error).splitlines()[0].partition(". ")[0])


def _not_covered(row: Row) -> str | None:
    """What the row used and a job cannot say, or did not say and needs."""
    for name, value in (("pipeline", row.pp), ("context", row.cp), ("expert", row.ep)):
        if value not in ("", "0", "1"):
            return f"{name} parallelism"
    if row.tp not in ("", "0", "1") and row.source == "torchtitan-h100":
        return "tensor parallelism that also divides norms and the loss"
    for words, reason in (
        (("embedding and head trained",), "adapters with embedding and head trained"),
        (("int8", "8-bit"), "weights in 8 bits"),
    ):
        if any(word in f"{row.method} {row.precision}".lower() for word in words):
            return reason
    if "full" in row.method and ("8bit" in row.optimizer.lower() or "step in backward" in row.optimizer):
        return "8-bit optimizer, updated inside the backward pass"
    if row.source == "litgpt-hub" and "full" in row.method:
        return "one GPU or four: the page and its lines disagree"
    if not row.seq_len or not row.micro_batch:
        return "sequence length or micro-batch is not said"
    if _backend(row) not in BUILT_IN:
        return f"strategy '{row.strategy}' is none of ours"
    return None


SILENT = ("as ", "not said")
"""How a column begins whose page leaves it open."""


@cache
def settings() -> dict[str, dict[str, Any]]:
    """What the programs of some sources did."""
    found: dict[str, dict[str, Any]] = YAML(typ="safe").load(Path(__file__).with_name("settings.yaml"))
    return found


def completed(row: Row) -> Row:
    """The row with what its program's code says and its page does not."""
    own = settings().get(row.source, {})
    if not own:
        return row
    changes = {
        name: str(own[key][row.id])
        for name, key in (("micro_batch", "micro_batch"), ("gpu", "gpu"), ("model", "models"))
        if row.id in own.get(key, {})
    }
    if row.micro_batch and row.tokens_per_second and "micro_batch" in changes:  # from seconds of a step
        samples = int(changes["micro_batch"]) / int(row.micro_batch)
        changes["tokens_per_s_per_gpu"] = f"{row.tokens_per_second * samples:.4f}"
    silent = not row.activation_ckpt or row.activation_ckpt.startswith(SILENT)
    if "activation_ckpt" in own and silent and row.id not in own.get("not_said", ()):
        changes["activation_ckpt"] = own["activation_ckpt"]
    return replace(row, **changes)


def _loss(row: Row, strategy: StrategyKind) -> LogitBytes | None:
    """What the run's loss held; None: what ours does."""
    own = _own(row)
    if "foak-fast-kernels" in row.note:
        return None if "liger" in row.note else getattr(losses, own.get("kernel_loss", "FAST"))
    name = own.get("loss")
    if name is None:
        return None
    if strategy.zero_stage is not None:
        name = own.get("loss_under_deepspeed", name)
    found: LogitBytes = getattr(losses, name)
    return replace(found, kept=own["kept"]) if "kept" in own else found


BEFORE_0_19: dict[str, Any] = {"copies_weights_first": True}
"""What DeepSpeed did when these runs were published."""


def _program(row: Row, strategy: StrategyKind) -> Program:
    """What the run's program did otherwise than our job."""
    of_fsdp1 = {"keeps_reduced_shards": True} if _strategy(_backend(row)).family == "fsdp1" else {}
    own: dict[str, Any] = BEFORE_0_19 | of_fsdp1 | _own(row).get("other", {})
    modules: dict[str, Any] = {name: tuple(own.pop(name, ())) for name in ("recomputed", "caches")}
    return Program(loss=_loss(row, strategy), **modules, **own)


def _own(row: Row) -> dict[str, Any]:
    """What the program did, and what it did for this model and under this strategy."""
    own = settings().get(row.source, {})
    of_model: dict[str, Any] = next(
        (of for word, of in own.get("of_model", {}).items() if word in row.model), {}
    )
    of_strategies = own.get("of_strategy", {})
    of_strategy = of_strategies.get(row.strategy) or of_strategies.get(_backend(row), {})
    other = (one.get("other", {}) for one in (own, of_model, of_strategy))
    return own | of_model | of_strategy | {"other": {k: v for one in other for k, v in one.items()}}


def _chunk_tokens(row: Row, model: PlannedModel, tokens: int) -> int | None:
    """Of Liger's fused loss: as many tokens at once as make logits the size of the hidden states.

    liger_kernel, ops/fused_linear_cross_entropy.py: tokens over V / H, both rounded up to a power of two.
    """
    if "liger" not in row.note:
        return None
    pieces = -(-model.config["vocab_size"] // decoder(model).hidden)
    return 1 << (-(-tokens // pieces) - 1).bit_length()


def _backend(row: Row) -> str:
    own: dict[str, str] = settings().get(row.source, {}).get("strategies", {})
    name = row.strategy.removesuffix(" on one GPU")
    name = own.get(name, name)
    if row.tp not in ("", "0", "1") and "pp" not in name and "cp" not in name:
        return {"tp": "tp", "fsdp2+tp": "fsdp-tp"}.get(name, name)
    if name == "single" and "ds_config_zero3" in row.note and "full" in row.method:
        return "zero3"  # one process, and DeepSpeed's configuration all the same
    return STRATEGIES.get(name, name)


def _scenario(row: Row, hardware: Hardware) -> Mapped:
    assumptions: list[str] = []
    backend, checkpointing = _backend(row), _checkpointing(row)
    strategy = _strategy(backend)
    precision = _precision(settings().get(row.source, {}).get("precision", row.precision), strategy)
    if row.source == "fms-acceleration" and precision == "bf16-mixed" and strategy.family == "single":
        precision = "bf16"
        assumptions.append("weights loaded in bf16, which Accelerate widens under FSDP alone")
    if row.source == "qwen" and "lora" in row.method and strategy.family == "single":
        precision = "bf16-mixed"
        assumptions.append(
            "adapters in fp32 under autocast (peft: autocast_adapter_dtype), frozen weights in bf16"
        )
    adapter = _adapter(row, precision, assumptions)
    if adapter and strategy.family == "fsdp1":
        # Their wrapping policies leave adapters units of their own, whose frozen neighbours reduce nothing.
        backend = {"fsdp1": "fsdp", "fsdp1-no-shard": "ddp"}.get(backend.removeprefix("accelerate-"), backend)
        strategy = _strategy(backend)
        assumptions.append("FSDP1 with adapters as units of their own, as FSDP2 has them")
    per_node = int(row.gpus_per_node or min(GPUS_PER_NODE, row.gpus))
    sequence, micro_batch = int(row.seq_len), int(row.micro_batch)
    model = _model(row.model, sequence)
    _check_count(row, model)
    if settings().get(row.source, {}).get("untied"):
        model = _untied(model)
    device = hardware.device(_gpu(row.gpu))
    job = Job.model_validate(
        {
            "model": {"attention": _attention(row)},
            **({"adapter": adapter} if adapter else {}),
            "data": {"sequence_length": sequence},
            "loss": {"chunk_tokens": _chunk_tokens(row, model, micro_batch * sequence)},
            "training": {
                "precision": precision,
                "activation_checkpointing": checkpointing,
                "gradient_clipping": 1.0,
            },
        }
    )
    constants = None
    if "triton" in row.attention.lower():
        constants = _with_old_attention(device)
        assumptions.append("attention kernel of the first FlashAttention")
    fabric = None
    if row.gpus > per_node:
        fabric = _fabric(row, hardware, device.name, per_node, assumptions)
    if STATED_STATES in row.precision:
        assumptions.append(OWN_STATES)
    if row.source in REDUCED_EVERY_MICRO_STEP:
        assumptions.append(REDUCED_EVERY_MICRO_STEP[row.source])
    if not row.grad_accum:
        assumptions.append("no accumulation")
    own_words = settings().get(row.source, {})
    if why := own_words.get("why"):
        assumptions.append(why)
    if row.id in own_words.get("micro_batch", {}) and (why := own_words.get("why_micro_batch")):
        assumptions.append(why)
    if row.compile.lower() == "true":
        assumptions.append("compiled code holds what eager code does")
    if "foak-fast-kernels" in row.note:
        assumptions.append("of the custom kernels the loss alone changes memory")
    scenario = Scenario(
        model=model,
        job=job,
        label=f"{backend}:tensor={row.tp}" if backend in ("tp", "fsdp-tp") else backend,
        strategy=strategy,
        options=_options(row, backend, model),
        world_size=row.gpus,
        ranks_per_node=min(per_node, row.gpus),
        shard_size=min(per_node, row.gpus) if strategy.facts.has_replicas else None,
        preset="library-defaults",
        micro_batch_size=micro_batch,
        accumulation_steps=int(row.grad_accum or 1),
        device=device,
        fabric=fabric,
        other=_program(row, strategy),
    )
    text = f"{row.source} {row.note} {row.repo}".lower()
    own = (why for word, why in OWN_IMPLEMENTATIONS.items() if word in text)
    return Mapped(
        row=row,
        scenario=scenario,
        constants=constants,
        bounded=not row.activation_ckpt or row.activation_ckpt.lower().startswith(SILENT),
        speed_not_covered=_speed_not_covered(row, strategy),
        memory_not_covered=next(own, None) or _other_attention(scenario),
        assumptions=tuple(assumptions),
    )


def _speed_not_covered(row: Row, strategy: StrategyKind) -> str | None:
    if "float8" in row.precision or "FP8" in row.precision:
        return "float8's rates"
    slow = settings().get(row.source, {}).get("unknown_lanes", {})
    return next((why for gpu, why in slow.items() if gpu in row.gpu and strategy.stage == 3), None)


def _gpu(text: str) -> str:
    """A name of the catalogue. An A100 without its memory had at most 36 GiB in use: the smaller one."""
    plain = re.sub(r"\s*\(.*\)|( SXM\d?| NVLink)$", "", text)
    return "A100-40" if plain == "A100" else plain


def _strategy(backend: str) -> StrategyKind:
    strategy = BUILT_IN[backend].strategy
    assert strategy is not None
    return strategy


def _checkpointing(row: Row) -> bool | str:
    """Ours for what a page says; 'some blocks' without their share counts as every other one."""
    words = row.activation_ckpt.lower()
    if every := re.search(r"every (\d+)(?:[nrt][dh])? (?:layer|block)", words):
        return f"every-{every[1]}" if int(every[1]) > 1 else True
    if any(text in words for text in ("some blocks", "every other", "every second")):
        return "every-2"
    return "selective" if words.startswith("selective") else words.startswith("full")


def _adapter(row: Row, precision: str, assumptions: list[str]) -> dict[str, Any]:
    """The job's adapter; {} where all weights are trained. GPTQ's int4 counts as nf4: 4.16 and 4.13 bits."""
    method = row.method.lower()
    if "lora" not in method:
        return {}
    text = f"{method} {row.precision} {row.note}".lower()
    rank = re.search(r"rank (\d+)", text)
    packed = any(word in text for word in ("qlora", "nf4", "int4"))
    own = settings().get(row.source, {})
    named = next(
        (v for k, v in own.get("lora_of", {}).items() if k in row.model.lower()), own.get("lora", {})
    )
    if rank is None and not named:
        assumptions.append("rank 8 or peft's choice of layers where a page names neither")
    base = {"base_dtype": "nf4"} if packed else {} if precision == "bf16" else {"base_dtype": "bf16"}
    return {"kind": "lora", "rank": int(rank[1]) if rank else 8, **base} | named


AUTO = "auto"
"""Of a DeepSpeed configuration: transformers fills in buckets of hidden^2 (integrations/deepspeed.py)."""


def _options(row: Row, backend: str, model: PlannedModel) -> dict[str, Any]:
    """Of the backend: what a page says, and what the program's configuration sets."""
    given = settings().get(row.source, {}).get("options", {}).get(backend, {})
    own = {name: decoder(model).hidden ** 2 if value == AUTO else value for name, value in given.items()}
    return own | _said_options(row, backend)


def _said_options(row: Row, backend: str) -> dict[str, Any]:
    if backend in ("tp", "fsdp-tp"):
        return {"tensor": int(row.tp)}
    if not row.offload or row.offload.lower() in ("none", "no", "false"):
        return {}
    whole = any(word in row.offload.lower() for word in ("param", "all", "cpu (p"))
    if "zero" in backend:
        return {"offload": "cpu" if whole else "optimizer"}
    return {"offload": "cpu"}


PURE = ("pure b", "bf16-true", "bf16 parameters", "bf16 policy")
"""How pages begin that hold weights and optimizer states in bf16."""


def _precision(text: str, strategy: StrategyKind) -> str:
    """Ours for what a page says. A mixed-precision policy of FSDP keeps fp32 masters, and so does DeepSpeed
    whatever a page calls its bf16 or fp16; a bare 'bf16' elsewhere casts the weights."""
    words = text.lower()
    if (words.startswith(PURE) or words == "bf16") and strategy.zero_stage is None:
        return "bf16"
    if "fp16" in words:
        return "fp16-mixed"
    if "bf16" in words or "bfloat16" in words or words in UNCLEAR:
        return "bf16-mixed"
    if "fp32" in words or "float32" in words:
        return "fp32"
    raise ValueError(f"precision '{text}' is none of ours")


UNCLEAR = ("", "mixed", "amp (native)", "not clear")
"""What says no dtype: bf16 with fp32 masters, as libraries train by default, is assumed."""


def _attention(row: Row) -> str:
    text = row.attention.lower()
    if "flash_attention_2" in text:
        return "flash_attention_2"
    return "sdpa" if "sdpa" in text or "flash" in text else "auto"


def _other_attention(scenario: Scenario) -> str | None:
    """Why memory differs where the run used a fused kernel, and the model's code here has none."""
    name = scenario.model.architecture
    if scenario.job.model.attention_kernel is None or name not in EAGER_ONLY:
        return None
    return f"fused attention, which transformers' {name} lacks"


def _with_old_attention(device: Any) -> TimeConstants:
    source = "FlashAttention 1: 25 to 40 % of the peak (arXiv 2307.08691, section 1)"
    return replace(default_constants(device), attention_share=OLD_ATTENTION_SHARE, attention_source=source)


def _fabric(row: Row, hardware: Hardware, device: str, per_node: int, assumptions: list[str]) -> Fabric:
    """What the row says of its network, else what its source does, else what such nodes usually have."""
    said = re.search(r"(\d+)\s*Gbps", row.note)
    if said:
        rate = float(said[1]) * 1e9 / 8 / per_node
        return Fabric(
            name=f"{said[1]} Gb/s per node", bandwidth_per_gpu=rate, latency_seconds=14e-6, source=row.note
        )
    name = SOURCE_FABRICS.get(row.source) or next(
        (name for beginning, name in GUESSED_FABRICS.items() if device.startswith(beginning)), None
    )
    if name is None:
        raise HarnessError("the network between its nodes is not known")
    assumptions.append(f"network {name}")
    return hardware.fabric(name)


def _untied(model: PlannedModel) -> PlannedModel:
    """The model with an output projection of its own."""
    config = {**model.config, "tie_word_embeddings": False}
    return from_config(config, name=model.name, source=model.source, given_whole=False)


def _check_count(row: Row, model: PlannedModel) -> None:
    """Refuse a geometry that is not the published model's. Nominal counts are taken within a tenth."""
    if not row.params:
        return
    given = float(row.params)
    if given < 1e5:  # kempnerforge's column is in units of 1e7
        given *= 1e7
    if abs(model.parameters / given - 1) > (0.1 if "e9" in row.params or "e6" in row.params else 0.002):
        raise HarnessError(f"geometry unknown: {model.parameters:,} parameters, published {given:,.0f}")


@cache
def _hardware() -> Hardware:
    return load_hardware()


@cache
def _own_models() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = YAML(typ="safe").load(Path(__file__).with_name("models.yaml"))
    return found


def _gpt(name: str) -> dict[str, Any] | None:
    """GPT-2's geometry of a name with layers, width and heads; minGPT counts 65 characters."""
    found = re.search(r"L(\d+) d(\d+) h(\d+)(?: vocab (\d+))?", name)
    if found is None:
        return None
    layers, width, heads, vocabulary = found.groups()
    return {
        "model_type": "gpt2", "n_layer": int(layers), "n_embd": int(width), "n_head": int(heads),
        "vocab_size": int(vocabulary or 65),
    }  # fmt: skip


@cache
def _model(name: str, sequence: int) -> PlannedModel:
    own = _own_models().get(name) or _gpt(name)
    if own is None:
        plain = re.sub(r"\s*\(.*\)", "", name)
        try:
            return load_model(plain)
        except HarnessError:
            return load_model(plain.rpartition("/")[2].lower())
    config = dict(own)
    if config["model_type"] == "gpt2":
        config["n_positions"] = sequence
    else:
        config["max_position_embeddings"] = max(sequence, 4096)
    model = from_config(config, name=name, source="benchmarks/published/models.yaml", given_whole=False)
    # One profile of activations serves all lengths: positions are a table outside of the blocks.
    return replace(model, config={**model.config, **LONGEST}) if "n_positions" in config else model
