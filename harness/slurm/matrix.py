"""A rendered matrix: a folder of job scripts and the document that says which run each starts."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt, ValidationError, model_validator

from harness.backends.refusals import choices, explain_refusal
from harness.bounds import MOST_DOCUMENT_BYTES
from harness.errors import HarnessError
from harness.fabric.result import parse_rate
from harness.files import PlainName, Stored, read_plain, refusing, write_atomically
from harness.job.config import read_yaml_file
from harness.job.experiment import Experiment
from harness.launch.cells import begin_run, plan
from harness.nested import grouped
from harness.record.store import as_name, run_folder
from harness.run_directory.request import RunRequest
from harness.slurm.client import time_seconds

MEMORY = re.compile(r"[0-9]+[KMGT]?", re.IGNORECASE)
SCRIPT_VARIABLES = ("code", "ended", "hosts", "job", "python", "run", "runs")
# The script or `submit` writes these itself; given again they would contradict it.
OWN_OPTIONS = (
    "array", "cpus-per-task", "gpus-per-node", "gres", "job-name", "mem", "no-requeue", "nodes", "ntasks",
    "ntasks-per-node", "open-mode", "output", "parsable", "requeue", "signal", "time", "wrap",
)  # fmt: skip
# With these sbatch submits nothing, submits elsewhere, prints something else or returns at the job's end.
UNSUBMITTABLE = ("clusters", "help", "quiet", "test-only", "usage", "version", "wait")


def _control_character(text: str) -> str | None:
    """The first character that could end the line it is written into."""
    return next((c for c in text if ord(c) < 32 or ord(c) == 127 or c in "\x85\u2028\u2029"), None)


def _one_line(text: str) -> str:
    if _control_character(text) is not None:
        raise ValueError("must be one line without control characters")
    return text


def _time(text: str) -> str:
    if not time_seconds(text):
        raise ValueError("must be a time as Slurm writes it, above 0: minutes, HH:MM:SS or D-HH:MM:SS")
    return text


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
        description="sbatch's --mem, such as 120G; 0: all of the node, by default where a run has its nodes "
        "alone. Runs that need more are not queued",
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
            if self.notice_seconds >= (time_seconds(limit) or 0):
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

    def memory_of(self, ranks_per_node: int) -> str | None:
        """sbatch's --mem; with the whole node and no --mem Slurm gives its default, often too little."""
        if self.memory_per_node or any(name.startswith("mem-") for name in self.options):
            return self.memory_per_node
        return "0" if self.exclusive or 0 < self.gpus_per_node == ranks_per_node else None

    @property
    def device(self) -> str:
        return "cuda" if self.gpus_per_node else "cpu"

    @property
    def machine(self) -> str:
        """What stands for the processor and GPUs of nodes that the submitting machine does not see."""
        parts = (self.name, self.partition, self.constraint, self.gpu_type)
        return "slurm; " + "; ".join(part or "-" for part in parts)


HOW_TO_WRITE = "; write 'name: mine' and 'gpus_per_node: 8' into it (keys: slurm/README.md), or give @generic"


def load_site(path: Path) -> Site:
    """Read a site file. Raises HarnessError naming the key, what was given and what is allowed."""
    must_be = f"a mapping of {choices('', Site.model_fields)}"
    return read_yaml_file(path, "site file", Site, must_be, HOW_TO_WRITE)


OPTIONS = {"time_limit": "--time", "partition": "--partition", "account": "--account", "qos": "--qos"}
"""Keys of a site that `slurm render` takes as options, which replace the file's."""


def with_options(site: Site, given: Mapping[str, str | None]) -> Site:
    """The site with other values of `OPTIONS`; None: its own. Raises HarnessError as site files do."""
    values = {key: value for key, value in given.items() if value is not None}
    try:
        return Site.model_validate(site.model_dump() | values)
    except ValidationError as error:
        typed = " ".join(f"{OPTIONS[key]} {value}" for key, value in values.items())
        raise HarnessError(f"{typed}: {explain_refusal(error, Site)}") from error


if TYPE_CHECKING:
    from jinja2 import Template


def directive(option: str, value: str | int | None = None) -> str:
    """One `#SBATCH --option=value` line that sbatch reads back as given; None: an option without a value.

    sbatch takes quotes, backslashes and `#` as a shell does; the shell sees a comment as long as the line
    does not end. Raises HarnessError for a value with a line break or another control character.
    """
    if value is None:
        return f"#SBATCH --{option}"
    text = str(value)
    refuse_control_characters(text, f"--{option}")
    if text and all(c.isalnum() or c in "_-.,:=+@/%[]" for c in text):
        return f"#SBATCH --{option}={text}"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH --{option}="{escaped}"'


def refuse_control_characters(text: str, where: str) -> None:
    """Raise HarnessError if `text` could end the line that it is written into, or is no text at all."""
    found = _control_character(text)
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise HarnessError(f"{where} was given {text!r}, which is not UTF-8; give a name that is")
    if found is not None:
        raise HarnessError(
            f"{where} was given {text!r}: a job script has no place for the control character {found!r}; "
            "leave it out"
        )


def render_script(
    site: Site,
    *,
    job_name: str,
    nodes: int,
    ranks_per_node: int,
    run_directories: Sequence[Path],
    log_folder: Path,
    array: bool,
) -> str:
    """The sbatch script of one run, or of an array of runs in equal worlds.

    Raises HarnessError for a value that no script can hold.
    """
    gpus: dict[str, str] = {}
    variables = {"OMP_NUM_THREADS": str(site.cpus_per_rank)}
    if site.gpus_per_node:
        wanted = f"{site.gpu_type}:{ranks_per_node}" if site.gpu_type else str(ranks_per_node)
        gpus = {site.gpu_option: f"gpu:{wanted}" if site.gpu_option == "gres" else wanted}
    if site.interface is not None:
        variables |= {"GLOO_SOCKET_IFNAME": site.interface, "NCCL_SOCKET_IFNAME": site.interface}
    logs = str(log_folder).replace("%", "%%")
    options: dict[str, str | int | bool | None] = {
        "job-name": job_name,
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "reservation": site.reservation,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": site.cpus_per_rank * ranks_per_node,
        **gpus,
        "mem": site.memory_of(ranks_per_node),
        "time": site.time_limit_of(nodes * ranks_per_node),
        "signal": f"B:USR1@{site.notice_seconds}",
        "output": f"{logs}/{'%A_%a' if array else '%j'}.log",
        "open-mode": "append",
        "requeue" if site.requeue else "no-requeue": True,
        "exclusive": site.exclusive,
        **site.options,
        "array": f"0-{len(run_directories) - 1}" if array else None,
    }
    return _template().render(
        site=site,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        array=array,
        directives=[
            (option, None if value is True else value)
            for option, value in options.items()
            if value is not None and value is not False
        ],
        runs=[str(directory) for directory in run_directories],
        variables=variables | site.environment,
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("harness.slurm", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["word"] = word
    environment.globals["directive"] = directive
    return environment.get_template("job.sbatch.jinja")


def word(text: str) -> str:
    """One word of the shell on one line: sbatch obeys #PBS and #BSUB lines anywhere, within quotes too."""
    if "\n" not in text:
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"$'{escaped}'"


MATRIX_NAME = "matrix.json"
MATRIX_SCHEMA: Literal[1] = 1
ARRAY_SIZE = 1000
"""Runs of one job array: Slurm's own default of MaxArraySize is 1001."""


class PlannedRun(Stored):
    """One run of the matrix and the script that starts it."""

    request: RunRequest
    nodes: int
    script: PlainName
    """File name within the folder."""
    array_index: int | None = None


class Matrix(Stored):
    """What `render` decided; submission and collection only read it."""

    schema_version: Literal[1] = MATRIX_SCHEMA
    site: Site
    runs_folder: Path
    """Absolute: the same on every node."""
    runs: list[PlannedRun]

    @property
    def most_asked(self) -> str:
        """'at most 24 GPU-hours': of all runs, each to its time limit; of CPU ranks node-hours."""
        held = "GPU" if self.site.gpus_per_node else "node"
        hours = sum(
            (run.request.world_size if held == "GPU" else run.nodes)
            * (time_seconds(self.site.time_limit_of(run.request.world_size)) or 0) / 3600
            for run in self.runs
        )  # fmt: skip
        return f"at most {hours:,.3g} {held}-hours"

    def run_directory(self, run: PlannedRun) -> Path:
        return run_folder(self.runs_folder, run.request.run_id)


def plan_nodes(
    experiment: Experiment,
    site: Site,
    backends: Sequence[str],
    node_counts: Iterable[int],
    ranks_per_node: int,
    repeats: int,
) -> list[RunRequest]:
    """The cells of backends x node counts x repeats, each cell once, in rounds as `plan` has them.

    Raises HarnessError where the nodes have fewer GPUs than ranks, and as `plan` does.
    """
    if site.gpus_per_node and ranks_per_node > site.gpus_per_node:
        raise HarnessError(
            f"--nproc {ranks_per_node}: nodes of site '{site.name}' have gpus_per_node "
            f"{site.gpus_per_node}; lower --nproc"
        )
    cells: dict[str, RunRequest] = {}
    for nodes in node_counts:
        sizes = [nodes * ranks_per_node]
        planned = plan(experiment, backends, sizes, repeats, site.device, nodes=nodes, machine=site.machine)
        for cell in planned:
            cells.setdefault(cell.key, cell)
    return sorted(cells.values(), key=lambda cell: cell.repeat)


def on_site(experiment: Experiment, site: Site) -> Experiment:
    """The experiment with the site's device and threads, which this machine cannot know.

    Raises HarnessError for what the site has not, and for turns: a job runs one cell.
    """
    runtime = experiment.runtime
    if experiment.compare.turns not in (None, "auto"):
        raise HarnessError(
            f"compare.turns is {experiment.compare.turns}, but each job of Slurm runs one cell alone; "
            "--set compare.turns=null renders them"
        )
    if runtime.device not in ("auto", site.device):
        raise HarnessError(
            f"runtime.device is {runtime.device}, but site '{site.name}' has gpus_per_node "
            f"{site.gpus_per_node}; change one of them"
        )
    changes = {"device": site.device, "threads_per_rank": runtime.threads_per_rank or site.cpus_per_rank}
    return experiment.model_copy(update={"runtime": runtime.model_copy(update=changes)})


def render_matrix(
    cells: Sequence[RunRequest],
    experiment: Experiment,
    site: Site,
    *,
    folder: Path,
    runs_folder: Path,
    job_name: str,
    arrays: bool,
    command: list[str],
) -> tuple[Matrix, dict[str, str]]:
    """The matrix and its scripts by file name; writes nothing. Raises HarnessError for hostile paths.

    `arrays`: a job array of cells of equal worlds, ARRAY_SIZE at most, else one script per cell.
    """
    folder, runs_folder = folder.absolute(), runs_folder.absolute()
    for where, text in (("--job-name", job_name), ("-o", str(folder)), ("--runs", str(runs_folder))):
        refuse_control_characters(text, where)
    if "\\" in str(folder):
        raise HarnessError(
            f"-o was given '{folder}': Slurm starts no job whose log lies under a path with a backslash; "
            "give another folder"
        )
    runs: list[PlannedRun] = []
    scripts: dict[str, str] = {}
    parts: Counter[str] = Counter()
    # Those of equal worlds share an array; else each has a script.
    batches = grouped(((cell.nodes, cell.world_size) if arrays else cell.key, cell) for cell in cells)
    parted = (
        batch[i : i + ARRAY_SIZE] for batch in batches.values() for i in range(0, len(batch), ARRAY_SIZE)
    )
    for batch in parted:
        nodes, per_node = batch[0].nodes, batch[0].world_size // batch[0].nodes
        requests = [begin_run(cell, command) for cell in batch]
        world = f"{nodes}x{per_node}"
        part = f"-{parts[world]}" if parts[world] else ""
        parts[world] += 1
        script = f"array-{world}{part}.sbatch" if arrays else f"{requests[0].run_id}.sbatch"
        label = world + part if arrays else f"{batch[0].backend}-{world}-{requests[0].run_id[-6:]}"
        scripts[script] = render_script(
            site,
            job_name=f"{job_name}-{as_name(label)}",
            nodes=nodes,
            ranks_per_node=per_node,
            run_directories=[runs_folder / request.run_id for request in requests],
            log_folder=folder,
            array=arrays,
        )
        runs += [
            PlannedRun(request=request, nodes=nodes, script=script, array_index=index if arrays else None)
            for index, request in enumerate(requests)
        ]
    return Matrix(site=site, runs_folder=runs_folder, runs=runs), scripts


def write_matrix(folder: Path, matrix: Matrix, scripts: dict[str, str]) -> None:
    """Write a new folder. Raises HarnessError if there is a matrix already, or it cannot be written."""
    if (folder / MATRIX_NAME).exists():
        raise HarnessError(
            f"'{folder}' holds a matrix already: give another folder with -o, or collect and remove this one"
        )
    with refusing(f"folder '{folder}' cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in scripts.items():
            write_atomically(folder / name, text)
        write_atomically(folder / MATRIX_NAME, matrix.model_dump_json(indent=1))


def read_matrix(folder: Path) -> Matrix:
    """Read the matrix of a folder. Raises HarnessError if there is none that this version reads."""
    path = folder / MATRIX_NAME
    try:
        return Matrix.model_validate_json(read_plain(path, MOST_DOCUMENT_BYTES))
    except OSError as error:
        raise HarnessError(
            f"'{folder}' holds no matrix ({error.strerror}); give a folder that `harness slurm render` wrote"
        ) from error
    except ValidationError as error:
        raise HarnessError(
            f"{path} is not a matrix of this version: {explain_refusal(error, Matrix)}"
        ) from error
