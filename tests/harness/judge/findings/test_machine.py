from typing import Any

from harness.judge.comparison import Comparison
from harness.judge.findings.finding import kinds, role_of, statements
from harness.record import PlacementPart
from tests.records import ENVIRONMENT, make_record
from tests.timed_records import processors, ranks
from tests.timed_records import run as timed_run


def rows(load: float | None) -> Comparison:
    """One thread of the reference and two of ddp, on 8 cores."""
    quiet = make_record(environment=ENVIRONMENT | {"load_average": 0.1})
    return Comparison([quiet, make_record(label="ddp", environment=ENVIRONMENT | {"load_average": load})])


def test_a_load_that_no_run_before_it_leaves_is_told() -> None:
    (finding,) = [f for f in rows(10.5).findings if f.id == "busy-machine"]
    assert finding.backends == ("ddp",)
    assert finding.values == {"load_average": 10.5, "cores": 8, "threads_of_largest_run": 2}
    assert role_of("busy-machine") == "figures"


def test_only_what_was_seen_is_told_and_of_cells_alike_once() -> None:
    records = [
        make_record(label=label, environment=ENVIRONMENT | {"load_average": load})
        for label, load in (("ddp", 10.5), ("zero1", 12.25))
    ]
    (told,) = [s for s in statements(Comparison(records).findings) if s.id == "busy-machine"]
    assert told.sentence == (
        "ddp and zero1 on 2 ranks: the load average at the start exceeded cores and threads of the largest "
        "run combined: other programs, or processes of an earlier run, were running"
    )


def test_the_kind_tells_of_nodes_that_share_processors() -> None:
    assert "busiest node" in kinds()["busy-machine"].confirm


def test_ranks_that_take_turns_on_cores_are_told() -> None:
    records = [make_record(label=label, world_size=16) for label in ("ddp", "fsdp")]
    (told,) = [s for s in statements(Comparison(records).findings) if s.id == "cores-shared"]
    assert told.sentence == (
        "ddp and fsdp on 16 ranks: 16 threads per node share 8 cores: speed and scaling say little about the "
        "strategies"
    )
    assert told.role == "figures"


def test_as_many_threads_as_cores_take_no_turns_nor_do_ranks_on_gpus() -> None:
    full, wide = make_record(label="ddp", world_size=8), make_record(label="ddp", world_size=16)
    on_gpus = wide.model_copy(update={"world": wide.world.model_copy(update={"device": "cuda"})})
    for record in (full, on_gpus):
        assert "cores-shared" not in {f.id for f in Comparison([record]).findings}


def test_cells_one_after_the_other_are_no_other_work() -> None:
    for load in (None, 0.0, 2.0, 8.5, 10.0):
        assert "busy-machine" not in {f.id for f in rows(load).findings}


def test_a_cell_that_never_ran_met_no_load() -> None:
    busy = make_record(environment=ENVIRONMENT | {"load_average": 30.0})
    refused = busy.model_copy(update={"status": "unsupported"})
    assert "busy-machine" in {f.id for f in Comparison([busy]).findings}
    assert "busy-machine" not in {f.id for f in Comparison([refused]).findings}


def beside(other_seconds: float, *, cores: int = 2, **changes: Any) -> set[str]:
    """Findings of two ranks of one thread beside work that used so many processor seconds of four."""
    used = processors(machine_busy_seconds=8.0 + other_seconds)
    record = timed_run(
        ranks=[rank.model_copy(update={"processors": used}) for rank in ranks()],
        environment=ENVIRONMENT | {"cores": cores} | changes,
    )
    return {finding.id for finding in Comparison([record]).findings}


def test_work_that_takes_a_fifth_of_a_core_from_the_ranks_is_told() -> None:
    assert "busy-machine" not in beside(0.7)
    assert "busy-machine" in beside(0.9)


def test_work_on_cores_that_the_ranks_leave_free_is_not_told() -> None:
    assert "busy-machine" not in beside(3.9, cores=3)
    assert "busy-machine" in beside(4.9, cores=3)


def test_what_others_used_counts_more_than_the_load_before_the_run() -> None:
    assert "busy-machine" not in beside(0.0, load_average=30.0)
    assert "busy-machine" in beside(4.0, load_average=0.1)


def unbound(*places: PlacementPart, device: str = "cpu", threads: int = 1) -> list[str]:
    """What is said of two ranks in these places."""
    record = timed_run()
    parts = [
        part.model_copy(update={"placement": place}) for part, place in zip(record.ranks, places, strict=True)
    ]
    world = record.world.model_copy(update={"device": device, "threads_per_rank": threads})
    record = record.model_copy(update={"ranks": parts, "world": world})
    return [f.text for f in Comparison([record]).findings if f.id == "numa-unbound"]


def place(*numa_nodes: int, gpu: int | None = None, count: int = 8) -> PlacementPart:
    return PlacementPart(
        processors=f"0-{count - 1}", processor_count=count, numa_nodes=list(numa_nodes), device_numa_node=gpu
    )


def test_ranks_that_the_system_may_move_between_sockets_are_told() -> None:
    moved = ["may run on processors of several NUMA nodes in turn (ranks: 0, 1; NUMA nodes: 0, 1)"]
    assert unbound(place(0, 1), place(0, 1)) == moved
    assert unbound(place(0, 1, gpu=0), place(0, 1, gpu=1), device="cuda", threads=8) == moved


def test_a_rank_far_from_its_gpu_is_told() -> None:
    (text,) = unbound(place(0, gpu=0), place(0, gpu=1), device="cuda")
    assert text == "may run on processors of another NUMA node than their GPU (ranks: 1; NUMA nodes: 0)"


def test_bound_ranks_and_those_that_need_several_nodes_are_not_told() -> None:
    assert unbound(place(0), place(1)) == []
    assert unbound(place(0, gpu=0), place(1, gpu=1), device="cuda") == []
    assert unbound(place(0, 1), place(0, 1), threads=8) == []
    assert unbound(place(), place()) == []
