"""Reads a memory snapshot without executing anything that a pickle may hold."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

from harness.bounds import MOST_SNAPSHOT_BYTES
from harness.errors import HarnessError
from harness.files import read_plain, require_plain_input

Snapshot = dict[str, Any]


class _PlainUnpickler(pickle.Unpickler):
    """Admits containers, numbers and texts: no class, no function, no reference to elsewhere."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which a snapshot does not hold")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside of the file")


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in a file, pickle or JSON. Raises HarnessError for anything else."""
    require_plain_input(path, "snapshot")
    if path.is_dir():
        raise HarnessError(f"snapshot '{path}' is a folder; give its files")
    try:
        data = read_plain(path, MOST_SNAPSHOT_BYTES)
    except OSError as error:
        raise HarnessError(f"snapshot '{path}' cannot be read: {error.strerror}") from error
    if not data:
        raise HarnessError(f"snapshot '{path}' is empty")
    try:
        found = (
            json.loads(data)
            if data.lstrip()[:1] in (b"{", b"[")
            else _PlainUnpickler(io.BytesIO(data)).load()
        )
    except EOFError as error:
        raise _not_one(path, "is cut off") from error
    except pickle.UnpicklingError as error:
        cut = "truncated" in str(error)
        raise _not_one(path, "is cut off" if cut else f"is no pickle of plain values: {error}") from error
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _not_one(path, "is neither a pickle of plain values nor JSON, or is damaged") from error
    except (MemoryError, RecursionError) as error:
        raise _not_one(path, "asks for more memory than a snapshot needs") from error
    return _checked(path, found)


def _checked(path: Path, found: Any) -> Snapshot:
    """The same value, if it has the form of a snapshot."""
    if isinstance(found, list) and all(
        isinstance(segment, dict) and "blocks" in segment for segment in found
    ):
        found = {"segments": found}  # `torch.cuda.memory_snapshot()`
    if not isinstance(found, dict) or not isinstance(found.get("segments"), list):
        raise _not_one(path, "has no list 'segments'")
    for segment in found["segments"]:
        blocks = segment.get("blocks") if isinstance(segment, dict) else None
        whole = isinstance(blocks, list) and all(
            isinstance(b, dict) and isinstance(b.get("size"), int) and isinstance(b.get("state"), str)
            for b in blocks
        )
        if not whole or not isinstance(segment.get("total_size"), int):
            raise _not_one(path, "has a segment without blocks or size")
    traces = found.get("device_traces", [])
    if not isinstance(traces, list) or not all(isinstance(t, list) for t in traces):
        raise _not_one(path, "has 'device_traces' that are no lists")
    for trace in traces:
        if not all(isinstance(e, dict) and isinstance(e.get("action"), str) for e in trace):
            raise _not_one(path, "has a history whose entries name no action")
    return found


def _not_one(path: Path, what: str) -> HarnessError:
    return HarnessError(
        f"snapshot '{path}' {what}; give what torch.cuda.memory._dump_snapshot wrote, or that as JSON"
    )
