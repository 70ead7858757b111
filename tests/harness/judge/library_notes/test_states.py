from harness.backends.base import Preset
from harness.judge.comparison import Comparison
from harness.judge.library_notes import ReportNote, library_notes
from harness.judge.quantities import expected_states
from harness.record import MemoryPart, RankPart, Record
from tests.harness.judge.library_notes.moving import moving


def seen(*records: Record) -> dict[str, ReportNote]:
    return {note.library_note.id: note for note in library_notes(Comparison(records), "memory")}


def holding(
    label: str, *, more: int = 0, preset: Preset = "like-for-like", precision: str = "fp32"
) -> Record:
    """A run whose ranks hold what is expected of them, and `more` bytes of masters and gradients."""
    record = moving(label, precision=precision)
    record = record.model_copy(update={"world": record.world.model_copy(update={"preset": preset})})
    return record.model_copy(update={"ranks": [_rank(record, part, more) for part in record.ranks]})


def _rank(record: Record, part: RankPart, more: int) -> RankPart:
    states = expected_states(record, part.rank)
    assert states is not None
    kinds = states.kinds()
    kinds |= {kind: kinds.get(kind, 0) + more for kind in ("masters", "gradients") if more}
    moment = MemoryPart(step=4, moment="after_backward", allocated_bytes=None, peak_bytes=None, kinds=kinds)
    return part.model_copy(update={"memory": [moment]})


def test_fp32_stages_hold_a_second_copy_a_quarter_more_at_stage_3() -> None:
    note = seen(holding("zero3"))["second-fp32-copy"]
    assert 1.25 <= note.figures[0] < 1.27  # pieces are padded
    assert note.origin == "DeepSpeed 0.19.8"
    assert "second-fp32-copy" not in seen(holding("zero3", precision="bf16-mixed"))
    assert "second-fp32-copy" not in seen(holding("fsdp"))


def test_a_cause_is_named_only_where_its_kind_is_as_expected() -> None:
    found = seen(holding("zero1", more=40))
    assert "second-fp32-copy" not in found
    assert "gradients-cut-at-stage-1" not in found


def test_stage_1_leaves_its_part_of_the_gradients_and_stage_2_is_what_the_textbook_says() -> None:
    assert seen(holding("zero1"))["gradients-cut-at-stage-1"].saves
    assert "gradients-cut-at-stage-1" not in seen(holding("zero2"))


def test_fsdp_shards_weights_between_steps_though_its_stage_keeps_them() -> None:
    note = seen(holding("fsdp-grad-op"))["weights-cut-between-steps"]
    assert note.saves
    assert "weights-cut-between-steps" not in seen(holding("fsdp"))


def test_gradients_in_fp32_are_the_presets() -> None:
    note = seen(holding("zero3", precision="bf16-mixed"))["gradients-add-up-in-fp32"]
    assert note.origin == "The harness's preset"
    defaults = holding("zero3", precision="bf16-mixed", preset="library-defaults")
    assert "gradients-add-up-in-fp32" not in seen(defaults)


def test_the_default_bucket_comes_first_and_the_presets_after_what_grows_with_the_model() -> None:
    assert next(iter(seen(holding("zero3", preset="library-defaults")))) == "persistent-reduction-bucket"
    assert next(iter(seen(holding("zero3")))) == "second-fp32-copy"


def test_figures_ten_times_apart_share_no_line() -> None:
    runs = holding("zero3"), holding("zero3", preset="library-defaults"), holding("accelerate-zero3")
    every = library_notes(Comparison(runs), "memory")
    buckets = [one for one in every if one.library_note.id == "persistent-reduction-bucket"]
    large, small = sorted((one.figures for one in buckets), reverse=True)
    assert (len(large), len(small)) == (1, 2)
    assert min(large) > 10 * max(small)


def test_ddp_holds_gradients_twice_by_default() -> None:
    assert "gradients-twice" in seen(holding("ddp", preset="library-defaults"))
    assert "gradients-twice" not in seen(holding("ddp"))


def test_what_stays_gathered_is_told_by_its_own_size_besides_the_states() -> None:
    note = seen(holding("zero3", preset="library-defaults"))["stays-gathered"]
    assert 0.48 < note.figures[0] <= 0.5  # weights of 4 bytes over half of 16; pieces are padded
    assert not note.saves
    assert "stay gathered, beside the states: 0.5 x the textbook's states" in note.what
