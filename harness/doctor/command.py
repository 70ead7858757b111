"""`harness doctor`: runs the self-check and prints what it saw; printing through click, like cli.py."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import click
from tabulate import tabulate

from harness.compare.rows import reason
from harness.doctor.check import MUST_BE_NAMED, document, self_check
from harness.doctor.known import traps_of
from harness.launch.local import resolve_device
from harness.provenance import gpu_count, package_versions

RANKS = 2


def examine(as_json: bool) -> int:
    """Run the self-check; 0 if this installation can be trusted, else 1."""
    device = resolve_device("auto")
    ranks = min(RANKS, gpu_count()) if device == "cuda" else RANKS
    versions = package_versions(("torch", "transformers", "deepspeed", "accelerate"))
    known = traps_of(versions)
    with tempfile.TemporaryDirectory(prefix="harness-doctor-") as folder:
        check = self_check(Path(folder), device, ranks, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps({"versions": versions} | document(check, known), indent=1))
        return 0 if check.trusted else 1
    click.echo(", ".join(f"{name} {version}" for name, version in versions.items()))
    lines = [
        (r.record.backend.label, r.record.status, r.judgement.parity, reason(r.record) or "")
        for r in check.rows
    ]
    click.echo(tabulate(lines, headers=("backend", "status", "parity", "why")))
    click.echo("\nknown traps of these versions:")
    for trap in known:
        click.echo(f"- {trap.package}: {trap.trap}. Here: {trap.here}.")
    click.echo(
        f"\nself-check: {len(check.false)} findings on a clean matrix of {len(check.rows)} cells, "
        f"{len(MUST_BE_NAMED) - len(check.missed)} of {len(MUST_BE_NAMED)} planted defects named"
    )
    if check.trusted:
        click.echo("this installation can be trusted")
        return 0
    for name, why in check.failed.items():
        click.echo(f"- {name} did not finish: {why}")
    for finding in check.false:
        click.echo(f"- {finding.id}: {finding.message}")
    for name, said in check.missed.items():
        click.echo(f"- {name} was not named as {MUST_BE_NAMED[name]}: found {said}")
    click.echo("this installation cannot be trusted until these are resolved")
    return 1
