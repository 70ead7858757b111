"""A real Slurm on the nodes of one machine, and its commands for tests."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.nodes import MANAGEMENT, Nodes, wait_for

MUNGE = "/run/munge/munge.socket.2"
CPUS_PER_NODE = 2
CONFIGURATION = """\
ClusterName=tests
SlurmctldHost=head({network}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge},cred_expire=10
CredType=cred/munge
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PlugStackConfig=/dev/null
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=4000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=10
OverTimeLimit=0
MinJobAge=3600
JobRequeue=1
MailProg=/bin/true
"""


class SlurmCluster:
    """Starts on construction; `close` ends every process of it."""

    def __init__(
        self, folder: Path, prefix: Path, node_count: int, cpus_per_node: int = CPUS_PER_NODE
    ) -> None:
        self.folder = folder
        self._prefix = prefix = prefix.resolve()  # daemons start in other folders
        self._cpus_per_node = cpus_per_node
        self._plugins = next((prefix / "usr" / "lib").glob("*/slurm-wlm"))
        folder.mkdir(parents=True, exist_ok=True)
        self.nodes = Nodes(folder, [f"node{number + 1}" for number in range(node_count)])
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (folder / "state").mkdir()
        self._write_configuration()
        self.nodes.start()
        for name in ("head", *self.nodes.names):
            self._start_munge(name)
        self._daemon("head", "slurmctld", "-D", "-i", "-f", str(folder / "slurm.conf"))
        for name in self.nodes.names:
            self._start_slurmd(name)
        wait_for(lambda: self._states() == {"idle"}, f"Slurm: see {folder}/*.log")

    def close(self) -> None:
        self.nodes.stop()

    def command(
        self,
        *words: str | Path,
        cwd: Path,
        node: str = "head",
        check: bool = True,
        timeout: float = 300.0,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, Slurm's commands on its PATH."""
        done = subprocess.run(
            [*self.nodes.enter(node), str(cwd), *map(str, words)], env=self._environment() | variables,
            capture_output=True, text=True, check=False, timeout=timeout,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"{words} left with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    def harness(
        self, *words: str | Path, cwd: Path, check: bool = True, timeout: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        return self.command(sys.executable, "-m", "harness", *words, cwd=cwd, check=check, timeout=timeout)

    def wait_for_jobs(self, jobs: Sequence[str], folder: Path, seconds: float = 90) -> None:
        """Until none of the jobs waits or runs. Asks Slurm itself: a harness for each look is slow."""

        def over() -> bool:
            listed = self.command("squeue", "--noheader", f"--jobs={','.join(jobs)}", cwd=folder)
            return not listed.stdout.strip()

        wait_for(over, f"the end of jobs {', '.join(jobs)} in {folder}", seconds)

    def preempt(self, folder: Path, seconds: int = 2) -> None:
        """Submit a job that takes all nodes from those of the ordinary partition."""
        self.command(
            "sbatch", "--partition=urgent", f"--nodes={len(self.nodes.names)}", "--exclusive",
            "--output=/dev/null", f"--wrap=sleep {seconds}", cwd=folder,
        )  # fmt: skip

    def power_on_all(self) -> None:
        """Bring back the nodes that were powered off, and wait until all have nothing to do."""
        for name in self.nodes.powered_off():
            self.nodes.power_on(name)
            self._start_munge(name)
            self._start_slurmd(name)
        wait_for(lambda: self._states() == {"idle"}, "all nodes to be idle", 60)

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        root = Path(__file__).resolve().parents[2]
        return kept | {
            "PATH": f"{self._prefix}/usr/bin:{self._prefix}/usr/sbin:{os.environ['PATH']}:/usr/sbin:/sbin",
            "LD_LIBRARY_PATH": f"{self._plugins}:{self._plugins.parent}",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PYTHONPATH": str(root),
            "HF_HUB_OFFLINE": "1",
        }

    def _write_configuration(self) -> None:
        text = CONFIGURATION.format(
            network=MANAGEMENT, munge=MUNGE, plugins=self._plugins, folder=self.folder
        )
        for number, name in enumerate(self.nodes.names):
            text += (
                f"NodeName={name} NodeAddr={MANAGEMENT}.{11 + number} CPUs={self._cpus_per_node} "
                "RealMemory=16000 State=UNKNOWN\n"
            )
        nodes = ",".join(self.nodes.names)
        text += f"PartitionName=test Nodes={nodes} Default=YES MaxTime=60 State=UP PriorityTier=1\n"
        text += f"PartitionName=urgent Nodes={nodes} MaxTime=60 State=UP PriorityTier=2\n"
        (self.folder / "slurm.conf").write_text(text)
        # slurmd looks for cgroups unless told which kind it would be.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start_munge(self, name: str) -> None:
        # --force: the folder of a test is open to more readers than munged likes.
        self._daemon(
            name, "munged", "-F", "--force", f"--key-file={self.folder}/munge.key", f"--socket={MUNGE}",
            "--pid-file=/run/munge/munged.pid", "--seed-file=/run/munge/munged.seed",
            f"--log-file={self.folder}/munged-{name}.log",
        )  # fmt: skip
        wait_for(lambda: self.nodes.run(name, "test", "-S", MUNGE).returncode == 0, f"munged on {name}")

    def _start_slurmd(self, name: str) -> None:
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        stepd = self._prefix / "usr" / "sbin" / "slurmstepd"
        self._daemon(
            name, "slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf"), "-d", str(stepd)
        )

    def _daemon(self, name: str, *command: str) -> None:
        words: Sequence[str] = [*self.nodes.enter(name), str(self.folder), *command]
        with (self.folder / f"{command[0]}-{name}.out").open("ab") as log:
            subprocess.Popen(
                words, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def _states(self) -> set[str]:
        done = self.command("sinfo", "-h", "-N", "-o", "%T", cwd=self.folder, check=False)
        return set(done.stdout.split())
