"""What is trained: everything that decides the mathematics."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from harness.backends.base import Precision
from harness.backends.model_source import Loading
from harness.forms.model.activations import PARTIAL_CHECKPOINTING
from harness.job.data import IMAGES, ROWS, DataSection
from harness.job.model import AdapterSection, LossSection, ModelSection, SettingsSection, later_setting
from harness.job.optimizer import OptimizerSection, ScheduleSection

Task = Literal["causal-lm", "seq2seq", "classification", "custom"]
DEFAULT_TASK: Task = "causal-lm"


def require_fitting(task: Task, model: ModelSection, data: DataSection, loss: LossSection) -> None:
    """Raise ValueError for data or a loss that the task does not have."""
    own_data = data.factory is not None
    if task == "causal-lm" and data.source in IMAGES:
        raise ValueError(f"data.source '{data.source}' has no text; set task to classification")
    if task == "seq2seq" and not own_data:
        if data.is_packed or (data.source != "squad" and data.prompt_field is None):
            raise ValueError(
                f"task seq2seq needs an input for each text: data.source {', '.join(ROWS)} with "
                "data.prompt_field, squad, or data.factory"
            )
    if task == "classification" and not own_data and data.source not in (*ROWS, *IMAGES):
        raise ValueError(
            f"task classification needs labels, which data.source '{data.source}' has not: use "
            f"{', '.join((*ROWS, *IMAGES))}, or data.factory"
        )
    if task == "classification" and data.is_tokenized and data.is_packed:
        raise ValueError("task classification is one sample per row; leave `data.packed` out")
    if task == "custom" and not own_data:
        raise ValueError("task custom needs `data.factory`: nothing else says what its samples are")
    if data.target_length is not None and task != "seq2seq":
        raise ValueError("`data.target_length` is of task seq2seq; it would be ignored")
    if (
        task != "custom"
        and loss.factory is None
        and loss.model_copy(update={"chunk_tokens": None}) != LossSection()
    ):
        raise ValueError(f"`loss` of task {task} is the task's own; give `loss.factory`, or leave it out")
    if task != "custom" and loss.targets != "samples":
        raise ValueError(f"`loss.targets` is of task custom; task {task} has its own")
    if task == "custom" and model.factory is None and loss.factory is None:
        raise ValueError("task custom needs `model.factory`, `loss.factory` or both")


DEFAULT_GLOBAL_BATCH_SIZE = 8
DEFAULT_STEPS = 20
NAMED_FILES = (("model", "name"), ("data", "path"), ("data", "tokenizer"))
"""Settings that name a local file or folder, or something of the Hugging Face hub."""
FACTORIES = (("model", "factory"), ("data", "factory"), ("loss", "factory"), ("optimizer", "factory"))
"""Settings that name a function of the user's own."""


class TrainingSection(SettingsSection):
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
    precision: Literal["fp32", "bf16-mixed", "fp16-mixed", "bf16", "fp8"] = Field(
        "fp32",
        description=(
            "mixed: low-precision compute on fp32 masters (fp16 with a loss scaler); "
            "bf16: weights, gradients and optimizer states in bf16; fp8: linear layers of blocks multiply in "
            "fp8, emulated (needs the extra low-bit), everything else is fp32"
        ),
    )
    gradient_clipping: PositiveFloat | None = Field(
        1.0, description="largest global L2 norm of the gradient; null: none"
    )
    activation_checkpointing: bool | Annotated[str, Field(pattern=PARTIAL_CHECKPOINTING)] = Field(
        False,
        description="recompute activations in the backward pass: of every block (true or all), of every N-th "
        "(every-N), of every block but for its matrix products and attention, which are kept (selective), or "
        "of none (false or none)",
    )
    initial_loss_scale: PositiveFloat = Field(
        2.0**16, description="first loss scale of fp16-mixed; a power of two"
    )
    loss_scale_growth_interval: PositiveInt = Field(
        1000, description="steps without overflow before fp16-mixed doubles its loss scale"
    )
    seed: NonNegativeInt = Field(0, lt=2**63, description="seed of random weights and of the data order")
    deterministic: bool = Field(
        True, description="deterministic kernels; on CUDA an operator without one fails the run"
    )
    tf32: bool = Field(False, description="TF32 matrix products on CUDA")

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _one_name_each(cls, value: Any) -> Any:
        """The words for true and false are those values, so that they are the same job."""
        return (
            {"none": False, "all": True, "every-1": True}.get(value, value)
            if isinstance(value, str)
            else value
        )

    @model_validator(mode="after")
    def _consistent(self) -> TrainingSection:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give either `steps` or `epochs`, not both")
        if self.initial_loss_scale.hex().split("p")[0] != "0x1.0000000000000":
            raise ValueError("`initial_loss_scale` must be a power of two")
        return self

    @property
    def held_precision(self) -> Precision:
        """Of everything but products in fp8, which leave weights, states and traffic as fp32 has them."""
        return "fp32" if self.precision == "fp8" else self.precision


class EvaluationSection(SettingsSection):
    """Loss on samples that are held out of the training."""

    every_steps: PositiveInt | None = Field(None, description="evaluate every N optimizer steps; null: never")
    samples: PositiveInt = Field(32, description="samples held out, taken from the end of the data")
    answer_tokens: PositiveInt | None = later_setting(
        None,
        description="after the training, generate answers of at most this many tokens to the held-out "
        "questions of a SQuAD file: exact match and F1; null: none",
    )

    @model_validator(mode="after")
    def _answers_are_held_out(self) -> EvaluationSection:
        if self.answer_tokens is not None and self.every_steps is None:
            raise ValueError("`answer_tokens` needs `every_steps`: without evaluations nothing is held out")
        return self


class Job(SettingsSection):
    """What is trained: everything that decides the mathematics, nothing of backend or machine."""

    task: Task = later_setting(
        DEFAULT_TASK,
        description="what the model learns, which decides its class, the fields of a batch and the loss: the "
        "next token (causal-lm), a text from another (seq2seq), a class of texts or images (classification), "
        "or what model, data and loss of your own say (custom)",
    )
    model: ModelSection = ModelSection()
    adapter: AdapterSection = Field(
        AdapterSection(),
        exclude_if=lambda adapter: not adapter.is_present,
    )
    data: DataSection = DataSection()
    loss: LossSection = later_setting(LossSection())
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()

    @model_validator(mode="before")
    @classmethod
    def _tokenizer_of_the_model(cls, document: Any) -> Any:
        """A model by name is fed what its own tokenizer makes of the text, unless another is named."""
        if not isinstance(document, dict):
            return document
        model, data = document.get("model"), document.get("data", {})
        name = model.get("name") if isinstance(model, dict) else getattr(model, "name", None)
        if not isinstance(name, str) or not isinstance(data, dict) or "tokenizer" in data:
            return document
        if data.get("factory") is not None or data.get("source") in IMAGES:
            return document
        return {**document, "data": {**data, "tokenizer": name}}

    @model_validator(mode="after")
    def _task_fits(self) -> Job:
        require_fitting(self.task, self.model, self.data, self.loss)
        if self.adapter.is_present and self.task not in ("causal-lm", "seq2seq"):
            raise ValueError(
                f"`adapter` on task {self.task} would leave a new head frozen at random weights; use task "
                "causal-lm or seq2seq, or train all weights"
            )
        return self

    @model_validator(mode="after")
    def _chunks_have_logits(self) -> Job:
        if self.loss.chunk_tokens is None:
            return self
        if self.task != DEFAULT_TASK or self.model.factory is not None:
            raise ValueError("`loss.chunk_tokens` needs task causal-lm and a model of transformers")
        if self.model.compile == "model":
            raise ValueError(
                "`loss.chunk_tokens` hands the output layer other labels in each step, for which a model is "
                "compiled anew; use `model.compile: block`"
            )
        return self

    @model_validator(mode="after")
    def _narrow_products_alone(self) -> Job:
        if self.training.precision == "fp8" and (self.adapter.is_present or self.model.compile != "none"):
            raise ValueError(
                "`training.precision: fp8` excludes `adapter` and `model.compile`; leave them out"
            )
        return self

    @model_validator(mode="after")
    def _answers_have_questions(self) -> Job:
        most = self.evaluation.answer_tokens
        if most is not None and (self.data.source != "squad" or self.task != DEFAULT_TASK):
            raise ValueError(
                "`evaluation.answer_tokens` needs task causal-lm and `data.source: squad`: questions"
            )
        if most is not None and most >= self.data.sequence_length:
            raise ValueError("`evaluation.answer_tokens` must leave room for the question in a sequence")
        return self

    def why_whole(self, asked: Loading) -> str | None:
        """What of the job has every rank build the whole model although `asked` is not 'full'; None: nothing.

        A model of the user's own may do so too (`rank.loading.skeleton`).
        """
        if asked == "full":
            return None
        if self.adapter.is_quantised:
            return "bitsandbytes packs 4-bit weights from whole ones"
        if asked == "broadcast" and self.model.factory is not None:
            return (
                "buffers of a custom model reach the ranks through a file, "
                "which runtime.loading=slices writes"
            )
        return None

    def job_id(self, content_digests: dict[str, str] | None = None) -> str:
        """Hash of what is trained: 12 hexadecimal digits.

        Micro-batch and accumulation are left out: they split a global batch without changing it. So are the
        optimizer's implementation, which computes the same update, and deterministic kernels, which add in a
        fixed order. So call it on a job whose global batch is resolved. `content_digests` maps a local path
        or a factory in the job to the digest of the file there, so that the same data elsewhere is the same
        job.
        """
        document = self.model_dump(mode="json")
        for key in ("micro_batch_size", "accumulation_steps"):
            del document["training"][key]
        document["optimizer"].pop("implementation", None)
        document["training"]["deterministic"] = True
        for section, key in (*NAMED_FILES, *FACTORIES):
            digest = (content_digests or {}).get(str(document.get(section, {}).get(key)))
            if digest is not None:
                document[section][key] = digest
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def axes_of(job: Job) -> list[str]:
    """Settings of how a step is computed that differ from a plain one: 'model.compile=block'."""
    plain: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("model.compile", job.model.compile, ("none",)),
        ("optimizer.kind", job.optimizer.kind, ("adamw",)),
        ("optimizer.groups", [group.parameters for group in job.optimizer.groups], ([],)),
        ("training.precision", job.training.precision, ("fp32", "bf16-mixed", "fp16-mixed", "bf16")),
        ("data.document_attention", job.data.document_attention, ("across",)),
        ("loss.chunk_tokens", job.loss.chunk_tokens, (None,)),
        ("training.activation_checkpointing", job.training.activation_checkpointing, (False, True)),
    )
    return [f"{name}={value}" for name, value, of_plain in plain if value not in of_plain]
