"""Forms of traces that versions of torch write, and files that are no traces."""

import gzip
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.traces.analysis import RankTrace, read_trace, read_traces
from harness.traces.scanning import TraceFile, arguments_of, nanoseconds
from harness.traces.strategy import likeness_of
from tests.harness.cli.command_line import harness


def event(
    category: str, name: str, start: Any, length: Any, tid: Any = 7, pid: Any = 0, **arguments: Any
) -> Any:
    return {
        "ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": length,
        "args": arguments,
    }  # fmt: skip


GPU = Path(__file__).parent / "gpu"
KERNEL = event("kernel", "gemm", 10, 20)


def written(folder: Path, events: list[Any], name: str = "trace.json", **settings: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps({**settings, "traceEvents": events}), encoding="utf-8")
    return path


def one(path: Path) -> RankTrace:
    (rank,) = read_trace(path)
    return rank


def microseconds(rank: RankTrace) -> list[int]:
    d = rank.division
    values = (d.seconds, d.compute_seconds, d.communication_seconds, d.copy_seconds, d.idle_seconds)
    return [round((value or 0) * 1e6) for value in values]


def test_times_may_be_texts_and_keep_nanoseconds() -> None:
    assert nanoseconds("1711964646123456.789") == 1711964646123456789
    assert (nanoseconds(12), nanoseconds("12.5"), nanoseconds("1e3")) == (12_000, 12_500, 1_000_000)
    assert nanoseconds("nan") is None


HOSTILE = [
    event("cpu_op", name, start, length, tid=tid, pid=pid, **arguments)
    for name, tid, pid, start, length, arguments in (
        ("a", 7, 0, 1, 2, {}),
        ('","args":{"correlation": 9', "7", "0", "1.0009", 2.5, {"correlation": 4}),
        ("b", "stream 7", "7 x", -1, -0.25, {"Concrete Inputs": ["{", "}", '"correlation": 5', "\\"]}),
        ("c\n\t\u2028é", -7, 1.5, 1e-7, 10**25, {"correlation": "8", "of": {"correlation": 9}}),
        ("d}, {", None, True, "x", None, {"correlation": 10**30, "Input Dims": [[[1], []], []]}),
        ("f", 7, 0, 2, 3, {"a": "}}, ", "correlation": 11}),
        ("g", 7, 0, 2, 3, {"a": "}}, {", "b": "}},"}),
        ("e", [], {}, 5, 6, {"External id": 3, "correlation": -1}),
    )
]
HOSTILE += [{"ph": "s", "id": 3, "pid": 1, "tid": 2, "ts": 5, "cat": "ac2g", "name": "ac2g"}, {"ph": "X"}]
HOSTILE += [{"ph": "i", "name": "[memory]", "args": {"Device": text}} for text in ("a", "}}, ", '"}')]


@pytest.mark.parametrize("layout", ["as written", "compact", "indented", "keys in another order"])
@pytest.mark.parametrize("file", [None, *sorted(GPU.glob("*.gz"))], ids=lambda file: file and file.stem)
def test_what_is_read_by_the_order_of_keys_is_what_json_says(
    file: Path | None, layout: str, tmp_path: Path
) -> None:
    text = gzip.decompress(file.read_bytes()).decode() if file else json.dumps(3 * [*HOSTILE, *HOSTILE[::-1]])
    document = json.loads(text, strict=False, parse_float=str)
    events = document["traceEvents"] if isinstance(document, dict) else document
    if layout == "keys in another order":
        events = [dict(sorted(one.items())) for one in events]
    if layout != "as written":
        separators = (",", ":") if layout == "compact" else None
        text = json.dumps(events, indent=2 if layout == "indented" else None, separators=separators)
        events = json.loads(text, strict=False, parse_float=str)
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    for found, one in zip(TraceFile(path).events(), events, strict=True):
        assert found[0] == one["ph"]
        if found[0] == "X" and len(one) > 1:
            *_, start, length, arguments = found
            assert found[1:3] == (one["cat"], one["name"])
            assert [*map(str, found[3:5])] == [str(one["pid"]), str(one["tid"])]
            times = nanoseconds(start), nanoseconds(length)
            assert times == (nanoseconds(one["ts"]), nanoseconds(one["dur"]))
            assert arguments_of(arguments) == one.get("args", {})


@pytest.mark.parametrize("time", [float("nan"), 1e300, 10**40, True, None, [1], "soon"])
def test_events_without_a_valid_time_are_left_out_and_counted(time: Any, tmp_path: Path) -> None:
    rank = one(written(tmp_path, [KERNEL, KERNEL | {"ts": time}, KERNEL | {"dur": -5}]))
    assert microseconds(rank) == [20, 20, 0, 0, 0]
    assert rank.remarks == ["2 events are not JSON or have no valid time, and were left out"]


def test_every_kind_of_communication_kernel_is_seen(tmp_path: Path) -> None:
    names = [
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
        "void multimem_all_reduce_kernel<c10::BFloat16, 16>(...)",
        "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<float>(...)",
        "nvshmemi_transfer_thread", "void vllm::cross_device_reduce_1stage<__half, 8>(...)",
        "void aiter::reduce_scatter_cross_device_store<__hip_bfloat16, 8>(...)",
    ]  # fmt: skip
    events = [event("Kernel", name, str(100 * n), "50.0", tid="stream 20") for n, name in enumerate(names)]
    events += [
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 600, 50),
        event("cuda_sync", "x", 0, 9999),
    ]
    rank = one(written(tmp_path, events))
    assert microseconds(rank) == [650, 0, 350, 50, 300]
    assert {call.operation for call in rank.calls} == {None}


def said(name: str, given: int, taken: int, size: int, dtype: str = "Float", **more: Any) -> dict[str, Any]:
    """Arguments of NCCL: of a kernel, or of `record_param_comms`."""
    counts = {"In msg nelems": given, "Out msg nelems": taken, "Group size": size}
    return {"Collective name": name, **counts, "dtype": dtype} | more


STRIDED = {
    "Process Group Name": "3", "Process Group Ranks": "[0, 8, 16, ...]", "Global rank start": 0,
    "Global rank stride": 8,
}  # fmt: skip
COLLECTIVES = {
    "arguments of a kernel": (
        [event("kernel", "ncclDevKernel_SendRecv", 0, 10,
               **said("_allgather_base", 8, 64, 8, "BFloat16", **STRIDED))],
        ("all_gather", "bfloat16", 128, 10e-6), (8, tuple(range(0, 64, 8)), 128 / 10e-6 * 7 / 8),
    ),
    "a launch of NCCL": (
        [
            event("user_annotation", "nccl:all_to_all", 0, 10, tid=1, pid=99,
                  **{"Input Dims": [[6, 2]], "Input type": ["c10::Half"]}),
            event("cuda_runtime", "cudaLaunchKernelExC", 5, 1, tid=1, pid=99, correlation=4),
            event("kernel", "ncclKernel_AllReduce_RING_LL_Sum_int8_t", 20, 30, correlation=4),
        ],
        ("all_to_all", "float16", 24, 30e-6), (None, None, None),
    ),
    "a launch on an XPU": (
        [
            event("cpu_op", "record_param_comms", 0, 9, tid=1, pid=99, **said("allreduce", 4, 4, 2)),
            event("xpu_runtime", "urEnqueueKernelLaunch", 5, 1, tid=1, pid=99, correlation=4),
            event("collective_comm", "xccl::allreduce", 0, 9, tid=1, pid=99),
            event("kernel", "oneccl_allreduce_pcie", 20, 30, correlation=4),
        ],
        ("all_reduce", "float32", 16, 30e-6), (2, None, 16 / 30e-6),
    ),
    "groups and ranks of impossible size": (
        [event("kernel", "ncclDevKernel", 0, 10,
               **said("allreduce", 8, 8, 10**18, **STRIDED | {"Process Group Ranks": ""}))],
        ("all_reduce", "float32", 32, 10e-6), (None, None, None),
    ),
}  # fmt: skip
"""Events -> operation, dtype, payload, seconds of their collective; size, ranks of its group, bus bytes."""


@pytest.mark.parametrize("case", COLLECTIVES)
def test_arguments_launches_and_shapes_tell_of_a_collective_what_a_kernel_s_name_does_not(
    case: str, tmp_path: Path
) -> None:
    events, told, (size, ranks, rate) = COLLECTIVES[case]
    rank = one(written(tmp_path, events, distributedInfo={"rank": -1, "world_size": 10**30}))
    assert (rank.rank, rank.world_size) == (None, None)
    (call,) = rank.calls
    assert (call.operation, call.dtype, call.payload_bytes, call.seconds) == told
    assert (call.group.size, call.group.ranks) == (size, ranks)
    assert call.bus_bytes_per_second == (rate and pytest.approx(rate))


def test_merged_traces_are_one_line_for_each_device(tmp_path: Path) -> None:
    events = [event("kernel", "gemm", 0, 10, pid=pid) for pid in (0, 1)]
    assert [rank.rank for rank in read_trace(written(tmp_path, events))] == [0, 1]
    assert len(read_trace(written(tmp_path, events, distributedInfo={"rank": 5}))) == 1


def test_old_names_and_numbers_that_are_no_json_do_not_end_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(
        '{"traceEvents": [\n{"ph": "X", "cat": "kernel", "name": "C:\\gemm", "pid": 0, "tid": 7, '
        '"ts": 0, "dur": 4, "args": {"occupancy": inf}},\n' + json.dumps(KERNEL) + "\n]}",
        encoding="utf-8",
    )
    assert microseconds(one(path))[:2] == [30, 24]


def test_a_list_of_events_and_settings_after_them_are_read(tmp_path: Path) -> None:
    path = tmp_path / "worker_rank7.json"
    path.write_text(json.dumps([KERNEL, None, {"ph": "M"}]), encoding="utf-8")
    assert one(path).rank == 7
    path.write_text(
        json.dumps({"traceEvents": [KERNEL], "distributedInfo": {"rank": 3, "pg_config": "[..."}})
    )
    assert one(path).rank == 3


BAD = {
    "empty": (b"", "is empty"),
    "other.json": (b'{"nodes": []}', "has no list 'traceEvents'"),
    "no.json": (b"hello", "is not JSON"),
    "cut.json": (json.dumps({"traceEvents": [KERNEL, KERNEL]}).encode()[:-40], "is cut off after 1 events"),
    "cut.json.gz": (gzip.compress(json.dumps({"traceEvents": [KERNEL] * 99}).encode())[:-30], "is cut off"),
    "chrome.json": (json.dumps({"traceEvents": [event("blink", "paint", 0, 1)]}).encode(), "of another tool"),
    "idle.json": (json.dumps({"traceEvents": [event("cpu_op", "aten::mm", 0, 1)]}).encode(), "neither"),
    "nothing.json": (b'{"traceEvents": []}', "holds no event"),
    "timeline.raw.json": (b'[[1683000000000, 2, "aten::add", 0]]', "is a memory timeline"),
    "timeline.json.gz": (gzip.compress(b"[[0, 1], [[0, 512], [0, 512]]]"), "is a memory timeline"),
    "a.zip": (b"PK\x03\x04abcdefgh", "is a zip archive"),
    "a.nsys-rep": (b"SQLite format 3\0", "an SQLite database"),
    "deep.json": (b'{"traceEvents": [{"args":' + b"[" * 10**5, "nests too deeply"),
    "digits.json": (b'{"traceEvents": [{"ts":' + b"9" * 5000 + b"}]}", "a number of thousands of digits"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_trace_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    data, words = BAD[name]
    (tmp_path / name).write_bytes(data)
    done = harness("trace", tmp_path / name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_loop_of_links_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    done = harness("trace", tmp_path / "a", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot be read: Too many levels of symbolic links; give a trace" in done.stderr
    assert done.stderr.count("\n") == 1


def test_folders_pipes_and_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("pipe", "is a pipe or device"), (".", "is a folder"), ("absent", "No such file")):
        with pytest.raises(HarnessError, match=words):
            read_trace(tmp_path / name)
    monkeypatch.setattr("harness.traces.scanning.EARLY_BYTES", 2**20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b" " * 2**23))
    with pytest.raises(HarnessError, match="unpacks to more than 250 times"):
        read_trace(tmp_path / "bomb.gz")


def test_a_rank_given_twice_is_refused_and_a_baseline_compares(tmp_path: Path) -> None:
    first = written(tmp_path, [KERNEL], "a.json", distributedInfo={"rank": 0})
    second = written(tmp_path, [event("kernel", "gemm", 0, 40)], "b.json", distributedInfo={"rank": 0})
    done = harness("trace", first, second, cwd=tmp_path)
    assert done.returncode == 1
    assert "are both of rank 0" in done.stderr
    for distributed, words in ((None, "is given twice"), ({"rank": 1, "world_size": 2}, "of a job with 2")):
        other = (
            first if distributed is None else written(tmp_path, [KERNEL], "c", distributedInfo=distributed)
        )
        large = written(tmp_path, [KERNEL], "a.json", distributedInfo={"rank": 0, "world_size": 64})
        with pytest.raises(HarnessError, match=words):
            read_traces([other, large])
    done = harness("trace", first, "--baseline", second, "--json", "-o", "out.md", cwd=tmp_path)
    document = json.loads(done.stdout)
    kernel = {"kernel": "gemm", "before_seconds": 40e-6, "after_seconds": 20e-6}
    assert document["changes"]["kernels"] == [kernel]
    assert [*document["ranks"][0]][:8] == [
        "rank", "seconds", "compute_seconds", "communication_seconds", "exposed_seconds", "copy_seconds",
        "idle_seconds", "overlap_share",
    ]  # fmt: skip
    assert (tmp_path / "out.trace.svg").is_file()
    assert "out.trace.svg" in (tmp_path / "out.md").read_text(encoding="utf-8")


def test_many_all_reduces_of_two_sizes_are_not_taken_for_buckets(tmp_path: Path) -> None:
    """As 73 multimem_all_reduce kernels of a model on 8 B200 (AMD-AGI/TraceLens, tests/traces/b200)."""
    shapes = {"Input type": ["c10::BFloat16"]}
    events = []
    for number in range(73):
        at = 100 * number
        sizes = {"Input Dims": [[2727936 if number % 2 else 2557440]]}
        events += [
            event("cpu_op", "symm_mem::multimem_all_reduce_", at, 9, tid=1, pid=99, **shapes, **sizes),
            event("cuda_runtime", "cudaLaunchKernel", at + 1, 1, tid=1, pid=99, correlation=number + 1),
            event("kernel", "multimem_all_reduce_kernel<c10::BFloat16>", at, 29, correlation=number + 1),
        ]
    rank = one(written(tmp_path, events))
    assert Counter((call.operation, call.payload_bytes) for call in rank.calls) == {
        ("all_reduce", 5_455_872): 36,
        ("all_reduce", 5_114_880): 37,
    }
    assert likeness_of(rank).strategy == "tensor parallelism, or equal buckets of DDP"


def test_every_step_holds_its_own_kernels_and_calls(tmp_path: Path) -> None:
    events = [event("user_annotation", f"ProfilerStep#{n}", 100 * n, 90, tid=1, pid=99) for n in (2, 0, 1)]
    events += [event("kernel", "gemm", 100 * n + 10, 10 * (n + 1)) for n in range(3)]
    events += [event("kernel", "ncclDevKernel", 195, 30), event("gpu_memcpy", "Memcpy HtoD", 85, 10)]
    events += [event("cpu_op", "c10d::allreduce_", 100 * n + 50, 1, tid=1, pid=99) for n in range(3)]
    events += [event("cpu_op", "c10d::allreduce_", 95, 1, tid=1, pid=99)]
    rank = one(written(tmp_path, events))
    found = [
        (s.step, *(round((v or 0) * 1e6) for v in (d.compute_seconds, d.exposed_seconds, d.copy_seconds)))
        for s in rank.steps
        if (d := s.division)
    ]
    assert found == [(0, 10, 0, 5), (1, 20, 0, 0), (2, 30, 10, 0)]
    assert sorted(call.step for call in rank.calls if call.step is not None) == [0, 1, 2]


def test_zero_of_deepspeed_is_held_against_a_textbook_that_scatters(tmp_path: Path) -> None:
    """Norms are no part of what is reduced; an all-reduce and a gather are 3/2 of a scatter and a gather."""
    called = [("allreduce", 4096, 4096), ("allreduce", 1, 1), ("_allgather_base", 2048, 4096)]
    events = [event("kernel", "ncclDevKernel", number, 1, **said(*of, 2)) for number, of in enumerate(called)]
    like = likeness_of(one(written(tmp_path, events)))
    assert (like.parameters, like.unit_bytes) == (4096, [4 * 4096])
    assert like.expected_by.startswith("the closed form of ZeRO-1 and ZeRO-2 that scatter gradients")
    assert like.expected_bytes == 4 * 4096
    assert like.sent_bytes == pytest.approx(1.5 * 4 * 4096, abs=8)
