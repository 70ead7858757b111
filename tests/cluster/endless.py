"""Runs that never end by themselves: for tests that end them in another way."""

from __future__ import annotations

from pathlib import Path

from harness.record import Record
from tests.cluster.matrices import ENDLESS, RenderedMatrix, render
from tests.cluster.slurm import SlurmCluster

SLOW_LINK = "10mbit"
"""Over it ranks wait for each other most of the time, so that an endless run leaves the cores to others."""
TWO_NODES = ("--backends", "ddp", "--nodes", "2", "--nproc", "1")


def started(cluster: SlurmCluster, folder: Path, **site: object) -> RenderedMatrix:
    """DDP on two nodes over a slow link, submitted; its reference would never end either and is left out."""
    cluster.nodes.shape(SLOW_LINK)
    matrix = render(cluster, folder, *TWO_NODES, steps=ENDLESS, **site)  # type: ignore[arg-type]
    matrix.without("single").harness("submit")
    return matrix


def collected(matrix: RenderedMatrix) -> Record:
    """The record of a run that is over and had trained on both nodes."""
    record = collected_anyhow(matrix)
    assert len(trained_on(record)) == 2
    return record


def collected_anyhow(matrix: RenderedMatrix) -> Record:
    """The record of a run that is over, however far it came."""
    matrix.wait_until_over()
    matrix.harness("collect")
    (record,) = matrix.records()
    return record


def trained_on(record: Record) -> set[str]:
    """Hosts of a run that took steps and knows the loss of each."""
    assert record.steps
    assert all(step.loss is not None for step in record.steps)
    return {rank.host for rank in record.ranks}


def nodes_of(matrix: RenderedMatrix, backend: str) -> list[str]:
    """Names of the nodes that the job of a backend's only run has now."""
    cluster, folder, job = matrix.cluster, matrix.folder, matrix.job(backend)
    listed = cluster.command("squeue", "-h", "-j", job, "-o", "%N", cwd=folder).stdout.strip()
    return cluster.command("scontrol", "show", "hostnames", listed, cwd=folder).stdout.split()


def reason(record: Record) -> tuple[str, str]:
    """Status and kind of error."""
    assert record.error is not None
    return record.status, record.error.kind
