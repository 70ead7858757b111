"""The page of all deliberate mistakes: what was done, which finding names it, and which test plants it."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass

from tests.adapters.test_adapters import ADAPTED

from .planted import BF16, CLIPPED, DIVIDED, EXECUTION, LATE_SETTINGS, LIBRARIES, OWN_JOBS, TRAPS, Trap

PAGE = """\
{count} mistakes are made on purpose in tests, and each must be named by one of {findings}
[findings](findings.md), or refused with the reason (`unsupported`). [The list](faults/planted.csv) has what
was done, finding and test of each. Those with a number have occurred in public; 'unseen' are kinds of defects
for which no finding was written, 'late' are defects that begin after three correct steps. A sound cell must
raise none of them:
`make traps` runs every backend in fp32 and bf16-mixed, with and without accumulation, on 1, 2 and 4 ranks.
[The gallery](../reports/traps/README.md) has reports of many."""
RUNS = "tests/traps/test_traps.py::test_a_planted_trap_is_named"
JOBS = "tests/traps/test_own_jobs.py::test_a_planted_trap_is_named"
ADAPTERS = "tests/adapters/test_adapters.py::test_a_planted_mistake_is_named"


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A mistake that a test of its own plants."""

    name: str
    what: str
    finding: str
    test: str


NOT_RUN = "tests/backends/test_facts.py::test_what_is_not_run_is_refused_with_its_reason"
ELSEWHERE = [
    Planted(
        name="sleeping rank", what="rank 1 sleeps in each forward, or in each backward pass",
        finding="slow-rank", test="tests/traps/test_traps.py::test_a_rank_that_sleeps_in_each_step_is_named",
    ),
    Planted(
        name="no dropout on a rank", what="dropout turned off on rank 1 of FSDP alone",
        finding="ranks-differ",
        test="tests/traps/test_own_jobs.py::"
        "test_a_rank_without_dropout_is_named_though_dropout_is_not_judged",
    ),
    Planted(
        name="T15 volume", what="replicas of a built-in backend never reduced over: bytes are missing",
        finding="communication-differs",
        test="tests/traps/test_traps.py::test_a_known_implementation_that_moves_other_bytes",
    ),
    Planted(
        name="T17 volume", what="a built-in backend that synchronises in every micro-step",
        finding="communication-differs",
        test="tests/traps/test_traps.py::test_a_known_implementation_that_moves_other_bytes",
    ),
    Planted(
        name="T19", what="a timer that stops before the device has finished",
        finding="inconsistent-timing",
        test="tests/traps/test_traps.py::test_T19_a_timer_that_stops_before_the_device_has_finished",
    ),
    Planted(
        name="T20", what="a library's logger that synchronises every call of one backend",
        finding="instrumented-timing",
        test="tests/traps/test_traps.py::test_T20_a_logger_of_a_library_that_slows_one_backend",
    ),
    Planted(
        name="T23", what="two jobs in one table", finding="several-jobs",
        test="tests/traps/test_traps.py::test_T23_several_jobs_in_one_table_are_named_by_setting",
    ),
    Planted(
        name="T25", what="steps that a loss scaler skipped", finding="skipped-steps",
        test="tests/traps/test_traps.py::test_T25_steps_that_a_loss_scaler_skipped_are_counted",
    ),
    Planted(
        name="T26 ZenFlow", what="DeepSpeed's ZenFlow asked for by its option", finding="unsupported",
        test=NOT_RUN,
    ),
    Planted(
        name="T30", what="8-bit AdamW on flat partitions that are no multiple of 256 elements",
        finding="low-bit-states-wide",
        test="tests/axes/test_optimizers.py::test_trap_30_what_a_rank_updates_is_no_multiple_of_a_block",
    ),
    Planted(
        name="T30 bitsandbytes", what="8-bit AdamW on parts of matrices below 4,096 elements",
        finding="low-bit-states-wide",
        test="tests/axes/test_optimizers.py::test_trap_30_a_part_is_too_small_for_bitsandbytes",
    ),
    Planted(
        name="Muon on rows", what="each rank's Muon orthogonalises its own rows of a matrix",
        finding="muon-on-parts",
        test="tests/axes/test_optimizers.py::test_rows_that_are_orthogonalised_by_themselves_are_named",
    ),
    Planted(
        name="fp8 left behind", what="linear layers made wide again after they were converted to fp8",
        finding="fp8-not-applied",
        test="tests/axes/test_settings.py::test_layers_that_fell_back_are_named",
    ),
    Planted(
        name="T42", what="the lock of a killed build of an extension of DeepSpeed, waited for without end",
        finding="unsupported", test="tests/traps/test_refused.py::test_each_is_a_row_with_its_reason",
    ),
]  # fmt: skip


def rows() -> list[list[str]]:
    """Of each mistake its name, what was done, ranks, precision, finding and test, in order of names."""
    found = [_row(trap, RUNS) for trap in (*TRAPS, *DIVIDED, *LIBRARIES)]
    found += [_row(trap, JOBS) for trap in (*OWN_JOBS, *EXECUTION, *LATE_SETTINGS, *CLIPPED)]
    found += [_row(trap, ADAPTERS) for trap in ADAPTED]
    found += [[p.name, p.what, "", "", f"`{p.finding}`", f"`{p.test}`"] for p in ELSEWHERE]
    return sorted(found, key=lambda row: (not row[0].startswith("T"), row[0]))


def _row(trap: Trap, test: str) -> list[str]:
    precision = "bf16-mixed" if BF16 in trap.settings else "fp32"
    return [trap.name, trap.what, str(trap.world_size), precision, f"`{trap.finding}`", f"`{test}`"]


def page() -> str:
    """What stands between the marks of docs/faults.md."""
    return PAGE.format(count=len(rows()), findings=len({row[4] for row in rows()} - {"`unsupported`"}))


def listed() -> str:
    """The list of all mistakes as CSV."""
    written = io.StringIO()
    lines = csv.writer(written, lineterminator="\n")
    lines.writerow(("trap", "what was done", "ranks", "precision", "finding", "test"))
    lines.writerows([cell.strip("`") for cell in row] for row in rows())
    return written.getvalue()
