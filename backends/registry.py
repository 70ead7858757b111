"""Names of backends and the classes behind them, loaded only when one is built.

Third parties register a `Backend` subclass under the entry-point group 'harness.backends'.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any, get_args

from pydantic import ValidationError

from harness.backends.base import Backend, BackendOptions, Preset, World
from harness.backends.libraries.facts import unsupported, why_not_run
from harness.backends.mesh import SECOND_COPY, Mesh
from harness.backends.refusals import Unsupported, available, explain_refusal
from harness.backends.strategy import ROUTES, Route, Sharding, StrategyKind
from harness.backends.yaml_values import InvalidYaml, parse_value

ENTRY_POINT_GROUP = "harness.backends"


class UnknownBackend(ValueError):
    """A name or option that no backend has; the message says what was given and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One name: where its class is, with which parameters, and what to tell about it."""

    name: str
    target: str
    """'module:Class', for a third party as its entry point says."""
    options: str | None
    """'module:Class' of the options; None: ask the backend class."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    summary: str = ""
    packages: tuple[str, ...] = ("torch",)
    strategy: StrategyKind | None = None
    """What the name stands for; None: a third party's, which may claim to be one (`Backend.claims`)."""
    in_default_comparison: bool = False
    in_short_check: bool = False
    """Whether the self-check runs it whatever the time: one of each library."""

    @property
    def is_third_party(self) -> bool:
        """Whether another distribution brought it: its code is no part of the harness's own."""
        return self.options is None

    def options_class(self) -> type[BackendOptions]:
        if self.options:
            return load(self.options)  # type: ignore[no-any-return]
        return self.backend_class().Options

    def backend_class(self) -> type[Backend]:
        try:
            loaded = load(self.target)
        except (Exception, SystemExit) as error:  # a third party's module may raise anything
            why = f"{type(error).__name__}: {error}"
            raise UnknownBackend(f"backend '{self.name}' ({self.target}) cannot be loaded: {why}") from error
        if not (isinstance(loaded, type) and issubclass(loaded, Backend)):
            raise UnknownBackend(
                f"entry point '{self.name}' of group '{ENTRY_POINT_GROUP}' gives {loaded!r}; "
                "it must name a subclass of harness.backends.base.Backend"
            )
        return loaded


def load(target: str) -> Any:
    """Import what 'module:attribute' names."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


COMPARED_BY_DEFAULT = (
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
        in_default_comparison=name in COMPARED_BY_DEFAULT,
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
    _entry(
        "replicate", "fsdp.fsdp2:ReplicateBackend", "ReductionOptions",
        "replicate (torch's composable DDP): nothing sharded, gradients all-reduced by block",
        StrategyKind(family="replicate"), sharding="none",
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


OTHER_NAMES: dict[str, list[str]] = tomllib.loads(
    files(__package__).joinpath("other_names.toml").read_text(encoding="utf-8")
)
"""By small letters and digits alone."""
STAGE = re.compile(r"(?:deepspeed|ds)?(?:zero)?(?:stage)?([0-3])")


def meant(given: str, known: Iterable[str]) -> list[str]:
    """Backends that 'ZeRO-3', 'deepspeed' or 'FULL_SHARD' stands for; empty if nobody can tell."""
    plain = _plain(given)
    same = [name for name in known if _plain(name) == plain]
    if same or plain in OTHER_NAMES:
        return same or OTHER_NAMES[plain]
    stage = STAGE.fullmatch(plain)
    return [f"zero{stage[1]}"] if stage else []


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


__all__ = [
    "BUILT_IN", "ENTRY_POINT_GROUP", "IN_DEFAULT_COMPARISON", "PLANTED", "REFERENCE", "Entry",
    "UnknownBackend", "canonical_label", "claimed_strategy", "create", "entries", "mesh_of", "parse",
    "placed", "preset_of", "strategy_of", "unmet_requirements",
]  # fmt: skip

REFERENCE = "single"
PRESETS: tuple[Preset, ...] = get_args(Preset)


BUILT_IN = {entry.name: entry for entry in ENTRIES}
"""The built-in backends by name, in the order in which they are listed."""
ALSO_UNDER_LIBRARY_DEFAULTS = ("zero3", "fsdp")
"""Which the default comparison runs once more, to show what like-for-like costs or gives them."""
IN_DEFAULT_COMPARISON = tuple(
    label
    for entry in ENTRIES
    if entry.in_default_comparison
    for label in (
        entry.name,
        *([f"{entry.name}:preset=library-defaults"] if entry.name in ALSO_UNDER_LIBRARY_DEFAULTS else []),
    )
)
"""Labels, in the order of the backends."""

SIMPLEST = (
    "single", "ddp", "replicate", "zero0", "zero1", "zero2", "fsdp-grad-op", "fsdp", "fsdp1-no-shard",
    "fsdp1-grad-op", "fsdp1", "zero3",
)  # fmt: skip
"""Strategies by their moving parts, the fewest first; then come hybrids, then ranks that share samples."""
PLANTED = {
    name: Entry(
        name=name,
        target=f"harness.backends.injected_faults:{target}",
        options="harness.backends.options:NoOptions",
    )
    for name, target in (
        ("planted-gradients-summed", "GradientsSummed"),
        ("planted-out-of-memory", "OutOfMemory"),
        ("planted-out-of-memory-later", "OutOfMemoryLater"),
        ("planted-wrong-beta2", "WrongBeta2"),
        ("planted-stale-weights", "StaleWeights"),
        ("planted-divided-again", "DividedAgain"),
        ("planted-left-out", "LeftOut"),
    )
}
"""Backends that make a mistake, for the self-check and to show that it is found: in no list."""


def entries() -> dict[str, Entry]:
    """Every known backend by name: the built-in ones in their order, then third parties by name.

    A third party cannot take the name of a built-in backend.
    """
    known = dict(BUILT_IN)
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: p.name):
        if point.name not in known:
            distribution = (point.dist.name,) if point.dist else ()
            known[point.name] = Entry(
                name=point.name,
                target=point.value,
                options=None,
                summary=f"third party: {point.value}",
                packages=("torch", *distribution),
            )
    return known


def parse(label: str) -> tuple[Entry, BackendOptions]:
    """Split 'zero3:offload=cpu,reduce_bucket_size=1000' into its entry and validated options.

    Raises UnknownBackend, naming the alternatives and the closest one.
    """
    name, _, text = label.strip().partition(":")
    known = dict(BUILT_IN)
    if name in PLANTED:
        known = PLANTED
    elif name not in known:
        known = entries()  # reads the metadata of every installed distribution: some milliseconds
    if name not in known:
        raise UnknownBackend(
            f"backend '{name}' is unknown. {available(name, known, meant=meant(name, known))}"
        )
    entry, values = known[name], _values(name, text)
    if values.get("preset") not in (None, *PRESETS):
        given = str(values["preset"])
        raise UnknownBackend(f"preset '{given}' is unknown. {available(given, PRESETS)}")
    options_class = entry.options_class()
    try:
        return entry, options_class.model_validate(values)
    except ValidationError as error:
        place = f"option '{{}}' of backend '{name}'"
        asked = [why_not_run(word) for option in values.items() for word in map(str, option)]
        why = next((f". {reason}" for reason in asked if reason), "")
        raise UnknownBackend(explain_refusal(error, options_class, place) + why) from error


@lru_cache(maxsize=1024)
def _values(name: str, given: str) -> Mapping[str, Any]:
    """Options as typed: 'offload=cpu,reduce_bucket_size=1000' to their values."""
    values: dict[str, Any] = {}
    for item in filter(None, given.split(",")):
        key, _, value = item.partition("=")
        if key.strip() in values:
            raise UnknownBackend(f"option '{key}' of backend '{name}' is given twice: '{name}:{given}'")
        if not value.strip():
            raise UnknownBackend(f"option '{key}' of backend '{name}' has no value; write {key}=VALUE")
        try:
            values[key.strip()] = parse_value(value)
        except InvalidYaml as error:
            raise UnknownBackend(
                f"option '{key}' of backend '{name}' was given {value!r}, which is not a YAML value"
            ) from error
    return values


def create(label: str) -> Backend:
    """Build the backend that `label` names; imports its library.

    Raises Unsupported where the installed libraries cannot run it, or are not there.
    """
    entry, options = parse(label)
    if reasons := unsupported(entry.packages, entry.target.partition(":")[0]):
        raise Unsupported("; ".join(reasons))
    backend = entry.backend_class()(options, **entry.parameters)
    claimed_strategy(backend)  # a claim that nothing is known of is refused before anything runs
    return backend


def unmet_requirements(backend: Backend, world: World) -> list[str]:
    """Why a backend cannot run in this world, or with the installed versions; empty: it can."""
    reasons = unsupported(backend.packages, type(backend).__module__, world.device)
    try:
        backend.options.mesh(world.world_size)
    except Unsupported as misfit:
        return [*reasons, str(misfit)]
    return [*reasons, *backend.unmet_requirements(world)]


def mesh_of(label: str, world_size: int) -> Mesh:
    """How a label lays out its ranks. Where that does not fit, the backend is unsupported in this world, and
    all of them count as data parallel."""
    try:
        return parse(label)[1].mesh(world_size)
    except Unsupported:
        return Mesh.data_parallel(world_size)


def placed(label: str, world: World) -> World:
    """The world with the ranks laid out as the label does."""
    return replace(world, layout=mesh_of(label, world.world_size))


def canonical_label(label: str) -> str:
    """The one spelling of a label: options that were set, sorted by name, without blanks."""
    entry, options = parse(label)
    given = options.model_dump(exclude_unset=True, exclude_none=True)
    text = ",".join(f"{key}={_spelled(given[key])}" for key in sorted(given))
    return f"{entry.name}:{text}" if text else entry.name


def label_with(label: str, **options: object) -> str:
    """The one spelling of a label with further options. Raises UnknownBackend for one that it has."""
    added = ",".join(f"{key}={value}" for key, value in options.items())
    return canonical_label(f"{label}{',' if ':' in label else ':'}{added}")


def _spelled(value: Any) -> str:
    """What is read as the same value again: text that looks like a number keeps its quotes."""
    text = str(value)
    if not isinstance(value, str):
        return text
    try:
        return text if parse_value(text) == value else json.dumps(value, ensure_ascii=False)
    except InvalidYaml:
        return json.dumps(value, ensure_ascii=False)


def moving_parts(label: str) -> tuple[bool, int]:
    """Grows with what has to be set up and can go wrong: offload, ways to shard, groups of ranks.

    Raises UnknownBackend for a label of a backend that is not installed.
    """
    entry, given = parse(label)
    options = given.model_dump()
    offloads = options.get("offload", "none") != "none"
    places = len(SIMPLEST)
    if entry.strategy is not None and entry.strategy.facts.cuts_layers:
        return offloads, places + 3
    if "sequence" in options:
        return offloads, places + 2
    if "tensor" in options:
        return offloads, places + 1
    if entry.name not in SIMPLEST or any(options.get(name) for name in SECOND_COPY):
        return offloads, places
    return offloads, SIMPLEST.index(entry.name)


def preset_of(label: str, default: Preset) -> Preset:
    """The preset that a label names, else `default`: that of the experiment."""
    return parse(label)[1].preset or default


def strategy_of(label: str) -> StrategyKind | None:
    """What a built-in backend stands for, by its name or label; None: a third party's."""
    entry = BUILT_IN.get(label.partition(":")[0])
    return None if entry is None else entry.strategy


def claimed_strategy(backend: Backend) -> StrategyKind | None:
    """What a backend claims to be (`Backend.claims`); None: nothing.

    Raises UnknownBackend for a claim that names no built-in backend.
    """
    if backend.claims is None:
        return None
    strategy = strategy_of(backend.claims)
    if strategy is None:
        raise UnknownBackend(
            f"{type(backend).__name__} claims to be '{backend.claims}', which is no built-in backend. "
            f"{available(backend.claims, BUILT_IN)}"
        )
    return strategy
