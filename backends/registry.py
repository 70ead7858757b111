"""Names of backends and the classes behind them, loaded only when one is built.

Third parties register a `Backend` subclass under the entry-point group 'harness.backends'.
"""

from __future__ import annotations

import json
import os
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
from harness.backends.strategy import Route, StrategyKind
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


LIBRARIES: dict[Route, tuple[str, ...]] = {
    "native": (), "accelerate": ("accelerate",), "trainer": ("accelerate", "transformers"),
}  # fmt: skip
ALONE = ("target", "options", "summary", "compared", "checked", "parameters")
"""Keys of a row of `registry.toml` besides those of its strategy."""


def _read(table: str) -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath(table).read_text(encoding="utf-8"))


def _entry(name: str, row: Mapping[str, Any]) -> Entry:
    """A built-in backend; its packages follow from the strategy."""
    strategy = StrategyKind(**{key: value for key, value in row.items() if key not in ALONE})
    stage, parameters = strategy.zero_stage, row.get("parameters", {})
    return Entry(
        name=name,
        target=f"harness.backends.{row['target']}",
        options=f"harness.backends.options:{row['options']}",
        summary=row["summary"],
        packages=("torch", *LIBRARIES[strategy.route], *(() if stage is None else ("deepspeed",))),
        parameters=parameters if stage is None else {"stage": stage},
        strategy=strategy,
        in_default_comparison=row.get("compared", False),
        in_short_check=row.get("checked", False),
    )


ENTRIES = [_entry(name, row) for name, row in _read("registry.toml").items()]
OTHER_NAMES: dict[str, list[str]] = _read("other_names.toml")
"""By small letters and digits alone."""
STAGE = re.compile(r"(?:deepspeed|ds)?(?:zero)?(?:stage)?([0-3])")


def meant(given: str, known: Iterable[str]) -> list[str]:
    """Backends that 'ZeRO-3', 'deepspeed' or 'FULL_SHARD' stands for; empty if nobody can tell."""
    plain, *names = (re.sub(r"[^a-z0-9]", "", name.lower()) for name in (given, *known))
    same = [name for name, other in zip(known, names, strict=True) if other == plain]
    if same or plain in OTHER_NAMES:
        return same or OTHER_NAMES[plain]
    stage = STAGE.fullmatch(plain)
    return [f"zero{stage[1]}"] if stage else []


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
    entry.name + suffix
    for entry in ENTRIES
    if entry.in_default_comparison
    for suffix in ("", ":preset=library-defaults")
    if not suffix or entry.name in ALSO_UNDER_LIBRARY_DEFAULTS
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
        several = f"For several: `harness compare --backends {name}`" if "," in name else None
        hint = several or available(name, known, meant=meant(name, known))
        raise UnknownBackend(f"backend '{name}' is unknown. {hint}")
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
    pinned = os.environ.get("DS_ACCELERATOR", world.device)
    if "deepspeed" in backend.packages and pinned != world.device:
        reasons.append(f"DS_ACCELERATOR={pinned} is set, and ranks are on {world.device}: unset it")
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
    """The one spelling of a label: options that were set, sorted by name, without blanks.

    What is read as the same value again: text that looks like a number keeps its quotes.
    """
    entry, options = parse(label)
    spelled = []
    for key, value in sorted(options.model_dump(exclude_unset=True, exclude_none=True).items()):
        text = str(value)
        if isinstance(value, str):
            try:
                same = parse_value(text) == value
            except InvalidYaml:
                same = False
            text = text if same else json.dumps(value, ensure_ascii=False)
        spelled.append(f"{key}={text}")
    return f"{entry.name}:{','.join(spelled)}" if spelled else entry.name


def label_with(label: str, **options: object) -> str:
    """The one spelling of a label with further options. Raises UnknownBackend for one that it has."""
    added = ",".join(f"{key}={value}" for key, value in options.items())
    return canonical_label(f"{label}{',' if ':' in label else ':'}{added}")


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
