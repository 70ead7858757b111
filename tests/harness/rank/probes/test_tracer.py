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


class OlderEvent(Event):
    """As torch 2.11 gives it, which does not say its kind."""

    @property
    def activity_type(self) -> Any:  # type: ignore[override]
        raise AttributeError

    def is_user_annotation(self) -> bool:
        return self.kind.endswith("user_annotation")


def note(name: str, start: int, end: int) -> Event:
    return Event(f"harness::{name}", start, end, kind="user_annotation")


def gloo(name: str, start: int, end: int) -> Event:
    return Event(f"gloo:{name}", start, end, thread=9, asynchronous=True)


def kernel(name: str, start: int, end: int, correlation: int = 0) -> Event:
    return Event(name, start, end, thread=7, kind="kernel", device="CUDA", correlation=correlation)


def launch(start: int, correlation: int) -> Event:
    return Event("cudaLaunchKernel", start, start + 1, kind="cuda_runtime", correlation=correlation)


STEP = [note("step 5", 0, 100), note("phase forward", 0, 40), note("phase backward", 40, 100)]


def divided(*events: Event, device: str = "cpu", accounts: Any = None) -> dict[str, Any]:
    """The row of a step of 100 ns, its forward pass of 40 and its backward pass."""
    (row,) = divide_steps([*STEP, *events], device, accounts)
    assert row["step"] == 5
    return row


DIVISIONS = {
    "gloo's threads communicate": (
        "cpu", (30, 40, 30, 40),
        [Event("aten::mm", 0, 30), gloo("all_reduce", 20, 60), Event("aten::copy_", 25, 55, thread=9)],
    ),
    "a hook within autograd that waits does not compute": (
        "cpu", (11, 30, 30, 59),
        [
            Event("autograd::engine::evaluate_function: AddmmBackward0", 40, 90),
            Event("AddmmBackward0", 41, 50), Event("aten::mm", 42, 50),
            Event("c10d::_reduce_scatter_base_", 50, 85), Event("aten::clone", 52, 55),
            gloo("all_reduce", 55, 85),
        ],
    ),
    "messages that a thread sends itself": (
        "cpu", (50, 30, 30, 20),
        [
            Event("aten::mm", 0, 30), Event("c10d::send", 30, 60), Event("gloo:send", 30, 60),
            Event("aten::mm", 70, 90),
        ],
    ),
    "kernels of NCCL communicate, others compute, copies do neither": (
        "cuda", (40, 35, 30, 30),
        [
            Event("aten::mm", 0, 90),  # the host, which only launches
            kernel("sm90_xmma_gemm", 10, 50),
            Event("Memcpy HtoD", 60, 65, kind="gpu_memcpy", device="CUDA"),
            Event("harness::phase forward", 10, 90, kind="gpu_user_annotation", device="CUDA"),
            kernel("ncclDevKernel_AllGather_RING_LL", 45, 80),
        ],
    ),
    "symmetric memory and copies between devices communicate": (
        "cuda", (15, 30, 25, 60),
        [
            kernel("void c10d::symmetric_memory::(anonymous)::multimem_all_reduce_kernel<float>(...)", 0, 20),
            Event("Memcpy PtoP (Device -> Device)", 30, 40, kind="gpu_memcpy", device="CUDA"),
            kernel("gemm", 35, 50),
        ],
    ),
    "nothing on the CPU": ("cpu", (0, 0, 0, 100), []),
    "nothing on CUDA": ("cuda", (0, 0, 0, 100), []),
}  # fmt: skip
"""By case: device, nanoseconds of computing, communication, its exposed part and idling, events."""


@pytest.mark.parametrize("torch", [Event, OlderEvent])
@pytest.mark.parametrize("case", DIVISIONS)
def test_a_step_is_divided_by_what_its_events_mean(case: str, torch: type[Event]) -> None:
    device, expected, events = DIVISIONS[case]
    row = divided(*(torch(**vars(event)) for event in events), device=device)
    parts = ("compute", "communication", "exposed", "idle")
    assert tuple(round(row[f"{part}_seconds"] * 1e9) for part in parts) == expected


def test_collectives_belong_to_the_phase_in_which_they_began_or_were_launched() -> None:
    row = divided(gloo("all_reduce", 55, 85))
    assert [(wait["name"], wait["phase"]) for wait in row["waits"]] == [("gloo:all_reduce", "backward")]
    launched = kernel("ncclDevKernel_AllGather", 50, 80, correlation=11)
    for torch in (Event, OlderEvent):
        events = (torch(**vars(event)) for event in (launch(30, 11), launched))
        row = divided(*events, device="cuda")
        assert [wait["phase"] for wait in row["waits"]] == ["forward"]


def account(ran: int, queued: int) -> float:
    return (ran + queued) / 1e9


def test_a_rank_sleeps_while_it_neither_runs_nor_waits_for_a_processor_or_for_others() -> None:
    events = [
        Event("aten::mm", 0, 30), Event("c10d::allreduce_", 40, 42), gloo("all_reduce", 50, 70),
        Event("aten::mm", 65, 80),
    ]  # fmt: skip
    # Of 100 ns 25 were waited for the collective, from where it was handed over.
    for ran, queued, asleep in ((45, 10, 20), (45, 0, 30), (60, 20, 0)):
        row = divided(*events, accounts={5: StepAccounts(account(ran, queued), [])})
        assert row["asleep_seconds"] * 1e9 == pytest.approx(asleep)
    assert divided(*events)["asleep_seconds"] is None


def test_a_processor_that_is_taken_in_one_phase_hides_no_sleep_in_another() -> None:
    events = [Event("aten::mm", 0, 20), Event("aten::mm", 40, 60), gloo("all_reduce", 60, 90)]
    # 20 of the 40 ns of the forward pass are slept; in the backward pass the thread is queued beside the
    # collective, so that 25 ns are taken off twice.
    phases = [account(20, 0), account(30, 25)]
    for accounts, asleep in (
        (StepAccounts(account(50, 25), phases), pytest.approx(20e-9)),
        (StepAccounts(account(50, 25), []), 0),
        (StepAccounts(None, [None, None]), None),
    ):
        assert divided(*events, accounts={5: accounts})["asleep_seconds"] == asleep


def test_each_step_is_divided_apart() -> None:
    events = [note("step 7", 200, 300), note("step 6", 0, 100), Event("aten::mm", 90, 100)]
    events += [Event("aten::mm", 120, 190), Event("aten::mm", 200, 250)]
    rows = divide_steps(events, "cpu")
    assert [(row["step"], row["compute_seconds"]) for row in rows] == [(6, 10e-9), (7, 50e-9)]


def test_the_first_traced_step_on_a_gpu_only_starts_the_profiler_and_an_unseen_gpu_is_not_idle() -> None:
    steps = [note("step 5", 0, 100), note("step 6", 100, 200)]
    assert counted_steps([*steps, launch(30, 11)], "cuda") == ([], NOTHING_SEEN)
    for device, event, counted in (
        ("cuda", kernel("gemm", 110, 150), [6]),
        ("cpu", Event("aten::mm", 110, 150), [5, 6]),
    ):
        rows, missing = counted_steps([*steps, event], device)
        assert ([row["step"] for row in rows], missing) == (counted, None)
