"""How a device's time divides, counted by a sweep over its events; shares no code with the product."""

import gzip
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

KERNELS, COPIES = ("kernel", "concurrent_kernel"), ("gpu_memcpy", "gpu_memset", "memcpy", "memset")


def device_events(path: Path) -> list[tuple[int, int, str, str]]:
    """Begin and end in nanoseconds, category and name of all that ran on a device."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8", "replace")
    document = json.loads(text, parse_float=Decimal, strict=False)
    events: list[dict[str, Any]] = document if isinstance(document, list) else document["traceEvents"]
    found = []
    for event in events:
        category = str(event.get("cat") or "").lower()
        if event.get("ph") == "X" and category in KERNELS + COPIES:
            begin, length = (round(Decimal(str(event[key])) * 1000) for key in ("ts", "dur"))
            found.append((begin, begin + length, category, str(event["name"])))
    return found


def divided(path: Path, communicates: Callable[[str], bool]) -> dict[str, int]:
    """Nanoseconds of each state, from the first to the last event."""
    changes: list[tuple[int, int, str]] = []
    for begin, end, category, name in device_events(path):
        states = ["copy"] if category in COPIES else []
        if communicates(name):
            states.append("communication")
        elif not states:
            states.append("compute")
        changes += [(at, by, state) for state in states for at, by in ((begin, 1), (end, -1))]
    changes.sort()
    running = {"compute": 0, "communication": 0, "copy": 0}
    found = dict.fromkeys([*running, "exposed", "idle"], 0)
    before = changes[0][0]
    for at, by, state in changes:
        for name, count in running.items():
            found[name] += (at - before) * (count > 0)
        found["exposed"] += (at - before) * (running["communication"] > 0 == running["compute"])
        found["idle"] += (at - before) * (not any(running.values()))
        running[state] += by
        before = at
    return found | {"span": changes[-1][0] - changes[0][0]}
