"""Brings what ranks wrote on their own nodes to rank 0, where the nodes share no file system.

Files go through the store of the process group, not through a collective: a rank that failed can still hand
over what it has, and rank 0 waits for nobody for long.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from harness.atomic_write import write_atomically

PIECE_BYTES = 4 * 2**20
"""torch's store refuses values above 8 MiB."""
PATIENCE = timedelta(seconds=30)


def hand_over(store: Any, rank: int, files: Iterable[Path]) -> None:
    """Put these files of a rank into the store; `fetch` finds them once all of them are there."""
    contents = {path.name: path.read_text(encoding="utf-8") for path in files if path.exists()}
    packed = zlib.compress(json.dumps(contents).encode())
    pieces = [packed[start : start + PIECE_BYTES] for start in range(0, len(packed), PIECE_BYTES)]
    for index, piece in enumerate(pieces):
        store.set(_key(rank, str(index)), piece)
    store.set(_key(rank, "pieces"), str(len(pieces)))


def fetch(store: Any, rank: int, directory: Path, patience: timedelta = PATIENCE) -> bool:
    """Write a rank's files into `directory`; False if it did not hand them over in time."""
    count = _key(rank, "pieces")
    try:
        store.wait([count], patience)
    except RuntimeError:  # torch's DistStoreError: the rank died before it could
        return False
    pieces = [store.get(_key(rank, str(index))) for index in range(int(store.get(count)))]
    contents: dict[str, str] = json.loads(zlib.decompress(b"".join(pieces)))
    for name, text in contents.items():
        write_atomically(directory / Path(name).name, text)
    return True


def _key(rank: int, part: str) -> str:
    return f"harness/files/{rank}/{part}"
