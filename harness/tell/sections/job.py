"""The job or jobs that ran, how ranks and batch were laid out, and what each backend was configured with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from harness.backends import registry
from harness.backends.base import Preset
from harness.backends.presets import BESIDE_ZERO_OPTIMIZATION, PresetChange, preset_changes
from harness.backends.registry import REFERENCE
from harness.job.experiment import LEAST_TIMED_STEPS
from harness.judge.comparison import Comparison
from harness.judge.repeats import CellRuns
from harness.judge.wording import listed, ranks
from harness.nested import differences, put
from harness.record import GivenPart, Record
from harness.record.workload import closed_form_layout
from harness.tell.document import Block, Folded, Paragraph, Section, Table, yaml_code
from harness.tell.imported import given_table, summary
from harness.tell.tables import not_comparable_table, prose, table_columns

PRECISIONS = {
    "fp8": "fp8 (emulated: these runs show numerics only; speed and memory say nothing of fp8 hardware)"
}
SOURCES = {"prose": "prose, the English help texts of the Python that ran"}


def job_section(comparison: Comparison) -> Section:
    """Each job in a sentence, every setting folded."""
    ids = list(dict.fromkeys(row.record.job_id for row in comparison.rows))
    blocks: list[Block] = []
    if len(ids) > 1:
        blocks.append(
            Paragraph(
                f"These records hold {len(ids)} jobs. A run is compared only with the reference of its "
                "own job."
            )
        )
    for job_id in ids:
        of_job = [row.record for row in comparison.rows if row.record.job_id == job_id]
        weights = next((r.initial_weights for r in of_job if r.initial_weights), None)
        built = next((r.model for r in of_job if r.model), None)
        facts = [f"{built.architecture}, attention {built.attention}"] if built else []
        if weights:
            facts.append(f"{weights.parameter_count:,} parameters")
        if of_job[0].job.model.trust_remote_code:
            facts.append(f"code of '{of_job[0].job.model.name}' ran (trust_remote_code)")
        facts += _adapters(of_job)
        blocks.append(Paragraph(f"Job {', '.join([job_id, *facts])}: {_trained(of_job)}."))
        blocks.append(Folded(f"Job {job_id}, every setting", [yaml_code(_settings(of_job))]))
    return Section("job", "The job", blocks)


def _trained(records: Sequence[Record]) -> str:
    """'global batch 8 samples of 64 tokens, precision fp32, ...; data: text'."""
    job = records[0].job
    training = job.training
    batch = f"global batch {_known(training.global_batch_size)} samples"
    facts = [batch if job.data.sequence_length is None else f"{batch} of {job.data.sequence_length} tokens"]
    facts.append(f"precision {_known(PRECISIONS.get(training.precision, training.precision))}")
    facts.append(f"gradient clipping {training.gradient_clipping or 'none'}")
    data = next((r.data for r in records if r.data), None)
    samples = f", {data.training_samples:,} samples" if data else ""
    source = SOURCES.get(job.data.source, job.data.source)
    return f"{', '.join(facts)}; data: {_known(source)}{samples}"


def _known(value: Any) -> str:
    """As text; what was not seen of an observed script is 'n/a'."""
    return "n/a" if value is None else str(value)


def _adapters(records: Sequence[Record]) -> list[str]:
    """What is trained of a model whose weights are frozen."""
    adapter = records[0].job.adapter
    if not adapter.is_present:
        return []
    part = next((r.layout for r in records if r.layout), None)
    trained = f", {closed_form_layout(part).trained_count:,} of them trained" if part else ""
    return [f"adapters of rank {adapter.rank} (alpha {adapter.alpha:g}){trained}"]


def _settings(records: Sequence[Record]) -> dict[str, Any]:
    """The job of these records with the cut of its batch as it ran.

    The cut is no part of a job's identity. Where cells differ in it, it stands in the table of layouts only.
    """
    settings = records[0].job.model_dump(mode="json")
    worlds = [record.world for record in records if record.backend.name != REFERENCE]
    for key in ("micro_batch_size", "accumulation_steps"):
        del settings["training"][key]
        ran = {getattr(world, key) for world in worlds or [record.world for record in records]}
        if len(ran) == 1:
            settings["training"][key] = ran.pop()
    return settings


def not_comparable_section(comparison: Comparison) -> Section | None:
    """None where all runs of a job are one job."""
    table = not_comparable_table(comparison)
    if table is None:
        return None
    return Section("not_comparable", "Not comparable, and why", [Paragraph(prose("other_jobs")), table])


TITLE = "Layout and measurement"
COLUMNS = table_columns("layout")
TEXT_MEASUREMENT = prose("layout", least_timed_steps=LEAST_TIMED_STEPS)


def measurement_section(comparison: Comparison) -> Section:
    """A line for each layout with the backends that ran in it, and the settings of the measurement.

    A sentence shows what all cells share.
    """
    layouts = [(group.label, _layout(row.record)) for group in comparison.groups for row in group.rows]
    kept, shared = [0], []
    for index, column in list(enumerate(COLUMNS[:-1]))[1:]:
        values = {layout[index] for _, layout in layouts} - {None}
        if len(values) == 1:
            shared.append(f"{column.title} {values.pop()}")
        elif values:
            kept.append(index)
    found: dict[tuple[Any, ...], dict[str, None]] = {}
    for label, layout in layouts:
        found.setdefault(tuple(layout[index] for index in kept), {})[label] = None
    body = [[*layout, listed(list(names), len(names))] for layout, names in found.items()]
    columns = [*(COLUMNS[index] for index in kept), COLUMNS[-1]]
    blocks: list[Block] = [Table(key="layouts", columns=columns, rows=body)]
    if shared:
        blocks.append(Paragraph(f"The same in all cells that trained: {', '.join(shared)}."))
    blocks.append(Paragraph(TEXT_MEASUREMENT))
    settings = dict.fromkeys(row.record.measure for row in comparison.rows if row.record.measure)
    for number, measure in enumerate(settings, 1):
        which = f" ({number} of {len(settings)})" if len(settings) > 1 else ""
        blocks.append(
            Folded(f"Every setting of the measurement{which}", [yaml_code({"measure": measure.model_dump()})])
        )
    return Section("measurement", TITLE, blocks)


def _layout(record: Record) -> tuple[Any, ...]:
    world, windows = record.world, record.windows
    steps = (
        (windows.warmup, windows.probed, windows.traced, windows.cooldown, windows.timed)
        if windows and record.steps
        else (None,) * 5
    )
    return (
        world.world_size, world.nodes, world.ranks_per_node, world.threads_per_rank, world.micro_batch_size,
        world.accumulation_steps, *steps,
    )  # fmt: skip


LIKE_FOR_LIKE, LIBRARY_DEFAULTS = get_args(Preset)


def presets_section(comparison: Comparison) -> Section | None:
    """The changes, each once with its backends; None without a run that was set up."""
    ran = [row.record for row in comparison.rows if row.record.backend.effective]
    if not ran:
        return None
    backends: dict[tuple[str, ...], list[str]] = {}
    for group in comparison.groups:
        for change in _changes(group):
            changed = backends.setdefault(change, [])
            if group.backend not in changed:
                changed.append(group.backend)
    text = _in_force(ran)
    if any(record.world.preset == LIBRARY_DEFAULTS for record in ran):
        text += f" {LIBRARY_DEFAULTS} keeps a library's settings, except those that change the mathematics."
    if not backends:
        return Section("preset", "Preset", [Paragraph(text)])
    lines = [[*change, "; ".join(changed)] for change, changed in backends.items()]
    table = Table(key="preset_changes", columns=table_columns("job_presets"), rows=lines)
    return Section("preset", "Preset", [Paragraph(f"{text} What {LIKE_FOR_LIKE} changed:"), table])


def _in_force(ran: Sequence[Record]) -> str:
    """'Preset: like-for-like; library-defaults for zero3:preset=library-defaults.'"""
    common = dict.fromkeys(r.world.preset for r in ran if r.backend.own_preset is None)
    own: dict[str, dict[str, None]] = {}
    for record in ran:
        if record.backend.own_preset is not None:
            own.setdefault(record.world.preset, {})[record.backend.label] = None
    parts = [", ".join(common)] if common else []
    parts += [f"{preset} for {listed(list(labels))}" for preset, labels in own.items()]
    return f"Preset: {'; '.join(parts)}."


def _changes(group: CellRuns) -> list[tuple[str, ...]]:
    """Setting, value, the library's default and the reason of each."""
    record = group.record
    effective, strategy = record.backend.effective, registry.strategy_of(record.backend.name)
    if effective is None or strategy is None:
        return []
    changes = preset_changes(
        strategy,
        record.job.training.held_precision,
        record.world.preset,  # type: ignore[arg-type]
        effective.parameter_count,
    )
    return [
        (change.setting, str(change.value), str(change.default), change.reason)
        for change in changes
        if record.backend.options.get(change.setting) is None  # an option given by hand wins
        and _was_set(change, record)
    ]


def _was_set(change: PresetChange, record: Record) -> bool:
    """Whether the configuration of the run has it: a preset may have changed less when a record was made."""
    config = record.backend.native_config
    return not config or change.setting not in BESIDE_ZERO_OPTIMIZATION or change.setting in config


OBSERVED_SETTINGS = (
    "attention", "activation_checkpointing", "compiled",
    "compiled_graphs", "graph_breaks", "recompilations", "dropout", "tf32", "deterministic",
    "tied_parameters", "frozen_parameters", "parameters_left_out", "master_dtypes", "optimizer_state_dtypes",
)  # fmt: skip
"""What the harness saw of the live model and optimizer, whatever the backend says of itself."""


def configuration_section(comparison: Comparison) -> Section | None:
    """What was in force, folded: of each backend in full once, then what other cells of it change."""
    by_label: dict[tuple[str, str], list[CellRuns]] = {}
    for group in comparison.groups:
        if group.record.backend.effective is not None:
            by_label.setdefault((group.record.job_id, group.label), []).append(group)
    blocks = [_folded(groups) for groups in by_label.values()]
    return Section("configuration", "Configuration of each backend", blocks) if blocks else None


def _folded(groups: Sequence[CellRuns]) -> Folded:
    first, *others = groups
    settings = _keys_in_force(first.record)
    blocks: list[Block] = [yaml_code(settings)]
    for group in others:
        changed = difference(_keys_in_force(group.record), settings)
        same = f"{group.cell}: as {first.cell}"
        blocks += [Paragraph(f"{same}, but for"), yaml_code(changed)] if changed else [Paragraph(f"{same}.")]
    sizes = dict.fromkeys(ranks(group.world_size) for group in groups)
    return Folded(f"{first.label}, {', '.join(sizes)}", blocks)


def difference(given: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Values of `given` that `other` has not, nested; None for what only `other` has."""
    changed: dict[str, Any] = {}
    for keys, value, _ in differences(given, other):
        put(changed, keys, value)
    return changed


def _keys_in_force(record: Record) -> dict[str, Any]:
    document: dict[str, Any] = {
        "effective": record.backend.in_force(),
        "native_config": record.backend.native_config,
        "versions": record.backend.versions,
    }
    if record.world.dimensions:
        document["dimensions"] = {part.name: part.size for part in record.world.dimensions}
    if record.observed is not None:
        document["observed"] = record.observed.model_dump(
            mode="json", include=set(OBSERVED_SETTINGS), exclude_none=True
        )
    return document


def given_section(comparison: Comparison) -> Section | None:
    """None where no row came from a file."""
    parts: dict[str, tuple[str, GivenPart]] = {}
    for row in comparison.rows:
        part = row.record.backend.given
        if part is not None:
            parts.setdefault(part.model_dump_json(), (row.backend, part))
    if not parts:
        return None
    blocks: list[Block] = [Paragraph(prose("job_given"))]
    for number, (label, part) in enumerate(parts.values(), 1):
        blocks += [Paragraph(f"{summary(label, part)}. SHA-256: {part.sha256}."), given_table(part, number)]
    return Section("given", "Configuration files of other tools", blocks)
