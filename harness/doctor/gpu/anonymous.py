"""Text and documents without what names a machine, its user or its folders: to be sent to others."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from harness.run_directory.rank_state import shown_text
from harness.safe_text import harmless

# From a slash that begins a path to the last but one; behind -I, -L and an escaped line break too.
_FOLDERS = re.compile(r"""(?:(?<=-[IL])|(?<=\\[nt])|(?<![\w./<~-]))~?/(?:[^\s/"'<>|:;,()\[\]{}\\]+/)+""")
_COMMON = frozenset(
    (
        "admin", "cluster", "compute", "cpu", "cuda", "default", "docker", "gpu", "host", "job", "local",
        "localhost", "login", "main", "model", "node", "none", "python", "rank", "root", "server", "test",
        "train", "ubuntu", "user", "vm", "worker",
    )
)  # fmt: skip
"""Names that tell nothing, and stand in records for other things."""
LEAST_LETTERS = 3


def anonymous(text: str) -> str:
    """The text without secrets, folders, and the names and addresses of this machine and its user."""
    return _nameless(shown_text(harmless(text)))


def anonymous_document(value: Any) -> Any:
    """A JSON document without the same; its keys lose their folders only."""
    return nameless_document(json.loads(shown_text(harmless(json.dumps(value)))))


def nameless_document(value: Any) -> Any:
    """The same where secrets are gone already, or there is no place for them: megabytes take a second."""
    if isinstance(value, str):
        return _nameless(value)
    if isinstance(value, dict):
        return {_FOLDERS.sub("", str(key)): nameless_document(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [nameless_document(inner) for inner in value]
    return value


@lru_cache(maxsize=10_000)
def _nameless(text: str) -> str:
    for folder in _own_folders():
        text = text.replace(folder, "")
    text = _FOLDERS.sub("", text)
    hosts, users = _own_names()
    if hosts is not None:
        text = hosts.sub("host", text)
    return text if users is None else users.sub("user", text)


def forget_names() -> None:
    """Ask for the names of machine and user again."""
    for kept in (_nameless, _own_folders, _own_names):
        kept.cache_clear()


@lru_cache
def _own_folders() -> tuple[str, ...]:
    """Folders of this user and installation, each with its slash, the innermost first."""
    found = {
        Path.home(),
        Path.cwd(),
        Path(tempfile.gettempdir()),
        Path(sys.prefix),
        Path(__file__).parents[3],
    }
    found |= {folder.resolve() for folder in found}
    return tuple(sorted((f"{folder}/" for folder in found if len(folder.parts) > 1), key=len, reverse=True))


@lru_cache
def _own_names() -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
    """Patterns of the machine's names and addresses, and of the user's names."""
    variables = (os.environ.get(name, "") for name in ("HOSTNAME", "SLURMD_NODENAME"))
    hosts = {socket.gethostname(), os.uname().nodename, *variables}
    hosts |= {host.partition(".")[0] for host in hosts}
    addresses = {
        address.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6, psutil.AF_LINK)
    } - {"127.0.0.1", "::1", "00:00:00:00:00:00"}
    users = {Path.home().name, os.environ.get("USER", ""), os.environ.get("LOGNAME", "")}
    with suppress(KeyError, OSError):  # a container's number without a name
        users.add(getpass.getuser())
    named = {*filter(_tells, hosts), *addresses}
    return _any_of(named, r"(?:\.[A-Za-z][\w-]*)*"), _any_of(filter(_tells, users))


def _tells(name: str) -> bool:
    return len(name) >= LEAST_LETTERS and name.lower() not in _COMMON


def _any_of(names: Iterable[str], after: str = "") -> re.Pattern[str] | None:
    listed = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(rf"(?<![A-Za-z0-9])(?:{listed}){after}(?![A-Za-z0-9])") if listed else None
