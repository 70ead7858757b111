"""Errors of libraries that say neither which parameter nor what to do, and one that would hang."""

import os
import time
from pathlib import Path

import pytest

from harness.backends.libraries.facts import CPU_ADAM
from harness.backends.zero.extension_builds import QUIET_SECONDS, build_folder
from harness.judge.rows import reason
from harness.record.store import read_runs
from tests.harness.cli.command_line import SHORT, harness_process
from tests.sweep.table import BF16, WORDS, own

from .matrix import Matrix

pytestmark = pytest.mark.long(seconds=20)
EVALUATED = ("evaluation.every_steps=2", "evaluation.samples=8")
CASES = {
    "scalar": ("fsdp", own("odd", whole=True), "parameter 'whole' has no dimension"),
    "read by the loss": (
        "zero3",
        own("mlp", "of_lengths"),
        "the loss, or code outside of the model's forward pass",
    ),
    "across units": (
        "fsdp",
        own("tied"),
        "parameter 'blocks.0.linear.weight' is tied to 'blocks.1.linear.weight'",
    ),
    "given back": (
        "fsdp",
        own("mlp", "of_slopes"),
        "a weight is used after its unit has given its memory back",
    ),
    "complex in FSDP": ("fsdp", own("turning"), "parameter 'turns' is complex"),
    "unused": (
        "ddp",
        own("mlp", unused=True),
        "no gradient reaches parameter 'pooler.weight', 'pooler.bias' in some",
    ),
    "twice": ("ddp", own("checkpointed", reentrant=True, shared=2), "takes part in several backward passes"),
    "evaluated": ("ddp", (*own("mlp", "of_slopes"), *EVALUATED), "in evaluation nothing has one"),
    "written to": ("fsdp1", own("followed"), "the forward pass writes to a weight"),
    "replaced": ("zero3", own("replaced"), "a tensor replaces a weight"),
    "empty": ("zero2", own("odd", none=True), "parameter 'none' has no element to cut"),
    "empty at stage 3": ("zero3", own("odd", none=True), "parameter 'none' has no element to cut"),
    "method": ("ddp", own("mlp", "of_first"), "the loss asks DDP's wrapper for 'first'"),
    "sparse": (
        "ddp",
        own("recurrent", *WORDS, sparse=True),
        "the gradient of parameter 'words.weight' is sparse",
    ),
    "given back by ZeRO-3": (
        "zero3",
        own("mlp", "of_scores"),
        "a weight (of that size: 'heads.0.bias') is read outside of the module that holds it, where ZeRO-3",
    ),
    "table given back by ZeRO-3": (
        "zero3",
        own("encoder", "of_similar", "sentences", tied=False),
        "a weight is read outside of the module that holds it, where ZeRO-3",
    ),
    "graph kept": ("fsdp", own("mlp", "of_history"), "the loss uses the graph of an earlier step"),
    "recomputed otherwise": ("fsdp", own("wavering"), "a block computed something else when activation"),
    "not allocated": (
        "fsdp",
        own("convolutions", "of_slopes", groups=2),
        "a weight is used after its unit has given its memory back",
    ),
    "shapes of the first batch": ("ddp", own("lazy"), "takes its shape from the first batch"),
    "wider": ("zero2", (*own("widened"), BF16), "the forward pass gives module 'heads.0' another dtype"),
    "beyond the table": (
        "fsdp",
        own("recurrent", *WORDS, vocabulary=3),
        "a sample has a number beyond an embedding: 'words.weight' of 3 rows",
    ),
    "one sample": (
        "ddp",
        (*own("mlp", statistics=True), "training.accumulation_steps=4"),
        "a normalisation over the batch got one sample",
    ),
}
"""Of each message of the table the backend and the job that provoke it, and its first words."""
FEW = ("read by the loss", "unused")
"""The others are exhaustive: their words are held by tests of the table."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.exhaustive) for name in CASES]
)
def test_an_error_of_a_library_names_what_to_do(name: str, matrix: Matrix) -> None:
    label, settings, says = CASES[name]
    record = matrix.record(label, 2, settings)
    assert record.status == "failed", record.status
    assert says in record.error.message


@pytest.mark.parametrize("label", ["zero2", "zero3", "fsdp1"])
def test_complex_parameters_are_refused_where_their_imaginary_part_would_be_lost(
    label: str, matrix: Matrix
) -> None:
    record = matrix.record(label, 2, own("turning"))
    assert record.status == "unsupported"
    assert "parameter 'turns' is complex" in record.reasons[0]


SAYS = {
    "zero2:adam=deepspeed,offload=optimizer": (CPU_ADAM, "no process holds it", "remove it"),
}
"""The lock of a build that was killed."""


@pytest.mark.costly
def test_each_is_a_row_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extensions = tmp_path / "extensions"
    extensions.mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    lock = build_folder(CPU_ADAM) / "lock"
    lock.touch()
    old = time.time() - 2 * QUIET_SECONDS
    for path in (lock, lock.parent):
        os.utime(path, (old, old))
    words = ["compare", "--backends", ",".join(SAYS), "--nproc", "2", *SHORT, "--runs", "runs"]
    done = harness_process(*words, cwd=tmp_path, TORCH_EXTENSIONS_DIR=str(extensions))
    assert done.returncode == 0, done.stderr
    records = {record.backend.label: record for _, record in read_runs([tmp_path / "runs"])[0]}
    for label, says in SAYS.items():
        record = records[label]
        assert record.status == "unsupported", label
        why = reason(record) or ""
        assert all(part in why for part in says), why
        assert not record.steps
    assert done.stderr.count("unsupported: ") == len(SAYS)
