"""Checkpoints on devices: saved, loaded again, and continued on the same and on other backends and ranks."""

from itertools import product

import pytest

from harness.judge.comparison import Comparison
from harness.record import Record
from tests.gpu_stub.log import counted_collectives, told_collectives
from tests.gpu_stub.machine import Machine
from tests.gpu_stub.matrix import findings
from tests.representatives import first

LABELS = ("ddp", "zero1", "zero3", "fsdp", "fsdp1")
FORMATS = ("native", "neutral")
FEW = (("zero3", "native"), ("fsdp", "neutral"))
SAVED_AT = 4
ELSEWHERE = (("ddp", "zero3"), ("zero3", "fsdp"), ("fsdp", "ddp"))
"""From the first on 2 ranks to the second on 4."""


def saved(machine: Machine, label: str, form: str) -> Record:
    """A run that keeps a checkpoint and trains on to the end."""
    settings = [f"measure.checkpoint={form}", "measure.keep_checkpoint=true"]
    record = machine.run(label, 2, settings, log=True)
    assert record.status == "ok", record.error
    return record


def resumed(machine: Machine, label: str, nproc: int, source: Record) -> Record:
    record = machine.run(label, nproc, log=True, resume_from=source)
    assert record.status == "ok", record.error
    assert (record.resumed.run_id, record.resumed.step) == (source.run_id, SAVED_AT)
    return record


@pytest.mark.parametrize(("label", "form"), first(FEW, product(LABELS, FORMATS)))
def test_a_resumed_run_goes_on_to_the_bit(label: str, form: str, machine: Machine) -> None:
    whole = saved(machine, label, form)
    rest = resumed(machine, label, 2, whole)
    expected = [(step.loss, step.gradient_norm) for step in whole.steps[SAVED_AT:]]
    assert [(step.loss, step.gradient_norm) for step in rest.steps] == expected
    assert rest.final_weights.digest == whole.final_weights.digest


@pytest.mark.parametrize(("label", "form"), first(FEW, product(LABELS, FORMATS)))
def test_memory_and_collectives_of_saving_and_loading_are_recorded(
    label: str, form: str, machine: Machine
) -> None:
    whole = saved(machine, label, form)
    rest = resumed(machine, label, 2, whole)
    for rank in whole.ranks:
        assert [part.operation for part in rank.checkpoints] == ["save", "load"]
        assert "during_checkpoint" in {part.moment for part in rank.memory}
    for record in (whole, rest):
        for part in record.ranks:
            counted = counted_collectives(machine.run_directory(record), part.rank)
            assert told_collectives(record, part.rank) == counted


@pytest.mark.parametrize(("source", "target"), first([("fsdp", "ddp")], ELSEWHERE))
def test_another_backend_on_other_ranks_goes_on_like_the_reference(
    source: str, target: str, machine: Machine
) -> None:
    rest = resumed(machine, target, 4, saved(machine, source, "neutral"))
    comparison = Comparison([*machine.references(4), rest])
    assert [(found.id, found.message) for found in findings(comparison)] == []
    (row,) = (row for row in comparison.rows if row.record is rest)
    assert row.judgement.parity in {"exact", "tight"}
