"""What the published records show; each library note that they hold is named there."""

from typing import Any

import pytest

from harness.backends.base import Effective, Preset
from harness.judge.comparison import Comparison
from harness.judge.library_notes import ReportNote, library_notes
from harness.judge.quantities import expected_states
from harness.record import CommunicationPart, MemoryPart, Record
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


def clipped(version: str, *, config: dict[str, Any], asked: float | None, in_force: float | None) -> Record:
    return run(
        "zero1", config={"steps_per_print": 1} | config, versions={"deepspeed": version},
        effective=make_effective(gradient_clipping=in_force), training={"gradient_clipping": asked},
    )  # fmt: skip


def test_clipping_that_nobody_asked_for_is_the_default_since_0_19_3() -> None:
    note = of_training(clipped("0.19.8", config={}, asked=None, in_force=1.0))["clipped-by-default"]
    assert "clipped at 1, unasked" in note.what
    assert "since 0.19.3" in note.what
    assert note.origin == "DeepSpeed 0.19.8"
    assert "0.19.2" in note.library_note.since


@pytest.mark.parametrize(
    ("version", "set_to", "pinned"),
    [("0.19.2", 0.0, False), ("0.19.3", 0.0, True), ("0.20.0+cu1", 0.5, True), ("0.19.8", 1.0, False)],
)
def test_a_clipping_that_the_harness_sets_is_told_where_the_default_would_clip_otherwise(
    version: str, set_to: float, pinned: bool
) -> None:
    found = of_training(clipped(version, config={"gradient_clipping": set_to}, asked=None, in_force=None))
    assert ("clipping-set-by-harness" in found) is pinned
    assert "clipped-by-default" not in found


def test_the_clipping_that_the_job_asks_for_surprises_nobody() -> None:
    assert "clipped-by-default" not in of_training(clipped("0.19.8", config={}, asked=1.0, in_force=1.0))
    assert of_training(run("ddp")) == {}


@pytest.mark.parametrize(
    ("dtype", "precision", "surprising"),
    [("bfloat16", "bf16-mixed", True), ("float32", "bf16-mixed", False), ("bfloat16", "bf16", False)],
)
def test_masters_below_fp32_surprise_at_mixed_precision_only(
    dtype: str, precision: str, surprising: bool
) -> None:
    record = run("fsdp", effective=make_effective(master_dtype=dtype), training={"precision": precision})
    assert ("masters-in-low-precision" in of_training(record)) is surprising


@pytest.mark.parametrize(
    ("label", "setting"), [("zero2", "communication_data_type: fp32"), ("fsdp", "reduce_dtype: float32")]
)
def test_gradients_averaged_in_low_precision_name_the_librarys_setting(label: str, setting: str) -> None:
    low = [row.model_copy(update={"dtype": "bfloat16"}) for row in make_communication(2)]
    mixed = {"precision": "bf16-mixed"}
    note = of_training(run(label, comm=low, training=mixed))["reduced-in-low-precision"]
    assert note.library_note.advice == f"Set {setting}."
    assert "reduced-in-low-precision" not in of_training(run(label, training=mixed))


def test_micro_steps_that_add_up_in_low_precision_surprise_where_there_are_any() -> None:
    record = run(
        "zero2", effective=make_effective(accumulation_dtype="bfloat16"),
        training={"precision": "bf16-mixed"},
    )  # fmt: skip
    assert "accumulated-in-low-precision" not in of_training(record)
    found = of_training(changed(record, world={"accumulation_steps": 4}))
    assert "grad_accum_dtype" in found["accumulated-in-low-precision"].library_note.advice


def test_a_replaced_strategy_and_a_refused_cell_say_what_would_have_run() -> None:
    effective = make_effective(requested_strategy="FULL_SHARD", strategy="NO_SHARD")
    assert of_training(run("fsdp1", effective=effective))["strategy-replaced"].what == (
        "asked for FULL_SHARD, runs NO_SHARD"
    )
    reason = "accelerate 1.15.0 ignores {an FSDP plugin}"
    refused = run("accelerate-fsdp", status="unsupported", reasons=[reason])
    assert of_training(refused)["not-run"].what == f"not run: {reason}"
    assert "not-run" not in of_training(run("fsdp", status="unsupported", reasons=["needs 2 ranks"]))


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


@pytest.mark.parametrize("label", ["zero1", "zero2"])
def test_stages_1_and_2_all_reduce_and_the_transport_is_not_the_cause(label: str) -> None:
    note = of_traffic(moving(label))["gradients-all-reduced"]
    assert (note.figure, note.origin) == ("1.5", "DeepSpeed 0.19.8, not the transport")
    assert str(note.cells[0]) == f"{label} on 2 ranks"


def test_gradients_that_are_reduced_to_their_owners_surprise_nobody() -> None:
    record = changed(moving("zero1"), backend={"options": {"use_multi_rank_bucket_allreduce": False}})
    owned = changed(record, comm=expected_rows(record))
    assert any(row.op == "reduce" for row in owned.comm)
    assert "gradients-all-reduced" not in of_traffic(owned)


def test_stage_2_reduces_in_every_micro_step_and_stage_1_does_not() -> None:
    stage_1, stage_2 = (moving(label, accumulation_steps=3) for label in ("zero1", "zero2"))
    assert "reduced-every-micro-step" not in of_traffic(stage_1)
    # Two more all-reduces of 2 f P bytes on 2 f P of the textbook.
    assert of_traffic(stage_2)["reduced-every-micro-step"].figure == "3"
    assert "reduced-every-micro-step" not in of_traffic(moving("zero2"))


def test_fsdp1_sends_less_than_the_textbook_by_its_root() -> None:
    note = of_traffic(moving("fsdp1"))["root-not-resharded"]
    assert note.figures[0] < 1
    assert "root-not-resharded" not in of_traffic(moving("fsdp"))


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


def test_nothing_surprises_where_figures_equal_the_textbook() -> None:
    assert library_notes(Comparison([moving("ddp")]), "speed") == []


def test_cells_that_differ_alike_are_one_line() -> None:
    note = of_traffic(moving("zero1"), moving("zero2"))["gradients-all-reduced"]
    assert note.short_cells == "zero1 and zero2 on 2 ranks"


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


def test_fp32_stages_hold_a_second_copy_a_quarter_more_at_stage_3() -> None:
    note = of_memory(holding("zero3"))["second-fp32-copy"]
    assert 1.25 <= note.figures[0] < 1.27  # pieces are padded
    assert note.origin == "DeepSpeed 0.19.8"
    assert "second-fp32-copy" not in of_memory(holding("zero3", precision="bf16-mixed"))
    assert "second-fp32-copy" not in of_memory(holding("fsdp"))


def test_a_cause_is_named_only_where_its_kind_is_as_expected() -> None:
    found = of_memory(holding("zero1", more=40))
    assert "second-fp32-copy" not in found
    assert "gradients-cut-at-stage-1" not in found


def test_stage_1_leaves_its_part_of_the_gradients_and_stage_2_is_what_the_textbook_says() -> None:
    assert of_memory(holding("zero1"))["gradients-cut-at-stage-1"].saves
    assert "gradients-cut-at-stage-1" not in of_memory(holding("zero2"))


def test_fsdp_shards_weights_between_steps_though_its_stage_keeps_them() -> None:
    note = of_memory(holding("fsdp-grad-op"))["weights-cut-between-steps"]
    assert note.saves
    assert "weights-cut-between-steps" not in of_memory(holding("fsdp"))


def test_gradients_in_fp32_are_the_presets() -> None:
    note = of_memory(holding("zero3", precision="bf16-mixed"))["gradients-add-up-in-fp32"]
    assert note.origin == "The harness's preset"
    defaults = holding("zero3", precision="bf16-mixed", preset="library-defaults")
    assert "gradients-add-up-in-fp32" not in of_memory(defaults)


def test_the_default_bucket_comes_first_and_the_presets_after_what_grows_with_the_model() -> None:
    assert next(iter(of_memory(holding("zero3", preset="library-defaults")))) == "persistent-reduction-bucket"
    assert next(iter(of_memory(holding("zero3")))) == "second-fp32-copy"


def test_figures_ten_times_apart_share_no_line() -> None:
    runs = holding("zero3"), holding("zero3", preset="library-defaults"), holding("accelerate-zero3")
    every = library_notes(Comparison(runs), "memory")
    buckets = [one for one in every if one.library_note.id == "persistent-reduction-bucket"]
    large, small = sorted((one.figures for one in buckets), reverse=True)
    assert (len(large), len(small)) == (1, 2)
    assert min(large) > 10 * max(small)


def test_ddp_holds_gradients_twice_by_default() -> None:
    assert "gradients-twice" in of_memory(holding("ddp", preset="library-defaults"))
    assert "gradients-twice" not in of_memory(holding("ddp"))


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
        ("explain-clipping", {"clipped-by-default"}),
        ("explain-master-weights", {"masters-in-low-precision", "gradients-add-up-in-fp32"}),
    ],
)  # fmt: skip
def test_published_records_show_what_surprises(name: str, expected: set[str]) -> None:
    found = library_notes(published_comparison(name).comparable)
    assert expected <= {note.library_note.id for note in found}
    assert all(note.versions for note in found)
