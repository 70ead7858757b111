"""Reports over versions: which one changed a figure."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.api import Results
from harness.errors import HarnessError
from harness.judge.changes import changes, versions
from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.before_after import before_after, verdict
from harness.tell.report import write_report
from harness.tell.verify import verify
from tests.records import ENVIRONMENT, changed, make_communication, make_record, make_steps, written

DAYS = {"0.17.0": "03", "0.18.9": "01", "0.19.8": "02"}
"""The middle one ran first."""


def run(
    version: str, repeat: int = 0, seconds: float = 0.5, payload: int = 1000, label: str = "zero2"
) -> Record:
    began = f"2026-03-{DAYS[version]}T10:0{repeat}:00+00:00"
    environment = ENVIRONMENT | {
        "packages": {"torch": "2.13.0", "deepspeed": version}, "started_at": began
    }  # fmt: skip
    return make_record(
        label=label, repeat=repeat, run_id=f"{label}-{version}-{repeat}", environment=environment,
        steps=make_steps(seconds=seconds + repeat / 1000), comm=make_communication(2, payload_bytes=payload),
    )  # fmt: skip


def report(folder: Path, records: Sequence[Record], name: str = "report.md", by: str = "deepspeed") -> str:
    write_report(written(folder / "runs", *records), folder / name, over=by)
    assert verify(folder / name).problems == []
    return (folder / name).read_text()


def test_the_version_that_changed_a_figure_is_named_with_the_command_that_shows_both(tmp_path: Path) -> None:
    records = [
        run(version, repeat, seconds, payload)
        for version, seconds, payload in (("0.18.9", 0.5, 1000), ("0.19.8", 0.6, 3000), ("0.17.0", 0.5, 1000))
        for repeat in range(5)
    ]
    text = report(tmp_path, records)
    assert "# What changed from deepspeed 0.17.0 to 0.19.8, and in which version?" in text
    rows = [line for line in text.split("\n") if "harness diagnose" in line]
    assert ["tokens/s" in rows[0], "sent MB/step" in rows[1], len(rows)] == [True, True, 2]
    assert all("| 0.18.9 | 0.19.8 |" in row for row in rows)
    assert "harness diagnose runs/zero2-0.18.9-0 runs/zero2-0.19.8-0" in rows[0]
    picture = tmp_path / "report.over-tokens-per-second.svg"
    assert (
        Results([(tmp_path, one) for one in records]).plot("over-tokens-per-second", over="deepspeed")
        == picture.read_text()
    )


def test_a_change_by_chance_is_as_unlikely_over_many_versions_as_over_two() -> None:
    """Four repeats tell two versions apart; three versions are three tests, for which they are too few."""
    records = [run(v, r, seconds) for v, seconds in zip(DAYS, (0.5, 0.6, 0.6), strict=True) for r in range(4)]
    sides = list(versions(records, "deepspeed").values())
    judged = [
        {c.key: c.judgement for c in changes(*sides[:2], pairs_tested=tests)}["tokens_per_second"]
        for tests in (1, 3)
    ]
    assert judged == ["beyond noise", "not judged"]


def test_single_runs_show_counts_and_say_that_times_are_untested(tmp_path: Path) -> None:
    text = report(tmp_path, [run("0.17.0"), run("0.18.9", seconds=0.9), run("0.19.8")])
    assert "Equal, or within noise, from 0.17.0 to 0.19.8: " in text
    assert "harness diagnose" not in text
    text = report(tmp_path, [run("0.17.0"), run("0.18.9", seconds=0.9), run("0.19.8", seconds=0.8)])
    assert "Undecided, as runs are too few or overlap: tokens/s of zero2 on 2 ranks" in text


def test_a_cell_that_a_version_lacks_is_compared_with_the_last_that_had_it(tmp_path: Path) -> None:
    of_ddp = [run(version, payload=1000, label="ddp") for version in DAYS]
    lost = run("0.18.9").model_copy(update={"status": "failed"})
    text = report(tmp_path, [*of_ddp, run("0.17.0"), lost, run("0.19.8", payload=5000)], "report.html")
    assert "Without a whole result: zero2 on 2 ranks in 0.18.9 (failed: no result)." in text
    assert "runs/zero2-0.17.0-0 runs/zero2-0.19.8-0" in text


def test_cells_that_differ_within_one_version_are_compared_by_what_tells_them_apart(tmp_path: Path) -> None:
    more = changed(run("0.17.0", label="ddp"), world={"threads_per_rank": 9})
    other = [run("0.18.9", label="ddp"), run("0.18.9", payload=5000)]
    text = report(tmp_path, [run("0.17.0"), more, *other])
    assert "runs/zero2-0.17.0-0 runs/zero2-0.18.9-0" in text
    once = "ddp (9 threads) on 2 ranks in 0.17.0 and ddp (1 thread) on 2 ranks in 0.18.9."
    assert f"Not compared, as no other side has a result: {once}" in text


def test_what_is_not_compared_is_said_not_to_be(tmp_path: Path) -> None:
    bare = changed(run("0.19.8", label="fsdp"), environment={"packages": {}})
    text = report(tmp_path, [run("0.17.0"), run("0.18.9", label="ddp"), bare])
    assert "In no version: 1 record without a deepspeed." in text
    assert "no other side has a result: zero2 on 2 ranks in 0.17.0 and ddp on 2 ranks in 0.18.9." in text
    assert "No figure changed" not in text


def test_runs_of_another_job_are_counted_with_the_reason(tmp_path: Path) -> None:
    sound = [run(version, label=label) for version in ("0.17.0", "0.18.9") for label in ("ddp", "zero2")]
    odd = run("0.18.9", label="fsdp")
    text = report(tmp_path, [*sound, changed(odd, initial_weights={"digest": "f" * 64})])
    assert "1 run of another job than the others of their side" in text
    assert "fsdp on 2 ranks in 0.18.9: initial weights differ." in text


def test_two_sides_show_what_got_worse_the_command_that_shows_both_and_every_judgement(
    tmp_path: Path,
) -> None:
    sides = {"old": [run("0.17.0")], "new": [run("0.18.9", payload=5000)]}
    before, after = (written(tmp_path / name, *records) for name, records in sides.items())
    text = write_report(after, tmp_path / "report.md", baseline=before).read_text()
    assert verify(tmp_path / "report.md").problems == []
    (row,) = [line for line in text.splitlines() if "harness diagnose" in line]
    assert row.endswith("| harness diagnose old/zero2-0.17.0-0 new/zero2-0.18.9-0 |")
    assert (
        "| zero2 | 2 | sent MB/step | 0.001 | 0.005 | +400.0 % | +400.0 % | +400.0 % | beyond noise |" in text
    )
    assert "| backend | ranks | measure | better or worse | before | after |" in text
    assert "| zero2 | 2 | sent MB/step | worse | 0.001 | 0.005 |" in text
    told = list(verdict(before_after(*map(Comparison, sides.values()))))
    assert "Beyond noise, sent MB/step of zero2 on 2 ranks changed by +400.0 % (worse)." in told
    over = report(tmp_path, [one for records in sides.values() for one in records], "over.md")
    assert "| sent MB/step | 0.001 | 0.005 | +400.0 % | +400.0 % | +400.0 % | beyond noise |" in over
    assert "| measure | 0.17.0 | 0.18.9 | change |" in over
    assert len(list(tmp_path.glob("over.over-*.svg"))) == 1


def test_a_baseline_of_another_job_says_so_first_and_names_no_change(tmp_path: Path) -> None:
    old, new = run("0.17.0"), run("0.18.9", seconds=0.9, payload=5000)
    longer = new.job.model_copy(update={"training": new.job.training.model_copy(update={"steps": 99})})
    other = new.model_copy(update={"job_id": "f" * 12, "job": longer})
    told = list(verdict(before_after(Comparison([old]), Comparison([other]))))
    assert told[0].startswith(f"Not all ran the same job: {old.job_id} before, {'f' * 12} after.")
    assert not [
        line for line in told if "Beyond noise" in line or "within noise" in line or "Undecided" in line
    ]
    assert any("Beyond noise" in line for line in verdict(before_after(*map(Comparison, ([old], [new])))))
    last = run("0.19.8", payload=9).model_copy(update={"job_id": "f" * 12, "job": longer})
    steps = report(tmp_path, [old, new, last])
    rows = [line for line in steps.splitlines() if "harness diagnose" in line]
    assert ["| 0.17.0 | 0.18.9 |" in row for row in rows] == [True]


def test_versions_are_in_their_order_and_days_in_that_of_time() -> None:
    records = [run(version) for version in DAYS]
    assert list(versions(records, "deepspeed")) == ["0.17.0", "0.18.9", "0.19.8"]
    assert list(versions(records, "date")) == ["2026-03-01", "2026-03-02", "2026-03-03"]
    with pytest.raises(HarnessError, match=r"'torch', which does not differ .* deepspeed"):
        versions(records, "torch")


def test_of_one_day_its_sessions_are_compared() -> None:
    def at(time: str) -> Record:
        environment = ENVIRONMENT | {"started_at": f"2026-03-01T{time}:00+00:00"}
        return make_record(run_id=time.replace(":", "-"), environment=environment)

    records = [at(time) for time in ("09:00", "09:10", "15:30")]
    assert list(versions(records, "date")) == ["2026-03-01 09:00", "2026-03-01 15:30"]
    with pytest.raises(HarnessError, match="'date', which does not differ"):
        versions(records[:2], "date")
