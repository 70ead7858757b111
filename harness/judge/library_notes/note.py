"""Differences from the textbook and from defaults as data: where each was measured, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self

from harness.backends.libraries.facts import fact
from harness.job.experiment import ReportFocus
from harness.judge.rows import CellRuns
from harness.judge.wording import CellName, listed, ranks
from harness.record import Record

Cause = Literal["library", "transport", "preset"]
TRAFFIC: tuple[ReportFocus, ...] = ("speed", "scaling", "footprint")


MEMORY: tuple[ReportFocus, ...] = ("memory", "footprint")


PARITY: tuple[ReportFocus, ...] = ("parity",)


BEARS_ON = {"states": MEMORY, "traffic": TRAFFIC}
"""By the effect of a fact that names no questions itself."""
NAMES = {"deepspeed": "DeepSpeed", "torch": "torch", "accelerate": "Accelerate"}
MOST_LABELS = 3
"""In a sentence."""
SMALL_SHARE = 0.01
"""Of the textbook's bytes: less is norms, flags and padding, and not worth a note."""


@dataclass(frozen=True, kw_only=True)
class LibraryNote:
    """What a library or transport does, and since when; nothing is said of it unless a record shows it."""

    id: str
    """Stable."""
    what: str
    """What a record shows; `{figure}` stands for its number."""
    advice: str
    """What to set, or why nothing need be done."""
    questions: tuple[ReportFocus, ...]
    """Which of them it bears on."""
    packages: tuple[str, ...] = ("deepspeed",)
    """Whose versions the sentence names."""
    cause: Cause = "library"
    figure_is_ratio: bool = True
    """Whether a figure below 1 means that it costs less than the textbook."""
    since: str = ""
    """Versions known to do so, and where their source says it."""

    @classmethod
    def of(cls, name: str, **words: Any) -> Self:
        """Of a fact about a library, whose source it quotes; `words` say the rest."""
        known = fact(name)
        what = f"{{figure}} x {known.cost}: {known.what}" if known.cost else known.what
        told: dict[str, Any] = {
            "what": what,
            "advice": known.advice,
            "questions": known.questions or BEARS_ON[known.effect],
            "packages": (known.library,),
        }
        return cls(id=known.id, since=known.source, **(told | words))


@dataclass(frozen=True, kw_only=True)
class CellNote:
    """A note that the records of one cell show."""

    library_note: LibraryNote
    figure: float | None = None
    """Usually measured bytes relative to those without it."""
    effect: float | None = None
    """Where the size of the effect is not that of the figure."""


@dataclass(frozen=True, kw_only=True)
class ReportNote:
    """A note and every cell that shows it under the same versions."""

    library_note: LibraryNote
    versions: str
    """'DeepSpeed 0.19.8'; empty where the text names them."""
    cells: tuple[CellName, ...]
    figures: tuple[float, ...]
    """One for each cell that has one."""
    effect: float
    """Largest relative change; the order of the list."""
    transport: str

    @property
    def what(self) -> str:
        """'1.5 x the textbook's bytes: gradients are all-reduced'."""
        return self.library_note.what.format(figure=self.figure)

    @property
    def figure(self) -> str:
        """'1.5', or '1.17 to 1.25' over the cells."""
        texts = list(dict.fromkeys(f"{figure:.3g}" for figure in sorted(self.figures)))
        return " to ".join([texts[0], texts[-1]] if len(texts) > 1 else texts)

    @property
    def saves(self) -> bool:
        """Whether it costs less than the textbook."""
        return bool(self.figures) and self.library_note.figure_is_ratio and max(self.figures) < 1

    @property
    def origin(self) -> str:
        """'DeepSpeed 0.19.8, not the transport'."""
        match self.library_note.cause:
            case "transport":
                return f"{self.transport} in {self.versions}, not the library"
            case "preset":
                return "The harness's preset"
        is_traffic = self.library_note.questions[: len(TRAFFIC)] == TRAFFIC
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


APART = 10.0
"""Figures that lie this factor apart share no sentence: '0.5 to 287 x' says nothing of either."""


Seen = list[tuple[CellRuns, CellNote]]


def merged(cell_notes: Iterable[tuple[CellRuns, CellNote]]) -> list[ReportNote]:
    """The same notes of cells, under the same versions, as one: what costs most first, savings last."""
    alike: dict[tuple[LibraryNote, str, str], Seen] = {}
    for group, cell_note in cell_notes:
        versions = versions_of(group.record, cell_note.library_note.packages)
        transport = group.record.world.collectives
        alike.setdefault((cell_note.library_note, versions, transport), []).append((group, cell_note))
    found = [
        ReportNote(
            library_note=note,
            versions=versions,
            cells=tuple(dict.fromkeys(group.cell for group, _ in seen)),
            figures=tuple(s.figure for _, s in seen if s.figure is not None),
            effect=max(map(_effect, (cell_note for _, cell_note in seen))),
            transport=transport,
        )
        for (note, versions, transport), every in alike.items()
        for seen in _of_one_size(every)
    ]
    return sorted(found, key=lambda note: (note.saves, -note.effect))


def _of_one_size(every: Seen) -> list[Seen]:
    """Split where the next larger figure is `APART` times the smallest so far; cells keep their order."""
    starts: list[float] = []
    for figure in sorted(s.figure for _, s in every if s.figure is not None):
        if not starts or figure >= APART * starts[-1] > 0:
            starts.append(figure)
    parts: dict[int, Seen] = {}
    for group, cell_note in every:
        part = sum(start <= (cell_note.figure or 0.0) for start in starts)
        parts.setdefault(part, []).append((group, cell_note))
    return list(parts.values())


def _effect(cell_note: CellNote) -> float:
    if cell_note.effect is not None:
        return cell_note.effect
    return abs(cell_note.figure - 1) if cell_note.figure is not None else 0.0


def versions_of(record: Record, packages: Iterable[str]) -> str:
    """'DeepSpeed 0.19.8 and torch 2.13.0+cpu', as the run saw them; packages it did not see are left out."""
    known = record.environment.packages | record.backend.versions
    return listed([f"{NAMES[package]} {known[package]}" for package in packages if package in known])
