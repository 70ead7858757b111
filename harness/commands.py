"""What each command of the command line does; printing through click, like cli.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from backends import registry
from harness.batch import batch_layout
from harness.cells import (
    Cell,
    canonical_label,
    make_cell,
    make_request,
    modules_to_preload,
    plan,
    reusable,
    run_cell,
)
from harness.cli import EXIT_STRICT
from harness.compare.document import compare_document
from harness.compare.findings.catalogue import find_all
from harness.compare.rows import Row, make_rows, reason
from harness.config import load_experiment
from harness.display import Progress
from harness.errors import HarnessError
from harness.launch.external import (
    external_rank,
    external_ranks_per_node,
    external_world_size,
    started_as_rank,
)
from harness.launch.local import LocalLauncher, require_port, resolve_device
from harness.provenance import gpu_count
from harness.record import Record
from harness.request import RunRequest
from harness.spec import Experiment
from harness.store import Store

DEFAULT_CPU_RANKS = 2


def run_once(
    *,
    backend: str,
    config: Path | None,
    nproc: int | None,
    nodes: int,
    assignments: Sequence[str],
    runs: Path,
    port: int | None,
    as_json: bool,
) -> int:
    """`harness run`."""
    experiment = load_experiment(config, assignments)
    label = canonical_label(backend)
    device = resolve_device(experiment.runtime.device)
    store = Store(runs)
    if started_as_rank():
        return _run_as_rank(experiment, label, device, store, nproc, as_json)
    if nodes > 1:
        raise HarnessError(
            f"--nodes {nodes}: this command starts ranks on its own machine only; under Slurm use "
            "`harness slurm render`, else on each node `torchrun --nnodes ... --nproc-per-node ... "
            "-m harness run`"
        )
    world_size = _world_size(label, nproc, device)
    _require_gpus(device, world_size)
    if port is not None:
        require_port(port)
    layout = batch_layout(experiment.training, world_size)
    cell = make_cell(experiment, label, world_size, layout, 0, device)
    store.prepare()
    launcher = LocalLauncher(device, modules_to_preload(experiment, [label]))
    launcher.check(cell.job.model_dump_json())
    progress = Progress(label, world_size, sys.stderr, plain_lines=True)
    try:
        record = run_cell(cell, experiment, store, launcher, command=_command(), on_event=progress, port=port)
    finally:
        progress.close()
    return _present_run(record, store, as_json)


def compare_matrix(
    *,
    config: Path | None,
    backends: str | None,
    nproc: str | None,
    repeats: int | None,
    assignments: Sequence[str],
    runs: Path,
    report: Path | None,
    fresh: bool,
    strict: bool,
    as_json: bool,
) -> int:
    """`harness compare`."""
    if started_as_rank():
        raise HarnessError(
            "compare starts its own ranks and cannot be one of a launcher's: run it without torchrun, or "
            "start `harness run` under torchrun for each backend"
        )
    experiment = load_experiment(config, assignments)
    device = resolve_device(experiment.runtime.device)
    names = split_backends(backends) if backends else experiment.compare.backends
    sizes = _sizes(nproc) if nproc else experiment.compare.world_sizes
    cells = plan(experiment, names, sizes, repeats or experiment.compare.repeats, device)
    for size in sizes:
        _require_gpus(device, size)
    store = Store(runs)
    store.prepare()
    if report is not None:
        from harness.reporting import require_writable

        require_writable(report)
    wanted = {cell.key for cell in cells}
    known = {} if fresh else reusable(_readable_records(store), wanted.__contains__)
    missing = [cell for cell in cells if cell.key not in known]
    if len(missing) < len(cells):
        click.echo(f"{len(cells) - len(missing)} of {len(cells)} cells have a record", err=True)
    done = known | _run_cells(missing, experiment, store, device)
    records = [done[cell.key] for cell in cells if cell.key in done]
    rows = make_rows(records)
    if report is not None:
        from harness.report.report import write_report

        write_report([(_record_path(store, r), r) for r in records], report)
    _present_comparison(rows, report, as_json)
    if len(records) < len(cells):
        return 130
    return EXIT_STRICT if strict and _any_bad(rows) else 0


def list_backends(as_json: bool) -> int:
    """`harness backends`."""
    from harness.provenance import package_versions

    documents: list[dict[str, Any]] = []
    for entry in registry.entries().values():
        versions = package_versions(entry.packages)
        try:
            options = entry.options_class().model_fields
            problem = None
        except registry.UnknownBackend as error:
            options, problem = {}, str(error)
        documents.append(
            {
                "name": entry.name,
                "summary": problem or entry.summary,
                "loads": problem is None,
                "installed": all(package in versions for package in entry.packages),
                "versions": {name: versions.get(name) for name in entry.packages},
                "options": {name: field.description for name, field in options.items()},
            }
        )
    if as_json:
        click.echo(json.dumps({"backends": documents}, indent=1))
        return 0
    from tabulate import tabulate

    lines = [
        (
            d["name"],
            d["summary"],
            ", ".join(d["options"]) or "-",
            ", ".join(f"{n} {v or 'missing'}" for n, v in d["versions"].items()),
        )
        for d in documents
    ]
    click.echo(tabulate(lines, headers=("backend", "what it is", "options", "versions")))
    return 0


def split_backends(text: str) -> list[str]:
    """Split a comma-separated list; 'key=value' pieces belong to the backend before them."""
    labels: list[str] = []
    for piece in filter(None, (part.strip() for part in text.split(","))):
        if "=" in piece and ":" not in piece and labels:
            labels[-1] += f",{piece}"
        else:
            labels.append(piece)
    if not labels:
        raise HarnessError("--backends is empty; give names such as ddp,zero3,fsdp, or all")
    return labels


def _run_cells(cells: Sequence[Cell], experiment: Experiment, store: Store, device: str) -> dict[str, Record]:
    """Run cells one after the other; what ran before an interruption is kept."""
    done: dict[str, Record] = {}
    if not cells:
        return done
    launcher = LocalLauncher(device, modules_to_preload(experiment, [c.backend for c in cells]))
    for job in {cell.job_id: cell.job for cell in cells}.values():
        launcher.check(job.model_dump_json())
    for number, cell in enumerate(cells, start=1):
        progress = Progress(cell.backend, cell.world_size, sys.stderr, plain_lines=False)
        try:
            record = run_cell(cell, experiment, store, launcher, command=_command(), on_event=progress)
        finally:
            progress.close()
        done[cell.key] = record
        from harness.report.tables import cell_line

        row = make_rows([record])[0]
        click.echo(f"[{number}/{len(cells)}] {cell_line(row)}", err=True)
        if record.error is not None and record.error.kind == "Interrupted":
            break
    return done


def _run_as_rank(
    experiment: Experiment, label: str, device: str, store: Store, nproc: int | None, as_json: bool
) -> int:
    """Become one rank of a run that torchrun or accelerate launch started."""
    world_size = external_world_size()
    if nproc is not None:
        raise HarnessError(
            f"--nproc {nproc} would be ignored: the launcher started {world_size} ranks; leave it out"
        )
    layout = batch_layout(experiment.training, world_size)
    cell = make_cell(experiment, label, world_size, layout, 0, device)
    store.prepare()
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # libraries would prefer a GPU that they see
    from harness.worker.environment import leave
    from harness.worker.external import run_external

    def request() -> RunRequest:
        per_node = external_ranks_per_node()
        launcher = ["torchrun", "--nproc-per-node", str(per_node), "-m"]
        return make_request(cell, experiment, device, launcher + _command(), per_node)

    record, code = run_external(request, store.root)
    if record is not None and external_rank() == 0:
        code = _present_run(record, store, as_json)
    leave(code)


def _present_run(record: Record, store: Store, as_json: bool) -> int:
    if record.error is not None and record.error.kind == "JobError":
        store.discard(record.run_id)
        raise HarnessError(record.error.message)
    if as_json:
        click.echo(record.model_dump_json(indent=1))
    path = _record_path(store, record)
    if record.status == "unsupported":
        raise HarnessError(
            f"backend '{record.backend.label}' is unsupported here: {'; '.join(record.reasons)} "
            f"(record: {path})"
        )
    if record.status != "ok":
        raise HarnessError(f"run {record.status}: {reason(record)} (record and logs: {path.parent})")
    if not as_json:
        from harness.report.tables import main_table

        click.echo(main_table(make_rows([record])))
    click.echo(f"record: {path}", err=True)
    return 0


def _present_comparison(rows: Sequence[Row], report: Path | None, as_json: bool) -> None:
    from harness.report.tables import main_table

    table = main_table(rows)
    for finding in find_all(rows):
        table += f"\nfinding {finding.id}: {finding.message}"
    # With --json the table is for the person who watches, the document for the program that reads.
    click.echo(table, err=as_json)
    if as_json:
        click.echo(json.dumps(compare_document(rows), indent=1))
    if report is not None:
        click.echo(f"report: {report}", err=True)


def _readable_records(store: Store) -> list[Record]:
    """Records to take over; one that cannot be read is named and passed over."""
    records, unreadable = store.records()
    for problem in unreadable:
        click.echo(f"passed over: {problem}", err=True)
    return records


def _any_bad(rows: Sequence[Row]) -> bool:
    """Whether a cell failed, left its reference, or was no run of the same job."""
    return any(
        row.record.status not in ("ok", "unsupported")
        or row.judgement.parity == "diverged"
        or row.judgement.not_same_job
        for row in rows
    )


def _record_path(store: Store, record: Record) -> Path:
    return store.root / record.run_id / "record.json"


def _world_size(label: str, nproc: int | None, device: str) -> int:
    if registry.parse(label)[0].name == registry.REFERENCE:
        if nproc not in (None, 1):
            raise HarnessError(f"--nproc {nproc}: '{label}' is one process; leave --nproc out")
        return 1
    return nproc or (gpu_count() if device == "cuda" else DEFAULT_CPU_RANKS)


def _require_gpus(device: str, world_size: int) -> None:
    if device == "cuda" and world_size > gpu_count():
        raise HarnessError(
            f"{world_size} ranks were asked for, but this machine has {gpu_count()} GPUs; lower --nproc "
            "or set runtime.device=cpu"
        )


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise HarnessError(f"--nproc was given '{text}'; give numbers of ranks such as 2 or 2,4")
    return list(dict.fromkeys(sizes))


def _command() -> list[str]:
    """The command line as a person would type it again."""
    return ["harness", *sys.argv[1:]]
