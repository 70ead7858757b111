import pytest

from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.launch.cells import begin_run, in_rounds, plan, reusable, samples_of_cuts
from harness.record import SplitPart
from harness.run_directory.request import RunRequest
from tests.records import make_record

WITHOUT_NOISE_RUNS = "compare.noise_runs=false"

OTHER_ORDER = "single:micro_batch_size=4,norm=fp32,backward=reordered"


def planned(
    names: list[str], *settings: str, sizes: tuple[int, ...] = (2,), repeats: int = 1, device: str = "cpu",
    noise: bool = False,
) -> list[RunRequest]:  # fmt: skip
    experiment = load_experiment(None, [*settings, *([] if noise else [WITHOUT_NOISE_RUNS])])
    return plan(experiment, names, sizes, repeats, device)


def test_references_come_first_and_once_per_global_batch() -> None:
    cells = planned(["ddp", "zero1"], "training.global_batch_size=16", sizes=(2, 4))
    assert [(c.backend, c.world_size) for c in cells] == [
        ("single", 1), ("ddp", 2), ("zero1", 2), ("ddp", 4), ("zero1", 4)
    ]  # fmt: skip
    assert len({c.job_id for c in cells}) == 1
    weak = planned(["ddp"], "training.micro_batch_size=2", sizes=(2, 4))
    assert [(c.backend, c.layout.global_batch_size) for c in weak] == [
        ("single", 4), ("ddp", 4), ("single", 8), ("ddp", 8)
    ]  # fmt: skip


def test_repeats_have_cells_of_their_own_and_run_in_rounds() -> None:
    cells = planned(["ddp"], repeats=3)
    assert [(c.backend, c.repeat) for c in cells] == [
        ("single", 0), ("ddp", 0), ("single", 1), ("ddp", 1), ("single", 2), ("ddp", 2)
    ]  # fmt: skip
    assert len({c.key for c in cells}) == 6


def test_every_second_round_runs_in_reverse_after_the_reference() -> None:
    cells = planned(["ddp", "fsdp", "zero3"], repeats=3)
    rounds = [[cell.backend for cell in cells if cell.repeat == number] for number in range(3)]
    assert rounds[0] == rounds[2] == ["single", "ddp", "fsdp", "zero3"]
    assert rounds[1] == ["single", "zero3", "fsdp", "ddp"]
    assert [cell.repeat for cell in cells] == sorted(cell.repeat for cell in cells)
    assert in_rounds(cells) == cells


@pytest.mark.parametrize(
    ("settings", "cut"),
    [(["training.global_batch_size=16"], (8, 1)), (["training.micro_batch_size=2"], (2, 2))],
)
def test_ranks_that_share_samples_divide_the_same_global_batch(
    settings: list[str], cut: tuple[int, int]
) -> None:
    reference, ddp, tp = planned(["ddp", "tp:tensor=2"], *settings, sizes=(4,))
    assert reference.job_id == ddp.job_id == tp.job_id
    assert ddp.layout.global_batch_size == tp.layout.global_batch_size
    assert (tp.layout.micro_batch_size, tp.layout.accumulation_steps) == cut
    assert (ddp.data_size, tp.data_size) == (4, 2)


@pytest.mark.parametrize(
    ("assignments", "repetitions"),
    [
        ([], [OTHER_ORDER]),
        (["training.micro_batch_size=1"], [OTHER_ORDER.replace("4", "2")]),
        (["training.global_batch_size=1"], ["single:norm=fp32,backward=reordered", "single:precision=fp64"]),
        (["training.precision=bf16-mixed"], [OTHER_ORDER, "single:precision=fp32", "single:precision=cast"]),
        (["training.precision=bf16"], [OTHER_ORDER, "single:precision=fp32"]),
    ],
)
def test_the_reference_is_repeated_to_measure_rounding(assignments: list, repetitions: list) -> None:
    size = 1 if assignments == ["training.global_batch_size=1"] else 2
    cells = planned(["ddp"], *assignments, sizes=(size,), noise=True)
    assert [c.backend for c in cells] == ["single", *repetitions, "ddp"]
    assert len({c.job_id for c in cells}) == 1
    assert len({c.layout for c in cells if c.backend in ("single", "single:precision=fp32")}) == 1
    assert [c.backend for c in cells if not c.measure.timed] == repetitions


def test_all_means_every_backend_but_the_reference_once_more() -> None:
    labels = [c.backend for c in planned(["all"])]
    assert labels[0] == "single"
    assert labels.count("single") == 1
    assert {"ddp", "zero0", "zero1", "zero2", "zero3", "fsdp", "fsdp1"} <= set(labels)


@pytest.mark.parametrize(
    ("assignment", "is_another"),
    [
        *((text, True) for text in (
            "measure.probed_steps=1", "runtime.threads_per_rank=1", "runtime.preset=library-defaults",
            "optimizer.implementation=foreach",
        )),
        ("runtime.timeout_seconds=9", False),
    ],
)  # fmt: skip
def test_measuring_otherwise_is_another_cell_of_the_same_job(assignment: str, is_another: bool) -> None:
    before, after = planned(["ddp"]), planned(["ddp"], assignment)
    assert {c.job_id for c in before} == {c.job_id for c in after}
    assert {c.key for c in before}.isdisjoint(c.key for c in after) is is_another
    assert is_another or [c.key for c in before] == [c.key for c in after]


def test_a_preset_after_the_backend_holds_for_that_cell_alone_and_overrides_the_experiment_s() -> None:
    labels = ["zero3", "zero3:preset=library-defaults"]
    cells = {cell.backend: cell for cell in planned(labels)}
    assert {label: cell.preset for label, cell in cells.items()} == {
        "single": "like-for-like", "zero3": "like-for-like",
        "zero3:preset=library-defaults": "library-defaults",
    }  # fmt: skip
    assert len({cell.job_id for cell in cells.values()}) == 1
    asked = [begin_run(cells[label], []).preset for label in labels]
    assert asked == ["like-for-like", "library-defaults"]
    own = planned(["fsdp", "fsdp:preset=like-for-like"], "runtime.preset=library-defaults")
    assert [cell.preset for cell in own[-2:]] == ["library-defaults", "like-for-like"]


def test_the_default_comparison_runs_zero3_and_fsdp_under_the_libraries_defaults_too() -> None:
    backends = load_experiment(None).compare.backends
    assert len(backends) == 13
    assert {"zero3:preset=library-defaults", "fsdp:preset=library-defaults"} < set(backends)


@pytest.mark.parametrize(
    ("status", "kept"),
    [("ok", True), ("oom", True), ("diverged", True), ("unsupported", True), ("failed", False),
     ("timeout", False)],
)  # fmt: skip
def test_only_lasting_results_are_reused(status: str, kept: bool) -> None:
    record = make_record(status=status)
    assert (record.cell in reusable([record], lambda _: True)) is kept


def test_the_newest_record_of_a_wanted_cell_is_reused() -> None:
    old, new = make_record(run_id="old"), make_record(run_id="new")
    assert reusable([old, new], lambda _: True)[old.cell].run_id == "new"
    assert reusable([new], lambda _: False) == {}


def test_what_no_cell_can_be_is_refused_or_left_to_the_cell_to_say() -> None:
    assert [cell.backend for cell in planned(["ddp", " ddp", "single"])] == ["single", "ddp"]
    assert planned(["tp:tensor=3"])[1].data_size == 2
    with pytest.raises(HarnessError, match="do not fit"):
        planned(["single:micro_batch_size=3"])
    with pytest.raises(HarnessError, match="cannot be read: File name too long"):
        planned(["ddp"], f"model.name={'a' * 500}")


def test_a_memory_snapshot_needs_cuda() -> None:
    (cell, *_) = planned(["ddp"], "measure.memory_snapshot=true")
    with pytest.raises(HarnessError, match=r"measure\.memory_snapshot: true needs CUDA, this run is on cpu"):
        begin_run(cell, [])


def test_a_limit_of_memory_makes_another_cell_and_reaches_the_ranks_that_count() -> None:
    of_free, of_limited = (
        planned(["ddp"], "training.global_batch_size=8", *more, noise=True)
        for more in ([], ["runtime.memory_limit=2MB"])
    )
    assert {cell.key for cell in of_free}.isdisjoint(cell.key for cell in of_limited)
    limits = {cell.backend: begin_run(cell, []).memory_limit_bytes for cell in of_limited}
    assert limits == {"single": 2_000_000, OTHER_ORDER: None, "ddp": 2_000_000}
    assert begin_run(of_free[0], []).memory_limit_bytes is None


@pytest.mark.parametrize(
    ("assignment", "setting"),
    [
        ("model.name=./nope/model", "model.name"), ("model.name=/nope", "model.name"),
        ("model.name=my models/gpt2", "model.name"), ("model.name=a/b/c", "model.name"),
        ("data.tokenizer=../nowhere", "data.tokenizer"),
    ],
)  # fmt: skip
def test_a_path_that_leads_nowhere_is_named(assignment: str, setting: str) -> None:
    given = assignment.partition("=")[2]
    with pytest.raises(HarnessError) as caught:
        planned(["ddp"], assignment)
    message = str(caught.value)
    assert message.startswith(f"{setting} '{given}' does not exist")
    assert "give a local folder, or a name of the hub" in message


@pytest.mark.parametrize("name", ["gpt2", "bigscience/bloom-560m", "meta-llama/Llama-3.1-8B", "_a/b"])
def test_names_of_the_hub_are_not_looked_for_here(name: str) -> None:
    assert planned(["ddp"], f"model.name={name}")


@pytest.mark.parametrize("question", ["all", "speed", "scaling"])
def test_where_speed_is_asked_of_gpus_timed_runs_have_the_kernels_that_jobs_use(question: str) -> None:
    asked = f"compare.question={question}"
    cells = planned(["ddp"], asked, repeats=2, device="cuda")
    kernels = [(cell.backend, cell.repeat, cell.job.training.deterministic) for cell in cells]
    assert kernels == [
        ("single", 0, True), ("ddp", 0, True), ("ddp", 0, False), ("single", 1, True), ("ddp", 1, False),
    ]  # fmt: skip
    assert len({cell.job_id for cell in cells}) == 1
    assert len({cell.key for cell in cells}) == len(cells)
    assert all(cell.job.training.deterministic for cell in planned(["ddp"], asked, repeats=2))


@pytest.mark.parametrize(
    ("settings", "are_deterministic"),
    [
        (["compare.question=memory"], True), (["compare.question=parity"], True),
        (["measure.timed=false"], True), (["training.deterministic=false"], False),
    ],
)  # fmt: skip
def test_no_cell_runs_twice_on_gpus_unless_both_kinds_of_kernels_are_asked(
    settings: list[str], are_deterministic: bool
) -> None:
    cells = planned(["ddp"], *settings, repeats=2, device="cuda")
    assert [(cell.backend, cell.repeat) for cell in cells] == [
        ("single", 0), ("ddp", 0), ("single", 1), ("ddp", 1)
    ]  # fmt: skip
    assert {cell.job.training.deterministic for cell in cells} == {are_deterministic}


@pytest.mark.parametrize(
    ("split", "samples"),
    [
        (None, []),
        (SplitPart(difference=1e-9, repetition=0.0, rounding=1e-5), []),
        (SplitPart(difference=0.3, repetition=0.0, rounding=1e-5), [4]),
        (SplitPart(difference=0.3, repetition=0.2, rounding=1e-5, by_samples=0.1), []),
        (SplitPart(difference=0.3, repetition=0.2, rounding=1e-5, by_samples=1e-9), [8]),
    ],
)
def test_the_reference_is_cut_as_ranks_are_or_repeated_with_as_many_passes(
    split: SplitPart | None, samples: list[int]
) -> None:
    reference = make_record(split=split, world={"micro_batch_size": 8})
    assert samples_of_cuts(reference, [reference, make_record(label="ddp")]) == samples
