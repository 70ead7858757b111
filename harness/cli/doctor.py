"""`harness doctor` and `harness fabric`: check the installation, its GPUs and its network."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from harness.backends import registry
from harness.backends.libraries.facts import traps_of
from harness.backends.refusals import available
from harness.cli.options import (
    EXIT_GATE,
    PATH,
    common,
    default_ranks,
    json_option,
    resolve_device,
    split_backends,
)
from harness.cli.output import echo
from harness.doctor import gpu_runs
from harness.doctor.packing import PACKED, check_bundle, write_bundle
from harness.doctor.self_check import SelfCheck, cover, document, self_check
from harness.errors import HarnessError
from harness.fabric.result import (
    FABRIC_NAME,
    OPERATIONS,
    FabricResult,
    fabric_table,
    judged_batch,
    parse_rate,
    parse_size,
    result_file,
    shortfall,
    start_ranks,
    whole_elements,
    write_result,
)
from harness.files import refusing, scratch_folder, try_writing
from harness.gpus.found import device_of, find_gpus
from harness.judge.rows import reason
from harness.judge.wording import ranks
from harness.launch import external_rank, started_as_rank
from harness.launch.cells import canonical_label
from harness.launch.launcher import EVERY_RANK, require_libraries
from harness.rank.process.start import leave
from harness.record.provenance import environment, package_versions
from harness.tell.formats import fitted

PACKAGES = ("sharding-harness", "torch", "transformers", "deepspeed", "accelerate", "nvidia-ml-py")


CHECKS_SHARE = 0.4
"""Of the minutes of --full, which the comparisons take up."""


def examine_gpus(minutes: float, bundle: Path | None, size: Path | None, *, as_json: bool) -> int:
    """Run the checks, with a configuration `size` comparisons too; 1 if a check failed, else 0.

    Raises HarnessError where no GPU can be used.
    """
    if bundle is not None:
        check_bundle(bundle)
    gpus = find_gpus()
    why_not = gpus.refusal or gpus.why_none
    if why_not is not None:
        document = {
            "why_not": why_not,
            "devices": [gpu.name for gpu in gpus.devices],
            "signs": [str(sign) for sign in gpus.signs],
            "torch": str(gpus.wheel),
            "driver_cuda": gpus.driver_cuda,
            "versions": package_versions(PACKAGES),
        }
        if as_json:
            echo(json.dumps(document, indent=1))
        if bundle is not None:
            packed = document | {"environment": environment().model_dump(mode="json")}
            with scratch_folder("doctor") as folder:
                write_bundle(bundle, folder, packed, [f"no GPU can be checked: {why_not}"])
            echo(f"bundle: {bundle}", err=True)
        raise HarnessError(f"no GPU can be checked: {why_not}; `harness doctor` checks this machine's CPU")
    asked = [] if size is None else gpu_runs.matrices(gpu_runs.ranks_on(gpus), str(size))
    begin = time.monotonic()
    with scratch_folder("doctor") as folder:
        found = _Found(folder, bundle, begin)
        share, operations = (CHECKS_SHARE, ",".join(OPERATIONS)) if asked else (1.0, "all_reduce")
        evidence = gpu_runs.gather(folder, gpus, 60 * minutes * share, _say, operations)
        found.take_checks(evidence)
        if not evidence.is_interrupted:
            ends = begin + 60 * minutes
            for compared in gpu_runs.compare_all(asked, folder / "compared", folder / PACKED, ends, _say):
                found.take_comparison(compared)
    for line in found.lines():
        echo(line, err=as_json)
    if as_json:
        echo(json.dumps(found.document(), indent=1))
    if bundle is not None:
        echo(f"bundle: {bundle}", err=True)
    if found.is_interrupted:
        raise KeyboardInterrupt
    return 1 if any(answer.verdict == "failed" for answer in found.answers) else 0


def _say(text: str) -> None:
    echo(text, err=True)


class _Found:
    """What is known so far; the bundle is written again whenever that is more."""

    def __init__(self, folder: Path, bundle: Path | None, begin: float) -> None:
        self._folder, self._bundle, self._begin = folder, bundle, begin
        self._compared: list[gpu_runs.Compared] = []
        self.answers: list[gpu_runs.Answer] = []
        self.is_interrupted = False

    def take_checks(self, evidence: gpu_runs.Evidence) -> None:
        self._evidence, self.answers = evidence, gpu_runs.answer_all(evidence)
        self.is_interrupted = evidence.is_interrupted
        self._pack()

    def take_comparison(self, compared: gpu_runs.Compared) -> None:
        self._compared.append(compared)
        self.is_interrupted = compared.is_interrupted
        self._pack()

    def document(self) -> dict[str, Any]:
        """What `doctor --gpu --json` prints."""
        gpus, answers = self._evidence.gpus, self.answers
        document: dict[str, Any] = {
            "devices": [gpu.name for gpu in gpus.devices],
            "is_stub": self._evidence.is_stub,
            "ranks": self._evidence.ranks,
            "torch": str(gpus.wheel),
            "driver_cuda": gpus.driver_cuda,
            "versions": package_versions(PACKAGES),
            "seconds": round(time.monotonic() - self._begin, 1),
            "failed": [answer.check.id for answer in answers if answer.verdict == "failed"],
            "checks": [answer.as_json() for answer in answers],
            "runs": {name: record.run_id for name, record in self._evidence.records.items()},
            "not_run": dict(self._evidence.missing),
        }
        if self._compared:
            document["comparisons"] = {c.matrix.name: c.as_json() for c in self._compared}
        return document

    def lines(self) -> list[str]:
        """What is printed: the machine, a line for each check, the conclusion, the comparisons."""
        document = self.document()
        devices = " and ".join(f"{count} x {name}" for name, count in Counter(document["devices"]).items())
        rows = [(a.check.id, a.verdict, a.check.tolerance, a.detail) for a in self.answers]
        counts = Counter(answer.verdict for answer in self.answers)
        said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("ok", "failed", "skipped", "n/a"))
        lines = [
            f"{devices}, {document['torch']}, runs on {document['ranks']} of them",
            "",
            *fitted(rows, ("check", "verdict", "tolerance", "found")).splitlines(),
            "",
            f"{said}, in {document['seconds']:.0f} s",
            *(["no GPU was checked: the devices are a stub"] if document["is_stub"] else []),
        ]
        for one in self._compared:
            lines += ["", f"{one.matrix.name}: compare --config {one.matrix.config}", *one.lines]
            lines += [f"not all of it ran: {one.missing}"] if one.missing else []
        return lines

    def _pack(self) -> None:
        if self._bundle is not None:
            if self._evidence.fabric is not None:
                (self._folder / PACKED).mkdir(exist_ok=True)
                write_result(self._evidence.fabric, self._folder / PACKED / FABRIC_NAME)
            write_bundle(self._bundle, self._folder, self.document(), self.lines())


RANKS = 2
MINUTES, FULL_MINUTES = 2.0, 10.0


@click.command()
@click.option("--backends")
@click.option("--gpu", is_flag=True)
@click.option("--full", "size", type=PATH, is_flag=False, flag_value=Path(gpu_runs.AT_SIZE), metavar="[FILE]")
@click.option("--bundle", type=PATH)
@click.option("--minutes", type=click.FloatRange(0.1))
@json_option
@common
def doctor(
    backends: str | None,
    gpu: bool,
    size: Path | None,
    bundle: Path | None,
    minutes: float | None,
    as_json: bool,
) -> int:
    """Show what this machine can run, known problems of its versions, and whether to trust results.

    Runs a tiny job under every backend that fits this machine and two minutes, and three injected faults;
    lists what was not tried. With --gpu: checks devices, transport, bytes, clocks, traces, speed and the
    handling of out-of-memory errors, one line each. Exits with 1 if a check fails.
    """
    if gpu:
        if backends is not None:
            raise HarnessError("--gpu runs backends of its own choice; leave out --backends")
        return examine_gpus(minutes or (FULL_MINUTES if size else MINUTES), bundle, size, as_json=as_json)
    if bundle is not None or size is not None:
        raise HarnessError("--full and --bundle belong to the check of GPUs; add --gpu")
    named = split_backends(backends) if backends is not None else []
    return examine([] if named == ["all"] else named, as_json=as_json)


def examine(backends: Sequence[str], *, as_json: bool) -> int:
    """Run the self-check; 0 if this installation can be trusted in what was tried, else 1.

    Tries `backends`, else all that come with this project as far as two minutes go. Raises HarnessError
    for an unknown backend, and where nothing can run.
    """
    require_libraries("ranks")
    versions = package_versions((*EVERY_RANK, "deepspeed", "accelerate"))
    chosen = device_of(find_gpus())
    device = chosen.name
    size = min(RANKS, find_gpus().count) if device == "cuda" else RANKS
    needed = {package for entry in registry.entries().values() for package in entry.packages}
    installed = package_versions(tuple(needed))
    coverage = cover([canonical_label(name) for name in backends], size, installed)
    known = traps_of(versions)
    with scratch_folder("doctor") as folder:
        check = self_check(Path(folder), device, size, coverage, lambda text: echo(text, err=True))
    if as_json:
        facts = {"versions": versions, "device": device, "device_reason": chosen.why, "ranks": size}
        echo(json.dumps(facts | document(check, known), indent=1))
        return 0 if check.trusted else 1
    echo(", ".join(f"{name} {version}" for name, version in versions.items()))
    echo(f"{ranks(size)} on {'GPUs' if device == 'cuda' else 'the CPU'}: {chosen.why}\n")
    rows: list[Sequence[str]] = [
        (r.label, r.record.status, r.judgement.parity, reason(r.record) or "") for r in check.rows
    ]
    rows += [(what, "not tried", "-", why) for what, why in check.not_covered.items()]
    echo(fitted(rows, ("backend", "status", "parity", "why")))
    echo("\nknown problems of these versions:" if known else "\nno known problems of these versions")
    for trap in known:
        echo(f"- {trap.library}: {trap.what}. Here: {trap.handled}.")
    echo(
        f"\nself-check: {len(check.false)} findings on a clean matrix of {len(check.rows)} cells, "
        f"{check.planted - len(check.missed)} of {check.planted} injected faults found"
    )
    return _conclusion(check)


def _conclusion(check: SelfCheck) -> int:
    """Print what is off, or that nothing is; the exit code."""
    if check.trusted:
        left = len(check.not_covered)
        lines = "1 line above was" if left == 1 else f"{left} lines above were"
        limit = f", as far as it was tried: {lines} not" if left else ""
        echo(f"this installation can be trusted{limit}")
        return 0
    for name, why in check.failed.items():
        echo(f"- {name} did not finish: {why}")
    for finding in check.false:
        echo(f"- {finding.id}: {finding.message}")
    for name, found in check.missed.items():
        echo(f"- {name}: {found}")
    if not check.tried:
        echo("- no backend ran that could be judged")
    echo("this installation cannot be trusted until these are resolved")
    return 1


DEFAULT_LARGEST = {"cuda": "4GB", "cpu": "64MB"}
"""gloo moves about 1 GB/s: larger tensors tell no more and take minutes."""


@click.command()
@click.option("--nproc", type=click.IntRange(2))
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--max-size")
@click.option("--operations")
@click.option("--repeats", type=click.IntRange(1), default=20, show_default=True)
@click.option("--require-busbw", metavar="RATE")
@click.option("-o", "--output", type=PATH)
@json_option
@common
def fabric(
    nproc: int | None,
    device: str,
    max_size: str | None,
    operations: str | None,
    repeats: int,
    require_busbw: str | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Measure the network that collectives use, and check its bus bandwidth.

    Starts ranks on this machine, or becomes one of them under torchrun.
    """
    is_rank = started_as_rank()
    device = device if is_rank and device != "auto" else resolve_device(device, "--device cpu")
    wanted = split_operations(operations)
    largest = parse_size(max_size or DEFAULT_LARGEST[device])
    required = parse_rate(require_busbw) if require_busbw else None
    shows = not is_rank or external_rank() == 0
    if shows and output is not None:  # which minutes of measuring would be lost for
        path = result_file(output)
        with refusing(f"--output was given '{path}', which cannot be written"):
            try_writing(path)
    if is_rank:
        from harness.fabric.measurement import measure  # loads torch

        result = measure(device, largest, wanted, repeats=repeats)
    else:
        # Not sys.argv: torchrun takes --nproc for an abbreviation of its own, wherever it stands.
        arguments = [
            "--device", device, "--max-size", str(largest), "--operations", ",".join(wanted), "--repeats",
            str(repeats),
        ]  # fmt: skip
        result = start_ranks(nproc or default_ranks(device), arguments)
    if shows and output is not None:
        write_result(result, output)
    code = present(result, largest, required, as_json) if shows else 0
    if is_rank:
        leave(code)
    return code


def split_operations(text: str | None) -> list[str]:
    """Operations of a comma-separated list; all without one. Raises HarnessError for an unknown one."""
    if text is None:
        return list(OPERATIONS)
    names = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    for name in names:
        if name not in OPERATIONS:
            raise HarnessError(f"operation '{name}' is unknown. {available(name, OPERATIONS)}")
    return names or list(OPERATIONS)


def present(result: FabricResult, asked_bytes: int, required: float | None, as_json: bool) -> int:
    """Show a result and whether memory limited its sizes; return 3 if it misses the required bytes/s."""
    echo(fabric_table(result), err=as_json)
    largest = max(row.size_bytes for row in result.rows)
    if largest < 4 * whole_elements(asked_bytes, result.world_size):
        echo(f"not enough memory for {asked_bytes:,} bytes: measured up to {largest:,}", err=True)
    if as_json:
        rows = [
            row.model_dump()
            | {
                "algorithm_bytes_per_second": row.algorithm_bandwidth,
                "bus_bytes_per_second": row.bus_bandwidth,
            }
            for row in result.rows
        ]
        document = result.model_dump() | {"rows": rows, "summary": result.summary().model_dump()}
        echo(json.dumps(document, indent=1))
    missed = shortfall(result, required) if required is not None else None
    if missed is not None:
        echo(f"harness: {missed}", err=True)
        return EXIT_GATE
    if required is not None:
        echo(f"bus bandwidth meets --require-busbw ({judged_batch(result)})", err=True)
    return 0
