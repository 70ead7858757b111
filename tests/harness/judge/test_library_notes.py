"""What the published records show; each library note that they hold is named there."""

from dataclasses import replace
from typing import Any

import pytest

from harness.backends.base import Effective, Preset
from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison
from harness.judge.library_notes import ReportNote, library_notes
from harness.judge.quantities import expected_states
from harness.record import CommunicationPart, MemoryPart, Record
from harness.record.run import ObservationPart
from tests.records import (
    changed,
    make_communication,
    make_effective,
    make_ranks,
    make_record,
    published_comparison,
)
from tests.volumes import expected_rows, moving, with_rows


def of_training(record: Record) -> dict[str, ReportNote]:
    return {note.library_note.id: note for note in library_notes(Comparison([record]), "parity")}


def run(
    label: str,
    *,
    config: dict[str, Any] | None = None,
    versions: dict[str, str] | None = None,
    effective: Effective | None = None,
    **changes: Any,
) -> Record:
    backend = {
        "effective": effective or make_effective(), "native_config": config,
        "versions": versions or {"torch": "2.11.0"},
    }  # fmt: skip
    return make_record(label=label, backend=backend, **changes)


@pytest.mark.parametrize(
    ("version", "set_to", "pinned"),
    [
        ("0.19.2", 0.0, False),
        ("0.19.3", 0.0, True),
        ("0.20.0+cu1", 0.5, True),
        ("0.19.8", 1.0, False),
        ("0.19.8", None, False),
    ],
)
def test_a_clipping_that_the_harness_sets_is_told_where_the_default_would_clip_otherwise(
    version: str, set_to: float | None, pinned: bool
) -> None:
    config = {"steps_per_print": 1} | ({} if set_to is None else {"gradient_clipping": set_to})
    record = run("zero1", config=config, versions={"deepspeed": version})
    notes = of_training(record)
    assert list(notes) == ["clipping-set-by-harness"] * pinned
    seen = ObservationPart(command=["python", "train.py"], frameworks=[], base="zero1")
    assert of_training(changed(record, observation=seen)) == {}
    for note in notes.values():
        assert "since 0.19.3 DeepSpeed clips at 1.0" in note.what
        assert "0.19.2" in note.library_note.since


@pytest.mark.parametrize(
    ("label", "setting"), [("zero2", "communication_data_type: fp32"), ("fsdp", "reduce_dtype: float32")]
)
def test_gradients_averaged_in_low_precision_name_the_librarys_setting(label: str, setting: str) -> None:
    low = [row.model_copy(update={"dtype": "bfloat16"}) for row in make_communication(2)]
    mixed = {"precision": "bf16-mixed"}
    note = of_training(run(label, comm=low, training=mixed))["reduced-in-low-precision"]
    assert note.library_note.advice == f"Set {setting}."
    in_fp32 = run(label, training=mixed)
    assert of_training(in_fp32) == {}
    both = Comparison([run("ddp", training=mixed), run(label, comm=low, training=mixed)])
    assert not library_notes(both, "parity")  # the finding tells it
    assert "reduce-dtype-differs" in {one.id for one in both.findings}


def test_micro_steps_that_add_up_in_low_precision_surprise_where_there_are_any() -> None:
    record = run(
        "zero2", effective=make_effective(accumulation_dtype="bfloat16"),
        training={"precision": "bf16-mixed"},
    )  # fmt: skip
    assert "accumulated-in-low-precision" not in of_training(record)
    found = of_training(changed(record, world={"accumulation_steps": 4}))
    assert "grad_accum_dtype" in found["accumulated-in-low-precision"].library_note.advice


@pytest.mark.parametrize(
    ("device", "waits", "named"), [("cuda", True, 1), ("cuda", False, 0), ("cpu", True, 0)]
)
def test_a_timer_that_waits_for_the_device_is_named_where_there_is_one(
    device: str, waits: bool, named: int
) -> None:
    record = run("zero1", effective=make_effective(details={"throughput_timer_waits": waits}))
    record = changed(record, world={"device": device})
    found = library_notes(Comparison([record]), "speed")
    assert [s.library_note.id for s in found].count("waits-for-the-device") == named


def of_traffic(*records: Record) -> dict[str, ReportNote]:
    return {note.library_note.id: note for note in library_notes(Comparison(records), "speed")}


def on_nccl(record: Record) -> Record:
    return changed(record, world={"collectives": "nccl"})


def test_stages_1_and_2_all_reduce_and_the_transport_is_not_the_cause() -> None:
    note = of_traffic(moving("zero1"), moving("zero2"))["gradients-all-reduced"]
    assert (note.figure, note.origin) == ("1.5", "DeepSpeed 0.19.8, not the transport")
    assert note.short_cells == "zero1 and zero2 on 2 ranks"
    record = changed(moving("zero1"), backend={"options": {"use_multi_rank_bucket_allreduce": False}})
    owned = changed(record, comm=expected_rows(record))
    assert any(row.op == "reduce" for row in owned.comm)
    assert "gradients-all-reduced" not in of_traffic(owned)
    assert of_traffic(moving("ddp")) == {}


def test_gloo_emulates_a_reduce_scatter_and_nccl_does_not() -> None:
    note = of_traffic(moving("fsdp"))["transport-emulates"]
    assert note.library_note.cause == "transport"
    assert note.origin.startswith("gloo in torch ")
    assert note.origin.endswith("not the library")
    assert "transport-emulates" not in of_traffic(on_nccl(moving("fsdp")))
    assert "transport-emulates" not in of_traffic(moving("zero1"))


def test_a_cause_is_named_only_where_every_byte_is_as_its_closed_form_expects() -> None:
    def one_byte_more(row: CommunicationPart) -> CommunicationPart:
        return row.model_copy(update={"payload_bytes": row.payload_bytes + 1})

    for change in (one_byte_more, lambda _: None):
        assert "gradients-all-reduced" not in of_traffic(with_rows(moving("zero1"), change))


def of_memory(*records: Record) -> dict[str, ReportNote]:
    return {note.library_note.id: note for note in library_notes(Comparison(records), "memory")}


def holding(
    label: str, *, more: int = 0, preset: Preset = "like-for-like", precision: str = "fp32"
) -> Record:
    """A run whose ranks hold what is expected of them, and `more` bytes of masters and gradients."""
    record = changed(moving(label, precision=precision), world={"preset": preset})
    memory = []
    for rank in range(record.world.world_size):
        states = expected_states(record, rank)
        kinds = states.kinds()
        kinds |= {kind: kinds.get(kind, 0) + more for kind in ("masters", "gradients") if more}
        moment = {"step": 4, "moment": "after_backward", "allocated_bytes": None, "peak_bytes": None}
        memory.append([MemoryPart(**moment, kinds=kinds)])
    return changed(record, ranks=make_ranks(len(memory), memory=memory))


MIXED, DEFAULTS = {"precision": "bf16-mixed"}, {"preset": "library-defaults"}
DEEPSPEED, PRESET = "DeepSpeed 0.19.8", "The harness's preset"


@pytest.mark.parametrize(
    ("question", "name", "shown", "others", "origin", "figures"),
    [
        # Two more all-reduces of 2 f P bytes on 2 f P of the textbook.
        ("speed", "reduced-every-micro-step", ("zero2", {"accumulation_steps": 3}),
         [("zero1", {"accumulation_steps": 3}), ("zero2", {})], DEEPSPEED, (3, 3)),
        ("speed", "root-not-resharded", ("fsdp1", {}), [("fsdp", {})], "torch", (0.5, 0.999)),
        # Pieces are padded. A cause is named only where its kind is as expected.
        ("memory", "second-fp32-copy", ("zero3", {}),
         [("zero3", MIXED), ("fsdp", {}), ("zero1", {"more": 40})], DEEPSPEED, (1.25, 1.27)),
        ("memory", "gradients-cut-at-stage-1", ("zero1", {}), [("zero2", {}), ("zero1", {"more": 40})],
         DEEPSPEED, (0, 0.999)),
        ("memory", "weights-cut-between-steps", ("fsdp-grad-op", {}), [("fsdp", {})], "torch", (0, 0.999)),
        ("memory", "gradients-add-up-in-fp32", ("zero3", MIXED), [("zero3", MIXED | DEFAULTS)], PRESET,
         (1, 9)),
        ("memory", "gradients-twice", ("ddp", DEFAULTS), [("ddp", {})], "torch", (0.25, 1)),
    ],
)  # fmt: skip
def test_a_note_stands_where_it_holds_alone(
    question: ReportFocus, name: str, shown: tuple[str, dict[str, Any]],
    others: list[tuple[str, dict[str, Any]]], origin: str, figures: tuple[float, float],
) -> None:  # fmt: skip
    def of(label: str, changes: dict[str, Any]) -> dict[str, ReportNote]:
        made = moving(label, **changes) if question == "speed" else holding(label, **changes)
        return {note.library_note.id: note for note in library_notes(Comparison([made]), question)}

    note = of(*shown)[name]
    assert note.origin.startswith(origin)
    assert figures[0] <= note.figures[0] <= figures[1]
    assert note.saves is (figures[1] < 1)
    assert not any(name in of(*other) for other in others)


def test_the_default_bucket_comes_first_and_the_presets_after_what_grows_with_the_model() -> None:
    assert next(iter(of_memory(holding("zero3", preset="library-defaults")))) == "persistent-reduction-bucket"
    assert next(iter(of_memory(holding("zero3")))) == "second-fp32-copy"


def test_figures_of_ten_and_smaller_ones_share_no_line() -> None:
    runs = holding("zero3"), holding("zero3", preset="library-defaults"), holding("accelerate-zero3")
    every = library_notes(Comparison(runs), "memory")
    buckets = [one for one in every if one.library_note.id == "persistent-reduction-bucket"]
    large, small = sorted((one.figures for one in buckets), reverse=True)
    assert (len(large), len(small)) == (1, 2)
    assert min(large) > 10 * max(small)
    assert replace(buckets[0], figures=(1066.2, 1.5)).figure == "1.5 to 1,070"


def test_what_stays_gathered_is_told_by_its_own_size_besides_the_states() -> None:
    note = of_memory(holding("zero3", preset="library-defaults"))["stays-gathered"]
    assert 0.48 < note.figures[0] <= 0.5  # weights of 4 bytes over half of 16; pieces are padded
    assert not note.saves
    assert "stay gathered, beside the states: 0.5 x the textbook's states" in note.what


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "default",
            {
                "gradients-all-reduced", "transport-emulates", "gathers-by-module",
                "second-fp32-copy", "root-not-resharded", "weights-cut-between-steps",
                "gradients-cut-at-stage-1", "persistent-reduction-bucket",
            },
        ),
        ("explain-clipping", {"clipping-set-by-harness"}),
        ("explain-master-weights", {"gradients-add-up-in-fp32"}),
    ],
)  # fmt: skip
def test_published_records_show_what_surprises(name: str, expected: set[str]) -> None:
    found = library_notes(published_comparison(name).comparable)
    assert expected <= {note.library_note.id for note in found}
    assert all(note.versions for note in found)
