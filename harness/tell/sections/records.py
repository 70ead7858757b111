"""The records that the report was computed from."""

from __future__ import annotations

from pathlib import PurePosixPath

from harness.judge.comparison import Comparison
from harness.judge.ranking import EQUAL
from harness.judge.statistics import LEAST_FOR_P95, LEVEL, interval_runs
from harness.record.record_files import RECORD_NAME
from harness.tell.document import Block, Column, Items, Paragraph, Section, Shown, Table
from harness.tell.formats import percent
from harness.tell.manifest import Manifest, RecordEntry
from harness.tell.tables import NO_TEXT, of_no_text

COLUMNS = (
    Column("path", "record", align="left"),
    Column("status", "status", align="left"),
    Column("sha256", "SHA-256 (first 16)", lambda digest: str(digest)[:16], align="left"),
)
SIDE = Column("side", "side", align="left")


def records_section(manifest: Manifest) -> Section:
    """Each record's path and digest, once, and what was left out."""
    sides = manifest.kind == "baseline"
    body = [
        [*(["before" if entry.before else "after"] if sides else []),
         Shown(entry.path, _short(entry)), entry.status, entry.sha256]
        for entry in manifest.records
    ]  # fmt: skip
    columns = (SIDE, *COLUMNS) if sides else COLUMNS
    short = sorted({_folder(entry) for entry in manifest.records if _is_named_after_its_run(entry)})
    where = f" A record named by its run alone is {' or '.join(f'{f}/RUN/{RECORD_NAME}' for f in short)}."
    blocks: list[Block] = [
        Paragraph(
            f"Written by sharding-harness {manifest.harness}, pictures by {manifest.drawing}. "
            "harness verify recomputes this file from these records and names every line that differs. Paths "
            "are relative to the folder of this file; its manifest, which harness verify reads, "
            "holds them and the digests in full. Digests show that these are the records it was computed "
            f"from; that they are what was measured, only another run can show.{where if short else ''}"
        ),
        Table(key="records", columns=columns, rows=body),
    ]
    if manifest.left_out:
        count = len(manifest.left_out)
        what = "1 other record lies" if count == 1 else f"{count} other records lie"
        blocks.append(Paragraph(f"{what} in the same folder, not part of this report."))
    return Section("records", "Records", blocks)


def _short(entry: RecordEntry) -> str:
    return entry.run_id if _is_named_after_its_run(entry) else entry.path


def _is_named_after_its_run(entry: RecordEntry) -> bool:
    return entry.path == f"{_folder(entry)}/{entry.run_id}/{RECORD_NAME}"


def _folder(entry: RecordEntry) -> str:
    return PurePosixPath(entry.path).parent.parent.as_posix()


TITLE = "How to read the numbers"


def reading_section(comparison: Comparison) -> Section:
    """Definitions and formulae of the columns."""
    unit = [f"{NO_TEXT}."] if of_no_text(comparison) else []
    turns = [BY_TURN] if any(row.record.turns for row in comparison.rows) else []
    return Section("reading", TITLE, [Items([*_COMMON[:1], *unit, *_SPEEDS, *turns, *_COMMON[1:]])])


def reading_without_speeds(comparison: Comparison) -> Section:
    """The same for a report without figures of speed."""
    return Section("reading", TITLE, [Items(_COMMON)])


BY_TURN = (
    "turns: cells that took turns in a round (compare.turns) ran side by side. Where they took "
    f"{interval_runs()} or more, the ratio of the round is the median of those of its turns, which hold the "
    "same steps of both. Turns are no rounds: the interval and the test count rounds."
)
_SPEEDS = [
    "step ms, samples/s and tokens/s come from one clock, the mean timed step of a run: its duration, and "
    "what all ranks processed in the timed steps over their summed duration. A cell has the figure of the "
    "run of median step. A step lasts as long as on its slowest rank. Padding does not count.",
    f"p95: 95th percentile of the timed steps of all repeats together, n/a below {LEAST_FOR_P95} steps, "
    "where it would be the largest. 'Time' shows medians and percentiles of single steps.",
    f"least and most: of the runs, as measured. From {interval_runs()} runs on, also an interval that holds "
    f"the true median at {percent(LEVEL)}, between order statistics (sign test).",
    "speed: each cell is compared with the base (ddp, or the first that is listed) within each round, which "
    "holds one run of every cell. The ratio is the Hodges-Lehmann estimate over rounds, its interval that of "
    f"Wilcoxon's signed-rank test at {percent(LEVEL)}; below {interval_runs()} rounds there is none. equal: "
    f"the interval lies within {percent(EQUAL)} of 1. faster, slower: in a test that swaps all cells with "
    "the base round by round (step-down max-T), chance makes any cell of the table differ this much in at "
    f"most {percent(1 - LEVEL)} of cases, the interval leaves 1 out, and each session agrees. Sentences "
    "about two cells without the base rest on the same test of all such pairs. No test separates a cell "
    "from what changed on the machine within every round.",
]
_COMMON = [
    "MB is 1e6 bytes; n/a means not measured.",
    "peak MB/rank: the largest figure of torch's allocator in the probed steps, of all ranks and all "
    "repeats; in brackets the difference to the smallest of them. No test judges it, since one moment of "
    "one rank decides. CUDA: the caching allocator. CPU: a counting allocator in front of malloc.",
    "states MB: live weights, gradients, fp32 masters and optimizer states after a backward pass, "
    "each storage once, on the rank where they are largest.",
    "sent MB/step: bytes that a rank sends per optimizer step with the ring algorithm: passes x (n - 1) / n "
    "x payload of every collective, counted in torch's dispatcher; all-reduce has two passes, the others "
    "one. A transport that implements a collective as another, as gloo does reduce-scatter, sends more.",
    "expected: the same for what this implementation does: its buckets, units, paddings and repeated "
    "collectives.",
    "textbook: the same from the closed form of the strategy. If it differs, the library does "
    "not do what the paper does. It holds for one micro-step per step; accumulation adds what a library "
    "gathers or reduces in each.",
    "loss diff and norm diff: the largest difference of a step to the reference, which is one "
    "process on the global batch: in nats per target token for the loss, relative for the norm.",
    "parity: exact, bit-equal losses, norms and final weights; tight, within what another order of "
    "summation changes; band, within what the low precision changes; diverged, beyond that; unjudged, no "
    "comparison was possible. 'Parity levels' shows the limits and how they were found.",
]
