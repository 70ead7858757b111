"""`harness doctor --gpu`: one line for each check of this machine's GPUs."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.cli.output import echo
from harness.doctor.gpu.bundle import check_bundle, write_bundle
from harness.doctor.gpu.catalogue import answer_all
from harness.doctor.gpu.check import Answer
from harness.doctor.gpu.evidence import Evidence
from harness.doctor.gpu.runs import gather
from harness.errors import HarnessError
from harness.gpus.found import Gpus, find_gpus
from harness.record.provenance import environment, package_versions
from harness.scratch import scratch_folder
from harness.tell.narrow import fitted

PACKAGES = ("sharding-harness", "torch", "transformers", "deepspeed", "accelerate", "nvidia-ml-py")


def examine_gpus(minutes: float, bundle: Path | None, *, as_json: bool) -> int:
    """Run the checks; 1 if one failed, else 0. Raises HarnessError where no GPU can be used."""
    if bundle is not None:
        check_bundle(bundle)
    gpus = find_gpus()
    why_not = gpus.refusal or gpus.why_none
    if why_not is not None:
        if bundle is not None:
            _bundle_without_runs(bundle, gpus, why_not)
        raise HarnessError(f"no GPU can be checked: {why_not}; `harness doctor` checks this machine's CPU")
    begin = time.monotonic()
    with scratch_folder("doctor") as folder:
        evidence = gather(folder, gpus, 60 * minutes, lambda text: echo(text, err=True))
        answers = answer_all(evidence)
        document = _document(evidence, answers, time.monotonic() - begin)
        lines = _lines(document, answers)
        if bundle is not None:
            write_bundle(bundle, folder, document, lines)
    for line in lines:
        echo(line, err=as_json)
    if as_json:
        echo(json.dumps(document, indent=1))
    if bundle is not None:
        echo(f"bundle: {bundle}", err=True)
    return 1 if any(answer.verdict == "failed" for answer in answers) else 0


def _bundle_without_runs(bundle: Path, gpus: Gpus, why_not: str) -> None:
    """Pack what is known of a machine whose GPUs cannot be used."""
    document = {
        "why_not": why_not,
        "devices": [gpu.name for gpu in gpus.devices],
        "signs": [str(sign) for sign in gpus.signs],
        "torch": str(gpus.wheel),
        "driver_cuda": gpus.driver_cuda,
        "versions": package_versions(PACKAGES),
        "environment": environment().model_dump(mode="json"),
    }
    with scratch_folder("doctor") as folder:
        write_bundle(bundle, folder, document, [f"no GPU can be checked: {why_not}"])
    echo(f"bundle: {bundle}", err=True)


def _document(evidence: Evidence, answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """The document of `doctor --gpu --json`."""
    gpus = evidence.gpus
    return {
        "devices": [gpu.name for gpu in gpus.devices],
        "is_stub": evidence.is_stub,
        "ranks": evidence.ranks,
        "torch": str(gpus.wheel),
        "driver_cuda": gpus.driver_cuda,
        "versions": package_versions(PACKAGES),
        "seconds": round(seconds, 1),
        "failed": [answer.check.id for answer in answers if answer.verdict == "failed"],
        "checks": [answer.as_json() for answer in answers],
        "runs": {name: record.run_id for name, record in evidence.records.items()},
        "not_run": dict(evidence.missing),
    }


def _lines(document: dict[str, Any], answers: Sequence[Answer]) -> list[str]:
    """What is printed: the machine, a line for each check, the conclusion."""
    devices = " and ".join(f"{count} x {name}" for name, count in Counter(document["devices"]).items())
    rows = [(a.check.id, a.verdict, a.check.tolerance, a.detail) for a in answers]
    counts = Counter(answer.verdict for answer in answers)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("ok", "failed", "skipped", "n/a"))
    not_a_gpu = ["no GPU was checked: the devices are a stub"] if document["is_stub"] else []
    return [
        f"{devices}, {document['torch']}, runs on {document['ranks']} of them",
        "",
        *fitted(rows, ("check", "verdict", "tolerance", "found")).splitlines(),
        "",
        f"{said}, in {document['seconds']:.0f} s",
        *not_a_gpu,
    ]
