from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from harness.errors import HarnessError
from harness.plan.calibration import (
    Calibration,
    MeasuredCell,
    calibrate,
    measured_cells,
    read_calibration,
    write_calibration,
)
from harness.plan.hardware import TimeConstants, default_constants
from harness.plan.scenario import Scenario
from harness.plan.step_time import predict_speed
from harness.record.store import write_record
from tests.harness.plan.plans import A100, INFINIBAND, llama, scenario
from tests.records import make_record

SLOWER = replace(
    default_constants(A100), matrix_share=0.6, memory_share=0.6, fabric_share=0.8, contention=0.3,
    step_overhead_seconds=0.02,
)  # fmt: skip
"""A place where everything is slower than published."""
BACKENDS = ("ddp", "zero1", "zero3", "fsdp", "fsdp-hybrid")
SMALL = llama(2048, 4, 5504)


def cell(plan: Scenario, constants: TimeConstants) -> MeasuredCell:
    """Two runs of two steps around what the constants predict."""
    seconds = predict_speed(plan, constants).step_seconds
    return MeasuredCell(
        name=f"here: {plan.label} on {plan.world_size}", group="here", scenario=plan, device=plan.device,
        runs=((seconds, seconds * 1.01), (seconds * 0.99, seconds)), latency_seconds=None,
        exposed_share=None, load_averages=(0.5,),
    )  # fmt: skip


SLOW = [
    cell(scenario(name, ranks, model=SMALL, shard_size=8 if name == "fsdp-hybrid" else None), SLOWER)
    for name in BACKENDS
    for ranks in (8, 16)
    if ranks > 8 or name in ("ddp", "zero3")
]


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate(SLOW)


def test_cells_left_out_are_predicted(calibration: Calibration) -> None:
    published = predict_speed(SLOW[0].scenario)
    assert abs(published.step_seconds / calibration.cells[0].measured_seconds - 1) > 0.2
    assert max(calibration.errors) < 0.05
    right, pairs = calibration.order()
    assert right == pairs > 5


def test_the_error_is_that_of_the_cell_that_was_not_fitted() -> None:
    """One backend that takes twice as long as the model has it is missed by what it took."""
    odd = replace(SLOW[0], runs=tuple(tuple(2 * step for step in run) for run in SLOW[0].runs))
    found = calibrate([odd, *SLOW[1:]]).cells[0]
    assert found.error == pytest.approx(-0.5, abs=0.05)


def test_constants_serve_scenarios_that_were_not_measured(calibration: Calibration) -> None:
    constants = calibration.time_constants(A100)
    for backend in ("zero2", "fsdp-grad-op"):
        plan = scenario(backend, 32, model=SMALL, accumulation_steps=2)
        mine, real = predict_speed(plan, constants), predict_speed(plan, SLOWER)
        assert mine.step_seconds == pytest.approx(real.step_seconds, rel=0.08)
        assert any("calibrated on 7 cells" in remark for remark in mine.remarks)


def test_a_file_gives_the_same_constants_to_the_same_device(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(calibration, path)
    assert read_calibration(path).time_constants(A100) == calibration.time_constants(A100)
    with pytest.raises(HarnessError, match="calibration was made on A100-80, not H100-80; calibrate with"):
        calibration.time_constants(replace(A100, name="H100-80"))
    path.write_text("{}")
    with pytest.raises(HarnessError, match="is not a calibration that this version reads"):
        read_calibration(path)


def test_too_few_cells_and_those_of_two_devices_are_refused() -> None:
    with pytest.raises(HarnessError, match=r"2 usable cells are too few .* at least 3"):
        calibrate(SLOW[:2])
    other = replace(SLOW[0], device=replace(A100, name="H100-80"))
    with pytest.raises(HarnessError, match=r"several devices \(A100-80, H100-80\)"):
        calibrate([other, *SLOW])


def test_ranks_that_share_processors_otherwise_are_left_out_and_named() -> None:
    flops = {"float32": 1e11}
    device = replace(A100, name="CPU", peak_flops=flops, memory_bandwidth=1e10, link_bandwidth=1e9)
    asked = {
        "model": llama(256, 2, 512, 256), "precision": "fp32", "torch_device": "cpu", "transport": "gloo",
        "device": device, "fabric": None, "sequence_length": 64,
    }  # fmt: skip
    worlds = (("single", 1), ("ddp", 2), ("zero1", 2), ("zero3", 2), ("fsdp", 2))
    constants = replace(default_constants(device), matrix_share=0.1)
    found = calibrate([cell(scenario(*world, **asked), constants) for world in worlds])
    assert len(found.cells) == 4
    assert found.not_used == ["here: single on 1: ranks share processors otherwise than on 2 ranks"]


def test_nodes_without_a_self_test_are_left_out_and_named() -> None:
    unknown = replace(SLOW[1], scenario=replace(SLOW[1].scenario, fabric=None))
    assert SLOW[1].scenario.fabric == INFINIBAND
    found = calibrate([unknown, *SLOW[2:]])
    assert found.not_used[0].startswith("here: ddp on 16: no self-test of its network (fabric-*.json)")


PUBLISHED = Path(__file__).parents[3] / "reports" / "shaped-links"


@pytest.fixture(scope="module")
def cells() -> list[MeasuredCell]:
    return measured_cells([PUBLISHED / "200mbit" / "runs.tar.xz"])


def test_runs_of_a_backend_are_one_cell(cells: list[MeasuredCell]) -> None:
    names = {cell.name: len(cell.runs) for cell in cells}
    assert names["200mbit: zero2 on 4"] == 8
    assert len(cells) == 6


def test_self_tests_next_to_the_runs_say_what_the_network_gives(cells: list[MeasuredCell]) -> None:
    zero2 = next(cell for cell in cells if "zero2" in cell.name)
    # 200 Mbit/s, less what TCP adds, over the two ranks of a node.
    assert zero2.scenario.fabric.bandwidth_per_gpu * 2 * 8 == pytest.approx(192e6, rel=0.01)
    assert zero2.latency_seconds == pytest.approx(8e-3, rel=0.3)


def test_traces_say_how_much_of_the_communication_is_exposed(cells: list[MeasuredCell]) -> None:
    ddp = next(cell for cell in cells if "ddp" in cell.name)
    assert 0.9 < ddp.exposed_share < 1


def test_steps_over_a_slow_link_are_predicted_from_the_other_backends(cells: list[MeasuredCell]) -> None:
    """The link decides here, and bytes of each strategy are exact."""
    calibration = calibrate(cells)
    assert median(calibration.errors) < 0.1
    right, pairs = calibration.order()
    assert right == pairs >= 8


def test_runs_without_timed_steps_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    write_record(directory, make_record(steps=[]))
    with pytest.raises(HarnessError, match=r"--calibrate .*: no run there has timed steps"):
        measured_cells([tmp_path])
    for name, columns in (("nccl.txt", "size count type time algbw busbw #wrong"), ("words.txt", "hello")):
        (tmp_path / name).write_text(f"# {columns}\n1048576 262144 float 54.2 19.3 33.9 0\n")
        says = "is output of nccl-tests" if name == "nccl.txt" else "is no record, nor JSON"
        with pytest.raises(HarnessError, match=says):
            measured_cells([tmp_path / name])
