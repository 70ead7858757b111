"""What cannot be diagnosed is refused in one line."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli import harness
from harness.diagnose import rerun
from harness.errors import HarnessError
from harness.record import DimensionPart, ErrorPart, Record, SplitPart
from harness.record.run import ObservationPart
from harness.record.store import archive_runs, read_runs
from harness.run_directory.events import ExaminedEvent
from tests.records import ENVIRONMENT, LOSSES, make_record, make_steps, make_weights, saved, written


def write(folder: Path, **changes) -> Path:
    saved(folder.parent, folder.name, **changes)
    return folder


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return write(tmp_path / "runs" / "sound", label="ddp")


def refusal(*arguments: Path) -> str:
    done = CliRunner().invoke(harness, ["diagnose", *map(str, arguments)])
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    return line


def test_a_run_that_is_not_there(sound: Path) -> None:
    line = refusal(sound, sound.parent / "soumd")
    assert line == f"harness: there is no '{sound.parent}/soumd'. Did you mean 'sound'?"
    assert "Give the folder of a run" in refusal(sound, Path("nowhere/at-all"))


def test_a_folder_without_a_record_or_with_several(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no record" in refusal(sound, tmp_path / "empty")
    write(sound.parent / "another")
    assert "holds 2 records; give the folder of one run" in refusal(sound, sound.parent)


def test_runs_without_a_common_step(tmp_path: Path) -> None:
    record = make_record(label="ddp")
    ends = {"early": record.steps[:2], "late": record.steps[2:]}
    early, late = (write(tmp_path / name, label="ddp", steps=steps) for name, steps in ends.items())
    assert refusal(early, late).endswith(
        "these runs have no step in common: early took steps 0 to 1, late 2 to 3"
    )


def test_a_damaged_record(sound: Path, tmp_path: Path) -> None:
    wrong = json.dumps(json.loads((sound / "record.json").read_text()) | {"steps": "many"})
    for content, named in [
        ('{"schema_version": 1', "cannot be read"),
        ("{}", "not a record of this harness"),
        (wrong, "is not valid: 'steps'"),
    ]:
        (tmp_path / "damaged").mkdir(exist_ok=True)
        (tmp_path / "damaged" / "record.json").write_text(content)
        assert named in refusal(sound, tmp_path / "damaged")
        assert named in refusal(sound, tmp_path / "damaged" / "record.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"status": "failed", "error": ErrorPart(kind="Exit", message="gone"), "steps": []},
         "other is failed (Exit: gone): only finished runs"),
        ({"status": "unsupported", "reasons": ["needs a GPU"], "steps": []},
         "other is unsupported (needs a GPU)"),
        ({"model": {"dropout": 0.1}}, "by chance; repeat both with dropout 0 (--set model.dropout=0)"),
        ({"model": {"dropout": 0.1}, "steps": make_steps(changes={0: {"learning_rate": 0.5}})},
         "by chance; what else differs: learning rate of step 0 0.001 against 0.5; repeat both"),
        ({"label": "theirs"}, "backend 'theirs' is unknown"),
        ({"world": make_record(label="ddp").world.model_copy(update={"device": "cuda"})},
         "these runs were on cpu and cuda"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_diagnosed(sound: Path, tmp_path: Path, changes: dict, said: str) -> None:
    assert said in refusal(sound, write(tmp_path / "other", **changes))


def test_dropout_is_no_obstacle_between_two_jobs(tmp_path: Path, sound: Path) -> None:
    rerun.read_pair(sound, write(tmp_path / "other-job", job_id="b" * 12, model={"dropout": 0.1}))


def test_a_pair_is_read_from_an_archive(sound: Path, tmp_path: Path) -> None:
    archive = tmp_path / "runs.tar.xz"
    write(sound.parent / "another", label="ddp")
    archive_runs(read_runs([sound.parent])[0], archive)
    first, second = rerun.read_pair(archive / "sound", archive / "another" / "record.json")
    assert [run.record.run_id for run in (first, second)] == ["sound", "another"]
    hint = f"holds 2 records; give the folder of one run, such as {archive / 'another'}"
    assert hint in refusal(sound, archive)
    assert "holds no record" in refusal(sound, archive / "missing")


@pytest.mark.parametrize(
    ("labels", "places"), [(("slow", "fast"), ("slow", "fast")), ("xx", ("first", "second"))]
)
def test_scripts_of_one_strategy_have_their_names(tmp_path: Path, labels: str, places: tuple) -> None:
    made = [
        write(tmp_path / name, label="observed-ddp",
              observation=ObservationPart(command=["python", "train.py"], frameworks=[], label=label))
        for name, label in zip("ab", labels, strict=True)
    ]  # fmt: skip
    assert [run.place for run in rerun.read_pair(*made)] == [*places]


LABELS = ["single", "single:micro_batch_size=4"]


def fixed(_: Record | None) -> list[str]:
    return LABELS


def loaded(root: Path, name: str, **changes) -> rerun.LoadedRun:
    ((path, record),) = written(root, make_record(run_id=name, **changes))
    return rerun.LoadedRun(path=path.resolve(), record=record)


def pair_in(root: Path) -> tuple[rerun.LoadedRun, rerun.LoadedRun]:
    wrong = make_steps([loss + 0.5 for loss in LOSSES])
    return (
        loaded(root, "wrong", label="zero3", steps=wrong, final_weights=make_weights("c" * 64)),
        loaded(root, "sound", label="ddp"),
    )


def no_run(missing: list[str]) -> list[Record]:
    raise AssertionError(missing)


def test_the_reference_and_its_repetitions_lie_beside_the_pair(tmp_path: Path) -> None:
    pair = pair_in(tmp_path)
    for number, label in enumerate(LABELS):
        saved(tmp_path, f"stamp-single-n1-r0-{number}", label=label)
    runs = rerun.find_noise_runs(pair, fixed, no_run)
    assert runs.reference.backend.label == "single"
    assert [record.backend.label for record in runs.repeats] == ["single:micro_batch_size=4"]


@pytest.mark.parametrize(
    "change", [{"job_id": "b" * 12}, {"status": "failed"}, {"environment": ENVIRONMENT | {"code": "other"}}]
)
def test_a_reference_of_another_job_or_code_or_without_result_is_run_again(
    tmp_path: Path, change: dict
) -> None:
    loaded(tmp_path, "stamp-single-n1-r0-0", **change)
    asked: list[str] = []

    def run(missing: list[str]) -> list[Record]:
        asked.extend(missing)
        return [make_record(label=label) for label in missing]

    assert rerun.find_noise_runs(pair_in(tmp_path), fixed, run).reference is not None
    assert asked == LABELS


def test_of_two_runs_the_one_that_agrees_with_the_reference_is_the_baseline(tmp_path: Path) -> None:
    pair = pair_in(tmp_path)
    runs = rerun.find_noise_runs(pair, fixed, lambda missing: [make_record(label=label) for label in missing])
    assert [run.record.backend.label for run in runs.baseline(pair)] == ["ddp", "zero3"]
    assert runs.baseline(pair[::-1]) == pair[::-1]


def test_two_runs_may_lie_twice_as_far_apart_as_each_from_the_reference(tmp_path: Path) -> None:
    pair = pair_in(tmp_path)
    runs = rerun.find_noise_runs(pair, fixed, lambda missing: [make_record(label=label) for label in missing])
    assert runs.reference is not None
    one = runs.limits(runs.reference, pair[0].record)
    both = runs.limits(pair[1].record, pair[0].record)
    assert (both.loss, both.weights) == (2 * one.loss, 2 * one.weights)
    assert both.parameters == {name: 2 * limit for name, limit in one.parameters.items()}


def test_without_a_reference_the_lower_bounds_are_left(tmp_path: Path) -> None:
    pair = pair_in(tmp_path)
    runs = rerun.find_noise_runs(pair, fixed, lambda _: [])
    assert runs.baseline(pair) == pair
    assert "assumed, as no reference ran" in runs.noise(pair[1].record).derivation[0]


CUT = [
    "single:micro_batch_size=4",
    "single:micro_batch_size=4,norm=fp32,backward=reordered",
    "single:micro_batch_size=4,precision=fp64",
]
DEPENDS = SplitPart(difference=0.3, repetition=0.0, rounding=1e-5)


def test_a_loss_that_hangs_on_the_split_is_held_to_a_reference_with_it(tmp_path: Path) -> None:
    pair = loaded(tmp_path, "reference", split=DEPENDS), loaded(tmp_path, "sound", label="ddp")
    records = [run.record for run in pair]

    def run(missing: list[str]) -> list[Record]:
        return [in_parts(label) for label in missing]

    runs = rerun.find_noise_runs(pair, lambda plain: rerun.reference_labels(plain, records), run)
    assert runs.label == CUT[0]
    assert [record.backend.label for record in runs.repeats] == CUT[1:]
    said: list[str] = []
    first, second = rerun.in_one_split(pair, runs, said.append)
    assert (first.record.backend.label, second) == (CUT[0], pair[1])
    assert said == ["the loss depends on how the batch is split: single:micro_batch_size=4 stands for single"]


def in_parts(label: str) -> Record:
    return make_record(label=label, run_id=label, world={"micro_batch_size": 4, "accumulation_steps": 2})


def test_two_splits_and_random_parts_are_refused() -> None:
    plain = make_record(split=DEPENDS)
    two, four = make_record(label="ddp"), make_record(label="ddp", world_size=4, run_id="run-four")
    with pytest.raises(
        HarnessError, match="different numbers of samples at once: 4 in run-ddp-n2 and 2 in run-f"
    ):
        rerun.reference_labels(plain, [two, four])
    random = make_record(split=DEPENDS.model_copy(update={"repetition": 0.1}))
    with pytest.raises(HarnessError, match="draws random numbers"):
        rerun.reference_labels(random, [two, two])


def placed(label: str = "ddp", **world) -> Record:
    return make_record(label=label, world=world)


def test_more_ranks_than_this_machine_takes() -> None:
    rerun.require_room(placed(nodes=2, ranks_per_node=1))
    with pytest.raises(HarnessError) as error:
        rerun.require_room(placed(nodes=512, ranks_per_node=8, world_size=4096))
    assert "had 4096 ranks of 512 nodes and this machine takes" in str(error.value)
    assert "harness compare --nproc" in str(error.value)


def test_runs_on_gpus_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(HarnessError, match="takes 0 GPUs: diagnose on a machine with GPUs"):
        rerun.require_room(placed(device="cuda"))


def test_hybrid_sharding_keeps_the_shard_groups_of_its_nodes() -> None:
    assert rerun.label_on_one_machine(placed("fsdp-hybrid", nodes=4, ranks_per_node=2, world_size=8)) == (
        "fsdp-hybrid:shard_size=2"
    )
    assert (
        rerun.label_on_one_machine(placed("fsdp-hybrid:shard_size=4", nodes=2)) == "fsdp-hybrid:shard_size=4"
    )
    assert rerun.label_on_one_machine(placed("fsdp-hybrid")) == "fsdp-hybrid"


def test_noise_needs_another_split_and_at_low_precision_other_precisions() -> None:
    assert rerun.reference_labels(None, [placed()]) == [
        "single",
        "single:micro_batch_size=4,norm=fp32,backward=reordered",
    ]
    one = placed(micro_batch_size=1, accumulation_steps=1, world_size=1)
    assert rerun.reference_labels(None, [one]) == [
        "single", "single:norm=fp32,backward=reordered", "single:precision=fp64",
    ]  # fmt: skip
    mixed = make_record(label="ddp", training={"precision": "bf16-mixed"})
    assert rerun.reference_labels(None, [mixed])[2:] == ["single:precision=fp32", "single:precision=cast"]


def test_noise_of_cut_layers_is_measured_beside_it_at_low_precision() -> None:
    mixed = {"training": {"precision": "bf16-mixed"}}
    dimensions = [DimensionPart(name="data", size=2), DimensionPart(name="tensor", size=2)]
    cut = make_record(label="tp", world_size=4, world={"dimensions": dimensions}, **mixed)
    assert rerun.reference_labels(None, [make_record(**mixed), cut])[4:] == ["single:partial_sums=2"]


SKETCH = {"a": [2.0, *[2.0, -2.0] * 4], "b": [1.0, *[1.0, -1.0] * 4]}
LIMITS = dict.fromkeys(SKETCH, 1e-3)


def scaled(factor: float, names: str = "ab") -> dict[str, list[float]]:
    factors = {name: factor if name in names else 1.0 for name in SKETCH}
    return {
        name: [abs(factors[name]) * norm, *(value * factors[name] for value in values)]
        for name, (norm, *values) in SKETCH.items()
    }


def examined(factor: float = 1.0) -> rerun.Examined:
    return rerun.Examined(
        gradients=scaled(factor), updates=scaled(factor), weight_norms=dict.fromkeys(SKETCH, 10.0)
    )


def noise(precision: str = "fp32", factor: float = 1.0, **repeats: list[rerun.Examined]) -> rerun.TensorNoise:
    kinds = {"splits": [], "others": []} | repeats
    return rerun.TensorNoise(reference=examined(), precision=precision, factor=factor, **kinds)


def test_a_difference_within_its_limit_is_noise() -> None:
    found = rerun.compare_tensors(SKETCH, scaled(1.0), LIMITS)
    assert (found.beyond, found.common_factor, found.compared) == ((), None, 2)
    assert not rerun.compare_tensors(SKETCH, scaled(1.0009), LIMITS).beyond
    assert rerun.compare_tensors(SKETCH, scaled(1.0011), LIMITS).beyond


def test_one_factor_over_all_tensors_is_recognised_within_noise() -> None:
    second = scaled(2.0)
    second["b"] = [value * 1.0005 for value in second["b"]]
    assert rerun.compare_tensors(SKETCH, second, LIMITS).common_factor == pytest.approx(2.0, rel=1e-3)


def test_a_tensor_that_is_missing_is_one_of_zeros() -> None:
    (missing,) = rerun.compare_tensors(SKETCH, {"a": SKETCH["a"]}, LIMITS).beyond
    assert (missing.name, missing.ratio) == ("b", 0.0)
    (extra,) = rerun.compare_tensors({"a": SKETCH["a"]}, SKETCH, LIMITS).beyond
    assert (extra.name, extra.ratio) == ("b", None)


def test_numbers_that_are_not_finite_part() -> None:
    sketches = {"a": [None] * 9}
    event = ExaminedEvent(step=0, gradients=sketches, updates=sketches, weight_norms={"a": None})
    read = rerun.Examined.read(event)
    assert read.gradients["a"][0] == math.inf
    found = rerun.compare_tensors({"a": SKETCH["a"]}, read.gradients, LIMITS)
    assert [t.name for t in found.beyond] == ["a"]
    assert found.common_factor is None


@pytest.mark.parametrize(
    ("precision", "factor", "splits", "others", "limits"),
    [
        ("fp32", 1.0, [1.001], [], {"a": 1e-2, "b": 1e-2}),  # ten times how far another split lies
        ("bf16-mixed", 1.0, [1.0001], [1.1], {"a": 0.3, "b": 0.3}),  # three times as far as other precisions
        ("fp32", 2.0, [1.001], [], {"a": 2e-2, "b": 2e-2}),  # between two runs that are not the reference
        ("fp32", 1.0, [], [], {"a": 100 * 2.0**-23, "b": 100 * 2.0**-23}),  # the precision's lower bound
        ("bf16-mixed", 1.0, [], [], {"a": 3 * 2.0**-8, "b": 3 * 2.0**-8}),
    ],
)
def test_limits_of_gradients(
    precision: str, factor: float, splits: list[float], others: list[float], limits: dict[str, float]
) -> None:
    repeats = {"splits": list(map(examined, splits)), "others": list(map(examined, others))}
    assert noise(precision, factor, **repeats).limits("gradients") == pytest.approx(limits)


def test_an_update_is_rounded_to_the_spacing_of_its_weight() -> None:
    limits = noise(splits=[examined()]).limits("updates")
    assert limits == pytest.approx({"a": 10 * 2.0**-23 * 5, "b": 10 * 2.0**-23 * 10})
