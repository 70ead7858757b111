"""Options of the built-in backends. Importable without torch, so that a typing error costs no start-up."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from backends.base import BackendOptions


class NoOptions(BackendOptions):
    """This backend has no options."""


class ShardedOptions(BackendOptions):
    """FSDP without replicas."""

    offload: Literal["none", "cpu"] = Field(
        "none", description="cpu: weights, gradients and optimizer states live in host memory"
    )


class HybridOptions(ShardedOptions):
    """FSDP that shards within groups of ranks and replicates across them."""

    shard_size: PositiveInt | None = Field(
        None,
        description="ranks in one shard group; default: the ranks of a node, or half of one node",
    )


class ZeroOptions(BackendOptions):
    """DeepSpeed ZeRO. Sizes are in elements, as in DeepSpeed's own configuration."""

    offload: Literal["none", "optimizer", "cpu"] = Field(
        "none",
        description="optimizer: its states live in host memory; cpu: at stage 3 the weights too",
    )
    reduce_bucket_size: PositiveInt | None = Field(
        None, description="gradient elements reduced at once; default: by the preset"
    )
    allgather_bucket_size: PositiveInt | None = Field(
        None, description="weight elements gathered at once (stages 1 and 2); default: by the preset"
    )
    gradient_clipping: float | None = Field(
        None,
        ge=0,
        description="overrides the job's clipping for this backend only; 0: off (for experiments)",
    )
