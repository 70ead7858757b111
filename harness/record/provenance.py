"""What a record says of machine, versions and code. Reads an allow-list of variables, never secrets."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

from harness.backends.libraries.facts import installed_version
from harness.gpus.found import find_gpus
from harness.job.job import split_factory
from harness.record.measured import EnvironmentPart, GitPart

ROOT = Path(__file__).resolve().parents[2]
OWN_PACKAGES = ("backends", "harness")
PACKAGES = ("torch", "deepspeed", "accelerate", "transformers", "datasets", "pydantic", "numpy")
VARIABLES = (
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR",
    "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "PYTORCH_HIP_ALLOC_CONF",
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING", "GLOO_SOCKET_IFNAME", "TORCH_COMPILE_DISABLE",
    "CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG",
    "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION",
)  # fmt: skip
PATIENCE_SECONDS = 30.0
"""For nvidia-smi."""
PREFIXES = ("NCCL_", "TORCH_NCCL_", "RCCL_")
# What decides a measurement. Reports and tables may change without making records stale.
MEASURING_SOURCES = (
    "harness/backends", "harness/rank", "harness/launch", "harness/run_directory", "harness/record",
    "harness/job",
)  # fmt: skip


def environment() -> EnvironmentPart:
    """Describe the machine, the versions, the code and the allow-listed variables."""
    recorded = [name for name in VARIABLES if name in os.environ]
    recorded += sorted(name for name in os.environ if name.startswith(PREFIXES))
    return EnvironmentPart(
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=_cpu_model(),
        cores=os.cpu_count(),
        load_average=load_average(),
        memory_bytes=host_memory_bytes(),
        gpus=list(_gpus()),
        packages=package_versions(),
        code=code_fingerprint(),
        git=git_state(),
        variables={name: os.environ[name] for name in recorded},
    )


def host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def load_average() -> float:
    """Runnable processes over the last minute: before a run it tells whether the run shares the machine."""
    return os.getloadavg()[0]


def package_versions(extra: tuple[str, ...] = ()) -> dict[str, str]:
    """Versions of the installed ones among the packages that matter, and of `extra`."""
    found = {name: installed_version(name) for name in (*PACKAGES, *extra)}
    return {name: version for name, version in found.items() if version is not None}


@lru_cache(maxsize=1)
def code_fingerprint() -> str:
    """Digest of the sources that run inside a cell: 12 hexadecimal digits."""
    return _digest((str(file.relative_to(ROOT)), file) for file in measuring_files())


def has_changed() -> bool:
    """Whether these sources are others than when this process first read them: a run may mix both."""
    return code_fingerprint.__wrapped__() != code_fingerprint()


def measuring_files() -> list[Path]:
    """What runs inside a cell, and the tables that it reads."""
    files = (file for name in MEASURING_SOURCES for file in sorted((ROOT / name).rglob("*")))
    return [file for file in files if file.suffix in (".py", ".cpp", ".toml", ".yaml")]


@lru_cache
def module_fingerprint(target: str) -> str:
    """Fingerprint of the top-level package or module that a third party's 'module:Class' lies in."""
    spec = find_spec(target.partition(":")[0].partition(".")[0])
    if spec is None:
        return _digest(())
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))] or [Path(spec.origin or "")]
    return _digest((file.name, file) for file in files)


def factory_digest(spelling: str) -> str:
    """Digest of what a factory's function lies in, with its name: a file or its package, 12 digits.

    What that imports from elsewhere is not part of it.
    """
    place, function = split_factory(spelling)
    if not place.endswith(".py"):
        return f"{module_fingerprint(place)}:{function}"
    file = Path(place)
    package = package_root(file)
    files = sorted(package.rglob("*.py")) if package else [file]
    return f"{_digest((str(f.relative_to(package or f.parent)), f) for f in files)}:{function}"


def package_root(file: Path) -> Path | None:
    """The outermost folder of the package that a source lies in; None: it is a module of its own."""
    root = None
    for folder in file.resolve().parents:
        if not (folder / "__init__.py").is_file():
            break
        root = folder
    return root


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    """Digest of named files; one that is not there counts by its name."""
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(name.encode() + b"\0" + (file.read_bytes() if file.is_file() else b""))
    return digest.hexdigest()[:12]


@lru_cache(maxsize=1)
def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def _gpus() -> tuple[str, ...]:
    """Name and driver of each GPU, as nvidia-smi lists them; where it does not answer, as torch does."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):  # it hangs where a driver does
        return tuple(gpu.name for gpu in find_gpus().devices)
    return tuple(done.stdout.strip().splitlines())


def machine_name() -> str:
    """Processor, cores and GPUs: timings of another machine are not this one's."""
    return f"{_cpu_model()} x {os.cpu_count()}; {'; '.join(_gpus())}"


def content_digest(path: Path) -> str:
    """SHA-256 of a file, or of the names and contents of all files of a folder."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        own = _file_digest(file.resolve(), status.st_size, status.st_mtime_ns)
        digest.update(f"{file.relative_to(path) if file != path else ''} {own}\n".encode())
    return f"sha256:{digest.hexdigest()}"


@cache
def _file_digest(file: Path, _bytes: int, _changed_at: int) -> str:
    """Read once while size and time stay: every cell of a matrix names the same, maybe large files."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@lru_cache(maxsize=1)
def git_state(root: Path = ROOT) -> GitPart | None:
    """Commit of the checkout that the harness runs from, and in which files its packages differ from it.

    None outside of a checkout. Reports, records and notes that lie in the tree change no run and are not
    looked at; configurations are in the record's job, versions in its environment.
    """
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        return done.stdout.splitlines() if done.returncode == 0 else []

    commit = git("rev-parse", "HEAD")
    if not commit:
        return None
    changed = git("diff", "--name-only", "HEAD", "--", *OWN_PACKAGES)
    changed += git("ls-files", "--others", "--exclude-standard", "--", *OWN_PACKAGES)
    return GitPart(commit=commit[0], modified=bool(changed), changed=sorted(changed))
