"""A rendered matrix: a folder of job scripts and the document that says which run each starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.backends.explain import explain
from harness.bounds import MOST_DOCUMENT_BYTES
from harness.errors import HarnessError
from harness.files import read_plain, write_atomically
from harness.job.experiment import Experiment
from harness.launch.cells import Cell, make_request, plan
from harness.record.run_id import PlainName, run_folder
from harness.run_directory.request import RunRequest
from harness.slurm.directives import refuse_control_characters
from harness.slurm.script import render_script
from harness.slurm.site import Site

MATRIX_NAME = "matrix.json"
MATRIX_SCHEMA: Literal[1] = 1
ARRAY_SIZE = 1000
"""Runs of one job array: Slurm's own default of MaxArraySize is 1001."""


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlannedRun(_Document):
    """One run of the matrix and the script that starts it."""

    request: RunRequest
    nodes: int
    script: PlainName
    """File name within the folder."""
    array_index: int | None = None


class Matrix(_Document):
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
    """The experiment with the site's device and threads, which this machine cannot know."""
    runtime = experiment.runtime
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
            job_name=f"{job_name}-{label}",
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in scripts.items():
            write_atomically(folder / name, text)
        write_atomically(folder / MATRIX_NAME, matrix.model_dump_json(indent=1))
    except OSError as error:
        raise HarnessError(f"folder '{folder}' cannot be written: {error.strerror}") from error


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
        raise HarnessError(f"{path} is not a matrix of this version: {explain(error, Matrix)}") from error


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
