"""Three of the faults in one comparison: a rank leaves, one sleeps, one calls a collective too many."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.faults.injection import IN_STEP, KINDS, together
from tests.faults.namespaces import why_not

pytestmark = [pytest.mark.long(seconds=40), pytest.mark.exhaustive]
NAMES = ("exit-0", "sleep", "extra-collective")
SEED = 0


@pytest.mark.skipif(why_not() is not None, reason=f"needs namespaces of its own: {why_not()}")
def test_three_faults_leave_truthful_records_and_nothing_else() -> None:
    with TemporaryDirectory(prefix="faults-") as folder:  # pytest's path is too long for sockets
        _inject(Path(folder))


def _inject(folder: Path) -> None:
    named = {kind.name: kind for kind in KINDS}
    injections = together([named[name] for name in NAMES], SEED)
    assert injections[1].phase in IN_STEP  # elsewhere a hang takes a minute
    command = [sys.executable, "-m", "tests.faults", str(folder / "few"), "--together"]
    done = subprocess.run(
        [*command, "--kinds", ",".join(NAMES), "--seed", str(SEED)],
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "3 injections, 0 did not end as they should" in done.stderr
