"""`harness export accelerate | deepspeed | torchrun`: what was measured, for a program of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli import completion
from harness.cli.arguments import default_ranks
from harness.cli.device import resolve_device
from harness.cli.given import GivenFiles, given_options
from harness.cli.options import PATH, common, config_option, notice, set_option, with_new_options
from harness.cli.output import echo
from harness.cli.view import View

if TYPE_CHECKING:
    from harness.exported.folder import Tool

MOST_STEPS = 5
"""Steps of the example whose samples are written."""
JOB_FILE = "job.yaml"


def program(tool: Tool, summary: str) -> click.Command:
    """The command of one tool."""

    @common
    @given_options
    def export(**arguments: Any) -> int:
        return _export(tool, **arguments)

    described: Callable[..., None] = export
    for option in reversed((
        click.option(
            "--backend", help="Name, with options after a colon.", shell_complete=completion.backend),
        config_option,
        set_option,
        click.option("--nproc", type=click.IntRange(1), help="Ranks on this machine."),
        click.option("-o", "--output", required=True, type=PATH, help="New folder for the files."),
        click.option("--steps", type=click.IntRange(1), default=MOST_STEPS, show_default=True,
                     help="Steps of the example, whose samples are written."),
    )):  # fmt: skip
        described = option(described)
    return click.command(name=tool, help=summary)(described)


def _export(
    tool: Tool, backend: str | None, config: Path | None, assignments: tuple[str, ...], nproc: int | None,
    output: Path, steps: int, given: GivenFiles,
) -> int:  # fmt: skip
    from harness.exported.folder import LAUNCH, ON_CPU, exported_files, require_exportable, write_folder
    from harness.exported.strategies import strategy_of
    from harness.job.batch import batch_layout
    from harness.job.config import load_experiment
    from harness.launch.cells import canonical_label, make_cell
    from harness.launch.launcher import LocalLauncher, modules_to_preload

    experiment = load_experiment(config, assignments, notice)
    row = given.only_row(backend, experiment, View())
    experiment = row.experiment if row is not None else experiment
    label = row.label if row is not None else canonical_label(*with_new_options([backend or ""]))
    require_exportable(tool, label, experiment)
    device = resolve_device(experiment.runtime.device)
    ranks = nproc or default_ranks(device)
    layout = batch_layout(experiment.training, ranks)
    cell = make_cell(experiment, label, ranks, layout, 0, device)
    launcher = LocalLauncher(device, modules_to_preload(experiment, [label]))
    job = cell.job.model_dump(mode="json")
    found = exported_files(
        tool, label, cell.job, layout, world_size=ranks, device=device, preset=cell.preset,
        facts=launcher.check(json.dumps(job)),
        example=launcher.example(json.dumps({"job": job, "steps": steps})),
    )  # fmt: skip
    found[JOB_FILE] = json.dumps(experiment.model_dump(mode="json", exclude_unset=True), indent=1) + "\n"
    write_folder(output, found)
    launch = (LAUNCH if device == "cuda" else ON_CPU)[tool].format(ranks=ranks)
    echo(f"{output}: {', '.join(found)}")
    if tool == "accelerate" and device == "cpu" and strategy_of(label).family.startswith("fsdp"):
        notice("Accelerate shards with FSDP on GPUs only; on the CPU this file would start DDP")
    echo(f"start it with: cd {output} && {launch}")
    return 0
