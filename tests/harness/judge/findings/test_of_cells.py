from collections.abc import Iterator

from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding, of_cells
from harness.judge.rows import JudgedRun
from harness.judge.wording import CellName
from tests.records import make_record


def judge(row: JudgedRun) -> Iterator[Finding]:
    if row.record.repeat < 2:
        text = f"rank {row.record.repeat} waits"
        yield Finding(id="slow-rank", about=CellName.of(row.record), text=text)


def test_what_not_all_repeats_say_is_told_with_their_number() -> None:
    comparison = Comparison([make_record(label="ddp", repeat=repeat) for repeat in range(3)])
    assert [finding.message for finding in of_cells(comparison, judge)] == [
        "ddp on 2 ranks: rank 0 waits; in 1 of 3 runs",
        "ddp on 2 ranks: rank 1 waits; in 1 of 3 runs",
    ]


def test_what_every_repeat_says_is_told_plainly() -> None:
    comparison = Comparison([make_record(label="ddp")])
    assert [finding.message for finding in of_cells(comparison, judge)] == ["ddp on 2 ranks: rank 0 waits"]
