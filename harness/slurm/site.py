"""A site file: what a cluster wants to hear. Validation touches neither environment nor network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)

from harness.backends.refusals import choices, explain_refusal
from harness.errors import HarnessError
from harness.fabric.result import parse_rate
from harness.files import Stored
from harness.job.yaml_files import read_yaml_file

TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-5]?[0-9]))?(?::([0-5]?[0-9]))?")
MEMORY = re.compile(r"[0-9]+[KMGT]?", re.IGNORECASE)
SCRIPT_VARIABLES = ("code", "ended", "hosts", "job", "python", "run", "runs")
# The script or `submit` writes these itself; given again they would contradict it.
OWN_OPTIONS = (
    "array", "cpus-per-task", "gpus-per-node", "gres", "job-name", "mem", "no-requeue", "nodes", "ntasks",
    "ntasks-per-node", "open-mode", "output", "parsable", "requeue", "signal", "time", "wrap",
)  # fmt: skip
# With these sbatch submits nothing, submits elsewhere, prints something else or returns at the job's end.
UNSUBMITTABLE = ("clusters", "help", "quiet", "test-only", "usage", "version", "wait")


def _one_line(text: str) -> str:
    if any(ord(c) < 32 or ord(c) == 127 or c in "\x85\u2028\u2029" for c in text):
        raise ValueError("must be one line without control characters")
    return text


def _time(text: str) -> str:
    if time_seconds(text) == 0:
        raise ValueError("must be a time as Slurm writes it, above 0: minutes, HH:MM:SS or D-HH:MM:SS")
    return text


def time_seconds(text: str) -> int:
    """Seconds of a time as Slurm writes it; 0 of anything else."""
    match = TIME.fullmatch(text)
    if match is None:
        return 0
    days = match[1]
    pieces = [int(piece) for piece in match.groups()[1:] if piece is not None]
    if days is not None:  # hours first
        pieces += [0] * (3 - len(pieces))
    elif len(pieces) == 1:  # minutes
        pieces.append(0)
    seconds = 0
    for piece in pieces:
        seconds = seconds * 60 + piece
    return int(days or 0) * 86400 + seconds


def _memory(text: str) -> str:
    if not MEMORY.fullmatch(text):
        raise ValueError("must be a number with K, M, G or T, such as 120G; 0: all of the node")
    return text


def _rate(text: str) -> str:
    try:
        parse_rate(text)
    except HarnessError as error:
        raise ValueError(str(error)) from error
    return text


Word = Annotated[str, Field(min_length=1), AfterValidator(_one_line)]


class Site(Stored):
    """One cluster, or one partition of it: frozen, unknown keys refused."""

    name: Word = Field(description="name of the site; cells of different sites are different cells")
    partition: Word | None = Field(None, description="sbatch's --partition")
    account: Word | None = Field(None, description="sbatch's --account")
    qos: Word | None = Field(None, description="sbatch's --qos")
    constraint: Word | None = Field(None, description="sbatch's --constraint")
    reservation: Word | None = Field(None, description="sbatch's --reservation")
    time_limit: Annotated[str, AfterValidator(_time)] = Field(
        "00:30:00", description="time limit of one cell: minutes, HH:MM:SS or D-HH:MM:SS"
    )
    one_rank_time_limit: Annotated[str, AfterValidator(_time)] | None = Field(
        None,
        description="time limit of cells of one rank, such as the reference, which trains the whole batch "
        "alone; default: time_limit",
    )
    notice_seconds: PositiveInt = Field(
        60, description="seconds before the time limit at which a run is asked to save its measurements"
    )
    gpus_per_node: int = Field(0, ge=0, description="GPUs of a node, one rank each; 0: ranks on the CPU")
    gpu_type: Word | None = Field(None, description="type of the GPUs as Slurm names it: a100, v100")
    gpu_option: Literal["gpus-per-node", "gres"] = Field(
        "gpus-per-node",
        description="how sbatch is asked for GPUs: --gpus-per-node=a100:4 or --gres=gpu:a100:4",
    )
    gpu: Word | None = Field(
        None,
        description="the GPU as `harness estimate --gpu` names it, such as A100-64; `submit` refuses runs "
        "that cannot fit, and a torch without kernels for it",
    )
    cpus_per_rank: PositiveInt = Field(1, description="CPU cores of a rank")
    memory_per_node: Annotated[Word, AfterValidator(_memory)] | None = Field(
        None,
        description="sbatch's --mem, such as 120G; 0: all of the node. Runs that need more are not queued",
    )
    exclusive: bool = Field(False, description="sbatch's --exclusive: use the nodes alone")
    requeue: bool = Field(True, description="Slurm may start a job anew after a node failed or was preempted")
    modules: list[Word] = Field([], description="environment modules to load, in order")
    virtual_environment: Word | None = Field(None, description="Python virtual environment to activate")
    container: list[Word] = Field(
        [], description="words put in front of python: [apptainer, exec, --nv, image.sif]"
    )
    python: Word = Field("python3", description="the interpreter that has the harness")
    environment: dict[str, str] = Field(
        {}, description="variables of the ranks; not `SLURM_*`, `MASTER_*` and those that the job script uses"
    )
    interface: Word | None = Field(
        None, description="network interface of the collectives: set for gloo and for NCCL's bootstrap"
    )
    require_busbw: Annotated[Word, AfterValidator(_rate)] | None = Field(
        None,
        description="measure the network before each run of several ranks, and do not begin below this "
        "all-reduce bus bandwidth: 5GB/s, or 40Gbit/s",
    )
    launcher: Literal["torchrun", "accelerate", "deepspeed"] = Field(
        "torchrun", description="what starts the ranks of a node"
    )
    max_queued_jobs: PositiveInt = Field(
        100, description="`submit` keeps no more of the user's jobs than this in the queue"
    )
    options: dict[str, str | int | bool] = Field(
        {}, description="further sbatch options by their long names; true: an option without a value"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Site:
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"environment: {name!r} is not the name of a variable")
            if name.startswith(("SLURM_", "MASTER_")) or name in SCRIPT_VARIABLES:
                raise ValueError(f"environment: {name} is Slurm's or the job script's own; leave it out")
            if "\0" in self.environment[name]:
                raise ValueError(f"environment: {name} holds a zero byte")
        for name, value in self.options.items():
            if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
                raise ValueError(f"options: {name!r} is not a long option of sbatch")
            # sbatch takes the begin of a long option for the option.
            if any(own.startswith(name) for own in OWN_OPTIONS):
                raise ValueError(f"options: '{name}' is written by the harness; use the site's own keys")
            if any(other.startswith(name) for other in UNSUBMITTABLE):
                raise ValueError(
                    f"options: '{name}' changes what sbatch itself does; the harness could not follow the job"
                )
            if name in Site.model_fields and getattr(self, name) is not None:
                raise ValueError(f"options: '{name}' is given twice")
            if isinstance(value, str):
                _one_line(value)
        for limit in (self.time_limit, self.time_limit_of(1)):
            if self.notice_seconds >= time_seconds(limit):
                raise ValueError(
                    f"notice_seconds is {self.notice_seconds}, which is not below the time limit "
                    f"{limit}; lower it or give more time"
                )
        for key in ("gpu_type", "gpu"):
            if getattr(self, key) is not None and self.gpus_per_node == 0:
                raise ValueError(f"{key} needs gpus_per_node")
        return self

    def time_limit_of(self, world_size: int) -> str:
        """Time limit of a cell of so many ranks."""
        return (self.one_rank_time_limit if world_size == 1 else None) or self.time_limit

    @property
    def device(self) -> str:
        return "cuda" if self.gpus_per_node else "cpu"

    @property
    def machine(self) -> str:
        """What stands for the processor and GPUs of nodes that the submitting machine does not see."""
        parts = (self.name, self.partition, self.constraint, self.gpu_type)
        return "slurm; " + "; ".join(part or "-" for part in parts)


def load_site(path: Path) -> Site:
    """Read a site file. Raises HarnessError naming the key, what was given and what is allowed."""
    return read_yaml_file(path, "site file", Site, f"a mapping of {choices('', Site.model_fields)}")


def with_time_limit(site: Site, time_limit: str) -> Site:
    """The site with another time limit. Raises HarnessError as site files do."""
    try:
        return Site.model_validate(site.model_dump() | {"time_limit": time_limit})
    except ValidationError as error:
        raise HarnessError(f"--time {time_limit}: {explain_refusal(error, Site)}") from error
