"""Snapshots of torch's own allocator on the CUDA stub, and files that are none.

stub.pickle: four linear layers of 256 x 256, two steps of AdamW on 512 rows, Python stacks.
"""

import gzip
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.snapshots.account import accounts, read_snapshot
from harness.tell.dumps import snapshot_document
from tests.harness.cli.command_line import harness

FILE = Path(__file__).parent / "stub.pickle"
LAYERS = 4 * 256 * (256 + 1)
"""Parameters."""
ACTIVATION_BYTES = 4 * 512 * 256


def test_the_peak_is_the_one_that_torch_counted() -> None:
    (account,) = accounts(read_snapshot(FILE))
    # torch.cuda.memory_stats() of the same process.
    assert account.peak_allocated_bytes == account.peak_active_bytes == 8_140_800
    assert (account.peak_reserved_bytes, account.allocated_bytes) == (31_457_280, 7_877_120)
    assert account.free_in_used_segments_bytes == 19_385_856
    assert sum(account.at_peak.values()) == account.peak_allocated_bytes


def test_blocks_belong_to_whom_stacks_and_sizes_prove() -> None:
    (account,) = accounts(read_snapshot(FILE))
    at_peak = account.at_peak
    assert at_peak["weights"] == 4 * LAYERS
    # Two moments, and a step count for each of the eight tensors stays on the host.
    assert at_peak["optimizer"] == 2 * 4 * LAYERS
    # Inputs and results of the activation of each layer; those of the last two are freed by then.
    assert at_peak["activations"] == 6 * ACTIVATION_BYTES
    assert at_peak["gradients"] == 4 * 256 * 256 + 1024
    # Gradients of the loss, and of activations on threads that have no Python stack; the batch and a loss.
    assert at_peak["backward"] == 2 * ACTIVATION_BYTES + 512
    assert at_peak["unknown"] == ACTIVATION_BYTES + 512


def block(address: int, size: int, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": []}


def segment(*blocks: dict[str, Any]) -> dict[str, Any]:
    total = sum(b["size"] for b in blocks)
    return {
        "device": 0, "address": blocks[0]["address"], "total_size": total, "stream": 0, "blocks": [*blocks],
    }  # fmt: skip


def step(action: str, address: int, size: int, *frames: tuple[str, str]) -> dict[str, Any]:
    shown = [{"filename": file, "name": name, "line": 1} for file, name in frames]
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": shown}


MB = 2**20
MOVE = ("torch/nn/modules/module.py", "_apply")
FORWARD = ("torch/nn/modules/module.py", "_call_impl")
ENGINE = ("??", "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::ReadyQueue>)")
WRAPPER = ("torch/optim/optimizer.py", "wrapper")
BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")


def of_steps(*events: tuple[int, tuple[tuple[str, str], ...]], freed: tuple[int, ...] = ()) -> dict[str, int]:
    """MB at the peak by category, of allocations of a size and a stack; `freed` ones end with the history."""
    trace = [step("alloc", 10**9 * n, size * MB, *frames) for n, (size, frames) in enumerate(events, 1)]
    trace += [step("free_requested", 10**9 * n, events[n - 1][0] * MB) for n in freed]
    left = [n for n in range(1, len(events) + 1) if n not in freed]
    pools = [segment(block(10**9 * n, events[n - 1][0] * MB)) for n in left]
    (account,) = accounts({"segments": pools, "device_traces": [trace]})
    return {category: size // MB for category, size in account.at_peak.items()}


@pytest.mark.parametrize(
    "stack",
    [
        (("own/lion.py", "step"), WRAPPER),
        (("torchao/optim/adam.py", "_new_buffer"), ("torchao/optim/adam.py", "step"), WRAPPER),
        (("transformers/optimization.py", "step"), WRAPPER),
        (("deepspeed/runtime/zero/stage3.py", "initialize_optimizer_states"),),
        (("own/muon.py", "step"), ("train.py", "main")),
    ],
)
def test_what_an_update_allocates_is_the_optimizer_s_if_it_lives_on(
    stack: tuple[tuple[str, str], ...],
) -> None:
    made = ((100, (MOVE,)), (200, stack), (300, stack))
    assert of_steps(*made) == {"weights": 100, "optimizer": 500}
    assert of_steps(*made, freed=(3,)) == {"weights": 100, "optimizer": 200, "temporary": 300}


def test_what_zero_allocates_has_its_category() -> None:
    """Places of snapshots that DeepSpeed 0.19.8 left on torch's own allocator, under stages 2 and 3."""
    stage2 = ("allreduce_bucket", "copy_grads_in_partition", "__init__", "flatten_dense_tensors_aligned")
    places = [("zero/stage_1_and_2.py", name) for name in stage2]
    places += [("zero/stage3.py", "_create_fp32_partitions"), ("zero/utils.py", "defragment")]
    found = of_steps(*((10**n, (place,)) for n, place in enumerate(places)))
    assert found == {"weights": 111100, "gradients": 10, "communication": 1}
    both = ("zero/stage3.py", "_setup_for_real_optimizer")
    made = ((20, (places[5],)), (20, (both,)), (30, (both,)), (20, (both,)))
    assert of_steps(*made) == {"weights": 20, "gradients": 20, "communication": 50}
    assert of_steps(*made[:1], made[2]) == {"weights": 20, "communication": 30}  # gradients on the host


@pytest.mark.parametrize("thread", [(), (("??", "at::detail::empty_cuda(...)"), ENGINE), (FORWARD, BACKWARD)])
def test_what_outlives_a_backward_pass_is_a_gradient_however_stacks_were_recorded(
    thread: tuple[tuple[str, str], ...],
) -> None:
    found = of_steps((100, (MOVE,)), (100, thread), (200, (("own/lion.py", "step"), WRAPPER)))
    named = "activations" if thread and thread[0] == FORWARD else "gradients"
    assert found == {"weights": 100, named: 100, "optimizer": 200}


def test_buckets_that_ddp_makes_again_in_a_forward_pass_are_no_activations() -> None:
    """After the first step, in the order in which gradients were ready."""
    assert of_steps((100, (("torch/nn/parallel/distributed.py", "_pre_forward"), FORWARD))) == {
        "communication": 100
    }


def test_a_thread_without_stacks_allocates_no_gradients_where_nothing_runs_backward() -> None:
    assert of_steps((100, (MOVE,)), (70, ()), (50, (FORWARD,))) == {
        "weights": 100, "activations": 50, "unknown": 70,
    }  # fmt: skip


def test_blocks_older_than_the_recording_have_a_row_of_their_own_and_their_sizes_are_of_weights() -> None:
    """The recording begins after the model was built."""
    grown = [step("alloc", 10**9, MB), step("alloc", 2 * 10**9, 2 * MB, FORWARD)]
    pools = [segment(block(512, MB)), segment(block(10**9, MB)), segment(block(2 * 10**9, 2 * MB))]
    (account,) = accounts({"segments": pools, "device_traces": [grown]})
    assert account.at_peak == {"gradients": MB, "activations": 2 * MB, "before the recording": MB}


def test_memory_over_time_reaches_the_peak_and_is_drawn_with_it(tmp_path: Path) -> None:
    (account,) = accounts(read_snapshot(FILE))
    (peak,) = [moment["bytes"] for moment in account.over_time if moment["is_peak"]]
    assert peak == account.at_peak
    assert sum(account.over_time[0]["bytes"].values()) == 0
    assert sum(account.over_time[-1]["bytes"].values()) == account.allocated_bytes
    for name in ("s.md", "s.html"):
        done = harness("snapshot", FILE, "-o", name, cwd=tmp_path)
        assert done.returncode == 0
        first = done.stdout.splitlines()[0]
        assert first == "Peak 8.14 MB allocated: activations 39 %, optimizer 26 %, weights 13 %"
    drawn = (tmp_path / "s.snapshot_over_time.svg").read_text()
    assert "peak 8.14 MB" in drawn
    assert "before the recording" not in drawn
    assert "peak 8.14 MB" in (tmp_path / "s.html").read_text()


def test_a_gzipped_snapshot_is_read(tmp_path: Path) -> None:
    (tmp_path / "s.pickle.gz").write_bytes(gzip.compress(FILE.read_bytes()))
    assert accounts(read_snapshot(tmp_path / "s.pickle.gz")) == accounts(read_snapshot(FILE))


def test_blocks_that_other_streams_hold_are_active_and_not_allocated() -> None:
    held = [step("alloc", 0, 1024), step("free_requested", 0, 1024), step("alloc", 4096, 512)]
    held += [step("free_completed", 0, 1024), step("free_requested", 4096, 512)]
    parts = [
        block(0, 4096, "inactive"), block(4096, 512, "active_awaiting_free"), block(4608, 100, "inactive"),
    ]  # fmt: skip
    (account,) = accounts({"segments": [segment(*parts)], "device_traces": [held]})
    assert (account.peak_allocated_bytes, account.peak_active_bytes) == (1024, 1536)
    assert (account.allocated_bytes, account.active_bytes) == (0, 512)
    assert (account.held_for_streams_bytes, account.most_held_for_streams_bytes) == (512, 1024)
    assert (account.free_in_used_segments_bytes, account.largest_free_block_bytes) == (4196, 4096)


def test_a_history_that_begins_late_is_counted_from_its_end_on_each_device(tmp_path: Path) -> None:
    """Expandable segments are mapped piece by piece; what was allocated before the history is freed in it."""
    grown = [
        step("free_requested", 0, 1000), step("free_completed", 0, 1000), step("segment_map", 4096, 8192),
    ]  # fmt: skip
    grown += [step("alloc", 4096, 5000), step("segment_unmap", 8192, 4096), step("snapshot", 0, 0)]
    pools = [
        segment(block(4096, 5120), block(9216, 3072, "inactive"))
        | {"is_expandable": True, "segment_pool_id": (0, 0), "segment_type": "large"},
        segment(block(1, 512)) | {"device": 3},
    ]
    (tmp_path / "s").write_bytes(
        pickle.dumps({"segments": pools, "device_traces": [grown, [], [], []], "external_annotations": []})
    )
    first, other = accounts(read_snapshot(tmp_path / "s"))
    assert (first.device, first.peak_allocated_bytes, first.allocated_bytes) == (0, 5120, 5120)
    assert (first.peak_reserved_bytes, first.reserved_bytes) == (8192 + 4096, 8192)
    assert (other.device, other.peak_allocated_bytes, other.has_history) == (3, 512, False)
    assert (first.at_peak, other.at_peak) == ({"unknown": 5120}, {"unknown": 512})


def test_a_history_that_ran_out_of_memory_says_so() -> None:
    oom = step("oom", 0, 10**9) | {"device_free": 5}
    (account,) = accounts({"segments": [], "device_traces": [[oom]]})
    assert account.out_of_memory == [{"bytes": 10**9, "device_free_bytes": 5}]
    both = [("s", [replace(account, device=1), account])]
    assert snapshot_document(both).title == "Out of memory for 1,000 MB; peak 0 MB allocated on device 1 of 2"


def test_json_says_the_same_and_one_without_history_is_of_its_moment(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(read_snapshot(FILE)), encoding="utf-8")
    done = harness("snapshot", tmp_path / "s.json", "--json", cwd=tmp_path)
    (device,) = json.loads(done.stdout)["devices"]
    assert device["peak_allocated_bytes"] == 8_140_800
    (tmp_path / "now.json").write_text(json.dumps([segment(block(0, 512), block(512, 512, "inactive"))]))
    done = harness("snapshot", tmp_path / "now.json", cwd=tmp_path)
    assert done.stdout.startswith("At the snapshot 0.000512 MB allocated: unknown 100 %\n")
    assert "no history was recorded" in done.stdout
    assert "50 % of what is reserved" in done.stdout


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("touch harmed",)


DEEP = 10**6
BAD = {
    "code": (pickle.dumps({"segments": [Harmful()]}), "it holds something else at byte 43"),
    "call": (b"\x80\x04cbuiltins\ngetattr\n(NNtR.", "it holds something else at byte 2"),
    "memo": (b"\x80\x04Nr\xff\xff\xff\x7f.", "it holds something else at byte 3"),
    "hash": (b"\x80\x04})" + b"\x85" * DEEP + b"Ns.", "it holds something else at byte 3"),
    "deep": (b"\x80\x04" + b"]" * DEEP + b"a" * (DEEP - 1) + b".", "has no list 'segments'"),
    "long": (pickle.dumps({"segments": [{"total_size": 10**5000, "blocks": []}]}), "it holds something else"),
    "old": (pickle.dumps({"segments": []}, 0), "is neither a pickle nor JSON"),
    "huge": (b'{"segments": [{"total_size": 1' + b"0" * 999 + b', "blocks": []}]}', "blocks or size"),
    "less": (
        pickle.dumps({"segments": [], "device_traces": [[{"action": "oom", "size": -5}]]}),
        "valid size",
    ),
    "cut": (FILE.read_bytes()[:-50], "is cut off"),
    "empty": (b"", "is empty"),
    "text": (b"hello", "give what torch.cuda.memory._dump_snapshot wrote"),
    "json": (b'{"traceEvents": []}', "has no list 'segments'"),
    "odd": (b'{"segments": [{"total_size": 4, "blocks": [7]}]}', "a segment without blocks or size"),
    "nothing": (b'{"segments": []}', "nothing to show"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_snapshot_is_refused_in_one_line_and_runs_nothing(name: str, tmp_path: Path) -> None:
    data, words = BAD[name]
    (tmp_path / name).write_bytes(data)
    done = harness("snapshot", name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "harmed").exists()


def test_folders_and_pipes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("pipe", "is a pipe or device"), (".", "is a folder")):
        with pytest.raises(HarnessError, match=words):
            read_snapshot(tmp_path / name)
