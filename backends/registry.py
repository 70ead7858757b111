"""Names of backends and the classes behind them, loaded only when one is built.

Third parties register a `Backend` subclass under the entry-point group 'harness.backends'.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any, get_args

from pydantic import ValidationError

from harness.backends.refusals import explain_refusal
from harness.backends.yaml_values import InvalidYaml, parse_value

from .base import Backend, BackendOptions, Preset, World
from .built_in import ENTRIES
from .entry import ENTRY_POINT_GROUP, Entry, UnknownBackend
from .hybrid import SECOND_COPY
from .libraries.facts import unsupported, why_not_run
from .mesh import Mesh
from .refusals import Unsupported, available
from .strategy import StrategyKind

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
    "single", "ddp", "zero0", "zero1", "zero2", "fsdp-grad-op", "fsdp", "fsdp1-no-shard", "fsdp1-grad-op",
    "fsdp1", "zero3",
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
