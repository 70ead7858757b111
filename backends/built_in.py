"""The built-in backends: one entry each, from which their closed forms, presets and defaults follow."""

from __future__ import annotations

from typing import Any

from harness.backends.entry import Entry
from harness.backends.strategy import SHARDINGS, Route, Sharding, StrategyKind


def _entry(
    name: str, target: str, options: str, summary: str, strategy: StrategyKind, *, default: bool = False,
    short_check: bool = False, **parameters: Any,
) -> Entry:  # fmt: skip
    """A built-in backend; its packages follow from the strategy."""
    through = {"native": (), "accelerate": ("accelerate",), "trainer": ("accelerate", "transformers")}
    engine = () if strategy.zero_stage is None else ("deepspeed",)
    return Entry(
        name=name,
        target=f"harness.backends.{target}",
        options=f"harness.backends.{options}" if ":" in options else f"harness.backends.options:{options}",
        summary=summary,
        packages=("torch", *through[strategy.route], *engine),
        parameters=parameters,
        strategy=strategy,
        in_default_comparison=default,
        in_short_check=short_check,
    )


def _zero(
    stage: int, sharded: str, route: Route = "native", *, default: bool = False, short_check: bool = False
) -> Entry:
    families: tuple[tuple[str, Sharding], ...] = (
        ("zero0", "none"), ("zero12", "grad-op"), ("zero12", "grad-op"), ("zero3", "full-shard"),
    )  # fmt: skip
    family, sharding = families[stage]
    strategy = StrategyKind(family=family, sharding=sharding, zero_stage=stage, route=route)
    options = ("ZeroOptions", "Zero12Options", "Zero12Options", "Zero3Options")[stage]
    if route == "accelerate":
        name, target = f"accelerate-zero{stage}", "accelerate:AccelerateZeroBackend"
        summary = f"DeepSpeed ZeRO stage {stage} through Accelerate"
    elif route == "trainer":
        name, target = f"trainer-zero{stage}", "trainer.backends:TrainerZeroBackend"
        summary = f"DeepSpeed ZeRO stage {stage} through transformers.Trainer"
    else:
        name, target = f"zero{stage}", "zero:ZeroBackend"
        summary = f"DeepSpeed ZeRO stage {stage}: {sharded} sharded"
    return _entry(
        name, target, options, summary, strategy, default=default, short_check=short_check, stage=stage
    )


def _fsdp2(
    name: str, sharding: Sharding, summary: str, *, default: bool = False, short_check: bool = False
) -> Entry:
    hybrid = "Hybrid" if SHARDINGS[sharding].has_replicas else ""
    options = "FullShard" if sharding == "full-shard" else hybrid
    return _entry(
        name, f"fsdp2:Fsdp2{hybrid}Backend", f"Fsdp2{options}Options", f"fully_shard (FSDP2){summary}",
        StrategyKind(family="fsdp2", sharding=sharding), default=default, short_check=short_check,
        sharding=sharding,
    )  # fmt: skip


def _fsdp1(name: str, sharding: Sharding, summary: str, *, default: bool = False) -> Entry:
    hybrid = "Hybrid" if SHARDINGS[sharding].has_replicas else ""
    return _entry(
        name, f"fsdp1:Fsdp1{hybrid}Backend", f"Fsdp1{hybrid}Options", summary,
        StrategyKind(family="fsdp1", sharding=sharding), default=default, sharding=sharding,
    )  # fmt: skip


def _ulysses(stage: int) -> Entry:
    family, sharding = ("zero3", "full-shard") if stage == 3 else ("zero12", "grad-op")
    return _entry(
        f"ulysses-zero{stage}", "ulysses:UlyssesBackend", f"Ulysses{'3' if stage == 3 else '12'}Options",
        f"DeepSpeed Ulysses (attention divided by heads) with ZeRO stage {stage}",
        StrategyKind(family=family, sharding=sharding, zero_stage=stage, sequence="exchange"),  # type: ignore[arg-type]
        stage=stage,
    )  # fmt: skip


def _autotp(stage: int) -> Entry:
    family, sharding = ("zero3-tensor", "full-shard") if stage == 3 else ("zero12-tensor", "grad-op")
    options = "AutoTp3Options" if stage == 3 else "AutoTp12Options"
    return _entry(
        f"autotp-zero{stage}", "autotp:AutoTpBackend", f"tensor_options:{options}",
        f"DeepSpeed AutoTP (layers cut over neighbours) with ZeRO stage {stage}",
        StrategyKind(family=family, sharding=sharding, zero_stage=stage),  # type: ignore[arg-type]
        stage=stage,
    )  # fmt: skip


def _accelerate_fsdp(name: str, version: int, summary: str) -> Entry:
    strategy = StrategyKind(family=f"fsdp{version}", sharding="full-shard", route="accelerate")
    return _entry(
        name,
        "accelerate_fsdp:AccelerateFsdpBackend",
        "AccelerateFsdpOptions",
        summary,
        strategy,
        version=version,
    )


def _trainer_fsdp(name: str, version: int, summary: str) -> Entry:
    strategy = StrategyKind(family=f"fsdp{version}", sharding="full-shard", route="trainer")
    return _entry(
        name,
        "trainer.backends:TrainerFsdpBackend",
        "AccelerateFsdpOptions",
        summary,
        strategy,
        version=version,
    )


ENTRIES = [
    _entry(
        "single", "single:SingleBackend", "SingleOptions", "one process, whole global batch: the reference",
        StrategyKind(family="single", sharding="single"), default=True,
    ),
    _entry(
        "ddp", "ddp:DdpBackend", "DdpOptions", "DistributedDataParallel: nothing sharded",
        StrategyKind(family="ddp"), default=True, short_check=True,
    ),
    _zero(0, "nothing", default=True),
    _zero(1, "optimizer states", default=True),
    _zero(2, "optimizer states and gradients", default=True),
    _zero(3, "optimizer states, gradients and weights", default=True, short_check=True),
    _fsdp2(
        "fsdp", "full-shard", ", weights gathered for forward and again for backward", default=True,
        short_check=True,
    ),
    _fsdp2("fsdp-grad-op", "grad-op", ", weights kept gathered between forward and backward", default=True),
    _fsdp2("fsdp-hybrid", "hybrid", " on a 2-D mesh: sharded within, replicated across groups"),
    _fsdp1("fsdp1", "full-shard", "FSDP1 FULL_SHARD", default=True),
    _fsdp1("fsdp1-grad-op", "grad-op", "FSDP1 SHARD_GRAD_OP"),
    _fsdp1("fsdp1-no-shard", "none", "FSDP1 NO_SHARD"),
    _fsdp1("fsdp1-hybrid", "hybrid", "FSDP1 HYBRID_SHARD"),
    _fsdp1("fsdp1-hybrid-grad-op", "hybrid-grad-op", "FSDP1 _HYBRID_SHARD_ZERO2"),
    _entry(
        "accelerate-ddp", "accelerate:AccelerateDdpBackend", "NoOptions", "DDP through Accelerate",
        StrategyKind(family="ddp", route="accelerate"), default=True,
    ),
    _zero(1, "optimizer states", "accelerate"),
    _zero(2, "optimizer states and gradients", "accelerate"),
    _zero(3, "optimizer states, gradients and weights", "accelerate", default=True),
    _accelerate_fsdp("accelerate-fsdp", 2, "FSDP2 through Accelerate"),
    _accelerate_fsdp("accelerate-fsdp1", 1, "FSDP1 FULL_SHARD through Accelerate"),
    _entry(
        "trainer-ddp", "trainer.backends:TrainerDdpBackend", "NoOptions", "DDP through transformers.Trainer",
        StrategyKind(family="ddp", route="trainer"),
    ),
    _trainer_fsdp("trainer-fsdp", 2, "FSDP2 through transformers.Trainer"),
    _trainer_fsdp("trainer-fsdp1", 1, "FSDP1 FULL_SHARD through transformers.Trainer"),
    _zero(1, "optimizer states", "trainer"),
    _zero(2, "optimizer states and gradients", "trainer"),
    _zero(3, "optimizer states, gradients and weights", "trainer"),
    _entry(
        "cp", "context_parallel:ContextParallelBackend", "ContextParallelOptions",
        "context parallelism (ring attention) with DistributedDataParallel",
        StrategyKind(family="ddp", sequence="ring"),
    ),
    _entry(
        "fsdp-cp", "context_parallel:FsdpContextParallelBackend", "FsdpContextParallelOptions",
        "context parallelism (ring attention) with fully_shard (FSDP2)",
        StrategyKind(family="fsdp2", sharding="full-shard", sequence="ring"),
    ),
    _ulysses(1),
    _ulysses(2),
    _ulysses(3),
    _entry(
        "pp", "pipeline.backend:PipelineBackend", "pipeline_options:PipelineOptions",
        "pipeline parallel: stages of blocks under a schedule of torch.distributed.pipelining",
        StrategyKind(family="pipeline", sharding="pipeline"),
    ),
    _entry(
        "tp", "tensor:TensorBackend", "tensor_options:TensorOptions",
        "DTensor: layers cut over ranks, nothing sharded",
        StrategyKind(family="tensor"),
    ),
    _entry(
        "fsdp-tp", "tensor:FsdpTensorBackend", "tensor_options:FsdpTensorOptions",
        "FSDP2 on a 2-D mesh: layers cut over neighbours, states sharded across them",
        StrategyKind(family="fsdp2-tensor", sharding="full-shard"),
    ),
    _autotp(1),
    _autotp(2),
    _autotp(3),
]  # fmt: skip
