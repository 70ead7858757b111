"""What ran and where: jobs, layouts, settings, files of other tools, machines, and how to run it again."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, get_args

from harness.backends import registry
from harness.backends.base import Preset
from harness.backends.presets import BESIDE_ZERO_OPTIMIZATION, preset_changes
from harness.backends.registry import REFERENCE
from harness.forms.textbook import is_stub
from harness.job.experiment import LEAST_TIMED_STEPS
from harness.judge.comparison import Comparison
from harness.judge.effective import Effect
from harness.judge.quantities import Run
from harness.judge.rows import CellRuns, JudgedRun
from harness.judge.run_conditions import accelerator_facts
from harness.judge.wording import listed, name_cells, ranks, words
from harness.nested import differences, grouped, put, removed
from harness.record import EnvironmentPart, GivenPart, GivenSettingPart, ObservationPart, Record
from harness.safe_text import by_name
from harness.tell import tables
from harness.tell.document import (
    Block,
    Code,
    Column,
    Folded,
    Items,
    Section,
    Shown,
    Table,
    yaml_code,
)
from harness.tell.formats import fitted, line_width, number

MOST_KEYS = 30
"""That a sentence names."""


def summary(label: str, part: GivenPart) -> str:
    """'ds.json (deepspeed, like-for-like) is row zero3: 9 keys taken, 3 pinned, 4 without effect...'."""
    pinned, idle = _pinned(part)
    taken = [setting for setting in part.settings if setting.handling == "taken"]
    counts = {
        name: len({setting.key for setting in settings if setting.given is not None})
        for name, settings in {"taken": taken, "pinned": pinned, "idle": idle}.items()
    }
    return tables.prose("given_summary", file=part.file, kind=part.kind, mode=part.mode, row=label, **counts)


def given_lines(label: str, part: GivenPart) -> Iterator[str]:
    """What differs from the file, key by key with the reason; then every key that has a part in a run."""
    yield summary(label, part)
    pinned, idle = _pinned(part)
    for reason, settings in _by_reason(pinned).items():
        keys = ", ".join(f"{s.key} {text(s.used)} instead of {text(s.given)}" for s in settings)
        yield from _wrapped(f"differs ({reason}): {keys}")
    used = grouped(((s.key, text(s.given)), text(s.used)) for s in part.settings if s.handling == "taken")
    if used:
        yield fitted([[*key, ", ".join(values)] for key, values in used.items()], ["key", "given", "used"])
    for reason, settings in _by_reason([setting for setting in idle if setting.given is not None]).items():
        keys = ", ".join(f"{s.key}={text(s.given)}" for s in settings)
        yield from _wrapped(f"without effect ({reason}): {keys}")


def _by_reason(settings: Sequence[GivenSettingPart]) -> dict[str, list[GivenSettingPart]]:
    return grouped((setting.reason or "", setting) for setting in settings)


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(
        line, line_width(), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )  # fmt: skip


def planned_lines(part: GivenPart, refused: Sequence[str]) -> list[str]:
    """What a plan takes from a file, what it does not, and what it did not understand: a sentence each."""
    given = [s for s in part.settings if s.given is not None and s.handling == "taken"]
    pinned, idle = _pinned(part)
    keys = {
        f"from {part.file}": [f"{s.key}={text(s.given)}" for s in given if s.given != "auto"],
        f"auto in {part.file}, so left to the job": [s.key for s in given if s.given == "auto"],
        **{
            f"not as in {part.file} ({reason})": [
                f"{s.key} {text(s.used)} instead of {text(s.given)}" for s in of if s.given is not None
            ]
            for reason, of in _by_reason(pinned).items()
        },
        f"without effect on a run, in {part.file}": [s.key for s in idle if s.given is not None],
    }
    lines = [f"{what}: {listed(list(dict.fromkeys(of)), MOST_KEYS)}" for what, of in keys.items() if of]
    return lines + [f"not understood in {part.file}, and left out: {reason}" for reason in refused]


def text(value: Any) -> str:
    """A value as the file's own language writes it; '-' for none."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return str(int(value))
    return str(value)


def _pinned(part: GivenPart) -> tuple[list[GivenSettingPart], list[GivenSettingPart]]:
    """What has another value in the run, and what has no part in it."""
    idle = [s for s in part.settings if s.handling == "pinned" and s.used is None]
    return [setting for setting in part.pinned if setting not in idle], idle


SEEN_AS = {
    "fp8": "fp8 (emulated: these runs show numerics only; speed and memory say nothing of fp8 hardware)",
    "prose": "prose, the English help texts of the Python that ran",
    None: "n/a",
}
"""What is said of a precision or a source of data; None: not seen of an observed script."""


def job_section(comparison: Comparison) -> Section:
    """Each job in a sentence, and folded as a file."""
    ids = list(dict.fromkeys(row.record.job_id for row in comparison.rows))
    blocks = tables.blocks_of(tables.prose("jobs", number=len(ids)) if len(ids) > 1 else None)
    for job_id in ids:
        rows = [row for row in comparison.rows if row.record.job_id == job_id]
        of_job = [row.record for row in rows]
        job, training = of_job[0].job, of_job[0].job.training
        weights = next((r.initial_weights for r in of_job if r.initial_weights), None)
        built = next((r.model for r in of_job if r.model), None)
        data = next((r.data for r in of_job if r.data), None)
        facts = [job_id, *([f"{built.architecture}, attention {built.attention}"] if built else [])]
        if weights:
            facts.append(f"{weights.parameter_count:,} parameters")
        if job.model.trust_remote_code:
            facts.append(f"code of '{job.model.name}' ran (trust_remote_code)")
        if job.adapter.is_present:
            part = next((r.layout for r in of_job if r.layout), None)
            trained = f", {part.trained_count:,} of them trained" if part else ""
            rank = f" of rank {job.adapter.rank}" if job.adapter.rank else ""
            alpha = f" (alpha {job.adapter.alpha:g})" if job.adapter.alpha else ""
            facts.append(f"adapters{rank}{alpha}{trained}")
        size, length = training.global_batch_size, job.data.sequence_length
        batch = f"global batch {SEEN_AS[None] if size is None else size} samples"
        clipping = training.gradient_clipping or "none"
        precision, source = (SEEN_AS.get(one, one) for one in (training.precision, job.data.source))
        ran = [
            batch if length is None else f"{batch} of {length} tokens",
            f"precision {precision}", f"gradient clipping {clipping}; data: {source}",
            *([f"{data.training_samples:,} samples"] if data else []),
        ]  # fmt: skip
        settings = Folded(f"Job {job_id}, every setting", [yaml_code(job_file(rows))])
        blocks += tables.blocks_of(f"Job {', '.join(facts)}: {', '.join(ran)}.", settings)
    return Section("job", "The job", blocks)


def job_file(rows: Sequence[JudgedRun]) -> dict[str, Any]:
    """A file for --config that asks for these runs of one job; keys in which cells differ are left out.

    A reference is added to every comparison, cut in its own way: it counts where nothing else ran.
    """
    cells = [row for row in rows if row.record.backend.name != REFERENCE] or rows
    # A row that names its own preset belongs to the file of those that do not.
    presets = [row.record.world.preset for row in cells if row.record.backend.own_preset is None]
    cut = ("micro_batch_size", "accumulation_steps")
    documents = []
    for record in (row.record for row in cells):
        world = record.world
        settings = record.job.model_dump(mode="json")
        settings["training"] |= {key: getattr(world, key) for key in cut}
        if record.measure:
            settings["measure"] = record.measure.model_dump(mode="json")
        preset = presets[0] if presets and record.backend.own_preset is not None else world.preset
        settings["runtime"] = {
            "preset": preset, "device": world.device, "threads_per_rank": world.threads_per_rank,
        }  # fmt: skip
        documents.append(settings)
    shared, *others = documents
    for other in others:
        for keys, *_ in list(differences(shared, other)):
            removed(shared, keys)
    if all(row.record.world.nodes == 1 for row in cells):
        shared["compare"] = {
            "backends": list(dict.fromkeys(row.backend for row in cells)),
            "world_sizes": sorted({row.record.world.world_size for row in cells}),
            "repeats": max(row.record.repeat for row in cells) + 1,
        }
    return shared


def not_comparable_section(comparison: Comparison) -> Section | None:
    """None where all runs of a job are one job."""
    excluded = tables.not_comparable_table(comparison)
    return tables.section("not_comparable", "Not comparable, and why", tables.prose("other_jobs"), excluded)


COLUMNS = tables.table_columns("layout")


def measurement_section(comparison: Comparison) -> Section:
    """A line for each layout with the backends that ran in it.

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
    blocks = tables.blocks_of(
        Table(key="layouts", columns=[COLUMNS[index] for index in (*kept, -1)], rows=body),
        f"The same in all cells that trained: {', '.join(shared)}." if shared else None,
        tables.prose("layout", least_timed_steps=LEAST_TIMED_STEPS),
        tables.prose("layout_of_scripts") if any(row.record.observation for row in comparison.rows) else None,
    )
    return Section("measurement", "Layout and measurement", blocks)


def _layout(record: Record) -> tuple[Any, ...]:
    """What the columns of the layouts ask of the world and, as '..._steps', of the windows of steps."""
    windows = record.windows if record.steps else None
    return tuple(
        getattr(windows, name.removesuffix("_steps"), None)
        if name.endswith("_steps") and name != "accumulation_steps"
        else getattr(record.world, name)
        for name in (column.key for column in COLUMNS[:-1])
    )


LIKE_FOR_LIKE, LIBRARY_DEFAULTS = get_args(Preset)


def presets_section(comparison: Comparison) -> Section | None:
    """The changes, each once with its backends; None without a run that was set up."""
    ran = [row.record for row in comparison.rows if row.record.backend.effective]
    if not ran:
        return None
    backends: dict[tuple[str, ...], dict[str, None]] = {}
    for group in comparison.groups:
        for change in _changes(group):
            backends.setdefault(change, {})[group.backend] = None
    # 'Preset: like-for-like; library-defaults for zero3:preset=library-defaults.'
    common = dict.fromkeys(r.world.preset for r in ran if r.backend.own_preset is None)
    own: dict[str, dict[str, None]] = {}
    for record in ran:
        if record.backend.own_preset is not None:
            own.setdefault(record.world.preset, {})[record.backend.label] = None
    parts = [", ".join(common)] if common else []
    parts += [f"{preset} for {listed(list(labels))}" for preset, labels in own.items()]
    texts = [f"Preset: {'; '.join(parts)}."]
    if any(record.world.preset == LIBRARY_DEFAULTS for record in ran):
        texts.append(tables.prose("presets_kept", preset=LIBRARY_DEFAULTS))
    texts += [f"What {LIKE_FOR_LIKE} changed:"] if backends else []
    lines = [[*change, "; ".join(changed)] for change, changed in backends.items()]
    blocks = tables.blocks_of(" ".join(texts), tables.table("preset_changes", lines, "job_presets"))
    return Section("preset", "Preset", blocks)


def _changes(group: CellRuns) -> list[tuple[str, ...]]:
    """Setting, value, the library's default and the reason of each."""
    record = group.record
    effective, strategy = record.backend.effective, registry.strategy_of(record.backend.name)
    if effective is None or strategy is None:
        return []
    preset: Preset = record.world.preset  # type: ignore[assignment]
    precision, config = record.job.training.held_precision, record.backend.native_config
    return [
        (change.setting, str(change.value), str(change.default), change.reason)
        for change in preset_changes(strategy, precision, preset, effective.parameter_count)
        if record.backend.options.get(change.setting) is None  # an option given by hand wins
        # A preset may have changed less when a record was made.
        if not config or change.setting not in BESIDE_ZERO_OPTIMIZATION or change.setting in config
    ]


OBSERVED_SETTINGS = (
    "attention", "activation_checkpointing", "compiled",
    "compiled_graphs", "graph_breaks", "recompilations", "dropout", "tf32", "deterministic",
    "tied_parameters", "frozen_parameters", "parameters_left_out", "master_dtypes", "optimizer_state_dtypes",
)  # fmt: skip
"""What the harness saw of the live model and optimizer, whatever the backend says of itself."""


def configuration_section(comparison: Comparison) -> Section | None:
    """What was in force, folded: of each backend in full once, then what other cells of it change."""
    by_label = grouped(
        ((group.record.job_id, group.label), group)
        for group in comparison.groups
        if group.record.backend.effective is not None
    )
    folds = []
    for first, *others in by_label.values():
        settings = _keys_in_force(first.record)
        blocks: list[Block] = [yaml_code(settings)]
        for group in others:
            changed = difference(_keys_in_force(group.record), settings)
            same = f"{group.cell}: as {first.cell}"
            blocks += (
                tables.blocks_of(f"{same}, but for", yaml_code(changed))
                if changed
                else tables.blocks_of(f"{same}.")
            )
        sizes = dict.fromkeys(ranks(group.world_size) for group in (first, *others))
        folds.append(Folded(f"{first.label}, {', '.join(sizes)}", blocks))
    return tables.section("configuration", "Configuration of each backend", *folds)


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
    blocks: list[Block | str] = []
    for place, (label, part) in enumerate(parts.values(), 1):
        rows = [[s.key, s.handling, text(s.given), text(s.used), s.setting or "", s.reason or ""]
                for s in part.settings]  # fmt: skip
        blocks.append(f"{summary(label, part)}. SHA-256: {part.sha256}.")
        blocks.append(Table(key=f"given_{place}", columns=tables.table_columns("given"), rows=rows))
    return tables.section("given", "Configuration files of other tools", tables.prose("job_given"), *blocks)


TITLE_SETTINGS = "Settings in force that differ"
CHANGES: dict[Effect, str] = {"mathematics": "the mathematics", "cost": "cost only"}


def settings_section(comparison: Comparison) -> Section | None:
    """One line for each value; None where no setting differs."""
    found = comparison.settings
    several = len({setting.job_id for setting in found}) > 1
    body = [
        [
            *([differing.job_id] if several else []),
            differing.setting,
            Shown(differing.effect, CHANGES[differing.effect]),
            Shown(value.value if isinstance(value.value, int | float | str) else words(value.value),
                  words(value.value)),
            name_cells(value.cells),
        ]
        for differing in found
        for value in differing.values
    ]  # fmt: skip
    columns = tables.with_job(tables.table_columns("settings"), several)
    shown = tables.table("settings_in_force", body, columns)
    return tables.section("settings_in_force", TITLE_SETTINGS, tables.prose("settings"), shown)


def slurm_jobs(comparison: Comparison) -> Folded | None:
    """The jobs, with what at least one of them has; None where no run was a job of `harness slurm`."""
    facts = tables.table_columns("slurm")
    jobs = [(row, slurm) for row in comparison.rows if (slurm := row.record.environment.slurm) is not None]
    body = [[*row.cell, row.record.repeat, *tables.row_of(facts, job)] for row, job in jobs]
    shown = tables.table("slurm_jobs", body, (*tables.LABELS, Column("repeat", "repeat"), *facts))
    return Folded(f"Slurm jobs: {len(jobs)}", [shown]) if shown else None


_OF_GPUS = re.compile(r"NCCL|RCCL|TF32|^CUDA_|^CUBLAS|ALLOC_CONF|_VISIBLE_DEVICES")


def machine_section(comparison: Comparison) -> Section:
    """Each distinct machine once, with the load that its runs found."""
    seen: dict[tuple[tuple[str, str], ...], list[Record]] = {}
    for row in comparison.rows:
        e = row.record.environment
        world = row.record.world
        stubs = sorted({rank.device_name for rank in row.record.ranks if is_stub(rank.device_name)})
        stub = f" ({listed(stubs)})" if stubs else ""
        facts = [
            ("CPU", f"{e.cpu}, {e.cores} cores, {e.memory_bytes / 2**30:.1f} GiB"),
            ("accelerators", "; ".join(e.gpus) or "none"),
            *_accelerator(e),
            ("system", f"{e.platform}, Python {e.python}"),
            ("packages", ", ".join(f"{name} {v}" for name, v in sorted(e.packages.items()))),
            ("harness code", e.code + commit_words(e)),
            ("device", f"{world.device}{stub}, collectives over {world.collectives}"),
        ]
        fabric = e.fabric  # what a self-test before the run measured
        if fabric is not None and fabric.all_reduce_bus_bytes_per_second is not None:
            bandwidth = number(fabric.all_reduce_bus_bytes_per_second / 1e9)
            latency = number((fabric.all_reduce_latency_seconds or 0.0) * 1e6)
            measured = f"{fabric.transport} on {fabric.world_size} ranks, {fabric.nodes} nodes: all-reduce "
            measured += f"bus bandwidth {bandwidth} GB/s at {fabric.all_reduce_bytes:,} bytes, "
            facts.append(("network", f"{measured}latency {latency} us"))
        seen.setdefault(tuple(facts), []).append(row.record)
    machines = (Items([*facts, *_time_and_load(runs)]) for facts, runs in seen.items())
    return Section("machine", "Machine and versions", tables.blocks_of(*machines, slurm_jobs(comparison)))


def _time_and_load(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """When the runs began, the runnable processes of the minute before (runs before leave some too), and
    what other work used meanwhile."""
    runs = sorted(records, key=lambda record: record.created_at)
    first, last = (run.created_at[:16].replace("T", " ") for run in (runs[0], runs[-1]))
    yield "runs began", f"from {first} to {last} UTC"
    loads = [load for run in runs if (load := run.environment.load_average) is not None]
    if loads:
        extent = f"{loads[0]:.2f} before the first, {min(loads):.2f} to {max(loads):.2f} before all"
        yield ("load before the runs", f"{extent} (average of a minute)")
    used = [one.other_cores for run in runs if (one := Run.of(run).disturbance) is not None]
    if used:
        yield ("other work during timed steps", f"{min(used):.2f} to {max(used):.2f} cores")


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


def commit_words(environment: EnvironmentPart) -> str:
    """The commit of the checkout that a run came from, to stand behind the code; empty outside of one."""
    git = environment.git
    if git is None:
        return ""
    commit = f", commit {git.commit[:12]}"
    if not git.modified:
        return commit
    return f"{commit} with local changes{f' to {listed(git.changed)}' if git.changed else ''}"


def observed_section(comparison: Comparison) -> Section | None:
    """None where no row is of a script."""
    seen = {
        row.label: row.record.observation for row in comparison.rows if row.record.observation is not None
    }
    if not seen:
        return None
    # What all rows lack in one line each, then what some do.
    fields = {(field, reason): None for part in seen.values() for field, reason in part.unknown.items()}
    lines = []
    for field, reason in fields:
        rows = [label for label, part in seen.items() if part.unknown.get(field) == reason]
        lines += [[row, field, reason] for row in (["all"] if len(rows) == len(seen) else rows)]
    summaries = (_summary(label, part) for label, part in seen.items())
    missing = Table(key="observed", columns=tables.table_columns("observed"), rows=lines)
    return tables.section("observed", "Observed scripts", tables.prose("observed"), *summaries, missing)


def _summary(label: str, part: ObservationPart) -> str:
    """'observed-ddp: `torchrun train.py`. Driven by lightning. Loss: ... . 2 optimizers step...'."""
    drivers = f" Driven by {', '.join(part.frameworks)}." if part.frameworks else ""
    loss = f" Loss: {part.loss}." if part.loss else ""
    same = f" Backend of the same strategy: {part.base}." if part.base else ""
    notes = "".join(f" {note[0].upper()}{note[1:]}." for note in part.notes)
    return f"{label}: `{shlex.join(part.command)}`.{drivers}{same}{loss}{notes}"


INSTALL = "pip install -c constraints.txt -e '.[train]'"


def reproduce_section(comparison: Comparison) -> Section:
    """Code, and commands, each once and without folders of the machine that ran them."""
    environments = [row.record.environment for row in comparison.rows]
    commits = dict.fromkeys(state.commit for one in environments if (state := one.git))
    # pip takes the build of torch that its index offers.
    versions = dict.fromkeys(one.packages.get("torch", "") for one in environments)
    builds = [version for version in versions if "+" in version]
    texts = [tables.prose("reproduce_commit", commit=listed(list(commits)))] if commits else []
    texts += [tables.prose("reproduce_build", build=listed(builds))] if builds else []
    blocks = tables.blocks_of(
        " ".join([*texts, "In a checkout of the code:"]),
        Code("sh", "\n".join([INSTALL, *commands_of(comparison)])),
        tables.prose("reproduce_configuration"),
    )
    return Section("reproduce", "How to reproduce", blocks)


def commands_of(comparison: Comparison) -> list[str]:
    """Each command that asked for runs, without folders of the machine that ran them."""
    return list(dict.fromkeys(shlex.join(by_name(row.record.command)) for row in comparison.rows))


NO_PART_OF_A_PLAN = ("measure.", "runtime.", "compare.", "evaluation.", "training.steps=")


def _words_of_job(command: Sequence[str]) -> list[str] | None:
    """What a command says of its job; None: it trains a script, or no command asked for the run."""
    if (
        command[:1] != ["harness"]
        or command[1:2] not in (["compare"], ["run"])
        or {"--", "--script"} & {*command}
    ):
        return None
    return [
        word
        for name, value in pairwise(command)
        if name in ("--config", "--model") or (name == "--set" and not value.startswith(NO_PART_OF_A_PLAN))
        for word in (name, value)
    ]


def words_to_plan(records: Iterable[Record]) -> list[str] | None:
    """What `harness estimate` takes of the job of the first run that has such words; None: none has."""
    found = (_words_of_job(by_name(record.command)) for record in records)
    return next((words for words in found if words is not None), None)
