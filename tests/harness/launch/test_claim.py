"""Locks of cells: kept while somebody holds them, removed when their owner was killed."""

import signal
import subprocess
import sys
from pathlib import Path

from harness.launch.external import claimed, forget_dead_claims

HOLD = """
import sys, time
from pathlib import Path
from harness.launch.external import claimed
with claimed(Path(sys.argv[1]), "cell", print):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_goes_with_its_owner_only(tmp_path: Path) -> None:
    lock = tmp_path / ".cell.lock"
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    forget_dead_claims(tmp_path)
    assert lock.exists()
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert lock.exists()
    forget_dead_claims(tmp_path)
    assert not lock.exists()
    with claimed(tmp_path, "cell", lambda: None):
        assert lock.exists()
    assert not lock.exists()
