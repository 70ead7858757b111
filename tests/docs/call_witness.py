"""Runs the command line and notes which of our functions call which, in this process and in its ranks.

python call_witness.py FILE compare ...: a line 'caller callee' in FILE for each pair.
"""

import os
import sys
import threading
from types import FrameType
from typing import Any

FILE = "CALL_WITNESS_FILE"
_seen: set[str] = set()


def _name(frame: FrameType) -> str | None:
    module = frame.f_globals.get("__name__", "")
    if not module.startswith("harness."):
        return None
    return f"{module.removeprefix('harness.')}.{frame.f_code.co_qualname.partition('.<locals>')[0]}"


def _note(frame: FrameType, event: str, _: Any) -> None:
    if event != "call" or (callee := _name(frame)) is None:
        return
    above = frame.f_back
    while above is not None and (_name(above) in (None, callee)):
        above = above.f_back  # past decorators, contextlib and click
    line = f"{_name(above) if above else None} {callee}\n"
    if line not in _seen:
        _seen.add(line)
        with open(os.environ[FILE], "a") as file:
            file.write(line)


def _watch() -> None:
    sys.setprofile(_note)
    threading.setprofile(_note)


if __name__ == "__main__":
    os.environ[FILE] = sys.argv[1]
    from harness.cli import compare, main

    wanted = compare.modules_to_preload
    compare.modules_to_preload = lambda *given: [*wanted(*given), "tests.docs.call_witness"]  # type: ignore[assignment]
    del sys.argv[1]
    _watch()
    main()
elif FILE in os.environ:  # imported by the fork server
    os.register_at_fork(after_in_child=_watch)
