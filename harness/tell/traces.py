"""Documents about traces: tables, sentences and pictures of what was found in them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from harness.nested import grouped, totals
from harness.tell.document import Block, Column, Document, Folded, Items, Paragraph, Picture, Section, Table
from harness.tell.formats import fitted, milliseconds, number, percent, shortened
from harness.tell.pictures.drawing import ACTIVITIES, COPIES_ALONE, EXPOSED
from harness.tell.pictures.plots import bar_chart, stack, text_after
from harness.tell.tables import blocks_of, prose, row_of, section, table, table_columns
from harness.traces.analysis import Division, RankTrace, Skew
from harness.traces.device import COMMUNICATION
from harness.traces.document import Row, summed
from harness.traces.strategy import Likeness

MOST_BARS = 24
MOST_ROWS = 20
"""Of a table for people; --json has all."""
LONGEST_NAME, LONGEST_KERNEL = 60, 48
STEP_TEXT = "A step is timed on the host from beginning to end; the device may lag behind."
TIMES = table_columns("traces_times")
COLLECTIVES = table_columns("traces_collectives")
WAITS, SKEW = table_columns("traces_waits"), table_columns("traces_skew")
CHANGES, CHANGED_KERNELS = table_columns("traces_changes"), table_columns("traces_changed_kernels")
KERNELS, IDLE = table_columns("traces_kernels"), table_columns("traces_idle")
PARTS = ("compute", "communication", "exposed", "idle")
IDLE_WORDS = {column.key: column.title.removesuffix(" ms") for column in IDLE}
COLLECTIVE_CHANGES = table_columns("traces_collective_changes")


def trace_document(
    ranks: Sequence[RankTrace],
    skew: Skew | None,
    likeness: Sequence[Likeness],
    changes: dict[str, Any] | None = None,
) -> Document:
    """What was found in traces, for every format."""
    sections = [
        _time(ranks),
        _steps(ranks),
        _idle(ranks),
        _kernels(ranks),
        _collectives(ranks),
        _waits(skew),
        _strategy(ranks, likeness),
        _changes(changes),
    ]
    return Document(_answer(ranks, likeness, changes), [*filter(None, sections)])


def _answer(ranks: Sequence[RankTrace], likeness: Sequence[Likeness], changes: dict[str, Any] | None) -> str:
    """'8 of 16 ranks, NVIDIA H100, FSDP2 full shard: computing 62 % of the steps; communication ...'"""
    world = {rank.world_size for rank in ranks if rank.world_size}
    of = f" of {max(world)}" if max(world, default=1) > 1 else ""
    whose = [f"{len(ranks)}{of} rank{'s' if max([len(ranks), *world]) > 1 else ''}"]
    whose += sorted({rank.device_name for rank in ranks if rank.device_name})
    strategies = {re.sub(r" of [\d,]+ bytes per \w+", "", like.strategy or "") for like in likeness}
    whose += [name for name in strategies if name and len(strategies) == 1]
    of_steps = [s.division for rank in ranks for s in rank.steps if s.division and s.is_complete]
    divided = of_steps or [rank.division for rank in ranks]
    span = sum(one.seconds for one in divided) or 1.0
    computing, talking, exposed, idle = (
        None if None in of else sum(of) / span
        for of in zip(*([getattr(one, f"{name}_seconds") for name in PARTS] for one in divided), strict=True)
    )
    says = [f"computing {percent(computing)} of the {'steps' if of_steps else 'trace'}"]
    if talking:
        hidden = percent(1 - (exposed or 0.0) / talking)
        says.append(f"communication {percent(talking)}, {hidden} of it hidden{_costliest(ranks)}")
    elif talking is not None:
        says.append("no communication found")
    if idle is not None:
        seconds = Counter[str]()
        for one in divided:
            seconds.update(one.idle_reasons or {})
        mostly = [f", mostly {IDLE_WORDS[name]}" for name in seconds if seconds[name] > idle * span / 2]
        says.append(f"idle {percent(idle)}{''.join(mostly)}")
    times = changes["step_seconds"] if changes else {"before": None, "after": None}
    if None not in (times["before"], times["after"]):
        says.append(f"median step {milliseconds(times['before'])} -> {milliseconds(times['after'])} ms")
    return f"{', '.join(whose)}: {'; '.join(says)}"


def terminal_lines(document: Document) -> Iterator[str]:
    """The document for a terminal: everything but pictures."""
    yield document.title
    for part in document.sections:
        yield from ["", part.title, *_lines(part.blocks)]


def _lines(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        match block:
            case Table():
                shown = block.for_people()
                titles = [column.title for column in shown.columns]
                aligned = {column.title: column.align for column in shown.columns}
                yield fitted(shown.texts(), titles, alignments=aligned)
            case Paragraph(text):
                yield text
            case Items():
                yield from (f"- {line.name + ': ' if line.name else ''}{line.text}" for line in block.lines())
            case Folded(_, inner):
                yield from _lines(inner)
            case _:
                pass


def _values(division: Division | None) -> list[Any]:
    return [None] * len(TIMES) if division is None else row_of(TIMES, division)


def _time(ranks: Sequence[RankTrace]) -> Section | None:
    rows = [[rank.label, *_values(rank.division)] for rank in ranks]
    remarks = [(rank.label, remark) for rank in ranks for remark in rank.remarks]
    missing = [rank for rank in ranks if rank.world_size and rank.world_size > len(ranks)]
    if missing:
        given = f"{len(ranks)} of {missing[0].world_size} given; who waits for the others is n/a"
        remarks.append(("ranks", given))
    kinds = {"traces_device": True, "traces_host": False}
    return section(
        "trace", "Time",
        table("ranks", rows, (Column("rank", "rank", align="left"), *TIMES)),
        *(prose(name) for name, on in kinds.items() if any(rank.on_device is on for rank in ranks)),
        Items(remarks) if remarks else None,
        _picture("trace", "time, ms", [(rank.label, rank.division) for rank in ranks]),
    )  # fmt: skip


def _steps(ranks: Sequence[RankTrace]) -> Section | None:
    steps = [(rank, step) for rank in ranks for step in rank.steps]
    rows = [
        [
            rank.label,
            f"{step.step}{'' if step.is_complete or step.division is None else ' *'}",
            *_values(step.division),
        ]
        for rank, step in steps
    ]
    texts = [STEP_TEXT]
    if len(rows) > MOST_ROWS:
        texts.append(f"{len(rows) - MOST_ROWS} more steps are under 'steps' of --json.")
    if any(step.division is None for _, step in steps):
        texts.append("n/a: no event of the device was recorded in the step.")
    if any(step.division and not step.is_complete for _, step in steps):
        texts.append("*: recording of the device began within this step.")
    columns = (Column("rank", "rank", align="left"), Column("step", "step"), *TIMES)
    bars = [(f"{rank.label}, step {step.step}", step.division) for rank, step in steps]
    picture = _picture("trace_steps", "time of a step, ms", bars)
    return section(
        "trace_steps", "Steps", table("steps", rows[:MOST_ROWS], columns), " ".join(texts), picture
    )


def _picture(key: str, title: str, bars: Sequence[tuple[str, Division | None]]) -> Picture | None:
    """A bar of computing, exposed communication, copies alone and idling for each."""
    known = [(name, parts) for name, division in bars if (parts := _parts(division)) is not None]
    drawn = known[:MOST_BARS]
    if not drawn:
        return None
    rows = [
        {
            "place": "", "name": shortened(name, LONGEST_NAME), "part": part,
            "milliseconds": time, "order": list(ACTIVITIES).index(part),
            "total": sum(parts.values()) if part == "computing" else None,
            "text": f"{number(sum(parts.values()))} ms" if part == "computing" else None,
        }
        for name, parts in drawn
        for part, time in parts.items()
    ]  # fmt: skip
    told = [
        f"{name} {number(sum(parts.values()))} ms, "
        f"{percent(parts[EXPOSED] / (sum(parts.values()) or 1))} {EXPOSED}"
        for name, parts in drawn[:6]
    ]
    left = f" {len(known) - len(drawn)} more are not drawn." if len(known) > len(drawn) else ""
    return Picture(
        key=key,
        caption=f"Where the time goes.{left}",
        alt=f"Stacked bars of {title}. {', '.join(told)}.",
        chart=lambda: bar_chart(
            rows, [stack("milliseconds", title, "part", ACTIVITIES), text_after("total")]
        ),
    )


def _parts(division: Division | None) -> dict[str, float] | None:
    """Milliseconds that add up to the span."""
    if division is None:
        return None
    seconds = (division.compute_seconds, division.exposed_seconds, division.idle_seconds)
    if None in seconds:
        return None
    compute, exposed, idle = ((value or 0.0) * 1e3 for value in seconds)
    alone = max(0.0, division.seconds * 1e3 - compute - exposed - idle)
    return {"computing": compute, EXPOSED: exposed, COPIES_ALONE: alone, "idle": idle}


def _idle(ranks: Sequence[RankTrace]) -> Section | None:
    """Why devices idle: in the complete trace, and in each step."""
    divisions: list[tuple[RankTrace, str, Division | None]] = []
    for rank in ranks:
        divisions += [(rank, "all", rank.division), *((rank, str(s.step), s.division) for s in rank.steps)]
    rows = [
        [rank.label, step, division.idle_seconds, *row_of(IDLE, division.idle_reasons)]
        for rank, step, division in divisions
        if division is not None and division.idle_reasons is not None
    ]
    if not any(row[2] for row in rows):
        return None
    texts = [prose("traces_idle")]
    if len(rows) > MOST_ROWS:
        texts.append(f"{len(rows) - MOST_ROWS} more rows are under 'idle' of --json.")
    columns = (Column("rank", "rank", align="left"), Column("step", "step"), TIMES[-1], *IDLE)
    return section("trace_idle", "Idle time", table("trace_idle", rows[:MOST_ROWS], columns), " ".join(texts))


def _kernels(ranks: Sequence[RankTrace]) -> Section | None:
    """Kernels and copies by time, and what they are; means of the ranks."""
    count, kernels = len(ranks), [one for rank in ranks for one in rank.kernels]
    if not kernels:
        return None
    alike = grouped(((one.name, one.kind), one) for one in kernels)
    shares = totals((one.kind.what, one.share / count) for one in kernels)
    rows: list[list[Any]] = []
    for (name, kind), of in alike.items():
        calls = sum(one.calls for one in of) / count
        rows.append(
            [
                name, ": ".join(filter(None, (kind.what, kind.operation))),
                _count(calls),
                sum(one.seconds for one in of) / count, sum(one.median_seconds for one in of) / len(of),
                sum(one.share for one in of) / count,
            ]
        )  # fmt: skip
    rows.sort(key=lambda row: (-row[3], row[0]))
    texts = [f"{what} {percent(share)}" for what, share in sorted(shares.items(), key=lambda one: -one[1])]
    words = [f"Of the time of all kernels and copies: {', '.join(texts)}.", prose("traces_kernels")]
    if count > 1:
        words.append("Means of the ranks.")
    if len(rows) > MOST_ROWS:
        words.append(f"{len(rows) - MOST_ROWS} more names are under 'kernels' of --json.")
    shown = rows[:MOST_ROWS]
    for row, name in zip(shown, told_apart([row[0] for row in shown], LONGEST_KERNEL), strict=True):
        row[0] = name
    return section("trace_kernels", "Kernels", table("trace_kernels", shown, KERNELS), " ".join(words))


def told_apart(names: Sequence[str], most: int) -> list[str]:
    """Names of kernels, short; those that would look the same show where they differ."""
    alike: dict[str, set[str]] = defaultdict(set)
    for name in names:
        alike[shortened(_without_arguments(name), most)].add(name)
    found: dict[str, str] = {}
    for short, of in alike.items():
        begin = most // 3
        same = next((at for at, ones in enumerate(zip(*of, strict=False)) if len({*ones}) > 1), begin)
        for name in sorted(of):
            cut = f"{name[:begin]}…{name[max(begin, same - begin // 2) :]}"
            told = short if len(of) == 1 else shortened(cut, most)
            number = sum(told == other.rpartition(" #")[0] or told == other for other in found.values())
            found[name] = f"{told} #{number + 1}" if number else told
    return [found[name] for name in names]


def _without_arguments(name: str) -> str:
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("at::native::", "")
    depth = 0
    for at in range(len(bare) - 1, 0, -1) if bare.endswith(")") else ():
        depth += {")": 1, "(": -1}.get(bare[at], 0)
        if depth == 0:
            return bare[:at]
    return bare


def _collectives(ranks: Sequence[RankTrace]) -> Section | None:
    def key(row: Row) -> tuple[Any, ...]:
        group = row["group"]
        if (on := row["group_ranks"]) is not None:
            named = ",".join(map(str, on)) if len(on) <= 8 else f"{on[0]},{on[1]}..{on[-1]}"
            group = f"{group} [{named}]" if group else f"[{named}]"
        return row["operation"] or row["kind"], row["dtype"], row["bytes"], group, row["group_size"]

    found = summed(ranks, key, of_all=False)
    if not found:
        return None
    rows = [
        [*key, _count(of.calls), of.seconds, (rate := of.bus_bytes_per_second), rate and _count(of.bus_calls)]
        for key, of in found.items()
    ]
    rows.sort(key=lambda row: (-(row[-3] or 0.0), -(row[2] or 0)))
    texts = [prose("traces_collectives")]
    if len(ranks) > 1:
        texts.append("Numbers of calls and ms are means of the ranks.")
    if len(rows) > MOST_ROWS:
        texts.append(f"{len(rows) - MOST_ROWS} more rows are under 'collectives' of --json.")
    shown = table("trace_collectives", rows[:MOST_ROWS], COLLECTIVES)
    sums = table("traces_operations", _operations(ranks))
    return section("trace_collectives", "Collectives", sums, shown, " ".join(texts))


def _operations(ranks: Sequence[RankTrace]) -> list[list[Any]]:
    """Collectives by operation, most time first: calls, bytes, seconds, share of all that communicates."""
    found = summed(ranks, lambda row: row["operation"] or row["kind"])
    times = [of.seconds for of in found.values()]
    kernels = [one.seconds for rank in ranks for one in rank.kernels if one.kind.what == COMMUNICATION]
    every = sum(kernels) / len(ranks) or (0.0 if None in times else sum(time or 0.0 for time in times))
    rows = [
        [name, _count(calls), size, seconds, seconds / every if every and seconds is not None else None]
        for name, (calls, size, seconds, *_) in found.items()
    ]
    return sorted(rows, key=lambda row: (-(row[3] or 0.0), -(row[2] or 0.0)))


def _costliest(ranks: Sequence[RankTrace]) -> str:
    """', 80 % of its time in all_to_all', if what has no known operation or time is less."""
    rows = [row for row in _operations(ranks) if row[0] and row[-1]]
    if not rows or rows[0][-1] <= 1 - sum(share for *_, share in rows):
        return ""
    return f", {percent(rows[0][-1])} of its time in {rows[0][0]}"


def _count(mean: float) -> float:
    return int(mean) if mean.is_integer() else round(mean, 1)


def _waits(skew: Skew | None) -> Section | None:
    if skew is None:
        return None
    worst = max(skew.ranks, key=lambda r: r.caused_seconds)
    caused = {"ms": milliseconds(worst.caused_seconds), "matched": skew.matched}
    words = prose("traces_last", rank=worst.label, last=worst.times_last, **caused)
    kinds = [row_of(SKEW, kind) for kind in skew.collectives[:MOST_ROWS]]
    found = [
        Table(key="trace_waits", columns=WAITS, rows=[[r.label, *row_of(WAITS[1:], r)] for r in skew.ranks]),
        words if worst.caused_seconds else None,
        Table(key="trace_skew", columns=SKEW, rows=kinds),
    ]
    blocks = blocks_of(
        *(found if skew.matched else ["n/a: no collective was found on all ranks given."]),
        prose("traces_wait"),
        Items(list(skew.unmatched)) if skew.unmatched else None,
    )
    return Section("trace_waits", "Who waits for whom", blocks)


def _strategy(ranks: Sequence[RankTrace], likeness: Sequence[Likeness]) -> Section | None:
    said = grouped((_likeness_words(like), rank.label) for rank, like in zip(ranks, likeness, strict=True))
    items = [
        (labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more", text)
        for text, labels in said.items()
    ]
    return Section("trace_strategy", "Strategy", [Items(items)]) if items else None


def _likeness_words(like: Likeness) -> str:
    text = f"looks like {like.strategy}" if like.strategy else "no strategy is recognised"
    text += f" ({'; '.join(like.evidence)})."
    if like.unit_bytes:
        sizes = [number(size / 1e6) for size in like.unit_bytes]
        shown = ", ".join(sizes[:8]) + (", ..." if len(sizes) > 8 else "")
        text += f" Reduced per {like.per}, MB: {shown}"
        text += f"; {like.parameters:,} elements together." if like.parameters is not None else "."
    if like.sent_bytes is not None:
        text += f" A rank sends {number(like.sent_bytes / 1e6)} MB per {like.per} on a ring"
        if like.expected_bytes:
            text += (
                f"; {like.expected_by} sends {number(like.expected_bytes / 1e6)} MB "
                f"({percent(like.sent_bytes / like.expected_bytes)})"
            )
        text += "."
    return text


def _changes(changes: dict[str, Any] | None) -> Section | None:
    if changes is None:
        return None
    figures = []
    for c in changes["figures"]:
        show = percent if c["figure"] == "overlap_share" else milliseconds
        figures.append([c["figure"], show(c["before"]), show(c["after"]), c["change"]])
    times = changes["step_seconds"]
    if None not in (times["before"], times["after"]):
        change = times["after"] / times["before"] - 1
        figures.append(["median step", milliseconds(times["before"]), milliseconds(times["after"]), change])
    collectives = [row_of(COLLECTIVE_CHANGES, c) for c in changes["collectives"]]
    names = told_apart([c["kernel"] for c in changes["kernels"]], LONGEST_KERNEL)
    kernels = [
        [name, before := c["before_seconds"], after := c["after_seconds"], after - before]
        for name, c in zip(names, changes["kernels"], strict=True)
    ]
    blocks = blocks_of(
        Table(key="trace_changes", columns=CHANGES, rows=figures),
        "Means of the ranks, ms.",
        table("trace_collective_changes", collectives[:MOST_ROWS], COLLECTIVE_CHANGES),
        table("trace_changed_kernels", kernels, CHANGED_KERNELS),
    )
    return Section("trace_changes", "Compared with the baseline", blocks)
