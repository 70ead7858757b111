"""The built-in backends: one entry each, from which their closed forms, presets and defaults follow."""

from __future__ import annotations

from typing import Any

from harness.backends.entry import Entry
from harness.backends.strategy import ROUTES, Route, Sharding, StrategyKind

IN_DEFAULT_COMPARISON = (
    "single", "ddp", "zero0", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op", "fsdp1", "accelerate-ddp",
    "accelerate-zero3",
)  # fmt: skip
IN_SHORT_CHECK = ("ddp", "zero3", "fsdp")
LIBRARIES: dict[Route, tuple[str, ...]] = {
    "native": (), "accelerate": ("accelerate",), "trainer": ("accelerate", "transformers"),
}  # fmt: skip
MODULES: dict[Route, tuple[str, str]] = {
    "accelerate": ("accelerate:Accelerate", "through Accelerate"),
    "trainer": ("trainer.backends:Trainer", "through transformers.Trainer"),
}
"""Of the libraries above a strategy: module and first word of its classes, and what summaries say."""
SHARDED_BY_STAGE = (
    "nothing",
    "optimizer states",
    "optimizer states and gradients",
    "optimizer states, gradients and weights",
)


def _entry(
    name: str, target: str, options: str, summary: str, strategy: StrategyKind, **parameters: Any
) -> Entry:
    """A built-in backend; its packages follow from the strategy."""
    engine = () if strategy.zero_stage is None else ("deepspeed",)
    return Entry(
        name=name,
        target=f"harness.backends.{target}",
        options=f"harness.backends.{options}" if ":" in options else f"harness.backends.options:{options}",
        summary=summary,
        packages=("torch", *LIBRARIES[strategy.route], *engine),
        parameters=parameters,
        strategy=strategy,
        in_default_comparison=name in IN_DEFAULT_COMPARISON,
        in_short_check=name in IN_SHORT_CHECK,
    )


def _zero(
    stage: int, prefix: str, target: str, options: str, summary: str, *, layers: str = "", **kind: Any
) -> Entry:
    """A ZeRO stage. `options`: how its class begins; `layers`: what its family adds where these are cut."""
    number = ("", "12", "12", "3")[stage]
    sharding: Sharding = ("none", "grad-op", "grad-op", "full-shard")[stage]  # type: ignore[assignment]
    strategy = StrategyKind(family=f"zero{number or 0}{layers}", sharding=sharding, zero_stage=stage, **kind)
    return _entry(f"{prefix}zero{stage}", target, f"{options}{number}Options", summary, strategy, stage=stage)


def _prepared_zero(route: Route) -> list[Entry]:
    (target, through), prefix = MODULES[route], ROUTES[route].prefix
    return [
        _zero(n, prefix, f"{target}ZeroBackend", "Zero", f"DeepSpeed ZeRO stage {n} {through}", route=route)
        for n in (1, 2, 3)
    ]


def _prepared_ddp(route: Route, summary: str) -> Entry:
    kind = StrategyKind(family="ddp", route=route)
    target = f"{MODULES[route][0]}DdpBackend"
    return _entry(f"{ROUTES[route].prefix}ddp", target, "ReductionOptions", summary, kind)


def _prepared_fsdp(route: Route) -> list[Entry]:
    (target, through), prefix = MODULES[route], ROUTES[route].prefix
    return [
        _entry(
            f"{prefix}{name}", f"{target}FsdpBackend", "AccelerateFsdpOptions", f"{what} {through}",
            StrategyKind(family=f"fsdp{version}", sharding="full-shard", route=route), version=version,
        )
        for name, version, what in (("fsdp", 2, "FSDP2"), ("fsdp1", 1, "FSDP1 FULL_SHARD"))
    ]  # fmt: skip


def _fsdp(version: int, name: str, sharding: Sharding, summary: str, options: str = "") -> Entry:
    return _entry(
        name, f"fsdp.fsdp{version}:Fsdp{version}Backend", f"Fsdp{version}{options}Options", summary,
        StrategyKind(family=f"fsdp{version}", sharding=sharding), sharding=sharding,
    )  # fmt: skip


FSDP2 = "fully_shard (FSDP2)"
ENTRIES = [
    _entry(
        "single", "single:SingleBackend", "SingleOptions", "one process, whole global batch: the reference",
        StrategyKind(family="single", sharding="single"),
    ),
    _entry(
        "ddp", "ddp:DdpBackend", "DdpOptions", "DistributedDataParallel: nothing sharded",
        StrategyKind(family="ddp"),
    ),
    *(
        _zero(stage, "", "zero.backend:ZeroBackend", "Zero", f"DeepSpeed ZeRO stage {stage}: {what} sharded")
        for stage, what in enumerate(SHARDED_BY_STAGE)
    ),
    _fsdp(
        2, "fsdp", "full-shard", f"{FSDP2}, weights gathered for forward and again for backward", "FullShard"
    ),
    _fsdp(2, "fsdp-grad-op", "grad-op", f"{FSDP2}, weights kept gathered between forward and backward"),
    _fsdp(
        2, "fsdp-hybrid", "hybrid", f"{FSDP2} on a 2-D mesh: sharded within, replicated across groups",
        "Hybrid",
    ),
    _fsdp(1, "fsdp1", "full-shard", "FSDP1 FULL_SHARD"),
    _fsdp(1, "fsdp1-grad-op", "grad-op", "FSDP1 SHARD_GRAD_OP"),
    _fsdp(1, "fsdp1-no-shard", "none", "FSDP1 NO_SHARD"),
    _fsdp(1, "fsdp1-hybrid", "hybrid", "FSDP1 HYBRID_SHARD", "Hybrid"),
    _fsdp(1, "fsdp1-hybrid-grad-op", "hybrid-grad-op", "FSDP1 _HYBRID_SHARD_ZERO2", "Hybrid"),
    _prepared_ddp("accelerate", "DDP through Accelerate"),
    *_prepared_zero("accelerate"),
    *_prepared_fsdp("accelerate"),
    _prepared_ddp("trainer", "DDP through transformers.Trainer"),
    *_prepared_fsdp("trainer"),
    *_prepared_zero("trainer"),
    _entry(
        "cp", "sequence.context_parallel:ContextParallelBackend", "ContextParallelOptions",
        "context parallelism (ring attention) with DistributedDataParallel",
        StrategyKind(family="ddp", sequence="ring"),
    ),
    _entry(
        "fsdp-cp", "sequence.context_parallel:FsdpContextParallelBackend", "FsdpContextParallelOptions",
        "context parallelism (ring attention) with fully_shard (FSDP2)",
        StrategyKind(family="fsdp2", sharding="full-shard", sequence="ring"),
    ),
    *(
        _zero(
            stage, "ulysses-", "sequence.ulysses:UlyssesBackend", "Ulysses",
            f"DeepSpeed Ulysses (attention divided by heads) with ZeRO stage {stage}", sequence="exchange",
        )
        for stage in (1, 2, 3)
    ),
    _entry(
        "pp", "pipeline.backend:PipelineBackend", "PipelineOptions",
        "pipeline parallel: stages of blocks under a schedule of torch.distributed.pipelining",
        StrategyKind(family="pipeline", sharding="pipeline"),
    ),
    _entry(
        "tp", "tensor.backend:TensorBackend", "TensorOptions",
        "DTensor: layers cut over ranks, nothing sharded",
        StrategyKind(family="tensor"),
    ),
    _entry(
        "fsdp-tp", "tensor.backend:FsdpTensorBackend", "FsdpTensorOptions",
        "FSDP2 on a 2-D mesh: layers cut over neighbours, states sharded across them",
        StrategyKind(family="fsdp2-tensor", sharding="full-shard"),
    ),
    *(
        _zero(
            stage, "autotp-", "tensor.autotp:AutoTpBackend", "AutoTp",
            f"DeepSpeed AutoTP (layers cut over neighbours) with ZeRO stage {stage}", layers="-tensor",
        )
        for stage in (1, 2, 3)
    ),
]  # fmt: skip
