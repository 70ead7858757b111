"""`harness labs ...`: jobs of public courses, run under the strategies that they compare."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import click
import psutil

from harness.cli import Group
from harness.cli.options import PATH, backends_option, common, json_option, measuring, set_option
from harness.cli.output import echo
from harness.errors import HarnessError
from harness.judge.wording import counted
from harness.labs.definitions import LABS, Lab, Scale, Variant, find_lab
from harness.record.store import read_runs
from harness.tell.formats import fitted


def processor_seconds() -> float:
    """User and system time of all processes; other programs hardly change it, unlike the time on the wall.

    A process that ended counts once its parent has waited for it.
    """
    this, total = psutil.Process(), 0.0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


ALL = "all"
FOLDER = Path("runs") / "labs"
SPENT = "spent.json"
"""In the folder of a lab: what its last runs took."""


def _lab_options(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option("--runs", type=PATH, default=FOLDER, show_default=True)(command)
    variants = click.Choice(get_args(Variant))
    command = click.option("--variant", type=variants, default="as-intended", show_default=True)(command)
    scales = click.Choice(get_args(Scale))
    command = click.option("--scale", type=scales, default="full", show_default=True)(command)
    return click.argument("name")(command)


@click.group(cls=Group)
def labs() -> None:
    """List, run and tabulate labs: jobs of public courses and talks."""


@labs.command("list")
@json_option
@common
def list_labs(as_json: bool) -> int:
    """List the labs, their variants and their authors."""
    if as_json:
        found = [
            {"name": lab.name, "title": lab.title, "variants": list(lab.variants), "source": lab.source}
            for lab in LABS
        ]
        echo(json.dumps({"labs": found}, indent=1))
        return 0
    rows = [
        [lab.name, ", ".join(lab.variants) if lab.needs_runs else "arithmetic", lab.title] for lab in LABS
    ]
    echo(fitted(rows, ("lab", "variants", "what it is")))
    return 0


@labs.command("run")
@_lab_options
@backends_option
@click.option("--nproc")
@set_option
@measuring
def run_lab(
    name: str, scale: Scale, variant: Variant, runs: Path, backends: str | None, nproc: str | None,
    assignments: tuple[str, ...],
) -> int:  # fmt: skip
    """Run a lab: its missing cells, their comparison with findings, and the hand-out's table.

    NAME all: every lab that has the variant.
    """
    for lab in [lab for lab in LABS if variant in lab.variants] if name == ALL else [find_lab(name)]:
        if name == ALL:
            echo(f"\n# {lab.name}: {lab.title}")
        used, began = processor_seconds(), time.monotonic()
        before = _count(folder := _folder(lab, scale, variant, runs))
        if code := _run(lab, scale, variant, runs, backends, nproc, assignments):
            return code
        if lab.needs_runs and (ran := _count(folder) - before):
            used, wall = processor_seconds() - used, time.monotonic() - began
            said = f"{counted(ran, 'run')}, {used:.0f} s of processor time, {wall:.0f} s"
            echo(f"{lab.name}: {said}", err=True)
            spent = {"runs": ran, "processor_seconds": used, "wall_seconds": wall}
            (folder / SPENT).write_text(json.dumps(spent, indent=1) + "\n")
    return 0


def _run(
    lab: Lab, scale: Scale, variant: Variant, runs: Path, backends: str | None, nproc: str | None,
    assignments: tuple[str, ...],
) -> int:  # fmt: skip
    folder = _folder(lab, scale, variant, runs)
    for configuration in lab.configurations(variant, scale) if lab.needs_runs else ():
        words = ["--config", configuration, "--runs", str(folder)]
        words += [word for option, value in (("--backends", backends), ("--nproc", nproc)) if value
                  for word in (option, value)]  # fmt: skip
        words += [word for assignment in assignments for word in ("--set", assignment)]
        from harness.cli.compare import compare

        try:
            compare.main(words, prog_name="harness compare", standalone_mode=False)
        except SystemExit as ended:
            if ended.code:
                return int(ended.code)
    return _show(lab, folder, as_json=False, markdown=False)


@labs.command()
@_lab_options
@click.option("--markdown", is_flag=True)
@json_option
@common
def table(name: str, scale: Scale, variant: Variant, runs: Path, markdown: bool, as_json: bool) -> int:
    """Fill in the hand-out's table from the records of a lab."""
    lab = find_lab(name)
    folder = _folder(lab, scale, variant, runs)
    if lab.needs_runs and not folder.is_dir():
        chosen = f"{lab.name} --scale {scale} --variant {variant} --runs {runs}"
        raise HarnessError(f"'{folder}' has no runs; start with `harness labs run {chosen}`")
    return _show(lab, folder, as_json=as_json, markdown=markdown)


def _folder(lab: Lab, scale: Scale, variant: Variant, runs: Path) -> Path:
    lab.configurations(variant, scale)  # raises for a variant that there is not
    return runs / f"{lab.name}.{variant}.{scale}"


def _count(folder: Path) -> int:
    """Runs with a record."""
    return len([*folder.glob("*/record.json")])


def _show(lab: Lab, folder: Path, *, as_json: bool, markdown: bool) -> int:
    from harness.labs.tables import fill  # loads NumPy

    tables = fill(lab, [record for _, record in read_runs([folder])[0]] if lab.needs_runs else [])
    if as_json:
        echo(json.dumps({"lab": lab.name, "tables": [asdict(found) for found in tables]}, indent=1))
    else:
        echo("\n" + "\n\n".join(found.markdown() if markdown else found.text() for found in tables))
    return 0
