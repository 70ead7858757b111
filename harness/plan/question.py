"""What a plan is asked: a model, a job, and where it may run; with the batch open, the tokens of a step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from harness.backends import registry
from harness.backends.base import Preset
from harness.errors import HarnessError
from harness.job.batch import job_layout
from harness.job.experiment import Experiment
from harness.job.job import Job
from harness.judge.wording import counted
from harness.launch.cells import canonical_label
from harness.plan import hardware
from harness.plan.model import PlannedModel, mixture_of_experts
from harness.plan.scenario import Scenario, job_model

MOST_SHARING = 16
"""GPUs that share samples: stages of the longest pipeline that is tried."""
POWERS = (2, 4, 8, 16)
NEAR_SHARE = 0.05
"""Of the batch asked for: so near one is taken that halves more often, as 2^20 tokens for a million."""
BATCH = ("global_batch_size", "micro_batch_size", "accumulation_steps")
"""What of a job says how many samples a step has, and how they are split."""
_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([kKmM]?)")
_THOUSANDS = re.compile(r"\d{1,3}(?:[,_]\d{3})+")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, a job, and where it may run."""

    model: PlannedModel
    experiment: Experiment
    labels: tuple[str, ...]
    """Backends with their options, canonical."""
    world_sizes: tuple[int, ...]
    ranks_per_node: int
    device: hardware.Device | None = None
    fabric: hardware.Fabric | None = None
    constants: hardware.TimeConstants | None = None
    """Of a calibration; None: published ones."""
    torch_device: str = "cuda"
    remarks: tuple[str, ...] = ()
    """What was chosen because nothing was given, or rounded."""
    names_all: bool = False
    """Whether every built-in strategy is asked for, not some by their names."""
    is_open: bool = False
    """Whether strategy, micro-batch, checkpointing and offload are searched."""
    tokens: int | None = None
    """Asked of a step; None: by the batch of the job, or by default."""
    checkpointing: tuple[bool | str, ...] = (False, True)
    """Choices of a search: both, unless the job says which."""

    @cached_property
    def job(self) -> Job:
        return self.experiment.job()

    @property
    def preset(self) -> Preset:
        return self.experiment.runtime.preset

    @property
    def gpus(self) -> int:
        """The largest number of ranks; of a search the only one."""
        return max(self.world_sizes)

    @property
    def gpus_per_node(self) -> int:
        """One that is smaller than a node fills none."""
        return min(self.ranks_per_node, self.gpus)

    @property
    def nodes(self) -> int:
        return self.gpus // self.gpus_per_node

    @property
    def network(self) -> hardware.Fabric | None:
        """The one that an answer rests on; None: on none."""
        return self.fabric if self.nodes > 1 or not (self.fabric and self.fabric.assumed) else None

    @property
    def is_mixture(self) -> bool:
        """Whether it is a mixture of experts, of which only model states are predicted."""
        return mixture_of_experts(self.model.config)

    def of(self, section: str, **values: Any) -> Question:
        """Question with other values in a section of the job."""
        changed = getattr(self.experiment, section).model_copy(update=values)
        return replace(self, experiment=self.experiment.model_copy(update={section: changed}))

    @property
    def sequence_length(self) -> int:
        return self.experiment.data.sequence_length

    @property
    def tokens_asked(self) -> int:
        assert self.tokens is not None
        return self.tokens

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

    def scenario(self, label: str, job: Job, world_size: int, **cut: Any) -> Scenario | None:
        """The scenario of one backend on so many ranks; `cut`: the micro-batch and accumulation steps."""
        return Scenario.of(
            label, self.model, job, world_size=world_size, preset=self.preset,
            ranks_per_node=min(self.ranks_per_node, world_size), device=self.device, fabric=self.fabric,
            constants=self.constants, **cut,
        )  # fmt: skip

    def opened(self, gpus: int) -> Question:
        """The search on so many GPUs: the tokens of a step are fixed, how they are split is not.

        Raises HarnessError for fewer tokens than a sample has.
        """
        training, remarks, tokens = self.experiment.training, list(self.remarks), self.tokens
        if tokens is None and (given := _given_tokens(self.experiment, gpus)):
            tokens, said = given
            remarks.append(f"--tokens-per-step={tokens}, from {said}; how it is split is open")
        if tokens is None:
            tokens, reason = default_tokens(
                self.model, gpus, self.sequence_length, adapted=self.experiment.adapter.is_present
            )
            remarks.append(f"--tokens-per-step={tokens}, since none is given: {reason}")
        if tokens < self.sequence_length:
            raise HarnessError(
                f"--tokens-per-step {tokens} is less than one sample of {self.sequence_length} tokens; raise "
                "it, or lower data.sequence_length"
            )
        chosen = training.activation_checkpointing
        asked = replace(
            self,
            world_sizes=(gpus,),
            fabric=hardware.joined_by(self.fabric, self.device, gpus),
            is_open=True,
            tokens=tokens,
            checkpointing=(chosen,)
            if "activation_checkpointing" in training.model_fields_set
            else self.checkpointing,
        )
        remarks += hardware.of_network(asked.network)
        if not asked.samples_per_rank:
            remarks.append(
                f"{tokens:,} tokens per step are {asked.samples_asked:,} samples of {self.sequence_length:,} "
                f"tokens, fewer than {gpus:,} GPUs: use {asked.samples_asked:,} GPUs at most, or at least "
                f"{gpus * self.sequence_length:,} tokens per step"
            )
        if asked.samples and asked.tokens_per_step != tokens:
            each = asked.samples_per_rank
            whose = f"{each:,} for each of {counted(gpus, 'GPU')}" if each else "shared by groups of GPUs"
            remarks.append(
                f"{asked.tokens_per_step:,} tokens per step instead of {tokens:,}: {asked.samples:,} "
                f"samples of {asked.sequence_length:,}, {whose}"
            )
        split = {"global_batch_size": asked.samples or gpus, "micro_batch_size": None}
        found = asked.of("training", **split, accumulation_steps=None)
        return replace(found, remarks=tuple(dict.fromkeys(remarks)))


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


def ask(
    model: PlannedModel,
    experiment: Experiment,
    *,
    world_sizes: Sequence[int],
    ranks_per_node: int,
    backends: Sequence[str] = ("all",),
    device: hardware.Device | None = None,
    fabric: hardware.Fabric | None = None,
    constants: hardware.TimeConstants | None = None,
    opens: bool = False,
    tokens: int | None = None,
    remarks: Sequence[str] = (),
) -> Question:
    """Check what is asked. `backends`: names with their options, or 'all' for every built-in one.

    The batch is open with `opens`, with `tokens`, and where every strategy is asked for on a GPU and the job
    names no batch. Elsewhere, without any size of a batch or with accumulation steps alone, the micro-batch
    is 1. `remarks`: what was chosen before. Raises HarnessError for an unknown or third party's backend,
    ranks that do not fill their nodes, a batch that does not divide, too long a sequence, and a batch that
    contradicts a search.
    """
    training, on_cpu = experiment.training, experiment.runtime.device == "cpu"
    given = [name for name in BATCH if getattr(training, name) is not None]
    names_all = "all" in backends
    is_open = opens or tokens is not None or (names_all and not given and device is not None and not on_cpu)
    by_default: list[str] = []
    if is_open:
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
    elif given in ([], ["accumulation_steps"]):
        by_default = [f"training.micro_batch_size=1, since {'none' if given else 'no batch'} is given"]
        one = training.model_copy(update={"micro_batch_size": 1})
        experiment = experiment.model_copy(update={"training": one})
    hardware.require_context(model, experiment)
    labels = tuple(dict.fromkeys(label for name in backends for label in _expand(name)))
    for size in world_sizes:
        if size > ranks_per_node and size % ranks_per_node:
            raise HarnessError(
                f"{size} ranks do not fill nodes of {ranks_per_node} GPUs; give a multiple of "
                "--gpus-per-node, or change it"
            )
        if not is_open:
            job_layout(labels, size, experiment.training)
    found = Question(
        model=model,
        experiment=experiment,
        labels=labels,
        world_sizes=tuple(world_sizes),
        ranks_per_node=ranks_per_node,
        device=device,
        fabric=fabric if on_cpu else hardware.joined_by(fabric, device, max(world_sizes)),
        constants=constants,
        torch_device="cpu" if on_cpu else "cuda",
        names_all=names_all,
        is_open=is_open,
        tokens=tokens,
    )
    network = [] if is_open else hardware.of_network(found.network)
    return replace(found, remarks=(*remarks, *by_default, *network))


def asked_of(
    experiment: Experiment,
    model: str | None,
    *,
    device: hardware.Device | None,
    assignments: Sequence[str] = (),
    remarks: Sequence[str] = (),
    **where: Any,
) -> Question:
    """What a command asks of a model by name, or of the job's; `where` as of `ask`.

    A GPU brings the precision, sequence and preset of ordinary training where the job names none.
    assignments: of `--set`, some of which may change the configuration of a named model.
    """
    planned = job_model(experiment.job(), model, assignments)
    experiment, defaults = hardware.with_training_defaults(planned, experiment, device)
    return ask(planned, experiment, device=device, remarks=(*remarks, *defaults), **where)


def _expand(name: str) -> Iterable[str]:
    if name == "all":
        return [entry for entry in registry.BUILT_IN if entry != registry.REFERENCE]
    label = canonical_label(name)
    entry, _ = registry.parse(label)
    if entry.strategy is None:
        raise HarnessError(
            f"backend '{entry.name}' is a third party's, without closed forms; "
            f"choose from {', '.join(registry.BUILT_IN)}"
        )
    return [label]


def read_count(text: str) -> int:
    """Tokens of '4194304', '1,000,000', '4M' or '5e5'; K and M are 10^3 and 10^6. Raises HarnessError."""
    text = text.strip()
    match = _COUNT.fullmatch(re.sub("[,_]", "", text) if _THOUSANDS.fullmatch(text) else text)
    value = float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6}[match[2].lower()] if match else 0.0
    if not 1 <= value < 1e15:
        raise HarnessError(
            f"--tokens-per-step was given '{text}'; give the tokens of one step such as 4194304 or 4M"
        )
    return round(value)


GPT_3_TOKENS = ((1.3e9, 500_000), (6.7e9, 1_000_000), (175e9, 2_000_000), (float("inf"), 3_200_000))
"""Parameters below -> tokens of a step: T. Brown et al., arXiv 2005.14165, table 2.1."""
FINE_TUNING_SAMPLES = 64
"""Of a step of fine-tuning: Llama 2's, H. Touvron et al., arXiv 2307.09288, section 3.1."""


def default_tokens(
    model: PlannedModel, gpus: int, sequence: int, *, adapted: bool = False
) -> tuple[int, str]:
    """Tokens of a step where nobody says, and why so many: at least one sample for each GPU.

    Adapters, and a model on one GPU, as in fine-tuning; others as GPT-3's models of that size had.
    """
    if adapted or gpus == 1:
        tokens = FINE_TUNING_SAMPLES * sequence
        reason = f"{FINE_TUNING_SAMPLES} samples, as Llama 2 was fine-tuned"
    else:
        tokens = next(tokens for below, tokens in GPT_3_TOKENS if model.parameters < below)
        reason = "the batch of a GPT-3 model of this size"
    return (tokens, reason) if tokens > gpus * sequence else (gpus * sequence, "a sample for each GPU")


def _given_tokens(experiment: Experiment, gpus: int) -> tuple[int, str] | None:
    """Tokens of a step, from the batch that the job names, and how; None: it names none."""
    training, sequence = experiment.training, experiment.data.sequence_length
    samples, steps = training.global_batch_size, training.accumulation_steps
    if samples is not None:
        return samples * sequence, f"training.global_batch_size={samples}"
    if steps is None:
        return None
    size = training.micro_batch_size or 1
    said = f"{counted(steps, 'micro-step')} of {counted(size, 'sample')} on {counted(gpus, 'GPU')}"
    return steps * size * gpus * sequence, f"{said} (training.accumulation_steps)"
