"""Differences from the textbook and from defaults: where each was measured, and why."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from harness.backends import registry
from harness.backends.libraries.facts import FACTS, fact
from harness.backends.presets import TIMER_WAITS, preset_changes
from harness.forms import terms
from harness.forms.ddp import BUCKETS_BESIDE_GRADIENTS
from harness.forms.layout import DTYPE_BYTES
from harness.forms.network import EMULATED
from harness.forms.zero0 import FP32_SURPLUS, SECOND_FP32_COPY
from harness.forms.zero3 import PERSISTENT_PARAMETERS, REDUCTION_BUCKET, TIED_TERM
from harness.job.experiment import ReportFocus
from harness.judge import quantities
from harness.judge.comparison import Comparison
from harness.judge.effective import master_dtypes, reduce_dtypes
from harness.judge.rows import CellRuns
from harness.judge.wording import CellName, listed, ranks
from harness.nested import grouped, totals
from harness.record import Record
from harness.record.workload import known_strategy, of_record

TRAFFIC: tuple[ReportFocus, ...] = ("speed", "scaling", "footprint")
BEARS_ON = {"states": ("memory", "footprint"), "traffic": TRAFFIC}
"""By the effect of a fact that names no questions itself."""
NAMES = {"deepspeed": "DeepSpeed", "torch": "torch", "accelerate": "Accelerate"}
MOST_LABELS = 3
"""In a sentence."""
SMALL_SHARE = 0.01
"""Of the textbook's bytes: less is norms, flags and padding, and not worth a note."""
NOTES = tomllib.loads(files(__package__).joinpath("notes.toml").read_text(encoding="utf-8"))


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
    cause: Literal["library", "transport", "preset"] = "library"
    figure_is_ratio: bool = True
    """Whether a figure below 1 means that it costs less than the textbook."""
    since: str = ""
    """Versions known to do so, and where their source says it."""


Noted = tuple[LibraryNote, float | None, float]
"""A note that the records of one cell show; its figure, usually measured bytes relative to those without it;
its relative size, by which notes are ordered."""


def noted(
    name: str,
    *,
    figure: float | None = None,
    effect: float | None = None,
    packages: tuple[str, ...] = (),
    **words: str,
) -> Noted:
    """A note of notes.toml or on a library's fact, whose source it quotes.

    effect: where it is not how far the figure lies from 1. words: what the text of notes.toml leaves open.
    """
    row: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in NOTES.get(name, {}).items()
    }
    source = row.pop("fact", name)
    told: dict[str, Any] = {}
    if any(known.id == source for known in FACTS):
        known = fact(source)
        told = {
            "what": f"{{figure}} x {known.cost}: {known.what}" if known.cost else known.what,
            "advice": known.advice,
            "questions": known.questions or BEARS_ON.get(known.effect, ()),
            "packages": (known.library,),
            "since": known.source,
        }
        words["first"] = known.first if "{first}" in row.get("what", "") else ""
    if "what" in row:  # the figure is filled in when cells are merged
        kept = {key: word.replace("{", "{{").replace("}", "}}") for key, word in words.items()}
        row["what"] = row["what"].format(figure="{figure}", **kept)
    if "advice" in row:
        row["advice"] = row["advice"].format(**words)
    told |= row | ({"packages": packages} if packages else {})
    if effect is None:
        effect = abs(figure - 1) if figure is not None else 0.0
    return LibraryNote(id=name, **told), figure, effect


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
        texts = list(dict.fromkeys(f"{float(f'{figure:.3g}'):,g}" for figure in sorted(self.figures)))
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
        sizes = grouped((cell.label, cell.world_size) for cell in self.cells)
        names = listed(list(sizes), MOST_LABELS)
        first = next(iter(sizes.values()))
        alike = all(of_label == first for of_label in sizes.values())
        return f"{names} on {ranks(*first)}" if alike else names


HUGE = 10.0
"""Figures from here on and smaller ones share no sentence."""


def merged(seen: Iterable[tuple[CellRuns, Noted]]) -> list[ReportNote]:
    """Merge equal notes of cells under the same versions: what costs most first, savings last.

    '0.5 to 287 x' in one sentence says nothing of either.
    """
    alike = grouped(
        (
            (note, versions_of(of.record, note.packages), of.record.world.collectives, (figure or 0) >= HUGE),
            (of.cell, figure, effect),
        )
        for of, (note, figure, effect) in seen
    )
    found = [
        ReportNote(
            library_note=note,
            versions=versions,
            cells=tuple(dict.fromkeys(cell for cell, _, _ in shown)),
            figures=tuple(figure for _, figure, _ in shown if figure is not None),
            effect=max(effect for _, _, effect in shown),
            transport=transport,
        )
        for (note, versions, transport, _), shown in alike.items()
    ]
    return sorted(found, key=lambda note: (note.saves, -note.effect))


def versions_of(record: Record, packages: Iterable[str]) -> str:
    """'DeepSpeed 0.19.8 and torch 2.13.0+cpu', as the run saw them; packages it did not see are left out."""
    known = record.environment.packages | record.backend.versions
    return listed([f"{NAMES[package]} {known[package]}" for package in packages if package in known])


CHANGES_TRAINING = math.inf
"""Effect of what trains something else than the job asks for: before every difference of cost."""
WOULD_CHANGE_TRAINING = 0.4
"""Effect of a default that would do so without this harness's setting: ranked as 40 % of bytes."""
CLIPPING_KEY, DEFAULT_CLIPPING = "gradient_clipping", 1.0
REDUCED_LOW = "reduced-in-low-precision"
WAITS_EFFECT = 0.05
"""Bytes do not show a wait for the device: ranked as 5 % of bytes."""


def find_in_training(group: CellRuns) -> list[Noted]:
    """What the first repeat of a cell shows, and no finding tells."""
    record, found = group.record, []
    effective, world = record.backend.effective, record.world
    # The library whose default it is: DeepSpeed where it runs, else torch.
    packages = tuple([name for name in ("deepspeed", "torch") if name in record.backend.versions][:1])
    version, config = record.backend.versions.get("deepspeed"), record.backend.native_config or {}
    figure = config.get(CLIPPING_KEY, DEFAULT_CLIPPING)
    pinned = effective is not None and record.observation is None and figure != DEFAULT_CLIPPING
    if pinned and version and fact("zero-clips-by-default").includes(version):
        found.append(noted("clipping-set-by-harness", figure=float(figure), effect=WOULD_CHANGE_TRAINING))
    low = [dtype for dtype in quantities.reduced_dtypes(record) if _is_low(dtype)]
    if low and _mixed(record):
        found.append(
            noted(
                REDUCED_LOW, effect=DTYPE_BYTES[low[0]] / DTYPE_BYTES["float32"],
                packages=packages, dtypes=listed(low), setting=_setting(record, "wire"),
            )
        )  # fmt: skip
    dtype = (effective.accumulation_dtype if effective else None) or ""
    if _is_low(dtype) and _mixed(record) and world.accumulation_steps > 1:
        found.append(
            noted(
                "accumulated-in-low-precision", effect=CHANGES_TRAINING, packages=packages, dtype=dtype,
                setting=_setting(record, "micro-steps"),
            )
        )  # fmt: skip
    if effective is not None and effective.details.get(TIMER_WAITS) and world.device != "cpu":
        found.append(noted("waits-for-the-device", effect=WAITS_EFFECT))
    return found


def _is_low(dtype: str) -> bool:
    return DTYPE_BYTES.get(dtype, 4) < 4


def _mixed(record: Record) -> bool:
    return record.job.training.precision.endswith("-mixed")


def _setting(record: Record, about: str) -> str:
    """What the like-for-like preset sets for this strategy, as advice; '' where it sets nothing."""
    strategy, effective = registry.strategy_of(record.backend.name), record.backend.effective
    if strategy is None or effective is None:
        return ""
    changes = preset_changes(
        strategy, record.job.training.held_precision, "like-for-like", effective.parameter_count
    )
    found = [change for change in changes if about in change.reason]
    return f"Set {listed([f'{c.setting}: {c.value}' for c in found])}." if found else ""


LEAST_EMULATED = 0.05
"""Of the counted bytes."""
MANY_CALLS = 2.0
"""Gathers relative to one per block."""
CALLS_EFFECT = 0.3
"""A gather costs latency, which bytes do not show: ranked as 30 % of bytes."""
BY_TERM: dict[tuple[str, str], str] = {
    ("zero12", terms.GRADIENTS): "gradients-all-reduced",
    ("zero12", terms.FURTHER_GRADIENTS): "reduced-every-micro-step",
    ("zero3", terms.FORWARD): "weights-stay-gathered",
    ("zero3", terms.BACKWARD): "weights-stay-gathered",
    ("zero3", terms.UPDATED): "weights-stay-gathered",
    ("zero3", TIED_TERM): "tied-weights-gathered-twice",
    ("fsdp1", terms.BACKWARD): "root-not-resharded",
    ("fsdp2", terms.BACKWARD): "root-not-resharded",
    **{("zero3", term): "moved-every-micro-step"
       for term in (terms.FURTHER_FORWARD, terms.FURTHER_BACKWARD, terms.FURTHER_GRADIENTS)},
    **{(family, term): "gathered-every-micro-step"
       for family in ("fsdp1", "fsdp2") for term in (terms.FURTHER_FORWARD, terms.FURTHER_BACKWARD)},
    **{(family, terms.FURTHER_GRADIENTS): "sync-each-batch" for family in ("ddp", "fsdp1", "fsdp2")},
}  # fmt: skip
"""Facts by family and term of the closed form; other terms are shown with the remark of the closed form."""


def find_in_traffic(group: CellRuns) -> list[Noted]:
    """Every one of a cell whose bytes were counted."""
    return [*_terms(group.record), *_emulated(group.record), *_by_module(group.record)]


def _terms(record: Record) -> list[Noted]:
    """The terms of one note together, relative to all that the textbook sends."""
    strategy, book = known_strategy(record), quantities.textbook_bytes_per_step(record)
    if strategy is None or not book or quantities.volume_differences(record) != []:
        return []
    owner = ("deepspeed" if strategy.family.startswith("zero") else "torch",)
    found = quantities.textbook_differences(record) or ()
    named = [(BY_TERM.get((strategy.family, one.term)), one) for one in found]
    surplus = totals(
        ((name, "" if name else f"{of.term} ({of.remark})" if of.remark else of.term), of.difference)
        for name, of in named
    )
    return [
        noted(name or "other-traffic", figure=1 + sent / book, packages=owner if term else (), term=term)
        for (name, term), sent in surplus.items()
        if abs(sent) >= SMALL_SHARE * book
    ]


def _emulated(record: Record) -> list[Noted]:
    """What the transport sends for the same calls, relative to what is counted."""
    replaced = EMULATED.get(record.world.collectives, {})
    counted, moved = quantities.sent_bytes_per_step(record), quantities.transport_bytes_per_step(record)
    if not replaced or not counted or moved is None or moved < (1 + LEAST_EMULATED) * counted:
        return []
    words = " and ".join(
        f"{one.replace('_', '-')} runs as {other.replace('_', '-')}" for one, other in replaced.items()
    )
    return [noted("transport-emulates", figure=moved / counted, words=words)]


def _by_module(record: Record) -> list[Noted]:
    """Counted calls of a forward pass, relative to one for each block and the root."""
    strategy, workload = known_strategy(record), of_record(record)
    if strategy is None or strategy.family != "zero3" or workload is None or record.windows is None:
        return []
    passes = record.windows.probed * record.world.accumulation_steps
    calls = sum(
        row.calls
        for row in record.comm
        if row.rank == 0 and row.phase == "forward" and row.op == "all_gather"
    )
    by_block = len(workload.layout.units())
    if not passes or calls < MANY_CALLS * by_block * passes:
        return []
    return [noted("gathers-by-module", figure=calls / passes / by_block, effect=CALLS_EFFECT)]


LIMITED_EFFECT = 0.1
"""Of a bucket that the preset limits to 25 MiB: large beside a small model, nothing beside a large one."""
CLEARLY_LESS = 0.97
"""Of the textbook's bytes."""
BY_NAME = {
    FP32_SURPLUS: "gradients-add-up-in-fp32",
    REDUCTION_BUCKET: "persistent-reduction-bucket",
    BUCKETS_BESIDE_GRADIENTS: "gradients-twice",
    PERSISTENT_PARAMETERS: "stays-gathered",
}
"""Notes by the name of the closed form's term; other extra terms are shown by their name."""
BY_THEMSELVES = (REDUCTION_BUCKET, BUCKETS_BESIDE_GRADIENTS, PERSISTENT_PARAMETERS)
"""Buffers and gathered weights, which are no model states: their figure is their own size."""


def find_in_states(group: CellRuns) -> list[Noted]:
    """Every one of a cell whose model states were measured; [] where closed form or textbook has none."""
    states, book = quantities.largest(quantities.rank_states(group.record)), quantities.textbook(group.record)
    if states is None or states.expected is None or not book:
        return []
    total, strategy, found = sum(book.values()), known_strategy(group.record), []
    for term in states.expected.terms:
        if not term.extra or term.bytes < SMALL_SHARE * total or states.is_off(term.kind):
            continue
        packages: tuple[str, ...] = ()
        surplus, words = term.bytes / total, term.name
        name = "second-fp32-copy" if term.name.startswith(SECOND_FP32_COPY) else BY_NAME.get(term.name)
        if name is None:
            is_zero = strategy is not None and strategy.zero_stage is not None
            name, packages = "other-states", ("deepspeed",) if is_zero else ("torch",)
            words = f"whole {term.name}" if term.kind == "gathered" else f"{term.kind}, {term.name}"
        figure = surplus if term.name in BY_THEMSELVES else 1 + surplus
        limited = term.name == REDUCTION_BUCKET and group.record.world.preset == "like-for-like"
        effect = min(surplus, LIMITED_EFFECT) if limited else surplus
        found.append(noted(name, figure=figure, effect=effect, packages=packages, term=words))
    return [*found, *_less(group, states, book)]


def _less(group: CellRuns, states: quantities.RankStates, book: dict[str, float]) -> list[Noted]:
    strategy = known_strategy(group.record)
    if strategy is None or group.world_size == 1:
        return []
    total, share = sum(book.values()), states.measured_bytes / sum(book.values())
    gradients, due = states.measured.get("gradients", 0), book["gradients"]
    cuts = strategy.zero_stage == 1 and gradients < CLEARLY_LESS * due
    if cuts and not states.is_off("gradients"):
        saved = (due - gradients) / total
        return [noted("gradients-cut-at-stage-1", figure=gradients / due, effect=saved)]
    other_dtype = _mixed(group.record) and any(map(_is_low, master_dtypes(group.record) or ()))
    if strategy.zero_stage is None and strategy.stage == 2 and share < CLEARLY_LESS and not other_dtype:
        return [noted("weights-cut-between-steps", figure=share)]
    return []


RULES: tuple[Callable[[CellRuns], list[Noted]], ...] = (find_in_training, find_in_traffic, find_in_states)


def library_notes(comparison: Comparison, question: ReportFocus = "all") -> list[ReportNote]:
    """Notes that bear on the question, costs first and savings last; only of built-in backends.

    What a third party's backend does differently is not a library's: it is a finding or its own matter.
    """
    told = any(reduce_dtypes(group.record) == ["float32"] for group in comparison.groups)  # as a finding
    found = merged(
        (group, seen)
        for group in comparison.groups
        if registry.strategy_of(group.record.backend.name) is not None
        for rule in RULES
        for seen in rule(group)
        if not told or seen[0].id != REDUCED_LOW
    )
    return [s for s in found if question == "all" or question in s.library_note.questions]
