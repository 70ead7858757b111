"""The machine, the versions and the code of a run, and what Slurm and a self-test of the network say."""

from __future__ import annotations

from harness.record.part import Part


class GitPart(Part):
    """The checkout that the harness ran from."""

    commit: str
    modified: bool
    changed: list[str] = []
    """Files of its packages that differ from the commit; older records do not name them."""


class InterfacePart(Part):
    """A network interface that is up."""

    name: str
    addresses: list[str]
    megabits_per_second: int | None
    """None: the kernel does not know."""
    mtu_bytes: int
    infiniband: bool


class NodePart(Part):
    """How the processors, GPUs and networks of one node are laid out."""

    host: str
    cpu: str
    cores: int | None
    usable_cores: int
    memory_bytes: int
    numa_nodes: int
    gpus: list[str]
    gpu_topology: list[str] | None
    """Lines of `nvidia-smi topo -m`; None without GPUs."""
    interfaces: list[InterfacePart]


class SlurmPart(Part):
    """The job of `harness slurm` that ran the cell; None where Slurm does not say."""

    job: str | None = None
    nodes: str | None = None
    """As Slurm writes lists: node[1-2]."""
    partition: str | None = None
    restarts: int | None = None
    attempts: int | None = None
    step_exit_code: int | None = None
    """Of the step that ran the launchers; None: the script did not note it."""
    state: str | None = None
    """As Slurm names it; None until it was asked."""
    reason: str | None = None
    exit_code: int | None = None
    """Of the batch script; negative: killed by that signal."""
    elapsed_seconds: int | None = None
    energy_joules: int | None = None
    max_resident_bytes: int | None = None
    """The largest process of the job."""


class FabricPart(Part):
    """What a self-test of the network measured before the run; None: not measured."""

    created_at: str
    transport: str
    interface: str | None
    world_size: int
    nodes: int
    all_reduce_bytes: int | None
    all_reduce_bus_bytes_per_second: float | None
    all_reduce_latency_seconds: float | None


class EnvironmentPart(Part):
    """Of several nodes, the first one's."""

    python: str
    platform: str
    cpu: str
    cores: int | None
    load_average: float | None = None
    """Runnable processes over the last minute before the run; None in older records."""
    memory_bytes: int
    gpus: list[str]
    packages: dict[str, str]
    code: str
    """Digest of the sources that run inside a cell."""
    git: GitPart | None = None
    """None outside of a checkout."""
    variables: dict[str, str]
    """Those of an allow-list that were set."""
    nodes: list[NodePart] = []
    """Of runs that a launcher of several nodes started."""
    slurm: SlurmPart | None = None
    fabric: FabricPart | None = None
    broken_event_lines: int = 0
    """Lines of the ranks' events that could not be read."""
