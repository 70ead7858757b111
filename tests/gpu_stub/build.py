"""Compiles the stub against the headers of torch's CUDA wheels, and says how a process loads it.

Usage: python -m tests.gpu_stub.build FOLDER     (by the interpreter whose torch it is for; needs g++)

What is there already and made of the same sources is kept.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

NATIVE = Path(__file__).with_name("native")
RUNTIME = ("device.cpp", "kernel.cpp", "log.cpp", "memory.cpp", "stream.cpp")
NCCL = ("collectives.cpp", "communicator.cpp", "log.cpp", "reduction.cpp", "transfers.cpp")
COMPILE = (
    "g++", "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall",
    "-Wno-range-loop-construct",
)  # fmt: skip
EMPTY_HEADERS = ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h")
"""NCCL's header includes them, and uses none of their types; no wheel holds them."""
WITHOUT_DRIVER = 'extern "C" int {name}() {{ return 0; }}\n'


def environment(folder: Path) -> dict[str, str]:
    """Variables with which a process finds the machine of the stub. `folder`: where it was built."""
    folder = folder.absolute()
    repository = NATIVE.parents[2]
    python_path = [str(folder / "python"), str(repository), os.environ.get("PYTHONPATH", "")]
    return {
        "CUDA_STUB": str(folder),
        "LD_PRELOAD": f"{folder / 'libcudart.so.13'} {folder / 'libnccl.so.2'}",
        "LD_LIBRARY_PATH": str(folder),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
    }


def build(folder: Path) -> None:
    """Compile what is missing. Raises subprocess.CalledProcessError with the compiler's words above it."""
    made_of = _digest()
    stamp = folder / "made-of"
    if stamp.is_file() and stamp.read_text() == made_of:
        return
    shutil.rmtree(folder, ignore_errors=True)
    headers = folder / "empty"
    headers.mkdir(parents=True)
    for name in EMPTY_HEADERS:
        headers.joinpath(name).touch()
    site = Path(sysconfig.get_paths()["purelib"])
    cuda = (f"-I{headers}", f"-I{site / 'nvidia/cu13/include'}", f"-I{site / 'nvidia/nccl/include'}")
    torch = site / "torch"
    torch_headers = (
        f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}", f"-L{torch / 'lib'}",
    )  # fmt: skip
    jobs = [
        ("libcuda.so.1", ["-x", "c++", str(_without_effect(folder, "driver"))]),
        ("libcudart.so.13", [*cuda, *_sources(RUNTIME), str(_without_effect(folder, "runtime")),
                             f"-Wl,--version-script={NATIVE / 'runtime.map'}"]),
        ("libnccl.so.2", [*cuda, *_sources(NCCL), str(_without_effect(folder, "nccl")), "-lrt"]),
        ("liboperators.so", [*torch_headers, str(NATIVE / "operators.cpp"), "-ltorch_cpu", "-lc10"]),
    ]  # fmt: skip
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: _compile(folder, *job), jobs))
    _install(folder)
    stamp.write_text(made_of)


def _compile(folder: Path, library: str, words: list[str]) -> None:
    command = [*COMPILE, f"-Wl,-soname,{library}", "-o", str(folder / library), *words]
    subprocess.run(command, check=True)


def _sources(names: tuple[str, ...]) -> list[str]:
    return [str(NATIVE / name) for name in names]


def _without_effect(folder: Path, library: str) -> Path:
    """Source of the functions that torch links and a run does not need: they succeed and do nothing."""
    names = (NATIVE / f"{library}.symbols").read_text().split()
    text = "#pragma GCC visibility push(default)\n" + "".join(
        WITHOUT_DRIVER.format(name=name) for name in names
    )
    path = folder / f"{library}_without_effect.cpp"
    path.write_text(text)
    return path


def _install(folder: Path) -> None:
    """The Python side: an entry point that `import torch` loads, and an nvidia-smi."""
    distribution = folder / "python" / "cuda_stub-1.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: cuda-stub\nVersion: 1\n")
    (distribution / "entry_points.txt").write_text("[torch.backends]\ncuda_stub = cuda_stub:load\n")
    shutil.copy(NATIVE / "cuda_stub.py", folder / "python")
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    shutil.copy(NATIVE / "nvidia-smi", tool)
    tool.chmod(0o755)


def _digest() -> str:
    """Of everything that the result depends on."""
    parts = [version("torch"), sys.version, Path(__file__).read_text()]
    parts += [f"{path.name}\n{path.read_text()}" for path in sorted(NATIVE.iterdir()) if path.is_file()]
    return sha256("\n".join(parts).encode()).hexdigest()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    build(where)
    sys.stdout.writelines(f"export {name}={value!r}\n" for name, value in environment(where).items())
