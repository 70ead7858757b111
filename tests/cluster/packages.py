"""`python -m tests.cluster.packages FOLDER`: unpack Debian's Slurm and munge there; nothing is installed."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "libmunge2")
# Libraries that those need, by the package that has them, where the machine does not.
LIBRARIES = {
    "libhwloc.so.15": "libhwloc15", "liblua5.1.so.0": "liblua5.1-0", "libjson-c.so.5": "libjson-c5",
    "libyaml-0.so.2": "libyaml-0-2", "libnuma.so.1": "libnuma1", "libdbus-1.so.3": "libdbus-1-3",
    "liblz4.so.1": "liblz4-1",
}  # fmt: skip


def fetch(folder: Path) -> None:
    """Download and unpack, as whoever calls. Raises CalledProcessError where apt has no such packages."""
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    wanted = [*PACKAGES, *(package for library, package in LIBRARIES.items() if library not in known)]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            _download(wanted, scratch)
        except subprocess.CalledProcessError:
            subprocess.run(["apt-get", "-qq", "update"], check=True)
            _download(wanted, scratch)
        for archive in Path(scratch).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
    for name in ("slurmctld", "slurmd", "slurmstepd"):
        # Slurm reads its configuration by the name that it was started under.
        link = folder / "usr" / "sbin" / name
        if not link.exists():
            link.symlink_to(f"{name}-wlm")


def unmet(prefix: Path) -> str | None:
    """Why no cluster can be had on this machine; None if it can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if not (prefix / "usr" / "sbin" / "slurmctld").exists():
        return f"no Slurm in {prefix}: `make test-cluster` fetches it where apt has Debian's packages"
    for tool in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(tool) is None:
            return f"'{tool}' is not installed"
    probe = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else None


def _download(packages: list[str], folder: str) -> None:
    subprocess.run(["apt-get", "-qq", "download", *packages], cwd=folder, check=True)


if __name__ == "__main__":
    if not (Path(sys.argv[1]) / "usr" / "sbin" / "slurmctld").exists():
        fetch(Path(sys.argv[1]))
