"""What a job is. Validation touches neither the environment nor the network nor torch."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from harness.backends.registry import IN_DEFAULT_COMPARISON
from harness.backends.values import TypedValues

DEFAULT_MODEL_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
DEFAULT_GLOBAL_BATCH_SIZE = 8
DEFAULT_STEPS = 20
LEAST_TIMED_STEPS = 8
"""A shorter run times every step that carries no probe, and has no cooldown."""


class Section(TypedValues):
    """A part of a configuration: frozen, unknown keys refused."""


class ModelSection(Section):
    """The model: a checkpoint by name or path, or a configuration with random weights."""

    name: str | None = Field(None, description="Hugging Face hub name or local folder; excludes `config`")
    revision: str | None = Field(None, description="hub revision of `name`")
    weights: Literal["pretrained", "random"] | None = Field(
        None,
        description="with `name`: its weights (pretrained, the default) or random ones from the seed",
    )
    config: dict[str, Any] | None = Field(
        None,
        description=(
            "values of the Hugging Face configuration. With `model_type` they stand on that type's "
            "defaults; without it they change the default small Llama. `vocab_size` defaults to the "
            "tokenizer's"
        ),
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = Field(
        "auto", description="attention kernel; auto: sdpa where the architecture has it, else eager"
    )
    dropout: float | None = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability written to every dropout of the model; null: as the model has it",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if self.name is not None and self.config is not None:
            raise ValueError("give either `name` or `config`, not both")
        if self.name is None and (self.weights == "pretrained" or self.revision):
            raise ValueError("`weights: pretrained` and `revision` need a `name`")
        return self

    @property
    def attention_kernel(self) -> str | None:
        """What transformers is asked for; None: its own choice."""
        return None if self.attention == "auto" else self.attention

    def config_values(self) -> dict[str, Any]:
        """Configuration values of a model without a name, the default's filled in."""
        given = self.config or {}
        return dict(given) if "model_type" in given else DEFAULT_MODEL_CONFIG | given


class DataSection(Section):
    """The text, how it becomes tokens, and how tokens become samples."""

    source: Literal["prose", "text", "jsonl", "squad", "datasets"] = Field(
        "prose",
        description=(
            "prose: the English help texts that every Python carries; text: a plain text file; jsonl: "
            "one JSON object a line; squad: a SQuAD v1.1 JSON file; datasets: anything that "
            "`datasets.load_dataset` or `load_from_disk` opens"
        ),
    )
    path: str | None = Field(
        None, description="file or folder; for `datasets` also a hub name; `prose` takes none"
    )
    configuration: str | None = Field(None, description="configuration name for `datasets`")
    split: str = Field("train", description="split for `datasets`")
    text_field: str = Field("text", description="field that holds the text (jsonl, datasets)")
    prompt_field: str | None = Field(
        None, description="field put before the text; its tokens are not trained on (jsonl, datasets)"
    )
    tokenizer: str = Field("bytes", description="'bytes' or a Hugging Face tokenizer name or folder")
    sequence_length: PositiveInt = Field(128, lt=2**31, description="tokens per sample")
    packed: bool | None = Field(
        None,
        description=(
            "true: one stream of tokens cut into samples; false: one sample per document, cut or "
            "padded. Default: true for prose and text, false otherwise"
        ),
    )
    shuffle: bool = Field(True, description="permute samples in each epoch, from the seed")
    limit: PositiveInt | None = Field(None, description="use at most so many samples")

    @model_validator(mode="after")
    def _path_fits_source(self) -> DataSection:
        if self.source == "prose" and self.path is not None:
            raise ValueError(
                "`path` would be ignored with source 'prose'; set source to text, jsonl, squad or datasets"
            )
        if self.source != "prose" and self.path is None:
            raise ValueError(f"source '{self.source}' needs a `path`")
        if self.prompt_field is not None and (self.source not in ("jsonl", "datasets") or self.is_packed):
            raise ValueError("`prompt_field` needs source jsonl or datasets and `packed: false`")
        if self.source == "squad" and self.packed:
            raise ValueError("source 'squad' is one sample per question; leave `packed` out")
        if self.sequence_length < 2:
            raise ValueError("`sequence_length` must be at least 2: a token is predicted from another")
        return self

    @property
    def is_packed(self) -> bool:
        return self.source in ("prose", "text") if self.packed is None else self.packed


class OptimizerSection(Section):
    """AdamW, every constant explicit."""

    learning_rate: PositiveFloat = Field(1e-3, description="peak learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    epsilon: PositiveFloat = Field(1e-8, description="added to the root of the second moment")
    weight_decay: NonNegativeFloat = Field(0.1, description="decoupled weight decay")
    decay: Literal["matrices", "all"] = Field(
        "matrices", description="parameters that decay: those with two dimensions or more, or all"
    )


class ScheduleSection(Section):
    """The learning rate over steps."""

    kind: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="shape after the warm-up, down to `final_fraction` at the last step"
    )
    warmup_steps: NonNegativeInt = Field(2, description="steps of linear rise from 0 to the peak")
    final_fraction: float = Field(
        0.1, ge=0, le=1, description="last learning rate over the peak (linear, cosine)"
    )


class TrainingSection(Section):
    """Batch, length, precision and randomness of the training."""

    steps: PositiveInt | None = Field(None, description="optimizer steps; excludes `epochs`")
    epochs: PositiveFloat | None = Field(None, description="passes over the data; excludes `steps`")
    global_batch_size: PositiveInt | None = Field(
        None, description="samples per optimizer step over all ranks"
    )
    micro_batch_size: PositiveInt | None = Field(None, description="samples per rank and forward pass")
    accumulation_steps: PositiveInt | None = Field(
        None, description="forward passes per optimizer step and rank"
    )
    precision: Literal["fp32", "bf16-mixed", "fp16-mixed", "bf16"] = Field(
        "fp32",
        description=(
            "mixed: low-precision compute on fp32 masters (fp16 with a loss scaler); "
            "bf16: weights, gradients and optimizer states in bf16"
        ),
    )
    gradient_clipping: PositiveFloat | None = Field(
        1.0, description="largest global L2 norm of the gradient; null: none"
    )
    activation_checkpointing: bool = Field(
        False, description="recompute each block's activations in the backward pass"
    )
    initial_loss_scale: PositiveFloat = Field(
        2.0**16, description="first loss scale of fp16-mixed; a power of two"
    )
    loss_scale_growth_interval: PositiveInt = Field(
        1000, description="steps without overflow before fp16-mixed doubles its loss scale"
    )
    seed: NonNegativeInt = Field(0, lt=2**63, description="seed of random weights and of the data order")
    deterministic: bool = Field(True, description="deterministic kernels where torch has them")
    tf32: bool = Field(False, description="TF32 matrix products on CUDA")

    @model_validator(mode="after")
    def _consistent(self) -> TrainingSection:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give either `steps` or `epochs`, not both")
        if self.initial_loss_scale.hex().split("p")[0] != "0x1.0000000000000":
            raise ValueError("`initial_loss_scale` must be a power of two")
        return self


class EvaluationSection(Section):
    """Loss on samples that are held out of the training."""

    every_steps: PositiveInt | None = Field(
        None, description="evaluate after every so many optimizer steps; null: never"
    )
    samples: PositiveInt = Field(32, description="samples held out, taken from the end of the data")


class Job(Section):
    """What is trained: everything that decides the mathematics, nothing of backend or machine."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()

    def job_id(self, content_digests: dict[str, str] | None = None) -> str:
        """Hash of what is trained: 12 hexadecimal digits.

        Micro-batch and accumulation are left out: they split a global batch without changing it. So
        call it on a job whose global batch is resolved. `content_digests` maps a local path in the
        job to the digest of the file there, so that the same data elsewhere is the same job.
        """
        document = self.model_dump(mode="json")
        for key in ("micro_batch_size", "accumulation_steps"):
            del document["training"][key]
        for section, key in (("model", "name"), ("data", "path"), ("data", "tokenizer")):
            digest = (content_digests or {}).get(str(document[section][key]))
            if digest is not None:
                document[section][key] = digest
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class MeasureSection(Section):
    """Which steps of a run are measured how."""

    warmup_steps: NonNegativeInt = Field(3, description="first steps, in no statistic")
    probed_steps: NonNegativeInt = Field(
        2,
        description="steps after the warm-up whose memory and communication are recorded, not timed",
    )
    traced_steps: NonNegativeInt = Field(
        1,
        description="steps after those under torch's profiler, not timed: how far communication overlaps",
    )
    cooldown_steps: NonNegativeInt = Field(
        3,
        description="steps after the probed and traced ones, in no statistic, until the side effects "
        "of the probes have faded; none in a run that would then time fewer than 8",
    )
    trace: bool = Field(
        False, description="keep the profiler's trace of each rank, for Perfetto or chrome://tracing"
    )
    matmul_peak: bool = Field(
        False,
        description="before the training, measure on each rank what matrix products alone reach",
    )
    memory_snapshot: bool = Field(
        False,
        description="CUDA: write every allocation of the probed steps, with its stack, to a file per rank",
    )
    checkpoint: bool = Field(
        False,
        description="save a checkpoint after the probed steps, with its memory and collectives recorded; "
        "its files are deleted again",
    )
    keep_checkpoint: bool = Field(
        False, description="leave that checkpoint in the run's folder, as `checkpoint`"
    )
    timed: bool = Field(
        True, description="time the steps after all these; false: a run of which losses and weights count"
    )
    weight_digests: bool = Field(
        True, description="gather and digest all weights before the first and after the last step"
    )

    @model_validator(mode="after")
    def _settings_take_effect(self) -> MeasureSection:
        if self.trace and not self.traced_steps:
            raise ValueError("`trace` needs `traced_steps` of at least 1")
        if self.checkpoint and not self.probed_steps:
            raise ValueError("`checkpoint` needs `probed_steps` of at least 1: it is saved after them")
        if self.keep_checkpoint and not self.checkpoint:
            raise ValueError("`keep_checkpoint` needs `checkpoint: true`")
        return self

    def losses_alone(self) -> MeasureSection:
        """These settings for a run that nothing looks at but its losses, norms and weights."""
        return MeasureSection(probed_steps=0, traced_steps=0, timed=False, weight_digests=self.weight_digests)

    def window(self, step: int, steps: int) -> Literal["warmup", "probed", "traced", "cooldown", "timed"]:
        """Which window a step of a run of `steps` belongs to; they follow each other in this order."""
        watched = self.probed_steps + self.traced_steps
        left = steps - self.warmup_steps - watched
        cooldown = self.cooldown_steps if watched and left - self.cooldown_steps >= LEAST_TIMED_STEPS else 0
        if step < self.warmup_steps or not self.timed:
            return "warmup"
        if step < self.warmup_steps + self.probed_steps:
            return "probed"
        if step < self.warmup_steps + watched:
            return "traced"
        return "cooldown" if step < self.warmup_steps + watched + cooldown else "timed"


class RuntimeSection(Section):
    """The machine's side of a run."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    threads_per_rank: PositiveInt | None = Field(
        None, le=1024, description="CPU threads per rank; default: cores divided by the ranks of the node"
    )
    timeout_seconds: PositiveFloat = Field(
        1800.0, description="seconds after which a run is stopped and recorded as timeout"
    )
    preset: Literal["like-for-like", "library-defaults"] = Field(
        "like-for-like",
        description="like-for-like: settings that make strategies textbook-comparable",
    )


class CompareSection(Section):
    """The matrix that `compare` runs."""

    backends: list[str] = Field(
        list(IN_DEFAULT_COMPARISON),
        min_length=1,
        description="backends, with options after a colon; [all] for every registered one",
    )
    world_sizes: list[PositiveInt] = Field([2], min_length=1, description="numbers of ranks")
    repeats: PositiveInt = Field(1, description="runs of each cell")
    noise_runs: bool = Field(
        True,
        description="repeat the reference with another split of the batch, and at low precision in fp32: "
        "how far these lie apart decides what counts as rounding",
    )


class Experiment(Job):
    """A configuration file: the job, and how to run and measure it."""

    measure: MeasureSection = MeasureSection()
    runtime: RuntimeSection = RuntimeSection()
    compare: CompareSection = CompareSection()

    def job(self) -> Job:
        return Job(**{name: getattr(self, name) for name in Job.model_fields})
