"""What the events of torch's profiler mean, on events written by hand for gloo and for NCCL."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from harness.rank.probes.tracer import NOTHING_SEEN, StepAccounts, counted_steps, divide_steps


@dataclass
class Event:
    """An event as torch's profiler (Kineto) gives it, with times in ns."""

    given_name: str
    start: int
    end: int
    thread: int = 1
    kind: str = "cpu_op"
    device: str = "CPU"
    correlation: int = 0
    asynchronous: bool = False

    def name(self) -> str:
        return self.given_name

    def start_ns(self) -> int:
        return self.start

    def end_ns(self) -> int:
        return self.end

    def start_thread_id(self) -> int:
        return self.thread

    def activity_type(self) -> str:
        return self.kind

    def device_type(self) -> Any:
        return SimpleNamespace(name=self.device)

    def correlation_id(self) -> int:
        return self.correlation

    def is_async(self) -> bool:
        return self.asynchronous


def note(name: str, start: int, end: int) -> Event:
    return Event(f"harness::{name}", start, end, kind="user_annotation")


def gloo(name: str, start: int, end: int) -> Event:
    return Event(f"gloo:{name}", start, end, thread=9, asynchronous=True)


def kernel(name: str, start: int, end: int, correlation: int = 0) -> Event:
    return Event(name, start, end, thread=7, kind="kernel", device="CUDA", correlation=correlation)


def launch(start: int, correlation: int) -> Event:
    return Event("cudaLaunchKernel", start, start + 1, kind="cuda_runtime", correlation=correlation)


STEP = [note("step 5", 0, 100), note("phase forward", 0, 40), note("phase backward", 40, 100)]


def nanoseconds(row: dict[str, Any]) -> dict[str, int]:
    parts = ("compute", "communication", "exposed", "idle")
    return {part: round(row[f"{part}_seconds"] * 1e9) for part in parts}


def test_on_gloo_operators_compute_and_the_threads_of_gloo_communicate() -> None:
    events = [
        *STEP,
        Event("aten::mm", 0, 30),
        gloo("all_reduce", 20, 60),
        Event("aten::copy_", 25, 55, thread=9),
    ]
    (row,) = divide_steps(events, "cpu")
    assert row["step"] == 5
    assert nanoseconds(row) == {"compute": 30, "communication": 40, "exposed": 30, "idle": 40}


def test_a_hook_within_autograd_that_waits_does_not_compute() -> None:
    events = [
        *STEP,
        Event("autograd::engine::evaluate_function: AddmmBackward0", 40, 90),
        Event("AddmmBackward0", 41, 50),
        Event("aten::mm", 42, 50),
        Event("c10d::_reduce_scatter_base_", 50, 85),
        Event("aten::clone", 52, 55),
        gloo("all_reduce", 55, 85),
    ]
    (row,) = divide_steps(events, "cpu")
    assert nanoseconds(row) == {"compute": 11, "communication": 30, "exposed": 30, "idle": 59}
    assert [(wait["name"], wait["phase"]) for wait in row["waits"]] == [("gloo:all_reduce", "backward")]


def test_on_cuda_kernels_of_nccl_communicate_other_kernels_compute_and_copies_do_neither() -> None:
    events = [
        *STEP,
        Event("aten::mm", 0, 90),  # the host, which only launches
        kernel("sm90_xmma_gemm", 10, 50),
        Event("Memcpy HtoD", 60, 65, kind="gpu_memcpy", device="CUDA"),
        Event("harness::phase forward", 10, 90, kind="gpu_user_annotation", device="CUDA"),
        kernel("ncclDevKernel_AllGather_RING_LL", 45, 80),
    ]
    (row,) = divide_steps(events, "cuda")
    assert nanoseconds(row) == {"compute": 40, "communication": 35, "exposed": 30, "idle": 30}
    assert row["copy_seconds"] * 1e9 == pytest.approx(5)


def test_kernels_of_symmetric_memory_and_copies_between_devices_communicate() -> None:
    events = [
        *STEP,
        kernel("void c10d::symmetric_memory::(anonymous)::multimem_all_reduce_kernel<float, 16>(...)", 0, 20),
        Event("Memcpy PtoP (Device -> Device)", 30, 40, kind="gpu_memcpy", device="CUDA"),
        kernel("gemm", 35, 50),
    ]
    (row,) = divide_steps(events, "cuda")
    assert nanoseconds(row) == {"compute": 15, "communication": 30, "exposed": 25, "idle": 60}


def account(ran: int, queued: int) -> float:
    return (ran + queued) / 1e9


def test_a_rank_sleeps_while_it_neither_runs_nor_waits_for_a_processor_or_for_others() -> None:
    events = [
        *STEP,
        Event("aten::mm", 0, 30),
        Event("c10d::allreduce_", 40, 42),
        gloo("all_reduce", 50, 70),
        Event("aten::mm", 65, 80),
    ]
    # Of 100 ns 25 were waited for the collective, from where it was handed over.
    for ran, queued, asleep in ((45, 10, 20), (45, 0, 30), (60, 20, 0)):
        (row,) = divide_steps(events, "cpu", {5: StepAccounts(account(ran, queued), [])})
        assert row["asleep_seconds"] * 1e9 == pytest.approx(asleep)
    (row,) = divide_steps(events, "cpu")
    assert row["asleep_seconds"] is None


def test_a_processor_that_is_taken_in_one_phase_hides_no_sleep_in_another() -> None:
    events = [*STEP, Event("aten::mm", 0, 20), Event("aten::mm", 40, 60), gloo("all_reduce", 60, 90)]
    # 20 of the 40 ns of the forward pass are slept; in the backward pass the thread is queued beside the
    # collective, so that 25 ns are taken off twice.
    phases = [account(20, 0), account(30, 25)]
    (row,) = divide_steps(events, "cpu", {5: StepAccounts(account(50, 25), phases)})
    assert row["asleep_seconds"] * 1e9 == pytest.approx(20)
    (row,) = divide_steps(events, "cpu", {5: StepAccounts(account(50, 25), [])})
    assert row["asleep_seconds"] == 0
    (row,) = divide_steps(events, "cpu", {5: StepAccounts(None, [None, None])})
    assert row["asleep_seconds"] is None


def test_a_rank_computes_beside_messages_that_its_own_thread_sends() -> None:
    messages = [Event("c10d::send", 30, 60), Event("gloo:send", 30, 60)]
    (row,) = divide_steps([*STEP, Event("aten::mm", 0, 30), *messages, Event("aten::mm", 70, 90)], "cpu")
    assert nanoseconds(row) == {"compute": 50, "communication": 30, "exposed": 30, "idle": 20}


def test_a_kernel_belongs_to_the_phase_that_launched_it() -> None:
    events = [*STEP, launch(30, 11), kernel("ncclDevKernel_AllGather", 50, 80, correlation=11)]
    (row,) = divide_steps(events, "cuda")
    assert [wait["phase"] for wait in row["waits"]] == ["forward"]


def test_each_step_is_divided_apart() -> None:
    events = [note("step 7", 200, 300), note("step 6", 0, 100), Event("aten::mm", 90, 100)]
    events += [Event("aten::mm", 120, 190), Event("aten::mm", 200, 250)]
    rows = divide_steps(events, "cpu")
    assert [row["step"] for row in rows] == [6, 7]
    assert [nanoseconds(row)["compute"] for row in rows] == [10, 50]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_without_events_is_idle(device: str) -> None:
    (row,) = divide_steps([note("step 0", 0, 10)], device)
    assert nanoseconds(row) == {"compute": 0, "communication": 0, "exposed": 0, "idle": 10}


TWO_STEPS = [note("step 5", 0, 100), note("step 6", 100, 200)]


def test_a_gpu_of_which_nothing_was_seen_is_not_idle() -> None:
    assert counted_steps([*TWO_STEPS, launch(30, 11)], "cuda") == ([], NOTHING_SEEN)


def test_the_first_traced_step_on_a_gpu_only_starts_the_profiler() -> None:
    rows, missing = counted_steps([*TWO_STEPS, kernel("gemm", 110, 150)], "cuda")
    assert ([row["step"] for row in rows], missing) == ([6], None)


def test_on_the_cpu_every_traced_step_counts() -> None:
    rows, missing = counted_steps([*TWO_STEPS, Event("aten::mm", 110, 150)], "cpu")
    assert ([row["step"] for row in rows], missing) == ([5, 6], None)
