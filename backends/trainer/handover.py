"""A library's loop on a thread that takes turns with its caller, and rates that its scheduler leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler


class Ended(BaseException):
    """Unwinds the library's loop. No `Exception`, so that the library does not handle it."""


class Handover:
    """Runs a function on a thread that works only while the caller waits in `call`, and the other way round.

    Neither side ever runs at the same time as the other, so that phases, memory and collectives that are
    measured between two calls belong to what ran between them.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._to_work = threading.Semaphore(0)
        self._to_caller = threading.Semaphore(0)
        self._value: Any = None
        self._error: BaseException | None = None
        self._ended = False
        # What torch keeps by thread.
        self._threads = torch.get_num_threads()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._run, name="library's loop", daemon=True)
        self._thread.start()

    def call(self, value: Any = None) -> Any:
        """The caller's side: hand over `value` and wait for the answer. Raises what the loop raised."""
        self._value = value
        self._to_work.release()
        self._to_caller.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        answer, self._value = self._value, None
        return answer

    def answer(self, value: Any = None) -> Any:
        """The loop's side: answer the last call and wait for the next, whose value is returned."""
        self._value = value
        del value  # the caller's from here on
        self._to_caller.release()
        self._to_work.acquire()
        if self._ended:
            raise Ended
        given, self._value = self._value, None
        return given

    def end(self) -> None:
        """Unwind the loop and wait for its thread."""
        self._ended = True
        self._to_work.release()
        self._thread.join()

    def _run(self) -> None:
        self._to_work.acquire()
        try:
            if self._ended:
                return
            torch.set_num_threads(self._threads)
            if self._device is not None:
                torch.cuda.set_device(self._device)
            self._work()
            raise RuntimeError("the library's loop ended before its last step")
        except Ended:
            pass
        except BaseException as error:
            self._error = error
        finally:
            del self._work  # and with it the model
            self._to_caller.release()


class GivenRates(LRScheduler):
    """Leaves the rates as they are: they are set before each update. Trainer steps it after each one."""

    def get_lr(self) -> list[float | Tensor]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def steps_taken(self) -> int:
        """Steps that Trainer took; the constructor takes one of its own."""
        return self._step_count - 1
