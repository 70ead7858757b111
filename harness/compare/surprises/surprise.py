"""A difference from the textbook or from a default as data: where it was measured, its cause, what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from harness.compare.cell import Cell
from harness.compare.repeats import Repeats
from harness.compare.wording import listed, ranks
from harness.record import Record
from harness.spec import Question

Cause = Literal["library", "transport", "preset"]
TRAFFIC: tuple[Question, ...] = ("speed", "scaling", "footprint")
MEMORY: tuple[Question, ...] = ("memory", "footprint")
PARITY: tuple[Question, ...] = ("parity",)
NAMES = {"deepspeed": "DeepSpeed", "torch": "torch", "accelerate": "Accelerate"}
CHANGES_TRAINING = math.inf
"""Effect of what trains something else than the job asks for: before every difference of cost."""
WOULD_CHANGE_TRAINING = 0.4
"""Effect of a default that would do so without this harness's setting: ranked as 40 % of bytes."""
MOST_LABELS = 2
"""In a sentence."""
SMALL_SHARE = 0.01
"""Of the textbook's bytes: less is norms, flags and padding, and no surprise."""


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What a library or transport does, and since when; nothing is said of it unless a record shows it."""

    id: str
    """Stable."""
    what: str
    """What a record shows; `{figure}` stands for its number."""
    advice: str
    """What to set, or why nothing need be done."""
    questions: tuple[Question, ...]
    """Which of them it bears on."""
    packages: tuple[str, ...] = ("deepspeed",)
    """Whose versions the sentence names."""
    cause: Cause = "library"
    figure_is_ratio: bool = True
    """Whether a figure below 1 means that it costs less than the textbook."""
    since: str = ""
    """Versions known to do so, and where their source says it."""


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """A behaviour in the records of one cell."""

    behaviour: Behaviour
    figure: float | None = None
    """Usually measured bytes relative to those without it."""
    effect: float | None = None
    """Where the size of the effect is not that of the figure."""


@dataclass(frozen=True, kw_only=True)
class Surprise:
    """A behaviour and every cell in which it was seen under the same versions."""

    behaviour: Behaviour
    versions: str
    """'DeepSpeed 0.19.8'; empty where the text names them."""
    cells: tuple[Cell, ...]
    figures: tuple[float, ...]
    """One for each cell that has one."""
    effect: float
    """Largest relative change; the order of the list."""
    transport: str

    @property
    def what(self) -> str:
        """'1.5 x the textbook's bytes: gradients are all-reduced'."""
        return self.behaviour.what.format(figure=self.figure)

    @property
    def figure(self) -> str:
        """'1.5', or '1.17 to 1.25' over the cells."""
        texts = list(dict.fromkeys(f"{figure:.3g}" for figure in sorted(self.figures)))
        return " to ".join([texts[0], texts[-1]] if len(texts) > 1 else texts)

    @property
    def saves(self) -> bool:
        """Whether it costs less than the textbook."""
        return bool(self.figures) and self.behaviour.figure_is_ratio and max(self.figures) < 1

    @property
    def origin(self) -> str:
        """'DeepSpeed 0.19.8, not the transport'."""
        match self.behaviour.cause:
            case "transport":
                return f"{self.transport} in {self.versions}, not the library"
            case "preset":
                return "The harness's preset"
        is_traffic = self.behaviour.questions[: len(TRAFFIC)] == TRAFFIC
        return f"{self.versions}, not the transport" if is_traffic else self.versions

    @property
    def short_cells(self) -> str:
        """'zero1 and 2 more on 2 ranks'; without ranks where they differ between backends."""
        sizes: dict[str, list[int]] = {}
        for cell in self.cells:
            sizes.setdefault(cell.label, []).append(cell.world_size)
        names = listed(list(sizes), MOST_LABELS)
        first = next(iter(sizes.values()))
        alike = all(of_label == first for of_label in sizes.values())
        return f"{names} on {ranks(*first)}" if alike else names


def merged(sightings: Iterable[tuple[Repeats, Sighting]]) -> list[Surprise]:
    """Sightings of one behaviour under the same versions as one: what costs most first, savings last."""
    alike: dict[tuple[Behaviour, str, str], list[tuple[Repeats, Sighting]]] = {}
    for group, sighting in sightings:
        versions = versions_of(group.record, sighting.behaviour.packages)
        transport = group.record.world.collectives
        alike.setdefault((sighting.behaviour, versions, transport), []).append((group, sighting))
    found = [
        Surprise(
            behaviour=behaviour,
            versions=versions,
            cells=tuple(dict.fromkeys(group.cell for group, _ in seen)),
            figures=tuple(s.figure for _, s in seen if s.figure is not None),
            effect=max(map(_effect, (sighting for _, sighting in seen))),
            transport=transport,
        )
        for (behaviour, versions, transport), seen in alike.items()
    ]
    return sorted(found, key=lambda surprise: (surprise.saves, -surprise.effect))


def _effect(sighting: Sighting) -> float:
    if sighting.effect is not None:
        return sighting.effect
    return abs(sighting.figure - 1) if sighting.figure is not None else 0.0


def versions_of(record: Record, packages: Iterable[str]) -> str:
    """'DeepSpeed 0.19.8 and torch 2.13.0+cpu', as the run saw them; packages it did not see are left out."""
    known = record.environment.packages | record.backend.versions
    return listed([f"{NAMES[package]} {known[package]}" for package in packages if package in known])
