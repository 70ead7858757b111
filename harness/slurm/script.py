"""Renders job scripts from a template; every value from a person is quoted, for sbatch or for the shell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from harness.slurm.directives import directive
from harness.slurm.site import Site

if TYPE_CHECKING:
    from jinja2 import Template


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
        "nodes": nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": site.cpus_per_rank * ranks_per_node,
        **_gpus(site, ranks_per_node),
        "mem": site.memory_per_node,
        "time": site.time_limit,
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
