"""A rendered matrix: a folder of job scripts and the document that says which run each starts."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from harness.backends.refusals import explain_refusal
from harness.bounds import MOST_DOCUMENT_BYTES
from harness.errors import HarnessError
from harness.files import Stored, read_plain, refusing, write_atomically
from harness.job.experiment import Experiment
from harness.launch.cells import Cell, make_request, plan
from harness.record.run_id import PlainName, as_name, run_folder
from harness.run_directory.request import RunRequest
from harness.slurm.site import Site

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
    found = next((c for c in text if ord(c) < 32 or ord(c) == 127 or c in "\x85\u2028\u2029"), None)
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
        **_gpus(site, ranks_per_node),
        "mem": site.memory_per_node,
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
        variables=_variables(site),
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


def _gpus(site: Site, ranks_per_node: int) -> dict[str, str]:
    """The option that asks for GPUs; none on the CPU."""
    if not site.gpus_per_node:
        return {}
    wanted = f"{site.gpu_type}:{ranks_per_node}" if site.gpu_type else str(ranks_per_node)
    return {site.gpu_option: f"gpu:{wanted}" if site.gpu_option == "gres" else wanted}


def _variables(site: Site) -> dict[str, str]:
    """Variables of the ranks; the site's own win."""
    variables = {"OMP_NUM_THREADS": str(site.cpus_per_rank)}
    if site.interface is not None:
        variables |= {"GLOO_SOCKET_IFNAME": site.interface, "NCCL_SOCKET_IFNAME": site.interface}
    return variables | site.environment


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

    def run_directory(self, run: PlannedRun) -> Path:
        return run_folder(self.runs_folder, run.request.run_id)


def plan_nodes(
    experiment: Experiment,
    site: Site,
    backends: Sequence[str],
    node_counts: Iterable[int],
    ranks_per_node: int,
    repeats: int,
) -> list[Cell]:
    """The cells of backends x node counts x repeats, each cell once, in rounds as `plan` has them.

    Raises HarnessError where the nodes have fewer GPUs than ranks, and as `plan` does.
    """
    if site.gpus_per_node and ranks_per_node > site.gpus_per_node:
        raise HarnessError(
            f"--nproc {ranks_per_node}: nodes of site '{site.name}' have gpus_per_node "
            f"{site.gpus_per_node}; lower --nproc"
        )
    cells: dict[str, Cell] = {}
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
    changes = {
        "device": site.device,
        "threads_per_rank": runtime.threads_per_rank or site.cpus_per_rank,
    }
    return experiment.model_copy(update={"runtime": runtime.model_copy(update=changes)})


def render_matrix(
    cells: Sequence[Cell],
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
    for batch in _batches(cells, arrays):
        nodes, per_node = batch[0].nodes, batch[0].world_size // batch[0].nodes
        requests = [make_request(cell, experiment, site.device, command, per_node) for cell in batch]
        world = f"{nodes}x{per_node}"
        part = f"-{parts[world]}" if parts[world] else ""
        parts[world] += 1
        script = f"array-{world}{part}.sbatch" if arrays else f"{requests[0].run_id}.sbatch"
        label = world if arrays else f"{batch[0].backend}-{world}"
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


def _batches(cells: Sequence[Cell], arrays: bool) -> list[list[Cell]]:
    """Cells that share a script: those of equal worlds in an array, else each alone."""
    key: Callable[[Cell], object] = (lambda c: (c.nodes, c.world_size)) if arrays else (lambda c: c.key)
    batches: dict[object, list[Cell]] = {}
    for cell in cells:
        batches.setdefault(key(cell), []).append(cell)
    return [
        batch[first : first + ARRAY_SIZE]
        for batch in batches.values()
        for first in range(0, len(batch), ARRAY_SIZE)
    ]
