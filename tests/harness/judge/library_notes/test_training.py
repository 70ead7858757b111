from typing import Any

import pytest

from harness.backends.base import Effective
from harness.judge.comparison import Comparison
from harness.judge.library_notes import ReportNote, library_notes
from harness.record import BackendPart, Record
from tests.records import make_communication, make_effective, make_record


def seen(record: Record) -> dict[str, ReportNote]:
    return {note.library_note.id: note for note in library_notes(Comparison([record]), "parity")}


def run(
    label: str,
    *,
    config: dict[str, Any] | None = None,
    versions: dict[str, str] | None = None,
    effective: Effective | None = None,
    **changes: Any,
) -> Record:
    backend = BackendPart(
        label=label, name=label, effective=effective or make_effective(), native_config=config,
        versions=versions or {"torch": "2.11.0"},
    )  # fmt: skip
    return make_record(label=label, backend=backend, **changes)


def clipped(version: str, *, config: dict[str, Any], asked: float | None, in_force: float | None) -> Record:
    return run(
        "zero1", config={"steps_per_print": 1} | config, versions={"deepspeed": version},
        effective=make_effective(gradient_clipping=in_force), training={"gradient_clipping": asked},
    )  # fmt: skip


def test_clipping_that_nobody_asked_for_is_the_default_since_0_19_3() -> None:
    note = seen(clipped("0.19.8", config={}, asked=None, in_force=1.0))["clipped-by-default"]
    assert "clipped at 1, unasked" in note.what
    assert "since 0.19.3" in note.what
    assert note.origin == "DeepSpeed 0.19.8"
    assert "0.19.2" in note.library_note.since


@pytest.mark.parametrize(("version", "pinned"), [("0.19.2", False), ("0.19.3", True), ("0.20.0+cu1", True)])
def test_a_clipping_that_the_harness_sets_is_told_where_the_default_would_clip(
    version: str, pinned: bool
) -> None:
    found = seen(clipped(version, config={"gradient_clipping": 0.0}, asked=None, in_force=None))
    assert ("clipping-set-by-harness" in found) is pinned
    assert "clipped-by-default" not in found


def test_the_clipping_that_the_job_asks_for_surprises_nobody() -> None:
    assert "clipped-by-default" not in seen(clipped("0.19.8", config={}, asked=1.0, in_force=1.0))
    assert seen(run("ddp")) == {}


@pytest.mark.parametrize(
    ("dtype", "precision", "surprising"),
    [("bfloat16", "bf16-mixed", True), ("float32", "bf16-mixed", False), ("bfloat16", "bf16", False)],
)
def test_masters_below_fp32_surprise_at_mixed_precision_only(
    dtype: str, precision: str, surprising: bool
) -> None:
    record = run("fsdp", effective=make_effective(master_dtype=dtype), training={"precision": precision})
    assert ("masters-in-low-precision" in seen(record)) is surprising


@pytest.mark.parametrize(
    ("label", "setting"), [("zero2", "communication_data_type: fp32"), ("fsdp", "reduce_dtype: float32")]
)
def test_gradients_averaged_in_low_precision_name_the_librarys_setting(label: str, setting: str) -> None:
    low = [row.model_copy(update={"dtype": "bfloat16"}) for row in make_communication(2)]
    mixed = {"precision": "bf16-mixed"}
    note = seen(run(label, comm=low, training=mixed))["reduced-in-low-precision"]
    assert note.library_note.advice == f"Set {setting}."
    assert "reduced-in-low-precision" not in seen(run(label, training=mixed))


def test_micro_steps_that_add_up_in_low_precision_surprise_where_there_are_any() -> None:
    record = run(
        "zero2", effective=make_effective(accumulation_dtype="bfloat16"),
        training={"precision": "bf16-mixed"},
    )  # fmt: skip
    world = record.world.model_copy(update={"accumulation_steps": 4})
    assert "accumulated-in-low-precision" not in seen(record)
    found = seen(record.model_copy(update={"world": world}))
    assert "grad_accum_dtype" in found["accumulated-in-low-precision"].library_note.advice


def test_a_replaced_strategy_and_a_refused_cell_say_what_would_have_run() -> None:
    effective = make_effective(requested_strategy="FULL_SHARD", strategy="NO_SHARD")
    assert seen(run("fsdp1", effective=effective))["strategy-replaced"].what == (
        "asked for FULL_SHARD, runs NO_SHARD"
    )
    reason = "accelerate 1.15.0 ignores {an FSDP plugin}"
    refused = run("accelerate-fsdp", status="unsupported", reasons=[reason])
    assert seen(refused)["not-run"].what == f"not run: {reason}"
    assert "not-run" not in seen(run("fsdp", status="unsupported", reasons=["needs 2 ranks"]))


@pytest.mark.parametrize(
    ("device", "waits", "named"), [("cuda", True, 1), ("cuda", False, 0), ("cpu", True, 0)]
)
def test_a_timer_that_waits_for_the_device_is_named_where_there_is_one(
    device: str, waits: bool, named: int
) -> None:
    record = run("zero1", effective=make_effective(details={"throughput_timer_waits": waits}))
    record = record.model_copy(update={"world": record.world.model_copy(update={"device": device})})
    found = library_notes(Comparison([record]), "speed")
    assert [s.library_note.id for s in found].count("waits-for-the-device") == named
