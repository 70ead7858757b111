"""The counter on a group of one rank: what it counts as what, and that nothing of it stays behind."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from harness.rank.live.observer import DIGESTED_STEPS, Observer
from harness.rank.probes import communication
from harness.rank.probes.memory import AllocatorProbe, allocator_probe
from harness.rank.probes.probes import Probes
from harness.rank.probes.tracer import Tracer
from harness.rank.step_hooks import Step, StepHook, StepHooks

TENSOR = torch.ones(10)


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def kernels() -> list[str]:
    """Operators for which a kernel of ours is in place."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in communication.OPERATORS if has(f"c10d::{name}", "BackendSelect")]


def test_every_operator_of_c10d_that_moves_data_is_counted() -> None:
    names = {
        schema.name.removeprefix("c10d::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("c10d::")
    }
    assert set(communication.OPERATORS) <= names
    assert names - set(communication.OPERATORS) <= {"check_for_nan"}  # looks at this rank's tensor only


def test_kernels_exist_while_it_counts_and_at_no_other_time_nor_after_an_error() -> None:
    counter = communication.CommunicationCounter()
    assert kernels() == []

    def fail() -> None:
        assert kernels() == list(communication.OPERATORS)
        raise RuntimeError("the library failed")

    with pytest.raises(RuntimeError, match="library"), counter.counting("evaluation"):
        fail()
    assert kernels() == []
    assert counter.phase == "setup"  # the phase of before, which was the first


def test_rows_hold_phase_calls_payload_and_role() -> None:
    counter = communication.CommunicationCounter()
    with counter.counting("setup"):
        dist.all_reduce(TENSOR)
        dist.barrier()
    dist.all_reduce(TENSOR)  # counted by nobody
    with counter.counting("evaluation"):
        dist.broadcast(TENSOR, 0)
        dist.broadcast(TENSOR, 0)
    found = [(r["phase"], r["op"], r["dtype"], r["calls"], r["payload_bytes"]) for r in counter.rows()]
    assert found == [
        ("setup", "all_reduce", "float32", 1, 40),
        ("setup", "barrier", "none", 1, 0),
        ("evaluation", "broadcast", "float32", 2, 80),
    ]
    assert {row["role"] for row in counter.rows()} == {"world"}


def test_the_largest_call_is_kept() -> None:
    counter = communication.CommunicationCounter()
    with counter.counting("step"):
        for count in (2, 7, 5):
            dist.all_reduce(torch.ones(count))
    (row,) = counter.rows()
    assert (row["calls"], row["payload_bytes"], row["largest_bytes"]) == (3, 56, 28)


def test_a_call_that_joins_dtypes_is_counted_once_under_each() -> None:
    counter = communication.CommunicationCounter()
    tensors = [torch.ones(7), torch.ones(6, dtype=torch.bfloat16), torch.ones(3)]
    whole = [torch.empty_like(tensor) for tensor in tensors]
    with counter.counting("step"):
        torch.ops.c10d.allgather_into_tensor_coalesced_(whole, tensors, dist.group.WORLD.boxed())
    found = [(r["op"], r["dtype"], r["calls"], r["payload_bytes"]) for r in counter.rows()]
    assert found == [("all_gather", "float32", 1, 40), ("all_gather", "bfloat16", 1, 12)]


def test_a_phase_within_a_probed_step_leaves_the_step_counting() -> None:
    counter = communication.CommunicationCounter()
    counter.start()
    counter.phase = "step"
    with counter.counting("checkpoint"):
        dist.all_reduce(TENSOR)
    dist.all_reduce(TENSOR)
    counter.stop()
    assert [row["phase"] for row in counter.rows()] == ["checkpoint", "step"]
    assert kernels() == []


@pytest.mark.parametrize(
    ("ranks", "role"),
    [([0, 1, 2, 3], "world"), ([2, 3], "shard"), ([1, 3], "replica"), ([0, 2], "replica")],
)
def test_neighbours_share_a_copy_and_ranks_apart_hold_the_same_shard(ranks: list[int], role: str) -> None:
    assert communication.group_role(ranks, 4) == role


def test_code_of_the_job_is_told_from_a_backend_of_the_same_package() -> None:
    assert communication.called_by({"tests"})
    assert not communication.called_by({"tests"}, {__name__})
    assert not communication.called_by({"elsewhere"})


def test_a_tracer_at_work_in_a_timed_step_is_told() -> None:
    tracer = Tracer("cpu", None)
    probes = Probes(allocator_probe("cpu"), communication.CommunicationCounter(), tracer, Observer())
    probes.prepare(Step(number=0, window="timed"))
    assert "tracer" not in probes.timed_probes
    tracer.start()
    probes.prepare(Step(number=1, window="traced"))
    assert "tracer" not in probes.timed_probes
    probes.prepare(Step(number=2, window="timed"))
    tracer.stop()
    assert "tracer" in probes.timed_probes


@pytest.mark.parametrize(("step", "told"), [(DIGESTED_STEPS - 1, {"observer"}), (DIGESTED_STEPS, set())])
def test_a_timed_step_that_is_looked_at_more_closely_is_told(step: int, told: set[str]) -> None:
    observer = Observer()
    probes = Probes(AllocatorProbe(), communication.CommunicationCounter(), Tracer("cpu", None), observer)
    observer.prepare(Step(number=step, since_first=step))
    probes.prepare(Step(number=step, window="timed"))
    observer.facts()
    assert probes.timed_probes == told


class Noting(StepHook):
    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def prepare(self, step: Step) -> None:
        self.told.append(f"prepare {self.name}")

    def enter(self, phase: str, last: bool) -> None:
        self.told.append(f"{phase} {self.name}")

    def facts(self) -> dict[str, str]:
        return {"known": self.name, self.name: ""}


def test_shells_are_prepared_from_without_and_told_from_within() -> None:
    told: list[str] = []
    shells = StepHooks([Noting("outer", told), Noting("inner", told)])
    shells.prepare(Step(number=0))
    shells.enter("forward")
    assert told == ["prepare outer", "prepare inner", "forward inner", "forward outer"]
    assert shells.facts() == {"known": "inner", "inner": "", "outer": ""}
