"""What ran and where: jobs, layouts, settings, files of other tools, machines, and how to run it again."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Sequence
from typing import Any, get_args

from harness.backends import registry
from harness.backends.base import Preset
from harness.backends.presets import BESIDE_ZERO_OPTIMIZATION, PresetChange, preset_changes
from harness.backends.registry import REFERENCE
from harness.forms.textbook import is_stub
from harness.job.experiment import LEAST_TIMED_STEPS
from harness.judge.comparison import Comparison
from harness.judge.effective import Effect
from harness.judge.quantities import disturbance
from harness.judge.rows import CellRuns, JudgedRun
from harness.judge.run_conditions import accelerator_facts
from harness.judge.wording import listed, name_cells, ranks, words
from harness.nested import differences, put
from harness.record import EnvironmentPart, GivenPart, GivenSettingPart, ObservationPart, Record
from harness.record.workload import closed_form_layout
from harness.safe_text import by_name
from harness.tell.document import (
    Block,
    Code,
    Column,
    Folded,
    Items,
    Paragraph,
    Section,
    Shown,
    Table,
    yaml_code,
)
from harness.tell.formats import fitted, line_width, number
from harness.tell.tables import LABELS, not_comparable_table, prose, table_columns

MOST_KEYS = 30
"""That a sentence names."""


def summary(label: str, part: GivenPart) -> str:
    """'ds.json (deepspeed, like-for-like) is row zero3: 9 keys taken, 3 pinned, 4 without effect...'."""
    pinned, idle = _pinned(part), _idle(part)
    absent = [setting for setting in part.settings if setting.given is None and setting.handling == "taken"]
    taken = len(part.settings) - len(pinned) - len(idle) - len(absent)
    return (
        f"{part.file} ({part.kind}, {part.mode}) is row {label}: {taken} keys taken, {len(pinned)} pinned, "
        f"{len(idle)} without effect on a run"
    )


def given_lines(label: str, part: GivenPart) -> list[str]:
    """What differs from the file, key by key with the reason; then every key that has a part in a run."""
    lines = [summary(label, part)]
    for reason, settings in _by_reason(_pinned(part)).items():
        keys = ", ".join(f"{s.key} {text(s.used)} instead of {text(s.given)}" for s in settings)
        lines += _wrapped(f"differs ({reason}): {keys}")
    taken = [s for s in part.settings if s.handling == "taken"]
    rows = [[s.key, text(s.given), text(s.used)] for s in taken]
    if rows:
        lines.append(fitted(rows, ["key", "given", "used"]))
    for reason, settings in _by_reason(_idle(part)).items():
        keys = ", ".join(f"{s.key}={text(s.given)}" for s in settings)
        lines += _wrapped(f"without effect ({reason}): {keys}")
    return lines


def _by_reason(settings: Sequence[GivenSettingPart]) -> dict[str, list[GivenSettingPart]]:
    found: dict[str, list[GivenSettingPart]] = {}
    for setting in settings:
        found.setdefault(setting.reason or "", []).append(setting)
    return found


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(
        line, line_width(), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )  # fmt: skip


def planned_lines(part: GivenPart, refused: Sequence[str]) -> list[str]:
    """What a plan takes from a file, what it does not, and what it did not understand: a sentence each."""
    given = [setting for setting in part.settings if setting.given is not None]
    taken = [s for s in given if s.handling == "taken" and s.given != "auto"]
    left = [s.key for s in given if s.handling == "taken" and s.given == "auto"]
    said = list(dict.fromkeys(f"{s.key}={text(s.given)}" for s in taken))
    lines = [f"from {part.file}: {listed(said, MOST_KEYS)}"] if said else []
    lines += [f"auto in {part.file}, so left to the job: {listed(left, MOST_KEYS)}"] if left else []
    for reason, settings in _by_reason(_pinned(part)).items():
        keys = [f"{s.key} {text(s.used)} instead of {text(s.given)}" for s in settings if s.given is not None]
        lines += [f"not as in {part.file} ({reason}): {listed(keys, MOST_KEYS)}"] if keys else []
    idle = [s.key for s in _idle(part) if s.given is not None]
    lines += [f"without effect on a run, in {part.file}: {listed(idle, MOST_KEYS)}"] if idle else []
    return lines + [f"not understood in {part.file}, and left out: {reason}" for reason in refused]


def given_table(part: GivenPart, number: int) -> Table:
    """Every key of a file; `number` tells the tables of a report apart."""
    rows = [[s.key, s.handling, text(s.given), text(s.used), s.setting or "", s.reason or ""]
            for s in part.settings]  # fmt: skip
    return Table(key=f"given_{number}", columns=table_columns("given"), rows=rows)


def text(value: Any) -> str:
    """A value as the file's own language writes it; '-' for none."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return str(int(value))
    return str(value)


def _is_idle(setting: GivenSettingPart) -> bool:
    return setting.handling == "pinned" and setting.used is None


def _idle(part: GivenPart) -> Sequence[GivenSettingPart]:
    return [setting for setting in part.settings if _is_idle(setting)]


def _pinned(part: GivenPart) -> Sequence[GivenSettingPart]:
    return [setting for setting in part.pinned if not _is_idle(setting)]


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


TITLE_MEASUREMENT = "Layout and measurement"
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
    for place, measure in enumerate(settings, 1):
        which = f" ({place} of {len(settings)})" if len(settings) > 1 else ""
        blocks.append(
            Folded(f"Every setting of the measurement{which}", [yaml_code({"measure": measure.model_dump()})])
        )
    return Section("measurement", TITLE_MEASUREMENT, blocks)


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
    for place, (label, part) in enumerate(parts.values(), 1):
        blocks += [Paragraph(f"{summary(label, part)}. SHA-256: {part.sha256}."), given_table(part, place)]
    return Section("given", "Configuration files of other tools", blocks)


TITLE_SETTINGS = "Settings in force that differ"
CHANGES: dict[Effect, str] = {"mathematics": "the mathematics", "cost": "cost only"}
COLUMNS_SETTINGS = table_columns("settings")


def settings_section(comparison: Comparison) -> Section | None:
    """One line for each value; None where no setting differs."""
    found = comparison.settings
    if not found:
        return None
    jobs = list(dict.fromkeys(setting.job_id for setting in found))
    body = [
        [
            *([differing.job_id] if len(jobs) > 1 else []),
            differing.setting,
            Shown(differing.effect, CHANGES[differing.effect]),
            Shown(value.value if isinstance(value.value, int | float | str) else words(value.value),
                  words(value.value)),
            name_cells(value.cells),
        ]
        for differing in found
        for value in differing.values
    ]  # fmt: skip
    columns = (
        (Column("job_id", "job", align="left"), *COLUMNS_SETTINGS) if len(jobs) > 1 else COLUMNS_SETTINGS
    )
    table = Table(key="settings_in_force", columns=columns, rows=body)
    return Section("settings_in_force", TITLE_SETTINGS, [Paragraph(prose("settings")), table])


FACTS = table_columns("slurm")


def slurm_jobs(comparison: Comparison) -> Folded | None:
    """The jobs, with what at least one of them has; None where no run was a job of `harness slurm`."""
    jobs = [(row, slurm) for row in comparison.rows if (slurm := row.record.environment.slurm) is not None]
    if not jobs:
        return None
    body = [[*row.cell, row.record.repeat, *(getattr(job, c.key) for c in FACTS)] for row, job in jobs]
    columns = (*LABELS, Column("repeat", "repeat"), *FACTS)
    table = Table(key="slurm_jobs", columns=columns, rows=body)
    return Folded(f"Slurm jobs: {len(jobs)}", [table])


_OF_GPUS = re.compile(r"NCCL|RCCL|TF32|^CUDA_|^CUBLAS|ALLOC_CONF|_VISIBLE_DEVICES")


def machine_section(comparison: Comparison) -> Section:
    """Each distinct machine once, with the load that its runs found."""
    seen: dict[tuple[tuple[str, str], ...], list[Record]] = {}
    for row in comparison.rows:
        e = row.record.environment
        world = row.record.world
        facts = [
            ("CPU", f"{e.cpu}, {e.cores} cores, {e.memory_bytes / 2**30:.1f} GiB"),
            ("accelerators", "; ".join(e.gpus) or "none"),
            *_accelerator(e),
            ("system", f"{e.platform}, Python {e.python}"),
            ("packages", ", ".join(f"{name} {v}" for name, v in sorted(e.packages.items()))),
            ("harness code", e.code + commit_words(e)),
            ("device", f"{_device(row.record)}, collectives over {world.collectives}"),
        ]
        facts += _network(e)
        seen.setdefault(tuple(facts), []).append(row.record)
    blocks: list[Block] = [Items([*facts, *_time_and_load(runs)]) for facts, runs in seen.items()]
    jobs = slurm_jobs(comparison)
    return Section("machine", "Machine and versions", [*blocks, jobs] if jobs else blocks)


def _device(record: Record) -> str:
    """'cpu', 'cuda', 'cuda (CUDA stub)'."""
    names = sorted({rank.device_name for rank in record.ranks if is_stub(rank.device_name)})
    return f"{record.world.device} ({listed(names)})" if names else record.world.device


def _time_and_load(records: Sequence[Record]) -> list[tuple[str, str]]:
    """When the runs began, the runnable processes of the minute before (runs before leave some too), and
    what other work used meanwhile."""
    runs = sorted(records, key=lambda record: record.created_at)
    first, last = (run.created_at[:16].replace("T", " ") for run in (runs[0], runs[-1]))
    facts = [("runs began", f"from {first} to {last} UTC")]
    loads = [load for run in runs if (load := run.environment.load_average) is not None]
    if loads:
        extent = f"{loads[0]:.2f} before the first, {min(loads):.2f} to {max(loads):.2f} before all"
        facts.append(("load before the runs", f"{extent} (average of a minute)"))
    used = [one.other_cores for run in runs if (one := disturbance(run)) is not None]
    if used:
        facts.append(("other work during timed steps", f"{min(used):.2f} to {max(used):.2f} cores"))
    return facts


def _accelerator(environment: EnvironmentPart) -> list[tuple[str, str]]:
    """Driver, libraries and settings of the GPUs; nothing on the CPU and in older records."""
    own = environment.accelerator
    if own is None:
        return []
    facts = [("GPU software", ", ".join(accelerator_facts(environment).values()) or "not known")]
    if own.float32_matmul is not None:
        in_cudnn = {None: "", True: "; TF32 in cuDNN on", False: "; TF32 in cuDNN off"}[own.cudnn_tf32]
        facts.append(("fp32 matrix products", f"precision '{own.float32_matmul}'{in_cudnn}"))
    named = [f"{name}={value}" for name, value in environment.variables.items() if _OF_GPUS.search(name)]
    return [*facts, ("variables", ", ".join(named) or "none of NCCL, CUDA or TF32")]


def _network(environment: EnvironmentPart) -> list[tuple[str, str]]:
    """What a self-test before the run measured, where there was one."""
    fabric = environment.fabric
    if fabric is None or fabric.all_reduce_bus_bytes_per_second is None:
        return []
    bandwidth = number(fabric.all_reduce_bus_bytes_per_second / 1e9)
    text = (
        f"{fabric.transport} on {fabric.world_size} ranks, {fabric.nodes} nodes: all-reduce bus "
        f"bandwidth {bandwidth} GB/s at {fabric.all_reduce_bytes:,} bytes, "
        f"latency {number((fabric.all_reduce_latency_seconds or 0.0) * 1e6)} us"
    )
    return [("network", text)]


def commit_words(environment: EnvironmentPart) -> str:
    """The commit of the checkout that a run came from, to stand behind the code; empty outside of one."""
    git = environment.git
    if git is None:
        return ""
    commit = f", commit {git.commit[:12]}"
    if not git.modified:
        return commit
    return f"{commit} with local changes{f' to {listed(git.changed)}' if git.changed else ''}"


EVERY = "all"


def observed_section(comparison: Comparison) -> Section | None:
    """None where no row is of a script."""
    seen = {
        row.backend: row.record.observation for row in comparison.rows if row.record.observation is not None
    }
    if not seen:
        return None
    blocks: list[Block] = [Paragraph(prose("observed"))]
    blocks += [Paragraph(_summary(label, part)) for label, part in seen.items()]
    blocks.append(Table(key="observed", columns=table_columns("observed"), rows=_missing(seen)))
    return Section("observed", "Observed scripts", blocks)


def _summary(label: str, part: ObservationPart) -> str:
    """'observed-ddp: `torchrun train.py`. Driven by lightning. Loss: ... . 2 optimizers step...'."""
    drivers = f" Driven by {', '.join(part.frameworks)}." if part.frameworks else ""
    loss = f" Loss: {part.loss}." if part.loss else ""
    same = f" Backend of the same strategy: {part.base}." if part.base else ""
    notes = "".join(f" {note[0].upper()}{note[1:]}." for note in part.notes)
    return f"{label}: `{shlex.join(part.command)}`.{drivers}{same}{loss}{notes}"


def _missing(seen: dict[str, ObservationPart]) -> list[list[str]]:
    """What all rows lack in one line each, then what some do."""
    fields = {(field, reason): None for part in seen.values() for field, reason in part.unknown.items()}
    lines = []
    for field, reason in fields:
        rows = [label for label, part in seen.items() if part.unknown.get(field) == reason]
        shown = [EVERY] if len(rows) == len(seen) else rows
        lines += [[row, field, reason] for row in shown]
    return lines


WHERE = "In a checkout of the code:"
INSTALL = "pip install -c constraints.txt -e '.[train]'"


def reproduce_section(comparison: Comparison) -> Section:
    """Code, commands, each once and without folders of the machine that ran them, and configurations."""
    records = [row.record for row in comparison.rows]
    commands = commands_of(comparison)
    files = _configurations(comparison)
    blocks: list[Block] = [
        Paragraph(" ".join([*_commits(records), *_builds(records), WHERE])),
        Code("sh", "\n".join([INSTALL, *commands])),
        Paragraph(prose("reproduce_configuration")),
        *(Folded(title, [yaml_code(settings)]) for title, settings in files.items()),
    ]
    return Section("reproduce", "How to reproduce", blocks)


def commands_of(comparison: Comparison) -> list[str]:
    """Each command that asked for runs, without folders of the machine that ran them."""
    return list(dict.fromkeys(shlex.join(by_name(row.record.command)) for row in comparison.rows))


def _commits(records: Sequence[Record]) -> list[str]:
    """The commits that the runs came from, in a sentence; [] where no record knows one."""
    states = [record.environment.git for record in records]
    commits = dict.fromkeys(state.commit for state in states if state)
    return [f"The code is that of commit {listed(list(commits))}."] if commits else []


def _builds(records: Sequence[Record]) -> list[str]:
    """Of which build torch was, where its version says so: pip takes the one that its index offers."""
    versions = dict.fromkeys(record.environment.packages.get("torch", "") for record in records)
    builds = [version for version in versions if "+" in version]
    return (
        [f"torch was the build {listed(builds)}; pip installs the one that its index offers."]
        if builds
        else []
    )


def _configurations(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Title and content of a configuration file for each job, cut of its batch and way of measuring.

    A reference is added to every comparison, cut in its own way: it counts where nothing else ran.
    """
    others = {row.record.job_id for row in comparison.rows if row.record.backend.name != REFERENCE}
    found: list[tuple[dict[str, Any], list[JudgedRun]]] = []
    # A row that names its own preset belongs to the file of those that do not.
    for row in sorted(comparison.rows, key=lambda row: row.record.backend.own_preset is not None):
        record = row.record
        if record.backend.name == REFERENCE and record.job_id in others:
            continue
        world = record.world
        settings = record.job.model_dump(mode="json")
        settings["training"]["accumulation_steps"] = world.accumulation_steps
        if record.measure:
            settings["measure"] = record.measure.model_dump(mode="json")
        settings["runtime"] = {"preset": world.preset, "device": world.device}
        known = next((alike for other, alike in found if _holds(other, settings, record)), None)
        if known is None:
            found.append((settings, known := []))
        known.append(row)
    return {
        f"Configuration{f' {number} of {len(found)}' if len(found) > 1 else ''}": _with_cells(settings, alike)
        for number, (settings, alike) in enumerate(found, 1)
    }


def _holds(file: dict[str, Any], settings: dict[str, Any], record: Record) -> bool:
    """Whether a file that holds some cells can hold the one of this record too."""
    if record.backend.own_preset is not None:
        settings = {**settings, "runtime": {**settings["runtime"], "preset": file["runtime"]["preset"]}}
    return file == settings


def _with_cells(settings: dict[str, Any], rows: Sequence[JudgedRun]) -> dict[str, Any]:
    """Settings with the threads that all runs share, and with the cells where one node held them."""
    worlds = [row.record.world for row in rows]
    threads = {world.threads_per_rank for world in worlds}
    runtime = {**settings["runtime"], **({"threads_per_rank": threads.pop()} if len(threads) == 1 else {})}
    if any(world.nodes > 1 for world in worlds):
        return {**settings, "runtime": runtime}
    cells = {
        "backends": list(dict.fromkeys(row.backend for row in rows)),
        "world_sizes": sorted({world.world_size for world in worlds}),
        "repeats": max(row.record.repeat for row in rows) + 1,
    }
    return {**settings, "runtime": runtime, "compare": cells}
