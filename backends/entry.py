"""What is known of one backend by name before its library is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from harness.backends.base import Backend, BackendOptions
from harness.backends.strategy import StrategyKind

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
