"""Progress bars of libraries within a rank. Must not import torch."""

from __future__ import annotations

import threading


def keep_lock_of_bars() -> None:
    """Give tqdm a lock of threads in place of its semaphore between processes.

    A rank leaves without finalisers, so that Python would warn of the semaphore as leaked when the launcher
    ends; transformers shows bars while it loads weights, datasets while it prepares them.
    """
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
