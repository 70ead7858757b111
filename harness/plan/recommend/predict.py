"""Predictions for one variant: the largest micro-batch that fits, and the speed near it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from harness.backends import registry
from harness.backends.entry import Entry
from harness.backends.hybrid import SECOND_COPY
from harness.backends.options import parts_of
from harness.errors import HarnessError
from harness.forms.families import collectives
from harness.forms.terms import STATE_KINDS
from harness.job.job import Job
from harness.plan.fit import divisors, largest_predicted
from harness.plan.leading import offloads, pointless, span
from harness.plan.limits import MemoryVerdict
from harness.plan.prediction import MemoryPrediction, Prediction, Predictors, predict, with_speed
from harness.plan.recommend.question import RecommendRequest
from harness.plan.scenario import Scenario

NOT_TRIED = {
    "pp:schedule=gpipe": "the bubble of 1f1b, with the activations of all micro-batches",
    "tensor and sequence across nodes": "they communicate in every layer",
    "pipelines of more than 16 stages": "not tried",
    "offload where ranks share samples": "not tried",
    "tensor, sequence and pipeline at once": "combined by no backend",
}
"""Further ways to divide a model, and why they are left out."""
MOST_STAGES = 4
"""Powers of two that are tried: 2 to 16 stages."""
GROUPS_OF_NODES = (1, 2, 4)
"""Shard groups of hybrid strategies, in nodes; on one node half of its ranks."""


def variants(entry: Entry, gpus: int, gpus_per_node: int, job: Job) -> Iterator[str]:
    """Labels of a backend with each of its offloads, degrees and groups of ranks that the world allows.

    A second copy of the weights is tried within a node only: what crosses its links is gathered once.
    """
    strategy = entry.strategy
    assert strategy is not None
    for size in _shard_sizes(gpus, gpus_per_node) if strategy.facts.has_replicas else [None]:
        for offload in offloads(entry, job):
            for degrees in _degrees(entry, gpus, gpus_per_node, bool(offload)):
                label = _variant(entry, shard_size=size, **offload, **degrees)
                if not pointless(label, gpus):
                    yield label
    for option in _second_copies(entry, gpus) if gpus > gpus_per_node and gpus % gpus_per_node == 0 else ():
        yield _variant(entry, **{option: gpus_per_node})


def _variant(entry: Entry, **given: str | int | None) -> str:
    text = ",".join(f"{key}={value}" for key, value in given.items() if value is not None)
    return registry.canonical_label(f"{entry.name}:{text}" if text else entry.name)


def _second_copies(entry: Entry, gpus: int) -> list[str]:
    """Options that keep a second copy of the weights within a node; only where nobody shares samples."""
    if registry.mesh_of(entry.name, gpus).shares_samples:
        return []
    return [name for name in SECOND_COPY if name in entry.options_class().model_fields]


def _degrees(entry: Entry, gpus: int, gpus_per_node: int, is_offloaded: bool) -> list[dict[str, Any]]:
    """Options that say how many ranks divide layers, samples or blocks; one empty set where none do.

    What crosses in every layer stays within a node.
    """
    fields = entry.options_class().model_fields
    powers = [2**n for n in range(1, 11) if 2**n <= gpus and gpus % 2**n == 0]
    inside = [power for power in powers if power <= gpus_per_node]
    if "micro_batches" in fields:
        return [degrees for stages in powers[:MOST_STAGES] for degrees in _pipelines(stages)]
    for name in ("tensor", "sequence"):
        if name in fields:
            return [] if is_offloaded else [{name: degree} for degree in inside]
    return [{}]


def _pipelines(stages: int) -> list[dict[str, Any]]:
    """1F1B with as many micro-batches as stages and with four times as many; interleaved with as many."""
    few, many = {"stages": stages, "micro_batches": stages}, {"stages": stages, "micro_batches": 4 * stages}
    return [few, many, {"schedule": "interleaved", **few}]


def _shard_sizes(gpus: int, gpus_per_node: int) -> list[int]:
    """Sizes of shard groups with at least two replicas of at least two shards."""
    sizes = [gpus_per_node * nodes for nodes in GROUPS_OF_NODES] if gpus > gpus_per_node else [gpus // 2]
    return [size for size in sizes if size > 1 and gpus % size == 0 and gpus // size > 1]


OF_SAMPLES = ("activations", "data")
"""Kinds of memory that grow with the tokens of a sample."""
SPEEDS = 2
"""Micro-batches from the largest downwards whose speed is predicted; the fastest is kept."""


@dataclass(frozen=True, kw_only=True)
class Configuration(Prediction):
    """A scenario in which all that was open is decided; there is no speed where it does not fit."""

    scenario: Scenario
    memory: MemoryPrediction
    """Of bounds, the most."""
    traffic: str | None = None
    """Why its speed rests on the papers' count of bytes, not on the library's; None: it does not."""

    @property
    def label(self) -> str:
        return self.scenario.label

    @property
    def backend(self) -> str:
        """The backend without its options."""
        return self.label.partition(":")[0]

    @property
    def offload(self) -> str:
        """'none', 'optimizer' or 'cpu'."""
        return str(self.scenario.options.get("offload", "none"))

    @property
    def checkpointing(self) -> bool | str:
        return self.scenario.job.training.activation_checkpointing

    @property
    def micro_batch_size(self) -> int:
        return self.scenario.micro_batch_size

    @property
    def accumulation_steps(self) -> int:
        return self.scenario.accumulation_steps

    @property
    def needed_bytes(self) -> int:
        """On the device, context and buffers of NCCL included."""
        return self.memory.device_bytes

    @property
    def needed_text(self) -> str:
        """'46.9', or '21.7 to 46.9' where bounds are all that is known, in GB."""
        return span([bound.device_bytes for bound in self.memory_bounds or (self.memory,)])

    @property
    def memory_bytes(self) -> int:
        """Of the device."""
        return self.verdict.device_bytes

    @property
    def verdict(self) -> MemoryVerdict:
        """Whether it fits; of bounds, whether the most does."""
        return self.held_against_limit(self.needed_bytes)

    @property
    def margin_bytes(self) -> int:
        """What stays free of the device; negative: what is missing."""
        return self.verdict.margin_bytes

    @property
    def fits(self) -> bool:
        return self.verdict.fits

    @property
    def is_tight(self) -> bool:
        """Whether it fits so closely that the error of a prediction may decide."""
        return self.verdict.answer == "close"

    def memory_groups(self) -> dict[str, int]:
        """Device bytes of the fullest moment: 'states' that sharding divides, 'activations' that grow with
        the tokens of a sample, and 'gathered' for the rest."""
        sums = {"states": 0, "gathered": 0, "activations": 0}
        moment = self.memory.decisive
        for term in moment.terms:
            if not term.host:
                is_state = term.kind in STATE_KINDS or moment.name == "optimizer step"
                group = "activations" if term.kind in OF_SAMPLES else "states" if is_state else "gathered"
                sums[group] += term.bytes
        return sums


def scenario_of(
    question: RecommendRequest, label: str, micro_batch_size: int, *, checkpointing: bool | str
) -> Scenario:
    """The scenario of one configuration."""
    training = question.job.training.model_copy(update={"activation_checkpointing": checkpointing})
    scenario = Scenario.of(
        label,
        question.model,
        question.job.model_copy(update={"training": training}),
        world_size=question.gpus,
        ranks_per_node=question.gpus_per_node,
        preset=question.preset,
        micro_batch_size=micro_batch_size,
        accumulation_steps=max(1, samples_of(question, label) // micro_batch_size),
        device=question.device,
        fabric=question.fabric,
    )
    assert scenario is not None  # variants are built-in
    return scenario


def samples_of(question: RecommendRequest, label: str) -> int:
    """Samples per step of each rank, or group of ranks, that has samples of its own."""
    mesh = registry.mesh_of(label, question.gpus)
    return question.samples // mesh.data_size


def micro_batch_sizes(question: RecommendRequest, label: str) -> list[int]:
    """Micro-batches that a run of the harness takes: they divide the samples of a rank or of a group.

    Raises HarnessError where the samples do not divide over those, or make no whole micro-batches of a
    pipeline.
    """
    data_ranks = registry.mesh_of(label, question.gpus).data_size
    if question.samples % data_ranks:
        raise HarnessError(f"{question.samples:,} samples do not divide over its {data_ranks:,} data ranks")
    samples = samples_of(question, label)
    parts = parts_of(registry.parse(label)[1], question.gpus)
    sizes = [size for size in divisors(samples) if size % parts == 0]
    if not sizes:
        raise HarnessError("its micro-batches do not divide the samples of a pipeline")
    return sizes


def best_configuration(
    question: RecommendRequest,
    label: str,
    predictors: Predictors,
    *,
    checkpointing: bool | str,
    with_speed: bool = True,
) -> Configuration:
    """The fastest split of the global batch that fits; the smallest, if none does."""
    return fastest(
        near_largest(question, label, predictors, checkpointing=checkpointing, with_speed=with_speed)
    )


def fastest(configurations: Sequence[Configuration]) -> Configuration:
    """The fastest that fits; if none does, what needs least."""
    fitting = [configuration for configuration in configurations if configuration.fits]
    if not fitting:
        return smallest_need(configurations)
    return max(fitting, key=lambda c: c.tokens_per_second_per_gpu)


def near_largest(
    question: RecommendRequest,
    label: str,
    predictors: Predictors,
    *,
    checkpointing: bool | str,
    with_speed: bool = True,
    likely: Collection[int] = (),
) -> list[Configuration]:
    """Splits of the global batch that fit, from the largest micro-batch down; if none does, what needs least.

    The largest micro-batch by halving, since memory grows with it, from `likely` on; then the speed of it,
    of the next smaller ones that fit, and of the largest that leaves room. `with_speed` False: the largest.
    """
    sizes = micro_batch_sizes(question, label)

    @cache
    def scenario(size: int) -> Scenario:
        return scenario_of(question, label, size, checkpointing=checkpointing)

    @cache
    def predicted(size: int) -> Configuration:
        return _configuration(predict(scenario(size), predictors, timed=False))

    @cache
    def least(size: int) -> int:
        return predictors.least(scenario(size))

    def fits(size: int) -> bool:
        return least(size) <= question.device.memory_bytes and predicted(size).fits

    largest = largest_predicted(sizes, fits, likely)
    if largest is None:
        smallest = predicted(sizes[0])
        if least(sizes[-1]) >= smallest.needed_bytes:
            return [smallest]
        return [smallest_need((smallest, predicted(sizes[-1])))]
    if not with_speed:
        return [predicted(largest)]
    smaller = [size for size in reversed(sizes) if size <= largest]
    roomy = next((size for size in smaller if predicted(size).verdict.leaves_room), largest)
    near = [predicted(size) for size in dict.fromkeys((*smaller[:SPEEDS], roomy))]
    return [_timed(configuration, predictors) for configuration in near if configuration.fits]


def smallest_need(configurations: Iterable[Configuration]) -> Configuration:
    """What needs least memory."""
    return min(configurations, key=lambda configuration: configuration.needed_bytes)


def _configuration(found: Prediction) -> Configuration:
    """Raises HarnessError where neither the memory nor bounds of it are known."""
    if (memory := found.most_memory) is None:
        raise HarnessError(str(found.memory_unknown))
    return Configuration(**{**vars(found), "memory": memory})


def _timed(configuration: Configuration, predictors: Predictors) -> Configuration:
    found = with_speed(configuration, predictors)
    return replace(found, traffic=collectives(found.scenario.workload()).unknown if found.speed else None)
