"""How many GPUs there are, why there are none, and when a run is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.errors import HarnessError
from harness.gpus.found import (
    Gpus,
    Sign,
    Wheel,
    choose_device,
    hiding,
    installed_wheel,
    judge,
    read_answer,
    read_wheel,
    runs_on,
    signs_of_gpus,
    unfit_wheel,
)
from tests.gpus import gpus_of

CPU = Wheel(version="2.13.0+cpu")
CUDA = Wheel(version="2.13.0+cu130", cuda="13.0")
ROCM = Wheel(version="2.13.0+rocm7.1", hip="7.1")
DEVICE_FILE = Sign(vendor="NVIDIA", what="/dev/nvidiactl")
V100 = {
    "name": "Tesla V100-SXM2-16GB", "uuid": "v", "memory_bytes": 2**34, "capability": [7, 0],
    "amd_architecture": "",
}  # fmt: skip
A100 = V100 | {"name": "NVIDIA A100-SXM4-80GB", "uuid": "a", "capability": [8, 0]}
MI250X = V100 | {"name": "AMD Instinct MI250X", "capability": [9, 0], "amd_architecture": "gfx90a"}
KERNELS = {"architectures": ["sm_75", "sm_80", "sm_90", "compute_120"]}


def said(answer: dict[str, object], wheel: Wheel = CUDA, **environment: str) -> Gpus:
    return read_answer(answer, wheel, (DEVICE_FILE,), environment)


def test_torch_counts_the_devices() -> None:
    found = said(KERNELS | {"devices": [A100, A100 | {"memory_bytes": 5}], "driver_cuda": 12040})
    assert (found.count, found.why_none, found.refusal) == (2, None, None)
    assert (found.named, found.smallest_bytes, found.driver_cuda) == ("2 x NVIDIA A100-SXM4-80GB", 5, "12.4")


def test_rocm_is_used_through_torch_cuda() -> None:
    found = said({"devices": [MI250X], "architectures": ["gfx90a", "gfx942"]}, ROCM)
    assert (found.count, found.refusal) == (1, None)
    lacking = said({"devices": [MI250X], "architectures": ["gfx942"]}, ROCM)
    assert "no kernels for AMD Instinct MI250X (gfx90a), only for gfx942" in str(lacking.refusal)


@pytest.mark.parametrize(
    ("wheel", "signs", "environment", "why"),
    [
        (None, [DEVICE_FILE], {}, "torch is not installed"),
        (CPU, [], {}, "this machine shows no GPU"),
        (CUDA, [], {}, "this machine shows no GPU"),
        (CPU, [DEVICE_FILE], {}, "torch 2.13.0+cpu is not built for CUDA, although /dev/nvidiactl"),
        (CPU, [Sign(vendor="AMD", what="/dev/kfd")], {}, "not built for ROCm, although /dev/kfd"),
        (ROCM, [DEVICE_FILE], {}, "(ROCm 7.1) is not built for CUDA, although /dev/nvidiactl"),
        (CUDA, [DEVICE_FILE], {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' hides all GPUs"),
        (CUDA, [DEVICE_FILE], {"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES='-1' hides all GPUs"),
        (CUDA, [DEVICE_FILE], {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "='NoDevFiles' hides all GPUs"),
    ],
)
def test_why_torch_need_not_be_asked(
    wheel: Wheel | None, signs: list[Sign], environment: dict[str, str], why: str
) -> None:
    found = judge(wheel, signs, environment)
    assert why in str(found.why_none)
    assert (found.count, found.refusal) == (0, None)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            "The NVIDIA driver on your system is too old (found version 11040). Please update",
            "the NVIDIA driver takes CUDA 11.4 and torch 2.13.0+cu130 (CUDA 13.0) needs a newer one",
        ),
        (
            "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
            "cannot use a GPU: Found no NVIDIA driver on your system",
        ),
        ("No CUDA GPUs are available", "torch 2.13.0+cu130 (CUDA 13.0) finds no GPU here"),
        (
            "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
            "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized",
            "cannot use a GPU: Unexpected error from cudaGetDeviceCount(): Error 802: system not yet init",
        ),
    ],
)
def test_why_torch_has_no_gpu(error: str, why: str) -> None:
    found = said({"error": error, "driver_cuda": 11040})
    assert why in str(found.why_none)
    assert found.refusal is None


@pytest.mark.parametrize(
    ("visible", "count", "refusal"),
    [
        ("0,1", 2, None),
        ("GPU-a1,GPU-b2", 2, None),
        ("MIG-a", 1, None),
        ("0,-1,1", 1, None),
        ("0,0", 2, "CUDA_VISIBLE_DEVICES=0,0 names device 0 more than once"),
        ("0,0", 0, "CUDA_VISIBLE_DEVICES=0,0 names device 0 more than once"),
        ("0,7,1", 1, "CUDA finds 1 of the 3 named"),
        ("7", 0, "CUDA finds 0 of the 1 named"),
        ("MIG-a,MIG-b", 1, "names 2 MIG instances, of which CUDA shows a process 1"),
    ],
)
def test_a_selection_that_is_not_what_it_seems_is_refused(
    visible: str, count: int, refusal: str | None
) -> None:
    answer = (
        KERNELS | {"devices": [A100] * count} | ({} if count else {"error": "No CUDA GPUs are available"})
    )
    found = said(answer, CUDA_VISIBLE_DEVICES=visible)
    if refusal is None:
        assert found.refusal is None
    else:
        assert refusal in str(found.refusal)


BY_SLURM = {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "-1"}


def test_variables_of_the_other_vendor_select_nothing() -> None:
    found = read_answer(KERNELS | {"devices": [A100]}, CUDA, (DEVICE_FILE,), BY_SLURM)
    assert (found.count, found.refusal) == (1, None)
    assert hiding(BY_SLURM, "NVIDIA") is None
    assert hiding(BY_SLURM, "AMD") == "HIP_VISIBLE_DEVICES='-1'"


def test_on_rocm_a_selection_among_those_that_slurm_left_is_no_fault() -> None:
    answer = {"devices": [MI250X], "architectures": ["gfx90a"]}
    amd = {"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "0"}
    assert read_answer(answer, ROCM, (), amd).refusal is None
    lacking = read_answer(answer, ROCM, (), amd | {"HIP_VISIBLE_DEVICES": "0,9"}).refusal
    assert "HIP_VISIBLE_DEVICES=0,9: CUDA finds 1 of the 2 named" in str(lacking)


def test_a_gpu_that_the_wheel_has_no_kernels_for_is_refused() -> None:
    refusal = said(KERNELS | {"devices": [A100, V100]}).refusal
    assert refusal is not None
    assert "torch 2.13.0+cu130 (CUDA 13.0) has no kernels for Tesla V100-SXM2-16GB (sm_70)" in refusal


def test_xpu_and_mps_are_refused() -> None:
    xpu = said({"xpu_devices": 4}, Wheel(version="2.13.0+xpu", xpu="20250302"))
    assert xpu.refusal == "found 4 XPU devices: the harness runs on CUDA and ROCm GPUs and on the CPU"
    assert "an MPS device" in str(judge(CPU, [Sign(vendor="Apple", what="Apple silicon")], {}).refusal)


FAKE_TORCH = """
import sys
from types import SimpleNamespace as Namespace
from torch import version
__version__ = version.__version__
devices = {devices}
xpu = Namespace(device_count=lambda: 0)
backends = Namespace(mps=Namespace(is_available=lambda: False))
cuda = Namespace(
    init=lambda: None, device_count=lambda: len(devices), get_arch_list=lambda: ["sm_80"],
    get_device_properties=lambda index: devices[index],
)
"""


def installed(folder: Path, count: int) -> None:
    """A torch with so many GPUs."""
    package = folder / "torch"
    package.mkdir()
    package.joinpath("version.py").write_text(
        "__version__ = '2.13.0+cu130'\ncuda: str = '13.0'\nhip: str = None\n"
    )
    device = "Namespace(name='NVIDIA A100', uuid='x', total_memory=7, major=8, minor=0)"
    package.joinpath("__init__.py").write_text(
        FAKE_TORCH.format(devices="[" + ", ".join([device] * count) + "]")
    )


def found_by_a_new_process(folder: Path, **variables: str) -> dict[str, object]:
    question = (
        "import json, sys; from harness.gpus.found import find_gpus; found = find_gpus(); find_gpus(); "
        "print(json.dumps([found.count, found.why_none, 'torch' in sys.modules]))"
    )
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", question], env=environment | variables, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    count, why, loaded = json.loads(done.stdout)
    return {"count": count, "why": why, "loaded": loaded}


def test_gpus_are_counted_without_nvidia_smi_and_without_loading_torch(tmp_path: Path) -> None:
    installed(tmp_path, 2)
    library = tmp_path / "driver"
    library.mkdir()
    (library / "libcuda.so.1").touch()
    found = found_by_a_new_process(tmp_path, LD_LIBRARY_PATH=str(library))
    assert found == {"count": 2, "why": None, "loaded": False}


def test_a_torch_that_ends_when_asked_is_named(tmp_path: Path) -> None:
    installed(tmp_path, 1)
    (tmp_path / "torch" / "__init__.py").write_text("import os; os._exit(3)")
    found = found_by_a_new_process(tmp_path, CUDA_VISIBLE_DEVICES="0")
    assert found["count"] == 0
    assert "torch ended with exit code 3" in str(found["why"])


KERNELS_OF_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((7, 0), KERNELS_OF_13, False),  # V100
        ((7, 5), KERNELS_OF_13, True),
        ((8, 9), KERNELS_OF_13, True),  # L4: sm_86 is of the same major
        ((10, 3), KERNELS_OF_13, True),
        ((11, 0), KERNELS_OF_13, False),
        ((12, 1), ("compute_120",), True),
        ((13, 0), ("compute_120",), True),
        ((9, 0), ("sm_90a",), True),
        ((10, 3), ("sm_100a",), False),
        ((8, 0), ("sm_86",), False),
    ],
)
def test_kernels_run_on_later_minors_and_intermediate_code_on_all_later(
    capability: tuple[int, int], architectures: tuple[str, ...], runs: bool
) -> None:
    assert runs_on(capability, architectures) is runs


CUDA_12_6 = Wheel(version="2.13.0+cu126", cuda="12.6")


OLD = (
    "torch 2.13.0+cu130 (CUDA 13.0) has no kernels for sm_70; install torch's wheel for CUDA 12.6 "
    "(https://download.pytorch.org/whl/cu126)"
)


@pytest.mark.parametrize(
    ("wheel", "capability", "refusal"),
    [
        (CUDA, (7, 0), OLD), (CUDA_12_6, (7, 0), None), *((CUDA, (n, 0), None) for n in (8, 9, 10)),
        (CUDA, (7, 5), None), (CUDA, (8, 9), None),
        (CUDA_12_6, (10, 0), "CUDA 13 (https://download.pytorch.org/whl/cu130)"),
        (CPU, (8, 0), "torch 2.13.0+cpu is not built for CUDA; install torch's wheel for CUDA 13"),
        # A build that the table does not have is not judged.
        (Wheel(version="2.13.0+own", cuda="12.4"), (7, 0), None), (Wheel(is_known=False), (7, 0), None),
    ],
)  # fmt: skip
def test_a_gpu_needs_a_wheel_with_kernels_for_it(
    wheel: Wheel, capability: tuple[int, int], refusal: str | None
) -> None:
    found = unfit_wheel(wheel, capability)
    assert found is None if refusal is None else refusal in str(found)


NONE = Gpus(why_none="the driver is too old", signs=(Sign(vendor="NVIDIA", what="/dev/nvidiactl"),))


def having(monkeypatch: pytest.MonkeyPatch, gpus: Gpus) -> None:
    monkeypatch.setattr("harness.gpus.found.find_gpus", lambda: gpus)


def test_gpus_are_used_where_there_are_some_unless_the_cpu_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    having(monkeypatch, gpus_of(1, 2))
    chosen = choose_device("auto")
    assert (chosen.name, chosen.why) == ("cuda", "2 x NVIDIA A100-SXM4-80GB")
    assert choose_device("cpu").name == "cpu"
    having(monkeypatch, NONE)
    chosen = choose_device("auto")
    assert (chosen.name, chosen.why, chosen.is_surprising) == ("cpu", "the driver is too old", True)
    with pytest.raises(
        HarnessError, match=r"^no GPU can be used: the driver is too old; --set runtime\.device"
    ):
        choose_device("cuda")
    having(monkeypatch, Gpus(why_none="this machine shows no GPU"))
    assert not choose_device("auto").is_surprising
    having(monkeypatch, Gpus(refusal="found 4 XPU devices"))
    with pytest.raises(HarnessError, match="found 4 XPU devices; --set runtime"):
        choose_device("auto")
    assert choose_device("cpu").name == "cpu"


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without GPUs, their tools and their libraries."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content", "vendors", "what"),
    [
        ("dev/null", "", [], ""), ("dev/nvidiactl", "", ["NVIDIA"], ""), ("dev/dxg", "", ["NVIDIA"], ""),
        ("dev/kfd", "", ["AMD"], ""), ("usr/lib64/libcuda.so.1", "", ["NVIDIA"], ""),
        ("etc/ld.so.cache", "\0libc.so.6\0libcuda.so.1\0/opt/driver/libcuda.so.1\0", ["NVIDIA"],
         "libcuda.so.1"),
        ("bin/nvidia-smi", "", ["NVIDIA"], "nvidia-smi"), ("bin/rocm-smi", "", ["AMD"], "rocm-smi"),
    ],
)  # fmt: skip
def test_a_device_a_driver_and_a_tool_are_signs(
    bare: Path, name: str, content: str, vendors: list[str], what: str
) -> None:
    file = bare / name
    file.parent.mkdir(parents=True)
    file.write_text(content)
    file.chmod(0o755)
    assert [sign.vendor for sign in signs_of_gpus(bare)] == vendors
    assert not what or [sign.what for sign in signs_of_gpus(bare)] == [what]


@pytest.mark.parametrize(("text", "signs"), [("0", 2), ("MIG-1", 2), ("", 0), ("-1", 0)])
def test_named_devices_are_a_sign(bare: Path, monkeypatch: pytest.MonkeyPatch, text: str, signs: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert len(signs_of_gpus(bare)) == signs


def test_the_installed_torch_is_read_as_it_says_itself() -> None:
    wheel = installed_wheel()
    assert (wheel.version, wheel.cuda, wheel.hip) == (
        torch.__version__, torch.version.cuda, torch.version.hip,
    )  # fmt: skip
    assert wheel.is_known


def test_a_file_that_says_nothing_leaves_the_build_unknown(tmp_path: Path) -> None:
    assert not read_wheel(tmp_path / "version.py").is_known
    (tmp_path / "version.py").write_text("from torch._version import *\n")
    assert not read_wheel(tmp_path / "version.py").is_known
