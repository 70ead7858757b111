"""Watches one input: how it ends, how long it takes, and what it writes or starts outside of a folder."""

import faulthandler
import multiprocessing.util
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

from harness.errors import HarnessError

SECONDS = 20.0
"""Of processor time, after which an input counts as a hang; other programs do not count."""
WAITING_SECONDS = 120.0
"""The same of wall time: it waits for something that does not come."""
BYTECODE = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]))
"""Where the interpreter writes what it compiles as it imports, which is no act of an input."""
MOST_MESSAGE = 4000
"""Characters of an error; what is longer hides its point."""
Verdict = Literal["result", "refused", "traceback", "hang", "outside", "not one line"]

_WRITES = (
    "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
)  # fmt: skip
_PROCESSES = ("os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec")


class Hang(BaseException):
    """An input took too long; no `except Exception` catches it."""


@dataclass
class Guard:
    """Judges inputs; refuses whatever would touch a file outside of `folder`, and every process."""

    folder: Path
    outside: list[str] = field(default_factory=list)
    """What was tried outside."""
    is_armed: bool = False

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        sys.addaudithook(self._audit)
        multiprocessing.util.spawnv_passfds = _no_process  # type: ignore[assignment]  # it raises no audit event
        for number in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, _out_of_time)

    def judge(self, work: Callable[[], object]) -> tuple[Verdict, str]:
        """How one input ends, with the reason of a bad one. `work` raises HarnessError to refuse it."""
        self.outside.clear()
        verdict: Verdict = "result"
        reason = ""
        faulthandler.dump_traceback_later(WAITING_SECONDS * 2, exit=True)  # code in C that takes no signal
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, WAITING_SECONDS)
        self.is_armed = True
        try:
            work()
        except HarnessError as error:
            text = str(error)
            ends_well = "\n" not in text and 0 < len(text) <= MOST_MESSAGE
            verdict, reason = ("refused", text) if ends_well else ("not one line", text[:2000])
        except Hang:
            verdict, reason = "hang", _where()
        except BaseException:
            verdict, reason = "traceback", _where()
        finally:
            self.is_armed = False
            for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
                signal.setitimer(timer, 0)
            faulthandler.cancel_dump_traceback_later()
        if self.outside:
            verdict, reason = "outside", "; ".join(self.outside)
        return verdict, reason

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_armed:
            return
        if event == "open":
            path, _, flags = arguments
            is_written = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if isinstance(flags, int) else 0
            if is_written and isinstance(path, str | bytes | os.PathLike):
                self._require_inside(event, path)
        elif event in _WRITES:
            for path in arguments[:2]:
                if isinstance(path, str | bytes | os.PathLike):
                    self._require_inside(event, path)
        elif event == "os.system" or (event == "subprocess.Popen" and str(arguments[0]).endswith("/sh")):
            self.outside.append(f"a shell: {arguments[:2]!r}")
            raise OSError(1, "no shell here")
        elif event in _PROCESSES or event == "subprocess.Popen":
            raise OSError(11, "no process can be started")

    def _require_inside(self, event: str, path: Any) -> None:
        real = os.path.realpath(os.fsdecode(path))
        if (
            real in (os.devnull, "/dev/full")
            or real == str(self.folder)
            or real.startswith(f"{self.folder}/")
            or (f"{os.sep}__pycache__" in real and real.startswith(BYTECODE))
        ):
            return
        self.outside.append(f"{event} of {real!r}")
        raise PermissionError(13, "outside of the folder", real)


def _no_process(*_: Any) -> NoReturn:
    raise OSError(11, "no process can be started")


def _out_of_time(_signal: int, _frame: FrameType | None) -> None:
    raise Hang


def _where() -> str:
    """The end of the traceback that is being handled."""
    lines = traceback.format_exc(limit=-6).splitlines()
    return "\n".join(line[:300] for line in lines[-20:])
