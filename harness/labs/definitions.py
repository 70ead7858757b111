"""Labs and the columns of their tables, from `labs.yaml`."""

from __future__ import annotations

from importlib.resources import files
from typing import Literal

from harness.backends.refusals import available
from harness.backends.yaml_values import parse_value
from harness.errors import HarnessError
from harness.files import Stored
from harness.shipped import MARK, names

Variant = Literal["as-intended", "as-written"]
Scale = Literal["full", "tiny"]
Arrangement = Literal["setups", "stages", "places", "strategies", "cells", "curves", "read-back"]
"""Which cells are rows, how they are named and what their factors are over."""


class Lab(Stored):
    """One job of a document, or several that fill one table."""

    name: str
    title: str
    source: str
    """Whose it is, with an address where it is public."""
    table: str
    full: tuple[str, ...] = ()
    """Names of the configurations; none: arithmetic, no run."""
    tiny: tuple[str, ...] = ()
    """The same for two CPU ranks."""

    def configurations(self, variant: Variant, scale: Scale) -> list[str]:
        """What `--config` takes for each part. Raises HarnessError for a variant that the lab lacks."""
        ending = "" if variant == "as-intended" else f".{variant}"
        folder = "labs/" if scale == "full" else "labs/tiny/"
        found = [f"{MARK}{folder}{part}{ending}" for part in (self.full if scale == "full" else self.tiny)]
        shipped = names("configs")
        if any(name not in shipped for name in found) or (ending and not found):
            raise HarnessError(
                f"lab '{self.name}' has no variant {variant}: nothing is known to be wrong with it"
            )
        return found

    @property
    def needs_runs(self) -> bool:
        return bool(self.full)

    @property
    def variants(self) -> tuple[Variant, ...]:
        written = bool(self.tiny) and f"{MARK}labs/tiny/{self.tiny[0]}.as-written" in names("configs")
        return ("as-intended", "as-written") if written else ("as-intended",)


class Figure(Stored):
    """What stands in a column."""

    figure: str
    digits: int = 2
    unit: Literal["GB", "MiB", "ms"] | None = None
    factor: Literal["over-base", "base-over"] | None = None
    epoch: int | None = None


class Estimated(Stored):
    """What an estimate is asked for; its rows are those of `estimate --json`, factors are over the first."""

    model: str
    settings: list[str]
    backends: list[str]
    ranks: list[int]
    ranks_per_node: int


class Counted(Stored):
    """Bytes of a parameter by column, for each dtype of each model; a column without any is n/a."""

    models: list[str]
    dtypes: dict[str, list[float]]


class TableLayout(Stored):
    """A table of a hand-out without its figures."""

    title: str = ""
    rows: Arrangement | Estimated | Counted
    columns: dict[str, Figure | None]
    corner: str | None = None
    """Heading of the figures' names where each is a line and each cell a column."""
    notes: list[str] = []


_DATA = parse_value(files(__package__).joinpath("labs.yaml").read_text(encoding="utf-8"))


def _lab(entry: dict[str, object]) -> Lab:
    both = entry.pop("configurations", ())
    return Lab.model_validate({"full": both, "tiny": both} | entry)


def _layout(entry: dict[str, dict[str, object]]) -> TableLayout:
    columns = {
        title: {"figure": given} if isinstance(given, str) else given
        for title, given in entry["columns"].items()
    }
    return TableLayout.model_validate(entry | {"columns": columns})


LABS = tuple(map(_lab, _DATA["labs"]))
LAYOUTS = {name: list(map(_layout, tables)) for name, tables in _DATA["tables"].items()}
"""Tables of measured figures by their names."""


def find_lab(name: str) -> Lab:
    """The lab of this name. Raises HarnessError."""
    by_name = {lab.name: lab for lab in LABS}
    if name not in by_name:
        raise HarnessError(f"lab '{name}' is unknown. {available(name, by_name)}")
    return by_name[name]
