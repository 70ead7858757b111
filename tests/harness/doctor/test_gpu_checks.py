"""Every check of a GPU machine is ok on sound evidence, and fails on the fault that it is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.doctor.gpu_runs import (
    AGAIN,
    CHECKS,
    FULL,
    ON_CPU,
    RUNS,
    SHARDED,
    SINGLE,
    ZERO,
    Answer,
    Evidence,
    answer_all,
    count_kernels,
)
from harness.gpus.found import Gpu
from harness.record import ErrorPart, RankPart, Record
from tests.harness.doctor.gpu_evidence import fabric_of, notes_of, sound

PAGE = Path(__file__).resolve().parents[3] / "docs" / "doctor.md"
Fault = Callable[[Evidence], Evidence]


def answers(evidence: Evidence) -> dict[str, Answer]:
    return {answer.check.id: answer for answer in answer_all(evidence)}


def with_record(name: str, change: Callable[[Record], dict[str, Any]]) -> Fault:
    """The evidence with fields of one record changed."""

    def planted(evidence: Evidence) -> Evidence:
        record = evidence.records[name]
        changed = record.model_copy(update=change(record))
        return replace(evidence, records={**evidence.records, name: changed})

    return planted


def with_ranks(name: str, change: Callable[[RankPart], dict[str, Any]]) -> Fault:
    """The evidence with fields of one record's ranks changed."""
    return with_record(name, lambda r: {"ranks": [p.model_copy(update=change(p)) for p in r.ranks]})


def with_notes(name: str, **changes: Any) -> Fault:
    return lambda evidence: replace(
        evidence, notes={**evidence.notes, name: notes_of(evidence.records[name], **changes)}
    )


def one_gpu_twice(evidence: Evidence) -> Evidence:
    notes = tuple(note.model_copy(update={"uuid": "GPU-0"}) for note in evidence.notes[ZERO])
    return replace(evidence, notes={**evidence.notes, ZERO: notes})


def old_gpu(evidence: Evidence) -> Evidence:
    v100 = Gpu(name="Tesla V100-SXM2-16GB", uuid="GPU-9", memory_bytes=2**34, capability=(7, 0))
    return replace(evidence, gpus=replace(evidence.gpus, devices=(v100, v100)))


def other_loss(record: Record) -> dict[str, Any]:
    first, *rest = record.steps
    assert first.loss is not None
    return {"steps": [replace(first, loss=first.loss * (1 + 2e-5)), *rest]}


def last_bit(record: Record) -> dict[str, Any]:
    *rest, last = record.steps
    assert last.loss is not None
    return {"steps": [*rest, replace(last, loss=last.loss * (1 + 2**-52))]}


def one_more_byte(record: Record) -> dict[str, Any]:
    index = next(i for i, row in enumerate(record.comm) if row.phase == "backward")
    more = record.comm[index].model_copy(update={"payload_bytes": record.comm[index].payload_bytes + 1})
    return {"comm": [*record.comm[:index], more, *record.comm[index + 1 :]]}


def larger_states(part: RankPart) -> dict[str, Any]:
    return {
        "memory": [
            m.model_copy(update={"kinds": m.kinds | {"optimizer": m.kinds["optimizer"] + 1}})
            if m.kinds and "optimizer" in m.kinds
            else m
            for m in part.memory
        ]
    }


def less_than_reserved(part: RankPart) -> dict[str, Any]:
    return {"memory": [m.model_copy(update={"device_used_bytes": m.reserved_bytes - 1}) for m in part.memory]}


def far_more_than_reserved(part: RankPart) -> dict[str, Any]:
    return {"memory": [m.model_copy(update={"device_used_bytes": 2**33}) for m in part.memory]}


def slow_phase(part: RankPart) -> dict[str, Any]:
    return {"phase_seconds": part.phase_seconds | {"step": [1.5 * s for s in part.step_seconds]}}


def lost_phase(part: RankPart) -> dict[str, Any]:
    return {"phase_seconds": part.phase_seconds | {"backward": [0.0] * len(part.step_seconds)}}


def short_clock(part: RankPart) -> dict[str, Any]:
    return {"step_seconds": [0.97 * seconds for seconds in part.step_seconds]}


def no_kernels(part: RankPart) -> dict[str, Any]:
    return {"overlap": [o.model_copy(update={"compute_seconds": 0.0}) for o in part.overlap]}


def idle_twice(part: RankPart) -> dict[str, Any]:
    return {
        "overlap": [o.model_copy(update={"idle_seconds": o.idle_seconds + o.seconds}) for o in part.overlap]
    }


def one_kernel_less(evidence: Evidence) -> Evidence:
    kernels = {
        rank: {step: count - 1 for step, count in steps.items()}
        for rank, steps in evidence.kernels[SHARDED].items()
    }
    return replace(evidence, kernels={SHARDED: kernels})


def products_at(flops_per_second: float) -> Fault:
    return with_ranks(SHARDED, lambda part: {"matmul_flops_per_second": {"float32": flops_per_second}})


def too_fast(record: Record) -> dict[str, Any]:
    return {"steps": [replace(step, seconds=step.seconds / 1e9) for step in record.steps]}


FAULTS: Sequence[tuple[str, Fault]] = [
    ("devices", one_gpu_twice),
    ("transport", with_record(ZERO, lambda r: {"world": r.world.model_copy(update={"collectives": "gloo"})})),
    ("architecture", old_gpu),
    ("initial-weights", with_record(ZERO, lambda r: {"initial_weights": r.final_weights})),
    ("initial-weights", with_record(SHARDED, lambda r: {"initial_weights": None})),
    ("repeat", with_record(AGAIN, last_bit)),
    ("repeat", with_record(AGAIN, lambda r: {"final_weights": r.initial_weights})),
    ("cpu-loss", with_record(SINGLE, other_loss)),
    ("traffic", with_record(ZERO, one_more_byte)),
    ("traffic", with_record(SHARDED, one_more_byte)),
    ("states", with_ranks(ZERO, larger_states)),
    ("norm", with_notes(SHARDED, norm_peak_bytes=640_001)),
    ("driver-memory", with_ranks(SHARDED, less_than_reserved)),
    ("driver-memory", with_ranks(ZERO, far_more_than_reserved)),
    ("phases", with_ranks(ZERO, slow_phase)),
    ("phases", with_ranks(SHARDED, lost_phase)),
    ("step-time", with_ranks(SHARDED, short_clock)),
    ("step-time", with_notes(ZERO, event_step_seconds=[])),
    ("deepspeed-waits", with_notes(ZERO, synchronisations=[2] * 20)),
    ("trace", with_ranks(SHARDED, no_kernels)),
    ("trace", with_ranks(SHARDED, idle_twice)),
    ("trace", with_ranks(SHARDED, lambda part: {"overlap": []})),
    ("kernels", one_kernel_less),
    ("products", products_at(0.39 * 19.5e12)),
    ("products", products_at(1.06 * 19.5e12)),
    ("utilisation", with_record(SHARDED, too_fast)),
    ("fabric", lambda evidence: replace(evidence, fabric=fabric_of(seconds=0.1))),
    ("fabric", lambda evidence: replace(evidence, fabric=fabric_of(seconds=1e-6))),
    ("fabric", lambda evidence: replace(evidence, fabric=fabric_of(latency=2e-3))),
    ("out-of-memory", with_record(FULL, lambda r: {"status": "failed"})),
    ("out-of-memory", lambda evidence: replace(evidence, seconds_to_notice=15.1)),
    ("after-out-of-memory", with_record(
        SHARDED, lambda r: {"status": "failed", "error": ErrorPart(kind="Exit", message="gone")}
    )),
]  # fmt: skip


def test_a_sound_machine_has_no_failed_check() -> None:
    assert {name: a.detail for name, a in answers(sound()).items() if a.verdict != "ok"} == {}


@pytest.mark.parametrize(
    ("check", "fault"), FAULTS, ids=[f"{i}-{name}" for i, (name, _) in enumerate(FAULTS)]
)
def test_a_fault_fails_its_check(check: str, fault: Fault) -> None:
    found = answers(fault(sound()))[check]
    assert found.verdict == "failed", found.detail


def test_each_check_has_a_fault() -> None:
    assert {check.id for check in CHECKS} == {name for name, _ in FAULTS}


def test_the_page_lists_the_checks() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## GPU check")[2].partition("\n### ")[0]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [(row[0], row[1]) for row in rows] == [(f"| `{check.id}`", check.question) for check in CHECKS]


def test_a_stub_is_never_ok_where_it_cannot_answer() -> None:
    evidence = sound()
    stub = Gpu(name="CUDA stub NVIDIA A100-SXM4-80GB", uuid="0", memory_bytes=2**34, capability=(8, 0))
    found = answers(replace(evidence, gpus=replace(evidence.gpus, devices=(stub, stub))))
    unanswerable = {
        "architecture", "cpu-loss", "norm", "driver-memory", "phases", "step-time", "trace", "kernels",
        "products", "utilisation", "fabric",
    }  # fmt: skip
    assert {name for name, answer in found.items() if answer.verdict == "n/a"} == unanswerable
    assert all("CUDA stub" in found[name].detail for name in unanswerable)


def test_one_gpu_skips_what_needs_two() -> None:
    found = answers(replace(sound(), ranks=1))
    assert {name for name, a in found.items() if a.verdict == "skipped"} == {"devices", "kernels", "fabric"}


def test_a_run_that_was_not_made_skips_its_checks_with_the_reason() -> None:
    reasons = dict.fromkeys(RUNS, "deepspeed is not installed")
    found = answers(replace(sound(), records={}, missing=reasons))
    assert {a.verdict for name, a in found.items() if name != "architecture" and name != "fabric"} == {
        "skipped"
    }
    assert found["traffic"].detail == "deepspeed is not installed"


def test_a_run_that_failed_fails_its_checks() -> None:
    failed = with_record(
        ZERO, lambda r: {"status": "failed", "error": ErrorPart(kind="RuntimeError", message="no luck")}
    )
    found = answers(failed(sound()))
    assert found["states"].verdict == "failed"
    assert "no luck" in found["states"].detail


def test_unknown_devices_and_a_silent_driver_are_not_failures() -> None:
    unknown = with_ranks(SHARDED, lambda part: {"device_name": "NVIDIA X1"})(sound())
    assert {answers(unknown)[name].verdict for name in ("products", "utilisation")} == {"n/a"}
    silent: dict[str, Any] = {"device_used_bytes": None, "device_used_unknown": "in a container"}
    evidence = sound()
    for name in (ON_CPU, SINGLE, AGAIN, ZERO, FULL, SHARDED):
        evidence = with_ranks(
            name, lambda part: {"memory": [m.model_copy(update=silent) for m in part.memory]}
        )(evidence)
    driver = answers(evidence)["driver-memory"]
    assert (driver.verdict, driver.detail) == ("n/a", "in a container")


def test_kernels_belong_to_the_step_in_which_they_begin() -> None:
    def event(name: str, begin: float, category: str = "kernel") -> dict[str, Any]:
        return {"name": name, "cat": category, "ts": begin, "dur": 10.0}

    step = "harness::step 7"
    trace = {
        "traceEvents": [
            event(step, 100, "user_annotation"), event(step, 100, "gpu_user_annotation"),
            event("ncclDevKernel_AllGather_RING_LL", 99), event("ncclDevKernel_AllGather_RING_LL", 101),
            event("ncclDevKernel_ReduceScatter_Sum_f32", 105), event("gemm", 103),
            event("ncclDevKernel_AllReduce_Sum_f64", 110),
        ]
    }  # fmt: skip
    assert count_kernels(trace) == {7: 2}
