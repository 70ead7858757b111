"""What is asked: a model, GPUs and tokens per step; and the job that follows from them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path

from harness.backends.base import Preset
from harness.errors import HarnessError
from harness.job.experiment import Experiment
from harness.job.job import Job
from harness.judge.wording import counted, listed
from harness.plan.hardware import (
    Device,
    Fabric,
    joined_by,
    of_network,
    require_context,
    with_training_defaults,
)
from harness.plan.model import PlannedModel
from harness.plan.models import COVERED, MIXTURE, NOT_COVERED, OTHER_TOOL, find_entry, load_model

MOST_SHARING = 16
"""GPUs that share samples: stages of the longest pipeline that is tried."""
POWERS = (2, 4, 8, 16)
NEAR_SHARE = 0.05
"""Of the batch asked for: so near one is taken that halves more often, as 2^20 tokens for a million."""
_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([kKmM]?)")
_THOUSANDS = re.compile(r"\d{1,3}(?:[,_]\d{3})+")


@dataclass(frozen=True, kw_only=True)
class RecommendRequest:
    """A job on a machine; strategy, micro-batch, checkpointing and offload are open."""

    model: PlannedModel
    job: Job
    """Its global batch is resolved; 0 samples a rank are possible, and then said."""
    preset: Preset
    """Of the libraries' settings: what plans, and what the printed commands run."""
    gpus: int
    gpus_per_node: int
    device: Device
    fabric: Fabric | None
    tokens_asked: int
    checkpointing: tuple[bool | str, ...]
    """Choices of activation checkpointing: both, unless the job says which."""
    remarks: tuple[str, ...] = ()
    """What was chosen because nothing was given, or rounded."""
    accumulates: bool = False
    """Whether the job names accumulation steps, from which the tokens follow."""

    @property
    def sequence_length(self) -> int:
        return self.job.data.sequence_length

    def with_length(self, sequence_length: int) -> RecommendRequest:
        """The same in samples of so many tokens."""
        data = self.job.data.model_copy(update={"sequence_length": sequence_length})
        return replace(self, job=self.job.model_copy(update={"data": data}))

    @property
    def samples_asked(self) -> int:
        """Whole samples that the tokens of a step make."""
        return self.tokens_asked // self.sequence_length

    @property
    def samples_per_rank(self) -> int:
        """0: GPUs share samples, since there are fewer."""
        return self.samples // self.gpus

    @cached_property
    def samples(self) -> int:
        """Samples of a step, for every strategy: near those asked for, and a multiple of the GPUs.

        Where those are nearer, of groups of GPUs that share each sample: within a node if there are enough
        samples for such groups, else of up to MOST_SHARING; 0: too few.
        """
        asked = self.tokens_asked / self.sequence_length
        found = [_near(asked, self.gpus)]
        for most in (self.gpus_per_node, MOST_SHARING) if asked < self.gpus else ():
            groups = [self.gpus // n for n in POWERS if n <= most and self.gpus % n == 0]
            if any(asked >= count for count in groups):
                found += [_near(asked, count) for count in groups]
                break
        return min(filter(None, found), key=lambda n: (abs(n - asked), n % self.gpus != 0, n), default=0)

    @property
    def tokens_per_step(self) -> int:
        return self.samples * self.sequence_length

    @property
    def nodes(self) -> int:
        return self.gpus // self.gpus_per_node

    @property
    def network(self) -> Fabric | None:
        """The one that the answer rests on; None: on none."""
        return self.fabric if self.nodes > 1 or not (self.fabric and self.fabric.assumed) else None


def _near(asked: float, ranks: int) -> int:
    """A multiple of ranks: what is asked for, else the one within NEAR_SHARE that halves most often.

    Micro-batches divide the samples of a rank: 61 have none but 1 and 61. Else the nearest, of two the less.
    """
    each = asked / ranks
    if each.is_integer():
        return int(each) * ranks
    powers = (2**n for n in range(int(each).bit_length(), -1, -1))
    near = (ceil(each / power - 0.5) * power for power in powers)
    return next((n for n in near if abs(n - each) <= NEAR_SHARE * each), ceil(each - 0.5)) * ranks


def read_count(text: str) -> int:
    """Tokens of '4194304', '1,000,000', '4M' or '5e5'; K and M are 10^3 and 10^6. Raises HarnessError."""
    text = text.strip()
    match = _COUNT.fullmatch(re.sub("[,_]", "", text) if _THOUSANDS.fullmatch(text) else text)
    value = float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6}[match[2].lower()] if match else 0.0
    if not 1 <= value < 1e15:
        raise HarnessError(
            f"--tokens-per-step was given '{text}'; give a number of tokens such as 4194304 or 4M"
        )
    return round(value)


GPT_3_TOKENS = ((1.3e9, 500_000), (6.7e9, 1_000_000), (175e9, 2_000_000), (float("inf"), 3_200_000))
"""Parameters below -> tokens of a step: T. Brown et al., arXiv 2005.14165, table 2.1."""


FINE_TUNING_SAMPLES = 64
"""Of a step of fine-tuning: Llama 2's, H. Touvron et al., arXiv 2307.09288, section 3.1."""


def default_tokens(
    model: PlannedModel, gpus: int, sequence: int, *, adapted: bool = False
) -> tuple[int, str]:
    """Of a step where nobody says, and why so many: at least one sample for each GPU.

    Adapters, and a model on one GPU, as in fine-tuning; others as GPT-3's models of that size had.
    """
    if adapted or gpus == 1:
        tokens = FINE_TUNING_SAMPLES * sequence
        reason = f"{FINE_TUNING_SAMPLES} samples, as Llama 2 was fine-tuned"
    else:
        tokens = next(tokens for below, tokens in GPT_3_TOKENS if model.parameters < below)
        reason = "as GPT-3 of this size had"
    return (tokens, reason) if tokens > gpus * sequence else (gpus * sequence, "a sample for each GPU")


def _given_tokens(experiment: Experiment, gpus: int, sequence: int) -> tuple[int, str] | None:
    """Of a step, from the batch that the job names, and how; None: it names none."""
    training = experiment.training
    samples, steps, micro = training.global_batch_size, training.accumulation_steps, training.micro_batch_size
    if samples is not None:
        return samples * sequence, f"training.global_batch_size={samples}"
    if steps is None:
        return None
    size = 1 if micro is None else micro
    said = f"{counted(steps, 'micro-step')} of {counted(size, 'sample')} on {counted(gpus, 'GPU')}"
    return steps * size * gpus * sequence, f"{said} (training.accumulation_steps)"


def ask(
    model: PlannedModel,
    experiment: Experiment,
    *,
    gpus: int,
    gpus_per_node: int,
    device: Device,
    fabric: Fabric | None,
    tokens: int | None,
    remarks: Sequence[str] = (),
) -> RecommendRequest:
    """The question for a job and a machine. `tokens`: of a step; None: `default_tokens`.

    `remarks`: what was chosen before.

    Raises HarnessError for what contradicts itself.
    """
    per_node = min(gpus, gpus_per_node)
    if gpus % per_node:
        raise HarnessError(
            f"--gpus {gpus} is not a multiple of --gpus-per-node {per_node}; change one of them"
        )
    _require_open(experiment, tokens)
    chosen = experiment.training.model_fields_set
    experiment, defaults = with_training_defaults(model, experiment, device)
    require_context(model, experiment)
    remarks, job = [*remarks, *defaults], experiment.job()
    sequence = job.data.sequence_length
    if tokens is None and (given := _given_tokens(experiment, gpus, sequence)):
        tokens, said = given
        remarks.append(f"--tokens-per-step={tokens}, from {said}; how it is split is open")
    if tokens is None:
        tokens, reason = default_tokens(model, gpus, sequence, adapted=job.adapter.is_present)
        remarks.append(f"--tokens-per-step={tokens}, since none is given: {reason}")
    if tokens < sequence:
        raise HarnessError(
            f"--tokens-per-step {tokens} is less than one sample of {sequence} tokens; raise it, or lower "
            "data.sequence_length"
        )
    asked = RecommendRequest(
        model=model,
        job=job,
        preset=experiment.runtime.preset,
        gpus=gpus,
        gpus_per_node=per_node,
        device=device,
        fabric=joined_by(fabric, device, gpus),
        tokens_asked=tokens,
        checkpointing=(job.training.activation_checkpointing,)
        if "activation_checkpointing" in chosen
        else (False, True),
        accumulates=job.training.accumulation_steps is not None,
    )
    remarks += of_network(asked.network)
    if asked.samples and asked.tokens_per_step != tokens:
        remarks.append(_rounded(asked))
    open_split = {"micro_batch_size": None, "accumulation_steps": None}
    training = job.training.model_copy(update={"global_batch_size": asked.samples or gpus, **open_split})
    return replace(asked, job=job.model_copy(update={"training": training}), remarks=tuple(remarks))


def _rounded(asked: RecommendRequest) -> str:
    each = asked.samples_per_rank
    whose = f"{each:,} for each of {counted(asked.gpus, 'GPU')}" if each else "shared by groups of GPUs"
    return (
        f"{asked.tokens_per_step:,} tokens per step instead of {asked.tokens_asked:,}: {asked.samples:,} "
        f"samples of {asked.sequence_length:,}, {whose}"
    )


BATCH = ("global_batch_size", "micro_batch_size", "accumulation_steps")
"""What of a job says how many samples a step has, and how they are split."""


def _require_open(experiment: Experiment, tokens: int | None) -> None:
    given = [name for name in BATCH if getattr(experiment.training, name) is not None]
    if given and tokens is not None:
        raise HarnessError(
            f"training.{given[0]} would be ignored: --tokens-per-step decides the global batch, and the "
            "recommendation its split; leave one of them out"
        )
    if given == ["micro_batch_size"]:
        raise HarnessError(
            "training.micro_batch_size would be ignored: the recommendation chooses it; to say how many "
            "tokens a step has, add training.accumulation_steps or give --tokens-per-step instead"
        )


def with_open_batch(experiment: Experiment, *, tokens: bool) -> tuple[Experiment, list[str]]:
    """A file's job without what the recommendation decides of its batch, and what that is.

    tokens: whether those of a step are given, which then decide all of it.
    """
    named = {name: value for name in BATCH if (value := getattr(experiment.training, name)) is not None}
    if not named or (set(named) != {"micro_batch_size"} and not tokens):
        return experiment, []
    training = experiment.training.model_copy(update=dict.fromkeys(named))
    said = listed([f"training.{name}={value}" for name, value in named.items()])
    return experiment.model_copy(update={"training": training}), [f"the file's {said} is left open"]


def find_model(text: str, assignments: Sequence[str] = ()) -> PlannedModel:
    """The model that `--model` names, with `assignments` of its configuration.

    Raises HarnessError; for a mixture of experts it names the tool.
    """
    if not Path(text).exists():
        name, entry = find_entry(text)
        if MIXTURE in str(entry.get(NOT_COVERED, "")):
            raise HarnessError(
                f"{name} is a {MIXTURE} of a type that is not covered; {COVERED}; {OTHER_TOOL}"
            )
    return load_model(text, assignments=assignments)
