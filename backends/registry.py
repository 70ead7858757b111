"""Names of backends and the classes behind them, loaded only when one is built.

Third parties register a `Backend` subclass under the entry-point group 'harness.backends'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from harness.backends.base import Backend, BackendOptions
from harness.backends.explain import choices, explain
from harness.backends.values import InvalidYaml, parse_value

if TYPE_CHECKING:
    from collections.abc import Iterable

ENTRY_POINT_GROUP = "harness.backends"
REFERENCE = "single"


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

    @property
    def is_third_party(self) -> bool:
        """Whether another distribution brought it: its code is no part of the harness's own."""
        return self.options is None

    def options_class(self) -> type[BackendOptions]:
        if self.options:
            return _load(self.options)  # type: ignore[no-any-return]
        return self.backend_class().Options

    def backend_class(self) -> type[Backend]:
        try:
            loaded = _load(self.target)
        except Exception as error:  # a third party's module may raise anything when it is imported
            raise UnknownBackend(
                f"backend '{self.name}' ({self.target}) cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        if not (isinstance(loaded, type) and issubclass(loaded, Backend)):
            raise UnknownBackend(
                f"entry point '{self.name}' of group '{ENTRY_POINT_GROUP}' gives {loaded!r}; "
                "it must name a subclass of harness.backends.base.Backend"
            )
        return loaded


def _entry(name: str, target: str, options: str, summary: str, *packages: str, **parameters: Any) -> Entry:
    return Entry(
        name=name,
        target=f"harness.backends.{target}",
        options=f"harness.backends.options:{options}",
        summary=summary,
        packages=("torch", *packages),
        parameters=parameters,
    )


_BUILT_IN = [
    _entry(
        "single", "single:SingleBackend", "SingleOptions", "one process, whole global batch: the reference"
    ),
    _entry("ddp", "ddp:DdpBackend", "NoOptions", "DistributedDataParallel: nothing sharded"),
    *(
        _entry(
            f"zero{stage}",
            "zero:ZeroBackend",
            "ZeroOptions",
            f"DeepSpeed ZeRO stage {stage}: {sharded} sharded",
            "deepspeed",
            stage=stage,
        )
        for stage, sharded in enumerate(
            (
                "nothing",
                "optimizer states",
                "optimizer states and gradients",
                "optimizer states, gradients and weights",
            )
        )
    ),
    _entry(
        "fsdp",
        "fsdp2:Fsdp2Backend",
        "Fsdp2Options",
        "fully_shard (FSDP2), weights gathered for forward and again for backward",
    ),
    _entry(
        "fsdp-grad-op",
        "fsdp2:Fsdp2Backend",
        "Fsdp2Options",
        "fully_shard (FSDP2), weights kept gathered between forward and backward",
        reshard=False,
    ),
    _entry(
        "fsdp-hybrid",
        "fsdp2:Fsdp2HybridBackend",
        "Fsdp2HybridOptions",
        "fully_shard (FSDP2) on a 2-D mesh: sharded within, replicated across groups",
        hybrid=True,
    ),
    _entry("fsdp1", "fsdp1:Fsdp1Backend", "Fsdp1Options", "FSDP1 FULL_SHARD", strategy="FULL_SHARD"),
    _entry(
        "fsdp1-grad-op",
        "fsdp1:Fsdp1Backend",
        "Fsdp1Options",
        "FSDP1 SHARD_GRAD_OP",
        strategy="SHARD_GRAD_OP",
    ),
    _entry("fsdp1-no-shard", "fsdp1:Fsdp1Backend", "Fsdp1Options", "FSDP1 NO_SHARD", strategy="NO_SHARD"),
    _entry("fsdp1-hybrid", "fsdp1:Fsdp1HybridBackend", "Fsdp1HybridOptions", "FSDP1 HYBRID_SHARD"),
    _entry(
        "accelerate-ddp",
        "accelerate:AccelerateDdpBackend",
        "NoOptions",
        "DDP through Accelerate",
        "accelerate",
    ),
    *(
        _entry(
            f"accelerate-zero{stage}",
            "accelerate:AccelerateZeroBackend",
            "ZeroOptions",
            f"DeepSpeed ZeRO stage {stage} through Accelerate",
            "accelerate",
            "deepspeed",
            stage=stage,
        )
        for stage in (1, 2, 3)
    ),
    _entry(
        "accelerate-fsdp",
        "accelerate:AccelerateFsdpBackend",
        "ShardedOptions",
        "FSDP2 through Accelerate",
        "accelerate",
        version=2,
    ),
    _entry(
        "accelerate-fsdp1",
        "accelerate:AccelerateFsdpBackend",
        "ShardedOptions",
        "FSDP1 FULL_SHARD through Accelerate",
        "accelerate",
        version=1,
    ),
]


BUILT_IN = tuple(entry.name for entry in _BUILT_IN)
"""Names of the built-in backends, in the order in which they are listed."""

PLANTED = {
    name: Entry(
        name=name, target=f"harness.backends.faulty:{target}", options="harness.backends.options:NoOptions"
    )
    for name, target in (
        ("planted-gradients-summed", "GradientsSummed"),
        ("planted-out-of-memory", "OutOfMemory"),
        ("planted-wrong-beta2", "WrongBeta2"),
        ("planted-stale-weights", "StaleWeights"),
        ("planted-divided-again", "DividedAgain"),
        ("planted-left-out", "LeftOut"),
    )
}
"""Defects for the self-check and for trying a report: known by name, and in no list."""


def entries() -> dict[str, Entry]:
    """Every known backend by name: the built-in ones in their order, then third parties by name.

    A third party cannot take the name of a built-in backend.
    """
    known = {entry.name: entry for entry in _BUILT_IN}
    for point in sorted(_third_parties(), key=lambda p: p.name):
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
    name, _, given = label.strip().partition(":")
    known = {entry.name: entry for entry in _BUILT_IN}
    if name in PLANTED:
        known = PLANTED
    elif name not in known:
        known = entries()  # reads the metadata of every installed distribution: some milliseconds
    if name not in known:
        raise UnknownBackend(f"backend '{name}' is unknown. Available: {choices(name, known)}")
    entry = known[name]
    values: dict[str, Any] = {}
    for item in filter(None, given.split(",")):
        key, _, value = item.partition("=")
        if key.strip() in values:
            raise UnknownBackend(f"option '{key}' of backend '{name}' is given twice: '{label}'")
        if not value.strip():
            raise UnknownBackend(f"option '{key}' of backend '{name}' has no value; write {key}=VALUE")
        try:
            values[key.strip()] = parse_value(value)
        except InvalidYaml as error:
            raise UnknownBackend(
                f"option '{key}' of backend '{name}' was given {value!r}, which is no YAML value"
            ) from error
    options_class = entry.options_class()
    try:
        return entry, options_class.model_validate(values)
    except ValidationError as error:
        place = f"option '{{}}' of backend '{name}'"
        raise UnknownBackend(explain(error, options_class, place)) from error


def create(label: str) -> Backend:
    """Build the backend that `label` names; imports its library."""
    entry, options = parse(label)
    return entry.backend_class()(options, **entry.parameters)


def canonical_label(label: str) -> str:
    """The one spelling of a label: options that were set, sorted by name, without blanks."""
    entry, options = parse(label)
    given = options.model_dump(exclude_unset=True, exclude_none=True)
    text = ",".join(f"{key}={given[key]}" for key in sorted(given))
    return f"{entry.name}:{text}" if text else entry.name


def _third_parties() -> Iterable[EntryPoint]:
    return entry_points(group=ENTRY_POINT_GROUP)


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
