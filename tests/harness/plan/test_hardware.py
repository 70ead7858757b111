"""GPUs and networks: what ships, what a user adds, and names that nothing has."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from harness.errors import HarnessError
from harness.forms.textbook import find_peak
from harness.plan.hardware import (
    Hardware,
    MemoryVerdict,
    control_group_headroom,
    joined_by,
    limits_here,
    load_hardware,
    ranks_per_node,
)
from tests.gpus import gpus_of


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return load_hardware()


def test_a_shipped_device_has_every_number_and_its_source(hardware: Hardware) -> None:
    assert len(hardware.devices) > 25
    for name in hardware.devices:
        device = hardware.device(name)
        assert device.name == name
        assert 10 * 2**30 < device.usable_bytes < device.memory_bytes
        assert device.peak_flops["float32"] > 0
        assert {"bfloat16", "float16"} & set(device.peak_flops)
        assert device.memory_bandwidth > 1e11
        assert device.link_bandwidth > 1e10
        assert device.watts
        assert device.source


def test_memory_stays_below_what_the_name_says(hardware: Hardware) -> None:
    """A figure in a name counts 1e9 or 2^30 bytes; torch shows at most the larger."""
    for name in hardware.devices:
        figure = name.partition("-")[2].partition("-")[0]
        if figure.isdigit() and int(figure) < 1000:
            assert 0.94 * int(figure) * 2**30 < hardware.device(name).memory_bytes <= int(figure) * 2**30


def test_a_node_has_the_gpus_of_a_machine_in_which_they_are_sold(hardware: Hardware) -> None:
    counts = {name: hardware.device(name).gpus_per_node for name in hardware.devices}
    assert {name for name, count in counts.items() if count != 8} == {
        "A100-64", "H100-64", "GB200", "GB300", "GH200",
    }  # fmt: skip
    assert {counts[name] for name in ("A100-64", "H100-64", "GB200", "GB300", "GH200")} == {4}
    gb200 = hardware.device("GB200")
    assert [ranks_per_node(gb200, given) for given in (None, 8)] == [4, 8]
    assert ranks_per_node(None, None) == 8
    # Trays of one rack are joined by the links of a tray.
    assert hardware.fabric("NVL72").bandwidth_per_gpu == gb200.link_bandwidth


@pytest.mark.parametrize(
    ("name", "link", "gb_per_second"),
    [
        ("A100-80", "PCIe 4", 32),  # of nothing said
        ("T4", "PCIe 3", 16),  # as its other links
        ("RTX-4090", "PCIe 4", 32),
        ("H100-80", "PCIe 5", 64),
        ("GH200", "NVLink-C2C", 450),
        ("GB200", "NVLink-C2C, 2 GPUs", 225),  # a Grace's 450 between two
    ],
)
def test_a_device_has_a_link_to_host_memory(
    hardware: Hardware, name: str, link: str, gb_per_second: float
) -> None:
    device = hardware.device(name)
    assert (device.host_link, device.host_link_bandwidth) == (link, gb_per_second * 1e9)


def test_a_shipped_fabric_has_every_number_and_a_peak_stands_in_one_place(hardware: Hardware) -> None:
    for fabric in map(hardware.fabric, hardware.fabrics):
        assert fabric.bandwidth_per_gpu > 1e8
        assert 0 < fabric.latency_seconds < 1e-3
        assert fabric.source
    peak = find_peak("NVIDIA H100 80GB HBM3", "bfloat16")[0]
    assert hardware.device("H100-80").peak_flops["bfloat16"] == peak == 989.5e12


@pytest.mark.parametrize("text", ["h100-80", "H100-80GB", "H100 80 GB", "NVIDIA H100 80GB HBM3", "h100_sxm"])
def test_spelling_does_not_matter(hardware: Hardware, text: str) -> None:
    assert hardware.device(text).name == "H100-80"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("10GbE", "Ethernet-10"), ("25 GbE", "Ethernet-25"), ("100GE", "Ethernet-100"),
        ("RoCE 400", "Ethernet-400"), ("IB 400", "NDR400"), ("25 Gb/s", "Ethernet-25"),
    ],
)  # fmt: skip
def test_what_can_only_be_one_network_is_that(hardware: Hardware, text: str, meant: str) -> None:
    assert hardware.fabric(text).name == meant


@pytest.mark.parametrize("text", ["675 GB", "80GiB", "24"])
def test_a_size_is_no_gpu(hardware: Hardware, text: str) -> None:
    with pytest.raises(HarnessError, match=f"GPU '{text}' is a size: give a name such as H100-80"):
        hardware.device(text)


def test_unknown_names_show_the_closest(hardware: Hardware) -> None:
    with pytest.raises(HarnessError, match=r"'A100-60' is unknown\. Did you mean 'A100-6?.*--hardware FILE"):
        hardware.device("A100-60")
    with pytest.raises(HarnessError, match=r"Did you mean 'A100-40' or 'A100-64' or 'A100-80' or"):
        hardware.device("a100")
    for typed, meant in (
        ("NDR40", "'NDR400'"),
        ("IB EDR", "'EDR100' or 'EDR50' or 'EDR33'?"),  # as people call them
        ("IB HDR", "'HDR200' or 'HDR100'?"),
        ("InfiniBand 200", "'NDR200' or 'HDR200'?"),
        ("RoCE", "'Ethernet-400' or 'Ethernet-100'?"),
    ):
        with pytest.raises(HarnessError) as refused:
            hardware.fabric(typed)
        assert f"fabric '{typed}' is unknown. Did you mean {meant}" in str(refused.value)


def test_each_network_of_a_gpu_is_known_and_all_but_the_last_have_an_end(hardware: Hardware) -> None:
    for device in map(hardware.device, hardware.devices):
        assert device.networks[-1].most_gpus is None
        assert all(one.most_gpus for one in device.networks[:-1])
    v100 = joined_by(None, hardware.device("V100-32"), 16)
    assert v100 == replace(hardware.fabric("DGX-1"), assumed=True)  # 4 ports of 100 Gb/s for 8 GPUs
    assert v100.bandwidth_per_gpu == 4 * 12.5e9 / 8
    assert hardware.fabric("Summit").bandwidth_per_gpu == pytest.approx(2 * 12.5e9 / 6, rel=0.001)
    rack = hardware.device("GB200")
    assert [joined_by(None, rack, gpus).name for gpus in (72, 76)] == ["NVL72", "NDR400"]


def test_a_file_adds_and_replaces(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text(
        "devices:\n"
        "  Ours: {memory_gib: 10, memory_gb_per_second: 100, link_gb_per_second: 8,\n"
        "    peak_teraflops: {bfloat16: 5}}\n"
        "  H200: {torch_name: NVIDIA H200, memory_gib: 100, memory_gb_per_second: 1, link_gb_per_second: 2}\n"
        "fabrics:\n"
        "  Slow: {gb_per_second: 0.1, latency_microseconds: 100}\n"
    )
    hardware = load_hardware(file)
    assert hardware.device("ours").peak_flops == {"bfloat16": 5e12}
    assert hardware.device("H200").memory_bytes == 100 * 2**30
    assert hardware.fabric("slow").bandwidth_per_gpu == pytest.approx(1e8)
    assert hardware.device("A100-80").name == "A100-80"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices: {Ours: {memory_gib: 10}}", "devices.Ours.memory_gb_per_second"),
        ("gpus: {}", "'gpus' is unknown. Allowed: devices, fabrics"),
        ("devices: {Ours: {memory_gib: -1}}", "greater than 0"),
        (
            "devices: {Ours: {memory_gib: 1, memory_gb_per_second: 1, link_gb_per_second: 1}}",
            "give `peak_teraflops`, or a `torch_name`",
        ),
        ("[1]", "must be a mapping"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text(text)
    with pytest.raises(HarnessError) as caught:
        load_hardware(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(HarnessError, match=r"none\.yaml cannot be read: No such file"):
        load_hardware(tmp_path / "none.yaml")


GB = 10**9


@pytest.mark.parametrize(
    ("needed", "answer", "said"),
    [
        (40 * GB, "fits", "fits"), (72 * GB, "fits", "fits"), (72 * GB + 1, "close", "close"),
        (8 * 98 * GB // 10 + 1, "close", "barely fits"), (80 * GB, "close", "barely fits"),
        (80 * GB + 1, "does not fit", "does not fit"),
    ],
)  # fmt: skip
def test_the_answer_follows_from_the_margin(needed: int, answer: str, said: str) -> None:
    verdict = MemoryVerdict(needed_bytes=needed, device_bytes=80 * GB)
    assert (verdict.answer, verdict.said, verdict.fits) == (answer, said, answer != "does not fit")


def group(root: Path, name: str, **files: str) -> None:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file.replace("__", ".")).write_text(text)


def membership(folder: Path, *lines: str) -> Path:
    file = folder / "cgroup"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def test_the_tightest_group_above_a_process_limits_it(tmp_path: Path) -> None:
    root = tmp_path / "groups"
    group(root, "job", memory__max="1000", memory__current="400", memory__stat="anon 1\ninactive_file 50\n")
    group(root, "job/step", memory__max="max", memory__current="300")
    group(root, ".", memory__max="9000", memory__current="500")
    assert control_group_headroom(root, membership(tmp_path, "0::/job/step")) == 650


def test_version_1_names_its_files_otherwise(tmp_path: Path) -> None:
    root = tmp_path / "groups"
    group(root, "memory/job", memory__limit_in_bytes="1000", memory__usage_in_bytes="400")
    group(root, "memory", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="900")
    lines = ("4:cpu,cpuacct:/job", "7:memory:/job")
    assert control_group_headroom(root, membership(tmp_path, *lines)) == 600


def test_without_a_limit_there_is_no_headroom_to_name(tmp_path: Path) -> None:
    root = tmp_path / "groups"
    group(root, "job", memory__max="max", memory__current="400")
    assert control_group_headroom(root, membership(tmp_path, "0::/job")) is None
    assert control_group_headroom(root, tmp_path / "none") is None
    assert control_group_headroom(root, membership(tmp_path, "", "garbled")) is None


def test_ranks_on_the_cpu_have_no_device_of_their_own_and_the_smallest_gpu_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = limits_here("cpu", imposed_bytes=5)
    assert (limits.device_bytes, limits.imposed_bytes) == (None, 5)
    assert 0 < limits.host_bytes <= psutil.virtual_memory().total
    monkeypatch.setattr("harness.plan.hardware.find_gpus", lambda: gpus_of(81559 * 2**20, 40960 * 2**20))
    assert limits_here("cuda").device_bytes == 40960 * 2**20
