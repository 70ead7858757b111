"""How the ranks were laid out, how the batch was cut over them, and which steps were measured for what."""

from __future__ import annotations

from typing import Any

from harness.judge.comparison import Comparison
from harness.judge.wording import listed
from harness.record import Record
from harness.report.document import Block, Column, Folded, Paragraph, Section, Table, yaml_code
from harness.spec import LEAST_TIMED_STEPS

TITLE = "Layout and measurement"
COLUMNS = (
    Column("world_size", "ranks"),
    Column("nodes", "nodes"),
    Column("ranks_per_node", "ranks per node"),
    Column("threads_per_rank", "threads per rank"),
    Column("micro_batch_size", "micro-batch"),
    Column("accumulation_steps", "accumulation"),
    Column("warmup_steps", "warm-up"),
    Column("probed_steps", "probed"),
    Column("traced_steps", "traced"),
    Column("cooldown_steps", "cooldown"),
    Column("timed_steps", "timed"),
    Column("backends", "backends", align="left"),
)
TEXT = (
    "micro-batch: samples that a rank takes at once; times accumulation and ranks it is the global batch. "
    "The other figures are steps: warm-up and cooldown steps are in no statistic, memory and communication "
    "are read in probed ones, overlap in traced ones, speed in timed ones. Cooldown steps "
    f"follow the probes unless fewer than {LEAST_TIMED_STEPS} would be left to time."
)


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
    blocks.append(Paragraph(TEXT))
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
