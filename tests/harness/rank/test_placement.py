import os
from pathlib import Path

import pytest

from harness.rank.accelerator import placed, placement, read_list


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0,2,4-5", {0, 2, 4, 5})]
)
def test_sets_of_processors_are_read_as_the_kernel_writes_them(text: str, numbers: set[int]) -> None:
    assert read_list(text) == numbers


def machine(folder: Path, gpu_node: str) -> tuple[Path, Path]:
    """Two nodes of four processors each, and a GPU."""
    nodes, devices = folder / "node", folder / "devices"
    for node, processors in enumerate(("0-1,4-5", "2-3,6-7")):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}" / "cpulist").write_text(f"{processors}\n")
    (devices / "0000:3b:00.0").mkdir(parents=True)
    (devices / "0000:3b:00.0" / "numa_node").write_text(f"{gpu_node}\n")
    return nodes, devices


@pytest.mark.parametrize(("processors", "numa_nodes"), [("0,4", [0]), ("0-2", [0, 1]), ("0-7", [0, 1])])
def test_a_rank_is_where_its_processors_are(tmp_path: Path, processors: str, numa_nodes: list[int]) -> None:
    place = placed(processors, None, *machine(tmp_path, "1"))
    assert (place.numa_nodes, place.device_numa_node) == (numa_nodes, None)
    assert (place.processors, place.processor_count) == (processors, len(read_list(processors)))


@pytest.mark.parametrize(("told", "node"), [("1", 1), ("0", 0), ("-1", None)])
def test_a_gpu_is_where_the_firmware_says(tmp_path: Path, told: str, node: int | None) -> None:
    assert placed("0", "0000:3b:00.0", *machine(tmp_path, told)).device_numa_node == node
    assert placed("0", "0000:ff:00.0", tmp_path / "node", tmp_path / "devices").device_numa_node is None


def test_this_process_is_somewhere() -> None:
    place = placement("cpu")
    assert place is not None
    assert read_list(place.processors) == os.sched_getaffinity(0)
    assert place.processor_count == len(read_list(place.processors)) > 0
