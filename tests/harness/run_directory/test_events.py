"""Messages by which memory ran out, as libraries word them."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from harness.backends.base import Effective
from harness.run_directory.events import (
    DoneEvent,
    EvaluationEvent,
    EventWriter,
    FailureEvent,
    SetupEvent,
    Tail,
    is_out_of_memory,
    line_of_out_of_memory,
    read_event,
    speaks_of_out_of_memory,
)
from tests.records import make_effective


@dataclass(frozen=True, kw_only=True)
class WithDepth(Effective):
    """What a third party's backend may say beyond the contract."""

    pipeline_depth: int = 4


def setup_event(effective: Effective, **changes: Any) -> SetupEvent:
    values: dict[str, Any] = {
        "native_config": {"stages": [1, 2]}, "versions": {}, "initial_weights": None, "collectives": "gloo",
        "rank": 0, "host": "node1", "device_name": "cpu", "steps": 2, "setup_seconds": 1.0,
        "data": dict.fromkeys(
            ("samples", "training_samples", "evaluation_samples", "target_tokens", "vocabulary_size"), 8
        ),
    }  # fmt: skip
    return SetupEvent(effective=effective, **(values | changes))


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    events = [
        setup_event(make_effective()),
        FailureEvent(status="failed", error_kind="E", message="line\nline", at=1.0),
        DoneEvent(),
    ]
    writer = EventWriter(path)
    for event in events:
        writer.write(event)
    writer.close()
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(events)
    tail = Tail(path)
    assert tail.read() == events
    assert tail.broken_lines == 0


def test_a_line_that_is_still_written_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    line = DoneEvent().model_dump_json().encode() + b"\n"
    path.write_bytes(line[:5])
    tail = Tail(path)
    assert tail.read() == []
    path.write_bytes(line)
    assert tail.read() == [DoneEvent()]
    assert tail.broken_lines == 0


def test_numbers_that_are_not_finite_are_null() -> None:
    evaluation = EvaluationEvent(step=1, loss_sum=math.nan, target_tokens=8, samples=2, seconds=1.0)
    assert json.loads(evaluation.model_dump_json())["loss_sum"] is None
    config = setup_event(make_effective(), native_config={"scale": [math.inf]})
    assert json.loads(config.model_dump_json())["native_config"] == {"scale": [None]}


def test_what_only_a_third_party_says_is_among_the_details() -> None:
    said = setup_event(WithDepth(**vars(make_effective(details={"mesh": [2]})))).effective
    assert type(said) is Effective
    assert said.details == {"mesh": [2], "pipeline_depth": 4}


def test_a_backend_that_says_what_runs_in_other_types_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"effective\.accumulation_steps"):
        setup_event(make_effective(accumulation_steps="many"))


@pytest.mark.parametrize("line", [b"", b"[]", b'{"kind": "other"}', b'{"kind": "done", "more": 1}', b'{"ki'])
def test_a_line_that_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(ValidationError):
        read_event(line)


OUT_OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has a total capacity of 19.07 MiB",
    "HIP out of memory. Tried to allocate 2.00 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.29.7\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "ncclUnhandledCudaError: Call failed.\nLast error:\nFailed to CUDA calloc async 608 bytes",
    "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8",
    "[Errno 12] Cannot allocate memory",
    "std::bad_alloc",
    "MemoryError",
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.28 TiB for an array",
]  # fmt: skip
OTHERS = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "NCCL error: unhandled system error, ncclSystemError: System call (e.g. socket, malloc) failed",
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE)",
    "no memory format was given",
    "except MemoryError: pass",
    "libgomp.so.1: cannot allocate memory in static TLS block",
]  # fmt: skip


@pytest.mark.parametrize("message", OUT_OF_MEMORY)
def test_what_libraries_say_of_memory_that_ran_out(message: str) -> None:
    assert speaks_of_out_of_memory(message)
    assert is_out_of_memory(RuntimeError(message))
    assert line_of_out_of_memory(f"step 3\n{message}\nAborted") is not None


@pytest.mark.parametrize("message", OTHERS)
def test_other_errors_are_not_of_memory(message: str) -> None:
    assert not is_out_of_memory(RuntimeError(message))
    assert line_of_out_of_memory(message) is None


def test_an_error_raised_from_it_is_one() -> None:
    kind = type("OutOfMemoryError", (RuntimeError,), {})
    assert is_out_of_memory(kind("no words"))
    assert is_out_of_memory(MemoryError())
    error = ValueError("the engine cannot be closed")
    error.__context__ = RuntimeError("CUDA out of memory")
    assert is_out_of_memory(error)
    error.__suppress_context__ = True
    assert not is_out_of_memory(error)


def test_warnings_of_a_program_that_went_on_do_not_count() -> None:
    assert line_of_out_of_memory("UserWarning: CUDA out of memory, a smaller block is taken") is None
    assert line_of_out_of_memory("node1:7:9 [0] NCCL WARN Cuda failure 2 'out of memory'") is not None
