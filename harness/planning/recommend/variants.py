"""The strategies to choose from: built-in ones, with offload and shard groups; duplicates are only named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from harness.backends import registry
from harness.backends.entry import Entry
from harness.backends.hybrid import SECOND_COPY
from harness.backends.not_run import reasons_not_run
from harness.backends.strategy import StrategyKind

NOT_TRIED = {
    "pp:schedule=gpipe": "the bubble of 1f1b, with the activations of all micro-batches",
    "tensor and sequence across nodes": "they communicate in every layer",
    "pipelines of more than 16 stages": "not tried",
    "offload where ranks share samples": "not tried",
    "tensor, sequence and pipeline at once": "no backend combines them",
}
"""Further ways to divide a model, and why they are left out."""
MOST_STAGES = 4
"""Powers of two that are tried: 2 to 16 stages."""
SHARDING_FAMILIES = ("zero12", "zero3", "fsdp1", "fsdp2")
GROUPS_OF_NODES = (1, 2, 4)
"""Shard groups of hybrid strategies, in nodes; on one node half of its ranks."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A backend with options."""

    label: str
    strategy: StrategyKind
    options: Mapping[str, Any]
    shard_size: int | None = None

    @property
    def offload(self) -> str:
        """'none', 'optimizer' or 'cpu'."""
        return str(self.options.get("offload", "none"))


def distinct_backends() -> tuple[list[Entry], dict[str, str]]:
    """Built-in backends that shard differently, and why each of the others is left out, by name.

    Of two libraries with one strategy both stay, since they differ in memory and speed; FSDP2 stands for
    FSDP1 where it has the strategy, and DDP for everything that shards nothing.
    """
    chosen: dict[object, Entry] = {}
    left_out: dict[str, str] = {}
    order = sorted(registry.BUILT_IN.values(), key=lambda entry: entry.strategy.family == "fsdp1")  # type: ignore[union-attr]
    for entry in order:
        strategy = entry.strategy
        assert strategy is not None
        if strategy.sharding == "single":
            left_out[entry.name] = "one process"
        elif strategy.through_accelerate:
            library = "Trainer" if strategy.route == "trainer" else "Accelerate"
            left_out[entry.name] = f"the same strategy through {library}"
        elif strategy.multiplies_gradients:
            left_out[entry.name] = "its gradients are too large by the ranks of a sample unless corrected"
        elif (key := _kind(strategy)) in chosen:
            left_out[entry.name] = f"shards like {chosen[key].name}"
        else:
            chosen[key] = entry
    return list(chosen.values()), left_out


def variants(entry: Entry, gpus: int, gpus_per_node: int) -> Iterator[Variant]:
    """A backend with each of its offloads, degrees and groups of ranks that the world allows.

    A second copy of the weights is tried within a node only: what crosses its links is gathered once.
    """
    strategy = entry.strategy
    assert strategy is not None
    for size in _shard_sizes(gpus, gpus_per_node) if strategy.facts.has_replicas else [None]:
        for offload in _offloads(entry):
            for degrees in _degrees(entry, gpus, gpus_per_node, offload):
                kept = None if offload == "none" else offload
                yield _variant(entry, offload=kept, shard_size=size, **degrees)
    for option in _second_copies(entry, gpus) if gpus > gpus_per_node and gpus % gpus_per_node == 0 else ():
        yield _variant(entry, **{option: gpus_per_node})


def _variant(entry: Entry, **given: str | int | None) -> Variant:
    assert entry.strategy is not None
    text = ",".join(f"{key}={value}" for key, value in given.items() if value is not None)
    label = registry.canonical_label(f"{entry.name}:{text}" if text else entry.name)
    options = registry.parse(label)[1].model_dump(mode="json")
    return Variant(
        label=label, strategy=entry.strategy, options=options, shard_size=options.get("shard_size")
    )


def _second_copies(entry: Entry, gpus: int) -> list[str]:
    """Options that keep a second copy of the weights within a node; only where nobody shares samples."""
    if registry.mesh_of(entry.name, gpus).shares_samples:
        return []
    return [name for name in SECOND_COPY if name in entry.options_class().model_fields]


def _kind(strategy: StrategyKind) -> object:
    """Equal for backends of which one is enough."""
    if strategy.sequence is not None or strategy.family not in ("ddp", "zero0", *SHARDING_FAMILIES):
        return (strategy.family, strategy.sequence, strategy.zero_stage)
    return strategy.sharding if strategy.stage == 0 else (strategy.sharding, strategy.zero_stage)


def _degrees(entry: Entry, gpus: int, gpus_per_node: int, offload: str) -> list[dict[str, Any]]:
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
            return [{name: degree} for degree in inside] if offload == "none" else []
    return [{}]


def _pipelines(stages: int) -> list[dict[str, Any]]:
    """1F1B with as many micro-batches as stages and with four times as many; interleaved with as many."""
    few, many = {"stages": stages, "micro_batches": stages}, {"stages": stages, "micro_batches": 4 * stages}
    return [few, many, {"schedule": "interleaved", **few}]


def _shard_sizes(gpus: int, gpus_per_node: int) -> list[int]:
    """Sizes of shard groups with at least two replicas of at least two shards."""
    sizes = [gpus_per_node * nodes for nodes in GROUPS_OF_NODES] if gpus > gpus_per_node else [gpus // 2]
    return [size for size in sizes if size > 1 and gpus % size == 0 and gpus // size > 1]


def _offloads(entry: Entry) -> list[str]:
    field = entry.options_class().model_fields.get("offload")
    offered = [str(value) for value in get_args(field.annotation)] if field else ["none"]
    # How fast a disk is that NVMe offload would use, no question says.
    offered = [v for v in offered if not v.startswith("nvme") and not reasons_not_run({"offload": v})]
    strategy = entry.strategy
    # Below stage 3 DeepSpeed keeps weights on the device in either case.
    below_stage_3 = strategy is not None and strategy.zero_stage in (1, 2)
    return [value for value in offered if not (below_stage_3 and value == "cpu")]
