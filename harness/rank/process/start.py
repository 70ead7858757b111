"""The first words of a rank: how it ends on a signal, and libraries' progress bars. Must not import torch."""

from __future__ import annotations

import os
import sys
import threading
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End the process without static destructors.

    About 2 % of DeepSpeed runs on gloo die in them after their work is done ('terminate called without
    an active exception'), which would turn a finished run into a failed one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def keep_lock_of_bars() -> None:
    """Give tqdm a lock of threads in place of its semaphore between processes.

    A rank leaves without finalisers, so that Python would warn of the semaphore as leaked when the launcher
    ends; transformers shows bars while it loads weights, datasets while it prepares them.
    """
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
