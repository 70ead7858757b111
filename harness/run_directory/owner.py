"""A process that others must be able to recognise: which one it is, and whether it still lives."""

from __future__ import annotations

import os
import socket

import psutil

from harness.record import Part


class Owner(Part):
    """A process on a machine."""

    host: str
    process: int
    started: float
    """When the process began: its number may be given again."""

    @classmethod
    def myself(cls) -> Owner:
        return cls(host=socket.gethostname(), process=os.getpid(), started=psutil.Process().create_time())

    @property
    def is_gone(self) -> bool:
        """Whether it is known to have ended; False on other machines, where that cannot be seen."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.process)
            is_another = abs(process.create_time() - self.started) > 1
            return is_another or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False
