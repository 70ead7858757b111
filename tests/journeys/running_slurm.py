"""Slurm's commands on PATH that run a submitted script at once, on this machine as its only node."""

import os
from pathlib import Path

from tests.harness.slurm.fakes import FakeSlurm

SBATCH = """\
for script; do :; done
n=$(($(cat {folder}/count) + 1)); echo $n >{folder}/count
export SLURM_JOB_ID=$n SLURM_JOB_NODELIST=localhost SLURM_PROCID=0
bash "$script" </dev/null >{folder}/$n.out 2>&1; code=$?
state=COMPLETED; [ $code = 0 ] || state=FAILED
echo "$n|$state|$code:0|1|localhost||" >>{folder}/accounts
echo "$n;cluster\""""
SRUN = 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'


class RunningSlurm(FakeSlurm):
    """`sbatch` returns when the job is over; one node, which is this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "accounts").touch()
        self._write("sbatch", SBATCH.format(folder=folder))
        self._write("srun", SRUN)
        self._write("sacct", f"cat {folder}/accounts")
        self._write("scontrol", "echo localhost")

    @property
    def path(self) -> str:
        """The value of PATH with these commands first."""
        return f"{self.folder}:{os.environ['PATH']}"

    def outputs(self) -> str:
        """What the jobs wrote."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.out")))
