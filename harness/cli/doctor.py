"""`harness doctor`: runs the self-check and prints its results."""

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
from harness.cli.options import PATH, common, json_option, split_backends
from harness.cli.output import echo
from harness.doctor import gpu_runs
from harness.doctor.packing import PACKED, check_bundle, write_bundle
from harness.doctor.self_check import SelfCheck, cover, document, self_check
from harness.errors import HarnessError
from harness.fabric.result import FABRIC_NAME, OPERATIONS, write_result
from harness.files import scratch_folder
from harness.gpus.found import device_of, find_gpus
from harness.judge.rows import reason
from harness.judge.wording import ranks
from harness.launch.cells import canonical_label
from harness.launch.launcher import EVERY_RANK, require_libraries
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
            ends, gpu = begin + 60 * minutes, gpus.devices[0].name
            for compared in gpu_runs.compare_all(
                asked, folder / "compared", folder / PACKED, ends, _say, gpu
            ):
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
        """Of `doctor --gpu --json`."""
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
