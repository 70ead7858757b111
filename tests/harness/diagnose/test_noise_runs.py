"""Which runs say what noise is, which run is the baseline, and how far two runs may lie apart."""

from pathlib import Path

import pytest

from harness.diagnose.rerun import LoadedRun, find_noise_runs, in_one_split, reference_labels
from harness.errors import HarnessError
from harness.record import Record, SplitPart
from harness.record.store import archive_runs, write_record
from tests.records import ENVIRONMENT, LOSSES, make_record, make_steps, make_weights

LABELS = ["single", "single:micro_batch_size=4"]


def fixed(_: Record | None) -> list[str]:
    return LABELS


def stored(root: Path, name: str, **changes) -> LoadedRun:
    record: Record = make_record(run_id=name, **changes)
    (root / name).mkdir()
    return LoadedRun(path=write_record(root / name, record).resolve(), record=record)


def pair_in(root: Path) -> tuple[LoadedRun, LoadedRun]:
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
    runs = find_noise_runs(pair, fixed, no_run)
    assert runs.reference is not None
    assert runs.reference.backend.label == "single"
    assert [record.backend.label for record in runs.repeats] == ["single:micro_batch_size=4"]


def test_an_archive_holds_the_reference_beside_the_pair(tmp_path: Path) -> None:
    pair = pair_in(tmp_path)
    stored_runs = [stored(tmp_path, f"stamp-single-n1-r0-{n}", label=label) for n, label in enumerate(LABELS)]
    packed = archive_runs([(run.path, run.record) for run in (*pair, *stored_runs)], tmp_path / "runs.tar.xz")
    left, right = (LoadedRun(path=path, record=record) for path, record in packed[:2])
    runs = find_noise_runs((left, right), fixed, no_run)
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

    assert find_noise_runs(pair_in(tmp_path), fixed, run).reference is not None
    assert asked == LABELS


def test_of_two_runs_the_one_that_agrees_with_the_reference_is_the_baseline(tmp_path: Path) -> None:
    pair = pair_in(tmp_path)
    runs = find_noise_runs(pair, fixed, lambda missing: [make_record(label=label) for label in missing])
    assert [run.record.backend.label for run in runs.baseline(pair)] == ["ddp", "zero3"]
    assert runs.baseline(pair[::-1]) == pair[::-1]


def test_two_runs_may_lie_twice_as_far_apart_as_each_from_the_reference(tmp_path: Path) -> None:
    pair = pair_in(tmp_path)
    runs = find_noise_runs(pair, fixed, lambda missing: [make_record(label=label) for label in missing])
    assert runs.reference is not None
    one = runs.limits(runs.reference, pair[0].record)
    both = runs.limits(pair[1].record, pair[0].record)
    assert (both.loss, both.weights) == (2 * one.loss, 2 * one.weights)
    assert both.parameters == {name: 2 * limit for name, limit in one.parameters.items()}


def test_without_a_reference_the_lower_bounds_are_left(tmp_path: Path) -> None:
    pair = pair_in(tmp_path)
    runs = find_noise_runs(pair, fixed, lambda _: [])
    assert runs.baseline(pair) == pair
    assert "not measured" in runs.noise(pair[1].record).derivation[0]


CUT = [
    "single:micro_batch_size=4",
    "single:micro_batch_size=4,norm=fp32,backward=reordered",
    "single:micro_batch_size=4,precision=fp64",
]
DEPENDS = SplitPart(difference=0.3, repetition=0.0, rounding=1e-5)


def test_a_loss_that_hangs_on_the_split_is_held_to_a_reference_with_it(tmp_path: Path) -> None:
    pair = stored(tmp_path, "reference", split=DEPENDS), stored(tmp_path, "sound", label="ddp")
    records = [run.record for run in pair]

    def run(missing: list[str]) -> list[Record]:
        return [in_parts(label) for label in missing]

    runs = find_noise_runs(pair, lambda plain: reference_labels(plain, records), run)
    assert runs.label == CUT[0]
    assert [record.backend.label for record in runs.repeats] == CUT[1:]
    said: list[str] = []
    first, second = in_one_split(pair, runs, said.append)
    assert (first.record.backend.label, second) == (CUT[0], pair[1])
    assert said == ["the loss depends on how the batch is split: single:micro_batch_size=4 stands for single"]


def in_parts(label: str) -> Record:
    record = make_record(label=label, run_id=label)
    world = record.world.model_copy(update={"micro_batch_size": 4, "accumulation_steps": 2})
    return record.model_copy(update={"world": world})


def test_two_splits_and_random_parts_are_refused() -> None:
    plain = make_record(split=DEPENDS)
    two, four = make_record(label="ddp"), make_record(label="ddp", world_size=4, run_id="run-four")
    with pytest.raises(
        HarnessError, match="other numbers of samples at once: 4 in run-ddp-n2 and 2 in run-f"
    ):
        reference_labels(plain, [two, four])
    random = make_record(split=DEPENDS.model_copy(update={"repetition": 0.1}))
    with pytest.raises(HarnessError, match="draws random numbers"):
        reference_labels(random, [two, two])
