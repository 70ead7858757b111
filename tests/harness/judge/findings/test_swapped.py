"""NVMe offload that frees no memory, and files that are not as long as their closed form."""

from dataclasses import replace

from harness.judge.comparison import Comparison
from harness.judge.findings import memory
from harness.judge.quantities.model_states import rank_states
from harness.record import LayoutPart, Record, TensorPart
from tests.harness.judge.findings.test_memory import run, steady

LAYOUT = LayoutPart(
    parameters=[TensorPart(name=f"{n}.w", shape=[1024, 1024], dtype="float32") for n in range(8)],
    decaying=[f"{n}.w" for n in range(8)],
    buffers=[],
    blocks=[],
)
LARGE = "zero3:offload=nvme"
CUT = "zero3:offload=nvme,sub_group_size=524288"


def swapping(label: str, file_bytes: int | None) -> Record:
    record = run([steady(file_bytes=file_bytes)] * 2, label=label)
    return record.model_copy(update={"layout": LAYOUT})


def with_weights(label: str, file_bytes: int) -> Record:
    record = swapping(label, file_bytes)
    effective = record.backend.effective
    assert effective is not None
    effective = replace(effective, offload=["optimizer in files", "weights in files"])
    return record.model_copy(update={"backend": record.backend.model_copy(update={"effective": effective})})


def expected(label: str) -> int:
    form = rank_states(swapping(label, 0))[0].expected
    assert form is not None
    return form.file_bytes


def ids(label: str, file_bytes: int | None) -> list[str]:
    return [finding.id for finding in memory.find_swapped(Comparison([swapping(label, file_bytes)]))]


def test_no_files_and_buffers_as_large_as_files_are_named() -> None:
    (finding,) = memory.find_swapped(Comparison([swapping(LARGE, 0)]))
    assert "0 bytes of optimizer states lie in files" in finding.text
    assert ids(LARGE, expected(LARGE)) == ["swapping-frees-no-memory"]


def test_smaller_sub_groups_free_memory() -> None:
    assert expected(CUT) == expected(LARGE) == 8 * 1024 * 1024 // 2 * 4 * 4
    assert ids(CUT, expected(CUT)) == []


def test_weights_in_files_count_with_their_buffers() -> None:
    whole, cut = (label.replace("nvme", "nvme-all") for label in (LARGE, CUT))
    (finding,) = memory.find_swapped(Comparison([with_weights(whole, expected(whole))]))
    states, weights, ranks = 8 * 1024 * 1024 // 2 * 4, 1024 * 1024 // 2 * 4, 2
    assert f"{5 * states * ranks:,} bytes of weights and optimizer states lie in files" in finding.text
    assert finding.values["buffer_bytes"] == (4 * states + 5 * weights + 2 * states) * ranks
    assert memory.find_swapped(Comparison([with_weights(cut, expected(cut))])) == []


def test_runs_that_swap_nothing_are_left_alone() -> None:
    assert ids("zero3", None) == []


def test_files_of_another_length_differ_from_the_closed_form() -> None:
    (finding,) = memory.find_memory(Comparison([swapping(CUT, expected(CUT) - 4096 * 1024)]))
    assert {"kind": "swapped states"}.items() <= finding.values["differences"][-1].items()
