"""docs/faults.md and its list hold what tests plant, each with a finding and a test that exist."""

import csv
import io
from pathlib import Path

from benchmarks.packed_page import between
from harness.judge.wording import entries
from tests.adapters.test_adapters import ADAPTED

from .planted import (
    CLIPPED,
    DIVIDED,
    EXECUTION,
    LATE_SETTINGS,
    LIBRARIES,
    OWN_JOBS,
    TRAPS,
    UPDATED,
    Trap,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "faults.md"
LIST = ROOT / "docs" / "faults" / "planted.csv"


def test_the_page_is_what_the_lists_give(update_golden: bool) -> None:
    held = DOCUMENT.read_text(encoding="utf-8")
    written = between(held, "<!-- traps -->", "<!-- end of traps -->", page())
    if update_golden:
        DOCUMENT.write_text(written, encoding="utf-8")
        LIST.write_text(listed(), encoding="utf-8")
    assert update_golden or (held == written and LIST.read_text(encoding="utf-8") == listed())


def test_every_mistake_has_a_name_of_its_own_a_finding_and_a_test_that_exist() -> None:
    names = [row[0] for row in rows()]
    assert sorted(set(names)) == sorted(names)
    for *_, finding, test in rows():
        file, _, function = test.strip("`").partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")
        assert finding.strip("`") in {"unsupported", *entries()}


PAGE = """\
{count} mistakes are made on purpose in tests, and each must be named by one of {findings}
[findings](findings.md), or refused with the reason (`unsupported`). [The list](faults/planted.csv) has what
was done, finding and test of each. Those with a number have occurred in public; 'unseen' are kinds of defects
for which no finding was written, 'late' are defects that begin after three correct steps. A sound cell must
raise none of them:
`make traps` runs every backend in fp32 and bf16-mixed, with and without accumulation, on 1, 2 and 4 ranks.
[The gallery](../reports/traps/README.md) has reports of many."""
HERE = "tests/traps/test_traps.py"
TIMING = "tests/harness/judge/findings/test_timing.py"
RUNS = f"{HERE}::test_a_planted_trap_is_named"
JOBS = "tests/traps/test_own_jobs.py::test_a_planted_trap_is_named"
ADAPTERS = "tests/adapters/test_adapters.py::test_a_planted_mistake_is_named"


NOT_RUN = "tests/backends/test_facts.py::test_what_is_not_run_is_refused_with_its_reason"
ELSEWHERE = [
    ("sleeping rank", "rank 1 sleeps in each forward, or in each backward pass", "slow-rank",
     f"{HERE}::test_a_rank_that_sleeps_in_each_step_is_named"),
    ("no dropout on a rank", "dropout turned off on rank 1 of FSDP alone", "ranks-differ",
     "tests/traps/test_own_jobs.py::test_a_rank_without_dropout_is_named_though_dropout_is_not_judged"),
    ("T15 volume",
     "replicas of a built-in backend never reduced over: bytes are missing",
     "communication-differs", f"{HERE}::test_a_known_implementation_that_moves_other_bytes"),
    ("T17 volume", "a built-in backend that synchronises in every micro-step", "communication-differs",
     f"{HERE}::test_a_known_implementation_that_moves_other_bytes"),
    ("T19", "a timer that stops before the device has finished", "inconsistent-timing",
     f"{TIMING}::test_a_timer_that_stops_too_early_is_found_and_fetching_overlaps_on_cuda_alone"),
    ("T20", "a library's logger that synchronises every call of one backend", "instrumented-timing",
     f"{TIMING}::test_what_one_row_shows_is_found_with_its_figures"),
    ("T23", "two jobs in one table", "several-jobs",
     f"{HERE}::test_T23_several_jobs_in_one_table_are_named_by_setting"),
    ("T25", "steps that a loss scaler skipped", "skipped-steps",
     f"{HERE}::test_T25_steps_that_a_loss_scaler_skipped_are_counted"),
    ("T26 ZenFlow", "DeepSpeed's ZenFlow asked for by its option", "unsupported", NOT_RUN),
    ("T30", "8-bit AdamW on flat partitions that are no multiple of 256 elements", "low-bit-states-wide",
     "tests/axes/test_optimizers.py::test_trap_30_what_a_rank_updates_is_no_multiple_of_a_block"),
    ("T30 bitsandbytes", "8-bit AdamW on parts of matrices below 4,096 elements", "low-bit-states-wide",
     "tests/axes/test_optimizers.py::test_trap_30_a_part_is_too_small_for_bitsandbytes"),
    ("Muon on rows", "each rank's Muon orthogonalises its own rows of a matrix", "muon-on-parts",
     "tests/axes/test_optimizers.py::test_rows_that_are_orthogonalised_by_themselves_are_named"),
    ("fp8 left behind", "linear layers made wide again after they were converted to fp8", "fp8-not-applied",
     "tests/axes/test_settings.py::test_layers_that_fell_back_are_named"),
    ("T42", "the lock of a killed build of an extension of DeepSpeed, waited for without end", "unsupported",
     "tests/traps/test_library_errors.py::test_each_is_a_row_with_its_reason"),
]  # fmt: skip
"""Mistakes that tests of their own plant: name, what was done, finding, test."""


PRECISION = "training.precision="


def rows() -> list[list[str]]:
    """Of each mistake its name, what was done, ranks, precision, finding and test, in order of names."""
    found = [_row(trap, RUNS) for trap in (*TRAPS, *DIVIDED, *LIBRARIES)]
    found += [_row(trap, JOBS) for trap in (*OWN_JOBS, *EXECUTION, *LATE_SETTINGS, *CLIPPED, *UPDATED)]
    found += [_row(trap, ADAPTERS) for trap in ADAPTED]
    found += [[name, what, "", "", f"`{finding}`", f"`{test}`"] for name, what, finding, test in ELSEWHERE]
    return sorted(found, key=lambda row: (not row[0].startswith("T"), row[0]))


def _row(trap: Trap, test: str) -> list[str]:
    asked = (one.removeprefix(PRECISION) for one in trap.settings if one.startswith(PRECISION))
    precision = next(asked, "fp32")
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
