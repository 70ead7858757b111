"""What a backend's name stands for: closed forms, presets and reports derive from it, and parse no name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from harness.backends.model_source import AskedLoading, Loading

Sharding = Literal["single", "none", "grad-op", "full-shard", "hybrid", "hybrid-grad-op", "pipeline"]
"""What is divided among ranks: there is one rank; nothing; optimizer states and gradients; weights too;
weights too, within groups of ranks that replicate one another; as grad-op, within such groups; layers, in
stages."""
Route = Literal["native", "accelerate", "trainer"]
SequenceParallelism = Literal["ring", "exchange"]
"""ring: each rank's queries meet the keys and values of all; exchange: all tokens of a part of the heads."""


@dataclass(frozen=True, kw_only=True)
class ShardingFacts:
    """What a sharding does, whatever the library."""

    stage: int
    """The stage that the ZeRO paper would give it."""
    reshards: bool = False
    """Whether weights are freed after the forward pass and gathered again for the backward pass."""
    has_replicas: bool = False
    """Whether only groups of ranks shard, and replicate one another."""
    cuts_layers: bool = False
    """Whether ranks hold different layers, so that activations cross the wire."""


SHARDINGS: dict[str, ShardingFacts] = {
    "single": ShardingFacts(stage=0),
    "none": ShardingFacts(stage=0),
    "grad-op": ShardingFacts(stage=2),
    "full-shard": ShardingFacts(stage=3, reshards=True),
    "hybrid": ShardingFacts(stage=3, reshards=True, has_replicas=True),
    "hybrid-grad-op": ShardingFacts(stage=2, has_replicas=True),
    "pipeline": ShardingFacts(stage=3, cuts_layers=True),
}


FSDP1_STRATEGIES: dict[Sharding, str] = {
    "none": "NO_SHARD",
    "grad-op": "SHARD_GRAD_OP",
    "full-shard": "FULL_SHARD",
    "hybrid": "HYBRID_SHARD",
    "hybrid-grad-op": "_HYBRID_SHARD_ZERO2",
}
"""What torch's `ShardingStrategy` calls them."""


@dataclass(frozen=True, kw_only=True)
class FamilyFacts:
    """What an implementation does, whatever it shards."""

    has_buckets: bool = False
    """Whether gradients lie in buckets that it can make them views of."""
    has_reduce_dtype: bool = False
    """Whether its mixed precision has a dtype of the reduction."""
    has_root_reshard: bool = False
    """Whether the root unit has its own setting of resharding."""
    shards_one_rank: bool = True
    """Whether it takes its sharding on one rank too."""
    fills_parts: bool = False
    """Whether its ranks build the model without weights and fill the parts that they keep."""
    replicates_alone: bool = False
    """Whether each rank is a shard group of its own: whatever is cut over one, nothing is."""
    gathers_as_it_runs: bool = False
    """Whether weights are gathered as modules run."""
    reduces_buckets: bool = False
    """Whether gradients are reduced by buckets of what is ready, whatever module holds them."""
    holds_dtensors: bool = False
    """Whether parameters are DTensors."""
    has_matrices: bool = False
    """Whether the optimizer is given each parameter by itself, whole or as rows that it can gather."""
    flat_gradients: bool = False
    """Whether gradients lie in one buffer: a parameter without a gradient has zeros there."""
    flat_states: bool = False
    """Whether the optimizer is given flat parts. Stage 0 keeps parameters whole (DeepSpeed 0.19): it flattens
    those of its own fused Adam alone."""
    autocasts: bool = False
    """Whether mixed precision is torch's autocast on weights that stay in the dtype that trains."""
    copies: tuple[int, int] = (0, 0)
    """How often what is gathered, and what is reduced, is read and written besides.

    DDP fills buckets and empties them (reducer.cpp, `mark_variable_ready_dense`, `finalize_bucket_dense`).
    FSDP1 joins the gradients of a unit (the backward pass of its views) and divides them (`_reduce_grad`);
    FSDP2 copies out what it gathered and gradients in (_fsdp_collectives.py). DeepSpeed fills a bucket, lays
    it out anew and divides it (stage_1_and_2.py, `allreduce_bucket`; coalesced_collectives.py), and ZeRO-3
    joins pieces (`AllGatherCoalescedHandle.wait`)."""
    underneath: str | None = None
    """If ranks cut layers: the family of those that hold the same part of them."""


_FSDP = FamilyFacts(has_reduce_dtype=True, fills_parts=True, copies=(0, 4))
_FSDP2 = replace(_FSDP, has_root_reshard=True, holds_dtensors=True, copies=(2, 2))
_ZERO = FamilyFacts(flat_gradients=True, flat_states=True, copies=(0, 6))
_ZERO12 = replace(_ZERO, reduces_buckets=True)
_WHOLE = FamilyFacts(has_matrices=True, autocasts=True)
FAMILIES: dict[str, FamilyFacts] = {
    "single": _WHOLE,
    "ddp": replace(_WHOLE, has_buckets=True, reduces_buckets=True, copies=(0, 4)),
    "zero0": replace(_ZERO12, flat_states=False),
    "zero12": _ZERO12,
    "zero3": replace(_ZERO, fills_parts=True, gathers_as_it_runs=True, copies=(2, 6)),
    "fsdp1": replace(_FSDP, shards_one_rank=False, gathers_as_it_runs=True, flat_gradients=True),
    "fsdp2": replace(_FSDP2, gathers_as_it_runs=True, has_matrices=True),
    "replicate": replace(_FSDP, replicates_alone=True, holds_dtensors=True),
    "pipeline": FamilyFacts(fills_parts=True, autocasts=True),
    "tensor": FamilyFacts(fills_parts=True, holds_dtensors=True, underneath="single"),
    "fsdp2-tensor": replace(_FSDP2, underneath="fsdp2"),
    "zero12-tensor": FamilyFacts(flat_gradients=True, flat_states=True, underneath="zero12"),
    "zero3-tensor": FamilyFacts(flat_gradients=True, flat_states=True, underneath="zero3"),
}
"""One of a third party has no row: nothing is known of it."""


@dataclass(frozen=True, kw_only=True)
class RouteFacts:
    """What a library above the strategy lets one set."""

    prefix: str = ""
    """Before the native backend's name."""
    sets_reduce_dtype: bool = True
    """Whether it has an argument for the dtype in which FSDP reduces."""
    sets_bucket_view: bool = True
    """Whether it has an argument for DDP's `gradient_as_bucket_view`."""


ROUTES: dict[Route, RouteFacts] = {
    "native": RouteFacts(),
    "accelerate": RouteFacts(prefix="accelerate-"),
    "trainer": RouteFacts(prefix="trainer-", sets_reduce_dtype=False, sets_bucket_view=False),
}
ROUTE_PREFIXES = tuple(facts.prefix for facts in ROUTES.values() if facts.prefix)


@dataclass(frozen=True, kw_only=True)
class StrategyKind:
    """One strategy of one library."""

    family: str
    """Whose closed forms hold: the name of a module in `harness/forms`, such as 'fsdp2'."""
    sharding: Sharding = "none"
    """What is cut over ranks."""
    zero_stage: int | None = None
    """The stage asked of DeepSpeed; None: another library."""
    sequence: SequenceParallelism | None = None
    """How attention sees samples that ranks divide; None: no rank divides samples."""
    route: Route = "native"
    """'accelerate': through Hugging Face Accelerate; 'trainer': through transformers.Trainer above it."""

    @property
    def through_accelerate(self) -> bool:
        """Whether Accelerate prepares model and optimizer."""
        return self.route != "native"

    @property
    def facts(self) -> ShardingFacts:
        return SHARDINGS[self.sharding]

    @property
    def multiplies_gradients(self) -> bool:
        """Whether the library leaves gradients too large by the ranks that share samples."""
        return self.sequence == "exchange" and self.stage < 3

    @property
    def cuts_model(self) -> bool:
        """Whether ranks hold different layers, or parts of them."""
        return self.facts.cuts_layers or self.of_family.underneath is not None

    @property
    def underneath(self) -> StrategyKind:
        """The strategy of ranks that hold the same part of each layer."""
        return replace(self, family=self.of_family.underneath or self.family)

    @property
    def of_family(self) -> FamilyFacts:
        return FAMILIES.get(self.family, FamilyFacts())

    @property
    def of_route(self) -> RouteFacts:
        return ROUTES[self.route]

    @property
    def sets_reduce_dtype(self) -> bool:
        """Whether one can say in which dtype its mixed precision reduces gradients."""
        return self.of_family.has_reduce_dtype and self.of_route.sets_reduce_dtype

    def loading(self, asked: AskedLoading, *, ranks: int, efficient: bool = False) -> Loading:
        """How initial weights reach its ranks if `asked` is asked for: `Effective.loading` of a run.

        efficient: `cpu_ram_efficient_loading` of Accelerate and Trainer.
        """
        if self.through_accelerate:
            return "broadcast" if efficient else "full"
        whole = self.family == "fsdp1" and self.sharding == "none"
        one_rank = ranks == 1 and not self.of_family.shards_one_rank
        return asked if self.of_family.fills_parts and not whole and not one_rank else "full"

    @property
    def stage(self) -> int:
        """The stage that the ZeRO paper would give it, whatever the library."""
        return self.facts.stage if self.zero_stage is None else self.zero_stage
