"""Differences from the textbook and from defaults as data: where each was measured, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self

from harness.backends import registry
from harness.backends.libraries.facts import fact
from harness.backends.presets import TIMER_WAITS, preset_changes
from harness.forms.ddp import BUCKETS_BESIDE_GRADIENTS
from harness.forms.model.layout import DTYPE_BYTES
from harness.forms.network import EMULATED
from harness.forms.terms import (
    BACKWARD,
    FORWARD,
    FURTHER_BACKWARD,
    FURTHER_FORWARD,
    FURTHER_GRADIENTS,
    GRADIENTS,
    UPDATED,
    Term,
)
from harness.forms.textbook import TermDifference
from harness.forms.zero.zero0 import FP32_SURPLUS, SECOND_FP32_COPY
from harness.forms.zero.zero3 import PERSISTENT_PARAMETERS, REDUCTION_BUCKET, TIED_TERM
from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison
from harness.judge.effective import clipping, master_dtypes
from harness.judge.quantities import (
    RankStates,
    largest,
    rank_states,
    reduced_dtypes,
    sent_bytes_per_step,
    textbook,
    textbook_bytes_per_step,
    textbook_differences,
    transport_bytes_per_step,
    volume_differences,
)
from harness.judge.rows import CellRuns
from harness.judge.wording import CellName, listed, ranks
from harness.record import Record
from harness.record.workload import known_strategy, of_record

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


CHANGES_TRAINING = math.inf
"""Effect of what trains something else than the job asks for: before every difference of cost."""
WOULD_CHANGE_TRAINING = 0.4
"""Effect of a default that would do so without this harness's setting: ranked as 40 % of bytes."""
CLIPS_BY_DEFAULT = fact("zero-clips-by-default")
CLIPPING_KEY = "gradient_clipping"
CLIPPED = LibraryNote(
    id="clipped-by-default",
    since=CLIPS_BY_DEFAULT.source,
    figure_is_ratio=False,
    what="gradients are clipped at {figure}, unasked: the default of DeepSpeed since "
    + CLIPS_BY_DEFAULT.first,
    advice="Set gradient_clipping: 0.0.",
    questions=PARITY,
)
CLIPPING_PINNED = LibraryNote(
    id="clipping-set-by-harness",
    since=CLIPS_BY_DEFAULT.source,
    figure_is_ratio=False,
    what=f"since {CLIPS_BY_DEFAULT.first} DeepSpeed clips at 1.0 if gradient_clipping is unset; here "
    "{figure} is set",
    advice="Set it yourself.",
    questions=PARITY,
)
WAITS_EFFECT = 0.05
"""Bytes do not show a wait for the device: ranked as 5 % of bytes."""


def find_in_training(group: CellRuns) -> list[CellNote]:
    """What the first repeat of a cell shows."""
    record = group.record
    looked = (_clipping, _masters, _reduction, _accumulation, _replaced, _refused, _waits)
    return [cell_note for look in looked if (cell_note := look(record)) is not None]


def _clipping(record: Record) -> CellNote | None:
    """In force unasked, or kept away by this harness."""
    version = record.backend.versions.get("deepspeed")
    config, in_force = record.backend.native_config, clipping(record)
    if version is None or not CLIPS_BY_DEFAULT.includes(version) or not config or in_force is None:
        return None
    if CLIPPING_KEY in config:
        return CellNote(
            library_note=CLIPPING_PINNED, figure=float(config[CLIPPING_KEY]), effect=WOULD_CHANGE_TRAINING
        )
    asked = record.job.training.gradient_clipping
    if in_force == "none" or asked == float(in_force):
        return None
    return CellNote(library_note=CLIPPED, figure=float(in_force), effect=CHANGES_TRAINING)


def low_precision_masters(record: Record) -> list[str]:
    """Dtypes below fp32 of weights that the optimizer updates although the job asks for mixed precision."""
    if not _mixed(record):
        return []
    return [dtype for dtype in master_dtypes(record) or () if DTYPE_BYTES.get(dtype, 4) < 4]


def _masters(record: Record) -> CellNote | None:
    low = low_precision_masters(record)
    if not low:
        return None
    note = LibraryNote.of(
        "masters-in-low-precision",
        what=f"the optimizer updates {listed(low)} weights: small updates vanish",
        packages=_packages(record),
    )
    return CellNote(library_note=note, effect=CHANGES_TRAINING)


def _reduction(record: Record) -> CellNote | None:
    """Gradients that cross the wire in low precision at mixed precision, as the library does by default."""
    low = [dtype for dtype in reduced_dtypes(record) if DTYPE_BYTES.get(dtype, 4) < 4]
    if not _mixed(record) or not low:
        return None
    note = LibraryNote.of(
        "reduced-in-low-precision",
        what=f"gradients are averaged in {listed(low)}: half the bytes, coarser sums",
        advice=_setting(record, "wire"),
        packages=_packages(record),
    )
    return CellNote(library_note=note, effect=DTYPE_BYTES[low[0]] / DTYPE_BYTES["float32"])


def _accumulation(record: Record) -> CellNote | None:
    """Micro-steps that add up in low precision at mixed precision."""
    effective = record.backend.effective
    dtype = effective.accumulation_dtype if effective else None
    if not _mixed(record) or record.world.accumulation_steps == 1 or DTYPE_BYTES.get(dtype or "", 4) >= 4:
        return None
    note = LibraryNote.of(
        "accumulated-in-low-precision",
        what=f"micro-steps add up in {dtype}, which drops what is below 1/256 of the sum",
        advice=_setting(record, "micro-steps"),
        packages=_packages(record),
    )
    return CellNote(library_note=note, effect=CHANGES_TRAINING)


def _replaced(record: Record) -> CellNote | None:
    """A library that runs another strategy than it was asked for."""
    effective = record.backend.effective
    if effective is None or effective.requested_strategy in (None, effective.strategy):
        return None
    note = LibraryNote(
        id="strategy-replaced",
        what=f"asked for {effective.requested_strategy}, runs {effective.strategy}",
        advice="Use more ranks, or take the row for what it runs.",
        questions=("parity", "memory", "speed", "scaling"),
        packages=_packages(record),
        since="read back from the library",
    )
    on_one_rank = record.world.world_size == 1  # which has nothing to shard
    return CellNote(library_note=note, effect=0.0 if on_one_rank else CHANGES_TRAINING)


def _refused(record: Record) -> CellNote | None:
    """A cell that was not run because of what a version of a library would have done."""
    reason = next((text for text in record.reasons if text.startswith(tuple(NAMES))), None)
    if record.status != "unsupported" or reason is None:
        return None
    note = LibraryNote(
        id="not-run",
        what=f"not run: {reason.rstrip('.').replace('{', '{{').replace('}', '}}')}",
        advice="",
        questions=("speed", "memory", "parity"),
        packages=(),
        since="read back from the library",
    )
    return CellNote(library_note=note, effect=0.0)


def _waits(record: Record) -> CellNote | None:
    """DeepSpeed's own timer, where there is a device to wait for."""
    effective = record.backend.effective
    waits = effective is not None and effective.details.get(TIMER_WAITS)
    if not waits or record.world.device == "cpu":
        return None
    return CellNote(library_note=LibraryNote.of("waits-for-the-device"), effect=WAITS_EFFECT)


def _mixed(record: Record) -> bool:
    return record.job.training.precision.endswith("-mixed")


def _packages(record: Record) -> tuple[str, ...]:
    """The library whose default it is: DeepSpeed where it runs, else torch."""
    own = [name for name in ("deepspeed", "torch") if name in record.backend.versions]
    return tuple(own[:1])


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
    ("zero12", GRADIENTS): "gradients-all-reduced",
    ("zero12", FURTHER_GRADIENTS): "reduced-every-micro-step",
    ("zero3", FORWARD): "weights-stay-gathered",
    ("zero3", BACKWARD): "weights-stay-gathered",
    ("zero3", UPDATED): "weights-stay-gathered",
    ("zero3", TIED_TERM): "tied-weights-gathered-twice",
    ("fsdp1", BACKWARD): "root-not-resharded",
    ("fsdp2", BACKWARD): "root-not-resharded",
    **{("zero3", term): "moved-every-micro-step"
       for term in (FURTHER_FORWARD, FURTHER_BACKWARD, FURTHER_GRADIENTS)},
    **{(family, term): "gathered-every-micro-step"
       for family in ("fsdp1", "fsdp2") for term in (FURTHER_FORWARD, FURTHER_BACKWARD)},
    **{(family, FURTHER_GRADIENTS): "sync-each-batch" for family in ("ddp", "fsdp1", "fsdp2")},
}  # fmt: skip
"""Facts by family and term of the closed form; other terms are shown with the remark of the closed form."""


def find_in_traffic(group: CellRuns) -> list[CellNote]:
    """Every one of a cell whose bytes were counted."""
    return [*_terms(group.record), *_emulated(group.record), *_by_module(group.record)]


def _terms(record: Record) -> list[CellNote]:
    """The terms of one note together, relative to all that the textbook sends."""
    strategy, textbook = known_strategy(record), textbook_bytes_per_step(record)
    if strategy is None or not textbook or volume_differences(record) != []:
        return []
    surplus: dict[LibraryNote, float] = {}
    for difference in textbook_differences(record) or ():
        name = BY_TERM.get((strategy.family, difference.term))
        note = LibraryNote.of(name) if name else _unlisted(difference, strategy.family)
        surplus[note] = surplus.get(note, 0.0) + difference.difference
    return [
        CellNote(library_note=note, figure=1 + sent / textbook)
        for note, sent in surplus.items()
        if abs(sent) >= SMALL_SHARE * textbook
    ]


def _unlisted(difference: TermDifference, family: str) -> LibraryNote:
    remark = f" ({difference.remark})" if difference.remark else ""
    return LibraryNote(
        id="other-traffic",
        what=f"{{figure}} x the textbook's bytes: {difference.term}{remark}",
        advice="No action: the implementation does so.",
        questions=TRAFFIC,
        packages=("deepspeed",) if family.startswith("zero") else ("torch",),
    )


def _emulated(record: Record) -> list[CellNote]:
    """What the transport sends for the same calls, relative to what is counted."""
    transport = record.world.collectives
    replaced = EMULATED.get(transport, {})
    counted, moved = sent_bytes_per_step(record), transport_bytes_per_step(record)
    if not replaced or not counted or moved is None or moved < (1 + LEAST_EMULATED) * counted:
        return []
    words = " and ".join(
        f"{one.replace('_', '-')} runs as {other.replace('_', '-')}" for one, other in replaced.items()
    )
    note = LibraryNote(
        id="transport-emulates",
        what=f"{{figure}} x the counted bytes cross the wire: {words}",
        advice="Compare counted bytes.",
        questions=TRAFFIC,
        packages=("torch",),
        cause="transport",
        since="torch 2.13, csrc/distributed/c10d/ProcessGroupGloo.cpp; confirmed by bytes on a wire",
    )
    return [CellNote(library_note=note, figure=moved / counted)]


def _by_module(record: Record) -> list[CellNote]:
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
    by_module = LibraryNote.of("gathers-by-module")
    return [CellNote(library_note=by_module, figure=calls / passes / by_block, effect=CALLS_EFFECT)]


CLOSE = 1e-3
"""Relative: measured bytes that are as expected."""
LIMITED_EFFECT = 0.1
"""Of a bucket that the preset limits to 25 MiB: large beside a small model, nothing beside a large one."""
CLEARLY_LESS = 0.97
"""Of the textbook's bytes."""


FP32_GRADIENTS = LibraryNote(
    id="gradients-add-up-in-fp32",
    what="{figure} x the textbook's states: gradients take 4 bytes, the textbook counts 2",
    advice='data_types: {"grad_accum_dtype": "bf16"} halves them and adds micro-steps up in bf16.',
    questions=MEMORY,
    cause="preset",
    since="like-for-like sets grad_accum_dtype to fp32, as DDP and FSDP add up; DeepSpeed's default is the "
    "model's dtype (runtime/engine.py, get_data_types)",
)
BUCKET = LibraryNote.of(
    "persistent-reduction-bucket",
    figure_is_ratio=False,
    what="a buffer for gradients, the reduction bucket, stays allocated: {figure} x the textbook's states",
)
GRADIENTS_TWICE = LibraryNote.of(
    "gradients-twice",
    figure_is_ratio=False,
    what="DDP's buckets hold a second copy of the gradients: {figure} x the textbook's states",
)
WHOLE_PARAMETERS = LibraryNote(
    id="stays-gathered",
    figure_is_ratio=False,
    what=f"{PERSISTENT_PARAMETERS} stay gathered, beside the states: {{figure}} x the textbook's states",
    advice="stage3_param_persistence_threshold: 0 shards them.",
    questions=MEMORY,
)
BY_NAME = {
    FP32_SURPLUS: FP32_GRADIENTS,
    REDUCTION_BUCKET: BUCKET,
    BUCKETS_BESIDE_GRADIENTS: GRADIENTS_TWICE,
    PERSISTENT_PARAMETERS: WHOLE_PARAMETERS,
}
"""By the name of the closed form's term; other extra terms are shown by their name."""
BY_THEMSELVES = (REDUCTION_BUCKET, BUCKETS_BESIDE_GRADIENTS, PERSISTENT_PARAMETERS)
"""Buffers and gathered weights, which are no model states: their figure is their own size."""


def find_in_states(group: CellRuns) -> list[CellNote]:
    """Every one of a cell whose model states were measured; [] where closed form or textbook has none."""
    states, book = largest(rank_states(group.record)), textbook(group.record)
    if states is None or states.expected is None or not book:
        return []
    return [*_extra(group, states, sum(book.values())), *_less(group, states, book)]


def _extra(group: CellRuns, states: RankStates, total: float) -> list[CellNote]:
    assert states.expected is not None
    strategy, found = known_strategy(group.record), []
    for term in states.expected.terms:
        if not term.extra or term.bytes < SMALL_SHARE * total or not _as_expected(states, term.kind):
            continue
        is_zero = strategy is not None and strategy.zero_stage is not None
        surplus = term.bytes / total
        figure = surplus if term.name in BY_THEMSELVES else 1 + surplus
        limited = term.name == REDUCTION_BUCKET and group.record.world.preset == "like-for-like"
        effect = min(surplus, LIMITED_EFFECT) if limited else surplus
        found.append(CellNote(library_note=_note(term, is_zero=is_zero), figure=figure, effect=effect))
    return found


def _note(term: Term, *, is_zero: bool) -> LibraryNote:
    if term.name.startswith(SECOND_FP32_COPY):
        return LibraryNote.of("second-fp32-copy")
    cause = f"whole {term.name}" if term.kind == "gathered" else f"{term.kind}, {term.name}"
    return BY_NAME.get(term.name) or LibraryNote(
        id="other-states",
        what=f"{{figure}} x the textbook's states: {cause}",
        advice="No action: the implementation does so.",
        questions=MEMORY,
        packages=("deepspeed",) if is_zero else ("torch",),
    )


def _less(group: CellRuns, states: RankStates, book: dict[str, float]) -> list[CellNote]:
    strategy = known_strategy(group.record)
    if strategy is None or group.world_size == 1:
        return []
    total = sum(book.values())
    gradients = states.measured.get("gradients", 0)
    if (
        strategy.zero_stage == 1
        and gradients < CLEARLY_LESS * book["gradients"]
        and _as_expected(states, "gradients")
    ):
        saved = (book["gradients"] - gradients) / total
        cut = LibraryNote.of("gradients-cut-at-stage-1")
        return [CellNote(library_note=cut, figure=gradients / book["gradients"], effect=saved)]
    share = states.measured_bytes / total
    other_dtype = low_precision_masters(group.record)
    if strategy.zero_stage is None and strategy.stage == 2 and share < CLEARLY_LESS and not other_dtype:
        return [CellNote(library_note=LibraryNote.of("weights-cut-between-steps"), figure=share)]
    return []


def _as_expected(states: RankStates, kind: str) -> bool:
    assert states.expected is not None
    form = states.expected.kinds().get(kind, 0)
    return abs(states.measured.get(kind, 0) - form) <= CLOSE * form


RULES: tuple[Callable[[CellRuns], list[CellNote]], ...] = (find_in_training, find_in_traffic, find_in_states)


def library_notes(comparison: Comparison, question: ReportFocus = "all") -> list[ReportNote]:
    """Those that bear on the question, costs first and savings last; only of built-in backends.

    What a third party's backend does differently is not a library's: it is a finding or its own matter.
    """
    found = merged(
        (group, cell_note)
        for group in comparison.groups
        if registry.strategy_of(group.record.backend.name) is not None
        for rule in RULES
        for cell_note in rule(group)
    )
    return [s for s in found if question == "all" or question in s.library_note.questions]
