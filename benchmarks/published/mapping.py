"""A published run as a scenario, or the reason why the model does not cover it."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from benchmarks.published import losses
from benchmarks.published.losses import LogitBytes
from benchmarks.published.programs import Program
from benchmarks.published.rows import Row, figure
from harness.backends.refusals import explain_refusal
from harness.backends.registry import BUILT_IN, label_with, parse
from harness.backends.strategy import StrategyKind
from harness.errors import HarnessError
from harness.forms.activations import SELECTIVE
from harness.job.config import parse_yaml
from harness.job.job import ALL_LINEAR, Job
from harness.plan.hardware import (
    Device,
    Fabric,
    Hardware,
    TimeConstants,
    default_constants,
    joined_by,
    load_hardware,
)
from harness.plan.model import PlannedModel, decoder
from harness.plan.models import from_config, load_model
from harness.plan.scenario import Scenario
from harness.plan.step_time import EAGER_ONLY

STATED_STATES = "20 bytes per parameter"
"""In the precision of nanotron's runs: weights and gradients in bf16 and gradients in fp32 on every rank, 8
bytes, masters and moments, 12 bytes, divided by ZeRO-1."""
OWN_STATES = (
    "states as the source states them, activations of our job under DeepSpeed, which casts weights as it does"
)
PREPARED = "what 4 bits do not hold is widened to fp32 (peft, prepare_model_for_kbit_training)"
UNDIVIDED = "whether tensor parallelism divides norms, residuals and the loss by tokens"
OLD_ATTENTION = 0.55
"""Of today's kernels on the same GPU, FlashAttention 1 and its triton version: on A100 25 to 40 % of the peak
(T. Dao, arXiv 2307.08691, section 1), where FlashAttention 2 reaches 50 to 73 %."""
CHECKPOINTED = "activation_checkpointing"
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
    def unsaid(self) -> str | None:
        """What of the memory's settings a page leaves open; None: nothing."""
        if self.bounded:
            return "training.activation_checkpointing is not said"
        if self._keeps_some and not program(self.row):
            return "which matrix products selective checkpointing keeps is not said"
        is_cut = self.scenario is not None and self.scenario.options.get("tensor", 1) > 1
        return f"{UNDIVIDED} is not said" if is_cut and not program(self.row) else None

    @property
    def least(self) -> Scenario | None:
        """Where something is left open the scenario that recomputes every block, or divides every sample."""
        whole = self.memory_scenario
        if whole is None or self.unsaid is None:
            return None
        is_recomputed = self.bounded or self._keeps_some
        return recomputing_all(whole) if is_recomputed else self._divided_sequence(whole)

    @property
    def _keeps_some(self) -> bool:
        training = self.scenario.job.training if self.scenario else None
        return training is not None and training.activation_checkpointing == SELECTIVE

    @property
    def memory_scenario(self) -> Scenario | None:
        """The scenario whose memory is that of the run, were it eager."""
        if self.scenario is None:
            return None
        model = self.scenario.job.model.model_copy(update={"compile": "none"})
        eager = replace(self.scenario, job=self.scenario.job.model_copy(update={"model": model}))
        if self.own_state_bytes is not None:
            label = "zero1" if eager.strategy.stage == 1 else "zero0"
            return replace(eager, label=label, strategy=_strategy(label))
        own = program(self.row)
        if "divides_sequence" in own and _tensor(self.row) > 1:
            return self._divided_sequence(eager)
        return replace(eager, accumulation_steps=1) if "reduces_each" in own else eager

    def _divided_sequence(self, scenario: Scenario) -> Scenario:
        """Sharding over all ranks, each with its part of every sample: what sequence and loss parallelism
        leave of activations and logits. A rank gathers a part of each block, and of the samples' hidden
        states whole ones: the block whole and the part of the samples here stand for both."""
        data = scenario.job.data
        shorter = data.model_copy(update={"sequence_length": data.sequence_length // _tensor(self.row)})
        return replace(
            scenario, label="fsdp", strategy=_strategy("fsdp"), options={},
            job=scenario.job.model_copy(update={"data": shorter}),
        )  # fmt: skip


def recomputing_all(scenario: Scenario) -> Scenario:
    """The same with every block computed again."""
    training = scenario.job.training.model_copy(update={CHECKPOINTED: True})
    return replace(scenario, job=scenario.job.model_copy(update={"training": training}))


UNREAD = "unknown"
"""A framework whose code nobody has read."""


def unread(mapped: Mapped) -> Mapped:
    """The same row as if nobody had read its program's code."""
    return map_row(replace(mapped.row, framework=UNREAD)) if program(mapped.row) else mapped


def map_row(row: Row, hardware: Hardware | None = None) -> Mapped:
    """The scenario of a row, or the first reason against it."""
    row = completed(row)
    try:
        return _scenario(row, hardware or _hardware())
    except ValidationError as error:
        return Mapped(row=row, not_covered=explain_refusal(error, Job))
    except (HarnessError, ValueError, LookupError) as error:
        return Mapped(row=row, not_covered=str(error).splitlines()[0].partition(". ")[0])


@cache
def data_file(name: str) -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load(Path(__file__).with_name(name))
    return found


def program(row: Row) -> dict[str, Any]:
    """What the code did that a row names; empty: it names none that is known."""
    named = row.framework or said("framework", f"{row.memory_statistic} {row.note}") or ""
    found: dict[str, Any] = data_file("programs.yaml").get(named, {})
    return found


def settings_of(row: Row) -> dict[str, Any]:
    """What the program's configuration sets: a setting of the job by its section and name, an option of the
    backend by its name. Raises HarnessError for what is no 'name=value'."""
    words = [word.partition("=") for word in row.settings.split()]
    if not all(name and equals for name, equals, _ in words):
        raise HarnessError(f"settings: '{row.settings}' is not of the form name=value")
    return {name: parse_yaml(value, f"settings {name}") for name, _, value in words}


DENYING = ("precision", "adapter", "optimizer")
"""Columns that may say what was not used: 'full, no LoRA'."""


def said(column: str, text: str) -> str | None:
    """The setting that a column says in words (`words.yaml`); None: none. Raises HarnessError with the reason
    why a row that says so cannot be asked."""
    words = text.strip().lower()
    if column in DENYING:
        words = re.sub(r"\b(?:no|not|without)\s+[\w-]+", "", words)
    for pattern, meant in data_file("words.yaml")[column]:
        if found := re.search(pattern, words):
            if meant.startswith("!"):
                raise HarnessError(meant[1:])
            return found.expand(meant.replace("\\1", r"\g<1>" if found.re.groups and found[1] else ""))
    return None


def _tensor(row: Row) -> int:
    """Ranks that divide each layer."""
    return _whole(row.tp if row.tp not in ("", "0") else "1", "the number of ranks that divide layers")


def _required(column: str, setting: str, text: str) -> str:
    found = said(column, text)
    if found is None:
        raise HarnessError(f"{setting} is not known: '{text}' is none of its values")
    return found


def _whole(text: str, setting: str) -> int:
    if not text.isdecimal() or not int(text):
        reason = f"'{text}', which is not one number" if text else "not said"
        raise HarnessError(f"{setting} is {reason}")
    return int(text)


def completed(row: Row) -> Row:
    """The row with what follows from its other columns."""
    changes: dict[str, str] = {}
    batch, samples = row.global_batch_seqs, row.grad_accum
    if not row.micro_batch and batch.isdecimal() and row.n_gpus.isdecimal() and samples.isdecimal():
        divided = [int(size) for size in (row.tp, row.pp, row.cp) if size.isdecimal()]
        ranks = int(row.n_gpus) * int(samples)
        each, left = divmod(int(batch) * prod(size for size in divided if size), ranks)
        changes |= {"micro_batch": str(each)} if each and not left else {}
    return replace(row, **changes)


def _loss(row: Row, strategy: StrategyKind) -> LogitBytes | None:
    """What the run's loss held; None: what ours does."""
    own = _own(row)
    if "foak" in row.note:
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


def _program(row: Row, strategy: StrategyKind, *, adapted: bool) -> Program:
    """What the run's program did otherwise than our job."""
    own: dict[str, Any] = BEFORE_0_19 | _own(row).get("other", {})
    if strategy.family == "fsdp1":
        own = {"keeps_reduced_shards": True} | own
        # Accelerate's rows are of the Trainer, whose checkpoints are reentrant unless it is told otherwise.
        own |= {"keeps_block_inputs": True} if adapted and row.strategy.startswith("accelerate") else {}
    modules: dict[str, Any] = {name: tuple(own.pop(name, ())) for name in ("recomputed", "caches")}
    return Program(loss=_loss(row, strategy), **modules, **own)


def _own(row: Row) -> dict[str, Any]:
    """What the program did, and what it did for this model and under this strategy."""
    own = program(row)
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
    for what, size in (("pipeline", row.pp), ("context", row.cp), ("expert", row.ep)):
        if size not in ("", "0", "1"):
            raise HarnessError(f"{what} parallelism")
    found = _required("strategy", "the strategy", row.strategy)
    if found not in BUILT_IN:
        raise HarnessError(f"strategy '{row.strategy}' is none of ours")
    if _tensor(row) > 1 and found not in TENSOR:
        raise HarnessError(f"tensor parallelism under '{row.strategy}' is no setting")
    return found


def _scenario(row: Row, hardware: Hardware) -> Mapped:
    assumptions: list[str] = []
    own, backend, given = program(row), _backend(row), settings_of(row)
    checkpointing = _required("activation_ckpt", "training.activation_checkpointing", row.activation_ckpt)
    strategy = _strategy(backend)
    said("optimizer", row.optimizer)
    sequence, micro_batch = (
        _whole(text, setting)
        for text, setting in (
            (row.seq_len, "data.sequence_length"), (row.micro_batch, "training.micro_batch_size"),
        )
    )  # fmt: skip
    gpus, tensor = _whole(row.n_gpus or "1", "the number of GPUs"), _tensor(row)
    accumulation = _whole(row.grad_accum or "1", "the number of micro-steps")
    base = _required("adapter", "adapter.kind", f"{row.method} {row.precision}")
    precision = given.pop("training.precision", None) or _precision(row.precision, strategy)
    adapted = base != "none"
    is_prepared = said("prepared", f"{row.method} {row.note}") == "peft"
    if precision.endswith("-mixed") and strategy.family == "single" and base == "nf4" and is_prepared:
        assumptions.append(PREPARED)
    of_job: dict[str, dict[str, Any]] = {}
    for section, key in (name.split(".") for name in [*given] if "." in name):
        of_job.setdefault(section, {})[key] = given.pop(f"{section}.{key}")
    if given:
        parse(label_with(backend, **given))  # refuses what is no option
    adapter = _adapter(row, base, precision, of_job.get("adapter", {}), assumptions)
    other = _program(row, strategy, adapted=adapted)
    if adapted and strategy.family == "fsdp1":
        # Their wrapping policies leave adapters units of their own, whose frozen neighbours reduce nothing.
        backend = {"fsdp1": "fsdp", "fsdp1-no-shard": "ddp"}.get(backend.removeprefix("accelerate-"), backend)
        strategy = _strategy(backend)
        assumptions.append("FSDP1 with adapters as units of their own, as FSDP2 has them")
    device = hardware.device(_gpu(row))
    per_node = _whole(row.gpus_per_node or str(min(device.gpus_per_node, gpus)), "the GPUs of a node")
    model = _model(row.model, sequence)
    _check_count(row, model)
    if own.get("untied"):
        model = _untied(model)
    bounded = checkpointing == "not said" and CHECKPOINTED not in of_job.get("training", {})
    attention = _required("attention", "model.attention", row.attention)
    compile_ = _required("compile", "model.compile", row.compile)
    asked: dict[str, Any] = {
        "model": {
            "attention": "sdpa" if attention == "old flash" else attention,
            "compile": compile_,
        },
        **({"adapter": adapter} if adapter else {}),
        "data": {"sequence_length": sequence},
        "loss": {"chunk_tokens": _chunk_tokens(row, model, micro_batch * sequence)},
        "training": {
            "precision": precision,
            CHECKPOINTED: {"true": True, "false": False, "not said": False}.get(
                checkpointing, "true" if checkpointing == "every-1" else checkpointing
            ),
            "gradient_clipping": 1.0,
            "deterministic": False,  # as nobody trains who publishes a speed
        },
    }
    asked |= {section: asked.get(section, {}) | values for section, values in of_job.items()}
    job = Job.model_validate(asked)
    constants = None
    if attention == "old flash":
        constants = _with_old_attention(device)
        assumptions.append("attention kernel of the first FlashAttention")
    fabric = None
    if gpus > per_node:
        fabric = _fabric(row, hardware, device, gpus, per_node, assumptions)
    if STATED_STATES in row.precision:
        assumptions.append(OWN_STATES)
    if not row.grad_accum:
        assumptions.append("no accumulation")
    assumptions += [own[name] for name in ("reduces_each", "why") if name in own]
    assumptions += [f"the program's configuration sets {row.settings}"] * bool(row.settings)
    assumptions += [own["divides_sequence"]] if tensor > 1 and "divides_sequence" in own else []
    if compile_ != "none":
        assumptions.append("compiled code holds what eager code does")
    if "foak" in row.note:
        assumptions.append("of the custom kernels the loss alone changes memory")
    scenario = Scenario(
        model=model,
        job=job,
        label=f"{backend}:tensor={tensor}" if backend in TENSOR else backend,
        strategy=strategy,
        options=given | _said_options(row, backend),
        world_size=gpus,
        ranks_per_node=min(per_node, gpus),
        shard_size=min(per_node, gpus) if strategy.facts.has_replicas else None,
        preset="library-defaults",
        micro_batch_size=micro_batch,
        accumulation_steps=accumulation,
        device=device,
        fabric=fabric,
        other=other,
    )
    text = f"{row.strategy} {row.framework} {row.note}"
    return Mapped(
        row=row,
        scenario=scenario,
        constants=constants,
        bounded=bounded,
        speed_not_covered=said("speed_unknown", f"{row.precision} {row.attention}")
        or said("lanes", row.note),
        memory_not_covered=said("memory_unknown", text) or _other_attention(scenario),
        assumptions=tuple(assumptions),
    )


TENSOR = ("tp", "fsdp-tp", "autotp-zero1", "autotp-zero2", "autotp-zero3")


def _gpu(row: Row) -> str:
    """A name of the catalogue. An A100 without its memory is the smaller one unless more was in use."""
    plain = re.sub(r"\s*\(.*\)| SXM\d?\b|( NVLink| power limited)$", "", row.gpu)
    plain = re.sub(r"^(\w+)[ -](\d+) ?GB[ -]PCIe$", r"\1-\2-PCIe", plain)
    used = figure(row.memory_gib_per_gpu) or 0
    return f"A100-{40 if used < 40 else 80}" if plain == "A100" else plain


def _strategy(backend: str) -> StrategyKind:
    strategy = BUILT_IN[backend].strategy
    assert strategy is not None
    return strategy


def _adapter(
    row: Row, base: str, precision: str, given: dict[str, Any], assumptions: list[str]
) -> dict[str, Any]:
    """The job's adapter; {} where all weights are trained. GPTQ's int4 counts as nf4: 4.16 and 4.13 bits."""
    if base == "none":
        return {}
    text = f"{row.method} {row.note}".lower()
    # 'LoRA rank 8' and 'adapters of rank 8', yet no 'memory of rank 3' nor 'rank 0', which are processes.
    ranks = re.findall(r"(?:(\w+) (?:of|on|from|by) )?\b(?:rank|r) ?=? ?([1-9]\d*)", text)
    rank = next((rank for of, rank in ranks if re.match("$|lora|adapter|matri|update", of)), None)
    layer = r"(?:[a-z]+_?(?:proj|attn|key_value|fc|lora)\w*|all[- ]linear)"
    targets = re.search(rf"(?:\bon|\btargets?|_modules)[ :=]+((?:{layer}[ ,/]*)+)|({ALL_LINEAR})", f"{text} ")
    found: dict[str, Any] = {}
    if targets is not None:
        layers = (targets[1] or targets[2]).replace("all linear", ALL_LINEAR)
        found["targets"] = re.split(r"[ ,/]+", layers.strip(" ,/"))
    found |= {"rank": int(rank)} if rank else {}
    found |= given
    if not {"rank", "targets"} <= found.keys():
        assumptions.append("rank 8 or peft's choice of layers where a page names neither")
    frozen = {"base_dtype": base} if base == "nf4" or precision != "bf16" else {}
    return {"kind": "lora", "rank": 8, **frozen} | found


def _said_options(row: Row, backend: str) -> dict[str, Any]:
    if backend in TENSOR:
        return {"tensor": _tensor(row)}
    offload = _required("offload", "the offload", row.offload)
    if offload == "none":
        return {}
    return {"offload": offload if _strategy(backend).zero_stage is not None else "cpu"}


def _precision(text: str, strategy: StrategyKind) -> str:
    """Ours for what a page says. A mixed-precision policy of FSDP keeps fp32 masters, and so does DeepSpeed
    whatever a page calls its bf16 or fp16; a bare 'bf16' elsewhere casts the weights."""
    found = _required("precision", "training.precision", text)
    return "bf16-mixed" if found == "bf16" and strategy.zero_stage is not None else found


def _other_attention(scenario: Scenario) -> str | None:
    """Why memory differs where the run used a fused kernel, and the model's code here has none."""
    name = scenario.model.architecture
    if scenario.job.model.attention_kernel is None or name not in EAGER_ONLY:
        return None
    return f"fused attention, which transformers' {name} lacks"


def _with_old_attention(device: Any) -> TimeConstants:
    today = default_constants(device)
    source = f"FlashAttention 1: {OLD_ATTENTION} of {today.attention_source}"
    return replace(today, attention_share=OLD_ATTENTION * today.attention_share, attention_source=source)


def _fabric(
    row: Row, hardware: Hardware, device: Device, gpus: int, per_node: int, assumptions: list[str]
) -> Fabric:
    """What the row says of its network, else what such nodes usually have."""
    named = said("network", row.note)
    if named is not None and " x " not in named:
        return hardware.fabric(named)
    if named is not None:
        rate = prod(map(int, named.split(" x ")))
        return Fabric(
            name=f"{rate} Gb/s per node", bandwidth_per_gpu=rate * 1e9 / 8 / per_node,
            latency_seconds=14e-6, source=row.note,
        )  # fmt: skip
    found = joined_by(None, device, gpus)
    if found is None or "networks" not in hardware.devices[device.name].model_fields_set:
        raise HarnessError("--fabric: the network between its nodes is not known")
    assumptions.append(f"network {found.name}")
    return found


def _untied(model: PlannedModel) -> PlannedModel:
    """The model with an output projection of its own."""
    config = {**model.config, "tie_word_embeddings": False}
    return from_config(config, name=model.name, source=model.source, given_whole=False)


NOMINAL_DIGITS = 3
"""Up to so many, a number of parameters is rounded."""


def _check_count(row: Row, model: PlannedModel) -> None:
    """Refuse a geometry that is not the published model's. Nominal counts are taken within a tenth."""
    given = figure(row.params)
    if given is None:
        return
    digits = re.sub(r"e\d+|[.]0*$", "", row.params).replace(".", "").strip("0")
    if abs(model.parameters / given - 1) > (0.1 if len(digits) <= NOMINAL_DIGITS else 0.002):
        raise HarnessError(
            f"model.config: geometry unknown: {model.parameters:,} parameters, published {given:,.0f}"
        )


@cache
def _hardware() -> Hardware:
    return load_hardware()


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
    own = data_file("models.yaml").get(name) or _gpt(name)
    if own is None:
        plain = re.sub(r"\s*\(.*\)", "", name)
        last = plain.rpartition("/")[2].lower()
        for one in (plain, last.replace(" ", "-")):
            with suppress(HarnessError):
                return load_model(one)
        return load_model(last)
    config = dict(own)
    if config["model_type"] == "gpt2":
        config["n_positions"] = sequence
    else:
        config["max_position_embeddings"] = max(sequence, 4096)
    model = from_config(config, name=name, source="benchmarks/published/models.yaml", given_whole=False)
    # One profile of activations serves all lengths: positions are a table outside of the blocks.
    return replace(model, config={**model.config, **LONGEST}) if "n_positions" in config else model
