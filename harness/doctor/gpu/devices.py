"""Checks of what ranks compute and communicate on."""

from __future__ import annotations

from harness.doctor.gpu.check import Check, Finding, held
from harness.doctor.gpu.evidence import SHARDED, ZERO, Evidence
from harness.gpus.found import runs_on, sm_name


def devices_differ(evidence: Evidence) -> Finding:
    """Each rank of a run has a device of its own."""
    uuids = [note.uuid for note in evidence.notes.get(ZERO, ())]
    if len(uuids) < evidence.ranks:
        return "failed", f"{len(uuids)} of {evidence.ranks} ranks named their device"
    return held(len(set(uuids)) == len(uuids), f"{len(set(uuids))} devices for {len(uuids)} ranks")


def transport_is_nccl(evidence: Evidence) -> Finding:
    """Collectives go through NCCL."""
    found = {evidence.records[name].world.collectives for name in (ZERO, SHARDED)}
    return held(found == {"nccl"}, ", ".join(sorted(found)))


def architecture_is_built(evidence: Evidence) -> Finding:
    """torch's wheel has kernels for every device."""
    gpus = evidence.gpus
    if not gpus.architectures:
        return "n/a", f"{gpus.wheel} names no architectures"
    names, lacking = [], []
    for gpu in gpus.devices:
        own = gpu.amd_architecture or sm_name(gpu.capability)
        names.append(own)
        if gpu.amd_architecture:
            runs = own in gpus.architectures
        else:
            runs = runs_on(gpu.capability, gpus.architectures)
        if not runs:
            lacking.append(own)
    listed = ", ".join(gpus.architectures)
    if lacking:
        return "failed", f"{', '.join(dict.fromkeys(lacking))} is not served by {listed}"
    return "ok", f"{', '.join(dict.fromkeys(names))} is served by {listed}"


CHECKS = (
    Check(
        id="devices", question="Does each rank have a device of its own?", tolerance="distinct UUIDs",
        judge=devices_differ, runs=(ZERO,), least_ranks=2,
    ),
    Check(
        id="transport", question="Do collectives go through NCCL?", tolerance="nccl",
        judge=transport_is_nccl, runs=(ZERO, SHARDED),
    ),
    Check(
        id="architecture", question="Does torch's wheel have kernels for the device?",
        tolerance="in torch's list", judge=architecture_is_built,
        not_on_stub="its architecture is made up",
    ),
)  # fmt: skip
