"""Which distributions are installed, and what is said where one is not."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from harness.backends.refusals import Unsupported


def absent(packages: Collection[str]) -> list[str]:
    """Those of these distributions that are not installed."""
    return [name for name in packages if installed_version(name) is None]


@lru_cache
def installed_version(library: str) -> str | None:
    """Of a distribution; None: it is not installed. Asked once: its whole description is parsed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def require_installed(package: str, setting: str, install: str = "") -> None:
    """Raise Unsupported for a setting that needs this distribution where it is not installed."""
    if installed_version(package) is None:
        how = f"pip install {install or package}"
        raise Unsupported(f"{setting} needs {package}, which is not installed: {how}")


def not_installed(packages: Collection[str]) -> str:
    """Why a backend that needs these distributions cannot run: 'deepspeed is not installed (pip ...)'."""
    are = "is" if len(packages) == 1 else "are"
    return f"{' and '.join(packages)} {are} not installed (pip install {' '.join(packages)})"
