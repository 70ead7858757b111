"""Which runs say what noise is, which run is the baseline, and how far two runs may lie apart."""

from pathlib import Path

import pytest

from harness.diagnose.diagnosis import find_noise_runs
from harness.diagnose.pair import Run
from harness.record import Record
from harness.record.store import archive_runs, write_record
from tests.records import ENVIRONMENT, LOSSES, make_record, make_steps, make_weights

LABELS = ["single", "single:micro_batch_size=4"]


def stored(root: Path, name: str, **changes) -> Run:
    record: Record = make_record(run_id=name, **changes)
    (root / name).mkdir()
    return Run(path=write_record(root / name, record).resolve(), record=record)


def pair_in(root: Path) -> tuple[Run, Run]:
    wrong = make_steps([loss + 0.5 for loss in LOSSES])
    return (
        stored(root, "wrong", label="zero3", steps=wrong, final_weights=make_weights("c" * 64)),
        stored(root, "sound", label="ddp"),
    )


def no_run(missing: list[str]) -> list[Record]:
    raise AssertionError(missing)


def test_the_reference_and_its_repetitions_lie_beside_the_pair(tmp_path: Path) -> None:
    pair = pair_in(tmp_path)
    for number, label in enumerate(LABELS):
        stored(tmp_path, f"stamp-single-n1-r0-{number}", label=label)
    runs = find_noise_runs(pair, LABELS, no_run)
    assert runs.reference is not None
    assert runs.reference.backend.label == "single"
    assert [record.backend.label for record in runs.repeats] == ["single:micro_batch_size=4"]


def test_an_archive_holds_the_reference_beside_the_pair(tmp_path: Path) -> None:
    pair = pair_in(tmp_path)
    stored_runs = [stored(tmp_path, f"stamp-single-n1-r0-{n}", label=label) for n, label in enumerate(LABELS)]
    packed = archive_runs([(run.path, run.record) for run in (*pair, *stored_runs)], tmp_path / "runs.tar.xz")
    left, right = (Run(path=path, record=record) for path, record in packed[:2])
    runs = find_noise_runs((left, right), LABELS, no_run)
    assert runs.reference == stored_runs[0].record
    assert runs.repeats == (stored_runs[1].record,)


@pytest.mark.parametrize(
    "change", [{"job_id": "b" * 12}, {"status": "failed"}, {"environment": ENVIRONMENT | {"code": "other"}}]
)
def test_a_reference_of_another_job_or_code_or_without_result_is_run_again(
    tmp_path: Path, change: dict
) -> None:
    stored(tmp_path, "stamp-single-n1-r0-0", **change)
    asked: list[str] = []

    def run(missing: list[str]) -> list[Record]:
        asked.extend(missing)
        return [make_record(label=label) for label in missing]

    assert find_noise_runs(pair_in(tmp_path), LABELS, run).reference is not None
    assert asked == LABELS


def test_of_two_runs_the_one_that_agrees_with_the_reference_is_the_baseline(tmp_path: Path) -> None:
    pair = pair_in(tmp_path)
    runs = find_noise_runs(pair, LABELS, lambda missing: [make_record(label=label) for label in missing])
    assert [run.record.backend.label for run in runs.baseline(pair)] == ["ddp", "zero3"]
    assert runs.baseline(pair[::-1]) == pair[::-1]


def test_two_runs_may_lie_twice_as_far_apart_as_each_from_the_reference(tmp_path: Path) -> None:
    pair = pair_in(tmp_path)
    runs = find_noise_runs(pair, LABELS, lambda missing: [make_record(label=label) for label in missing])
    assert runs.reference is not None
    one = runs.limits(runs.reference, pair[0].record)
    both = runs.limits(pair[1].record, pair[0].record)
    assert (both.loss, both.weights) == (2 * one.loss, 2 * one.weights)
    assert both.parameters == {name: 2 * limit for name, limit in one.parameters.items()}


def test_without_a_reference_the_lower_bounds_are_left(tmp_path: Path) -> None:
    pair = pair_in(tmp_path)
    runs = find_noise_runs(pair, LABELS, lambda _: [])
    assert runs.baseline(pair) == pair
    assert "not measured" in runs.noise(pair[1].record).derivation[0]
