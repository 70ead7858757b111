"""Counts the GPUs that ranks on this machine can use; says why there are none."""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from harness.errors import HarnessError
from harness.import_path import safe_environment

SELECTORS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
OF_CUDA, OF_ROCM = SELECTORS[:1], ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""What each runtime obeys. Slurm may set all of them where all GPUs are of one vendor. ROCm takes the
first that is set of HIP's and CUDA's, which selects among those that ROCR's leaves."""
NOTHING = "NoDevFiles"
"""What Slurm sets for a job without GPUs."""


def selected(text: str) -> list[str]:
    """The devices that a value names. CUDA ends the list at the first that is empty or negative."""
    names: list[str] = []
    for name in (piece.strip() for piece in text.split(",")):
        if not name or name.startswith("-") or name == NOTHING:
            break
        names.append(name)
    return names


def obeyed(vendor: str | None) -> tuple[str, ...]:
    """The variables that select among GPUs of a vendor, the last selection first."""
    return OF_CUDA if vendor == "NVIDIA" else OF_ROCM


def hiding(environment: Mapping[str, str], vendor: str | None) -> str | None:
    """The variable that hides all GPUs of a vendor, as it is set; None: none does."""
    for name in obeyed(vendor):
        if name in environment and not selected(environment[name]):
            return f"{name}='{environment[name]}'"
    return None


def fault_of_selection(environment: Mapping[str, str], count: int, vendor: str | None) -> str | None:
    """Why the selection is not what it seems; None: nothing is wrong.

    count: devices that torch shows a process with this environment.
    """
    variable = next((name for name in obeyed(vendor) if name in environment), None)
    if variable is None:
        return None
    text = environment[variable]
    names, given = selected(text), f"{variable}={text}"
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        return f"{given} names device {twice} more than once; name each once"
    if len(names) <= count:
        return None
    if sum(name.startswith("MIG") for name in names) > 1:
        return (
            f"{given} names {len(names)} MIG instances, of which CUDA shows a process {count}: ranks "
            "would have to share; name one and run one rank, or use undivided GPUs"
        )
    return (
        f"{given}: CUDA finds {count} of the {len(names)} named (it stops at the first not there); "
        "name devices of this machine"
    )


Vendor = Literal["NVIDIA", "AMD", "Intel", "Apple"]


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One build of torch."""

    version: str = "of unknown version"
    cuda: str | None = None
    """Version of CUDA that it was built for, such as '13.0'."""
    hip: str | None = None
    """The same of ROCm's HIP."""
    xpu: str | None = None
    """The same of Intel's oneAPI."""
    is_known: bool = True
    """False: its files do not say what it was built for."""

    @property
    def vendor(self) -> Vendor | None:
        """Whose GPUs it can drive; None: nobody's, or not known."""
        if self.hip:
            return "AMD"
        if self.cuda:
            return "NVIDIA"
        return "Intel" if self.xpu else None

    def __str__(self) -> str:
        """'torch 2.13.0+cu130 (CUDA 13.0)'."""
        builds = {"ROCm": self.hip, "CUDA": self.cuda, "XPU": self.xpu}
        built_for = next((f" ({name} {version})" for name, version in builds.items() if version), "")
        return f"torch {self.version}{built_for}"


def installed_wheel() -> Wheel | None:
    """The torch that a new process of this interpreter would import; None: there is none."""
    try:
        spec = find_spec("torch")
    except ModuleNotFoundError:  # of a finder that refuses it by name
        spec = None
    if spec is None:
        return None
    folders = spec.submodule_search_locations or ()
    files = [file for folder in folders if (file := Path(folder) / "version.py").is_file()]
    return read_wheel(files[0]) if files else Wheel(is_known=False)


def read_wheel(file: Path) -> Wheel:
    """What torch's `version.py` says."""
    try:
        tree = ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError):
        return Wheel(is_known=False)
    found: dict[str, str | None] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                found[target.id] = value.value if isinstance(value.value, str) else None
    return Wheel(
        version=found.get("__version__") or Wheel.version,
        cuda=found.get("cuda"), hip=found.get("hip"), xpu=found.get("xpu"),
        is_known="cuda" in found,
    )  # fmt: skip


# /dev/dxg: Windows' subsystem for Linux; /dev/nvhost-gpu, /dev/nvmap: Jetson.
DEVICE_FILES: dict[str, Vendor] = {
    "dev/nvidiactl": "NVIDIA", "dev/nvidia0": "NVIDIA", "proc/driver/nvidia": "NVIDIA",
    "dev/dxg": "NVIDIA", "dev/nvhost-gpu": "NVIDIA", "dev/nvmap": "NVIDIA", "dev/kfd": "AMD",
}  # fmt: skip
TOOLS: dict[str, Vendor] = {"nvidia-smi": "NVIDIA", "rocm-smi": "AMD", "amd-smi": "AMD", "rocminfo": "AMD"}
DRIVER = "libcuda.so.1"
LIBRARY_FOLDERS = (
    "lib64", "usr/lib64", "usr/lib", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu",
    "usr/lib/wsl/lib", "usr/local/cuda/compat", ".singularity.d/libs",
)  # fmt: skip
LOADER_CACHE = "etc/ld.so.cache"


@dataclass(frozen=True, kw_only=True)
class Sign:
    """One thing that only a machine with GPUs, or made for them, has."""

    vendor: Vendor
    what: str

    def __str__(self) -> str:
        return self.what


def signs_of_gpus(root: Path = Path("/")) -> list[Sign]:
    """Signs of GPUs on this machine; `root`: where its files are."""
    found = [(vendor, f"/{name}") for name, vendor in DEVICE_FILES.items() if (root / name).exists()]
    found += [(vendor, name) for name, vendor in TOOLS.items() if shutil.which(name) is not None]
    found += [("NVIDIA", place) for place in _library(root)]
    obeying: dict[Vendor, tuple[str, ...]] = {"NVIDIA": OF_CUDA, "AMD": OF_ROCM}
    set_here = {name: value for name in SELECTORS if selected(value := os.environ.get(name, "").strip())}
    found += [
        (by, f"{name}={set_here[name]}") for by, of in obeying.items() for name in of if name in set_here
    ]
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        found.append(("Apple", "Apple silicon"))
    return [Sign(vendor=vendor, what=what) for vendor, what in found]


def _library(root: Path) -> Iterator[str]:
    """Where the loader would find the driver. It is not loaded: a server that forks ranks must not."""
    named = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for folder in (*named, *(root / name for name in LIBRARY_FOLDERS)):
        if (folder / DRIVER).exists():
            yield str(folder / DRIVER)
            return
    try:
        if DRIVER.encode() in (root / LOADER_CACHE).read_bytes():
            yield DRIVER
    except OSError:
        return


ENTRY = re.compile(r"(sm|compute)_(\d+)(\d)[af]?")


def runs_on(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """Whether kernels for `architectures` (torch.cuda.get_arch_list()) run on NVIDIA's `capability`.

    Binary code (sm_80) runs on later minors of the same major; intermediate code (compute_80) on all that
    came later. Source: CUDA programming guide, 'Binary Compatibility' and 'PTX Compatibility'. Code for one
    architecture alone (sm_90a) counts for it.
    """
    for text in architectures:
        match = ENTRY.fullmatch(text)
        if match is None:
            continue
        kind, own = match[1], (int(match[2]), int(match[3]))
        if text[-1] in "af" and own != capability:
            continue
        if own <= capability and (kind == "compute" or own[0] == capability[0]):
            return True
    return False


def sm_name(capability: tuple[int, int]) -> str:
    """'sm_70' of (7, 0)."""
    return f"sm_{capability[0]}{capability[1]}"


INDEX = "https://download.pytorch.org/whl"
BUILDS = {"12.6": ((5, 0), (9, 0)), "12.8": ((7, 5), (12, 1)), "13": ((7, 5), (12, 1))}
"""CUDA of a wheel -> the oldest and the newest capability. Source: torch's RELEASE.md, support matrix of 2.11
and later; 12.9 and later minors of 13 as the last one before them."""


def unfit_wheel(wheel: Wheel, capability: tuple[int, int]) -> str | None:
    """Why a wheel has no kernels for a GPU, and which one has; None: it has, or is not in the table."""
    if (advice := wheel_for(capability)) is None:
        return f"no wheel of torch has kernels for {sm_name(capability)}"
    if wheel.vendor != "NVIDIA":
        return f"{wheel} is not built for CUDA; {advice}" if wheel.is_known else None
    build = next((cuda for cuda in BUILDS if f"{wheel.cuda}.".startswith(f"{cuda}.")), None)
    if build is None or build in _fitting(capability):
        return None
    return f"{wheel} has no kernels for {sm_name(capability)}; {advice}"


def wheel_for(capability: tuple[int, int]) -> str | None:
    """What to install for a GPU; None: no wheel has kernels for it."""
    fitting = _fitting(capability)
    return f"install torch's wheel for CUDA {fitting[-1]} ({index_of(fitting[-1])})" if fitting else None


def _fitting(capability: tuple[int, int]) -> list[str]:
    return [cuda for cuda, (oldest, newest) in BUILDS.items() if oldest <= capability <= newest]


def index_of(cuda: str) -> str:
    """Where pip finds the wheel: '.../whl/cu126'."""
    return f"{INDEX}/cu{(cuda if '.' in cuda else cuda + '.0').replace('.', '')}"


QUESTION = Path(__file__).with_name("ask_torch.py")
PATIENCE_SECONDS = 300.0
"""For an import of torch from a slow network file system."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device, as torch names it."""

    name: str
    uuid: str
    memory_bytes: int
    """All of it, as torch reports it."""
    capability: tuple[int, int]
    amd_architecture: str = ""
    """'gfx90a'; empty for NVIDIA's."""

    @property
    def architecture(self) -> str:
        """'gfx90a' or 'sm_70'."""
        return self.amd_architecture or sm_name(self.capability)

    def is_served_by(self, architectures: Sequence[str]) -> bool:
        """Whether kernels for these run on it."""
        if self.amd_architecture:
            return self.amd_architecture in architectures
        return runs_on(self.capability, architectures)


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """What ranks on this machine can use."""

    devices: tuple[Gpu, ...] = ()
    wheel: Wheel | None = None
    """None: torch is not installed."""
    architectures: tuple[str, ...] = ()
    """That the installed torch has kernels for; empty where it was not asked."""
    driver_cuda: str | None = None
    """The newest CUDA that the driver takes, such as '12.4'."""
    why_none: str | None = None
    """In one line; None: there are GPUs."""
    refusal: str | None = None
    """Why no run may start that would take GPUs where there are some, in one line."""
    signs: tuple[Sign, ...] = field(default=())
    """What makes one expect GPUs."""

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def smallest_bytes(self) -> int | None:
        """Memory of the smallest device; None: there is none."""
        return min((gpu.memory_bytes for gpu in self.devices), default=None)

    @property
    def named(self) -> str:
        """'4 x NVIDIA H200', '1 x Tesla T4 and 1 x Tesla V100-SXM2-16GB'."""
        return " and ".join(
            f"{count} x {name}" for name, count in Counter(gpu.name for gpu in self.devices).items()
        )


def find_gpus() -> Gpus:
    """The GPUs that a new process of this interpreter and environment would have.

    Asks torch in a process of its own, 2 to 5 s, where there is a sign of a GPU and a build of torch that can
    drive it; once per command and environment.
    """
    return _find(tuple((name, os.environ.get(name)) for name in (*SELECTORS, "LD_LIBRARY_PATH", "PATH")))


@lru_cache
def _find(_environment: tuple[tuple[str, str | None], ...]) -> Gpus:
    return judge(installed_wheel(), signs_of_gpus(), os.environ)


def judge(wheel: Wheel | None, signs: Sequence[Sign], environment: Mapping[str, str]) -> Gpus:
    """What a machine with these signs has; asks torch if only it can know."""
    found = tuple(signs)
    if wheel is None:
        return Gpus(why_none="torch is not installed", signs=found)
    if (without := why_not_asked(wheel, found)) is not None:
        apple = any(sign.vendor == "Apple" for sign in found)
        return Gpus(wheel=wheel, why_none=without, refusal=_unsupported("an MPS device") if apple else None,
                    signs=found)  # fmt: skip
    if wheel.vendor != "Intel" and (hidden := hiding(environment, wheel.vendor)) is not None:
        return Gpus(wheel=wheel, why_none=f"{hidden} hides all GPUs", signs=found)
    return read_answer(_ask(), wheel, found, environment)


def why_not_asked(wheel: Wheel, signs: Sequence[Sign]) -> str | None:
    """Why torch has no GPU for sure; None: it must be asked."""
    if not wheel.is_known:
        return None if signs else "this machine shows no GPU"
    matching = [sign for sign in signs if sign.vendor == wheel.vendor]
    if matching or wheel.vendor == "Intel":
        return None
    if not signs:
        return "this machine shows no GPU"
    sign = signs[0]
    if sign.vendor == "Apple":
        return "the harness does not run on Apple's GPUs"
    build = "CUDA" if sign.vendor == "NVIDIA" else "ROCm"
    return (
        f"{wheel} is not built for {build}, although {sign} suggests {sign.vendor} GPUs; install torch's "
        f"{build} wheel (https://pytorch.org/get-started/locally)"
    )


def read_answer(
    answer: Mapping[str, Any], wheel: Wheel, signs: tuple[Sign, ...], environment: Mapping[str, str]
) -> Gpus:
    """What torch's answer (`ask_torch`) means."""
    devices = tuple(
        Gpu(**(entry | {"capability": tuple(entry["capability"])})) for entry in answer.get("devices", ())
    )
    too_old = re.search(r"found version (\d+)", str(answer.get("error")))
    number = answer.get("driver_cuda") or (int(too_old[1]) if too_old else None)
    driver = None if number is None else f"{number // 1000}.{number % 1000 // 10}"  # '12.4' of 12040
    architectures = tuple(answer.get("architectures", ()))
    refusal, why = None, None
    if answer.get("xpu_devices"):
        refusal = why = _unsupported(f"{answer['xpu_devices']} XPU devices")
    elif not devices:
        why = _why_none(str(answer.get("error") or ""), wheel, driver)
        if "driver" not in why:
            refusal = fault_of_selection(environment, 0, wheel.vendor)
    else:
        refusal = fault_of_selection(environment, len(devices), wheel.vendor)
        refusal = refusal or without_kernels(devices, architectures, wheel)
    return Gpus(
        devices=devices, wheel=wheel, architectures=architectures, driver_cuda=driver, why_none=why,
        refusal=refusal, signs=signs,
    )  # fmt: skip


def without_kernels(devices: Sequence[Gpu], architectures: Sequence[str], wheel: Wheel) -> str | None:
    """Why this torch cannot compute on these GPUs; None: it can on all of them."""
    for gpu in devices:
        if architectures and not gpu.is_served_by(architectures):
            advice = None if gpu.amd_architecture else wheel_for(gpu.capability)
            advice = (
                advice or "install a build of torch that has them (https://pytorch.org/get-started/locally)"
            )
            has = ", ".join(architectures)
            return f"{wheel} has no kernels for {gpu.name} ({gpu.architecture}), only for {has}; {advice}"
    return None


def _unsupported(what: str) -> str:
    return f"found {what}: the harness runs on CUDA and ROCm GPUs and on the CPU"


def _why_none(error: str, wheel: Wheel, driver: str | None) -> str:
    first = " ".join(error.split()).split(". ")[0].rstrip(".")
    if "too old" in error:
        return (
            f"the NVIDIA driver takes CUDA {driver or 'of an older version'} and {wheel} needs a newer one; "
            "update the driver, or install torch's wheel for the driver's CUDA"
        )
    if first in ("", "No CUDA GPUs are available"):
        return f"{wheel} finds no GPU here"
    # torch asks first whether CUDA was used too early, and names CUDA's own error last.
    of_cuda = re.search(r"Error \d+: .+", " ".join(error.split()))
    said = f"{first}: {of_cuda[0].rstrip('.')}" if of_cuda and of_cuda[0] not in first else first
    return f"{wheel} cannot use a GPU: {said}"


def _ask() -> dict[str, Any]:
    """torch's answer; without one, why."""
    command = [sys.executable, "-P", str(QUESTION)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False, errors="replace",
            env=safe_environment(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"torch did not list the GPUs within {PATIENCE_SECONDS:.0f} s"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        return {"error": f"torch ended with exit code {done.returncode} when asked for GPUs: {last}"}
    return answer


ON_THE_CPU = "--set runtime.device=cpu"
"""How a command is told to run on the CPU."""


@dataclass(frozen=True, kw_only=True)
class ChosenDevice:
    """What the ranks of a run compute on."""

    name: Literal["cpu", "cuda"]
    why: str
    """'2 x NVIDIA H200', 'this machine shows no GPU'."""
    is_surprising: bool = False
    """Whether something speaks for GPUs and the ranks are on the CPU nevertheless."""


def choose_device(asked: str, cpu_option: str = ON_THE_CPU) -> ChosenDevice:
    """The device for `runtime.device`: 'auto', 'cpu' or 'cuda'.

    cpu_option: how the command is told to run on the CPU. Raises HarnessError where GPUs were asked for and
    none can be used, and where there are some that cannot be used as they are.
    """
    if asked == "cpu":
        return ChosenDevice(name="cpu", why="asked for")
    gpus = find_gpus()
    if gpus.refusal is not None:
        raise HarnessError(f"{gpus.refusal}; {cpu_option} runs on the CPU")
    if gpus.why_none is not None and asked == "cuda":
        raise HarnessError(f"no GPU can be used: {gpus.why_none}; {cpu_option} runs on the CPU")
    return device_of(gpus)


def device_of(gpus: Gpus) -> ChosenDevice:
    """The device that ranks can compute on, whatever was asked for."""
    why_not = gpus.refusal or gpus.why_none
    if why_not is None:
        return ChosenDevice(name="cuda", why=gpus.named)
    return ChosenDevice(name="cpu", why=why_not, is_surprising=bool(gpus.signs))
