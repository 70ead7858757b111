"""Doctored records; `tests/traps/test_traps.py` plants the same defects in real runs."""

from typing import Any

import pytest

from harness.forms.layout import Layout, Tensor
from harness.judge.findings.finding import Finding
from harness.record import BackendPart, MemoryPart, Record
from harness.record.workload import known_strategy
from tests.records import changed, make_effective, make_ranks, make_record, told
from tests.volumes import make_volume_record, with_rows


def finding_of(record: Record) -> Finding | None:
    found = told([record], "communication-differs")
    assert len(found) <= 1
    return found[0] if found else None


def backward(change: Any, *, role: str = "world") -> Any:
    """Apply `change` to what the backward pass reduces."""
    return lambda row: (
        change(row) if row.phase == "backward" and "reduce" in row.op and row.role == role else row
    )


def test_agreement_is_no_finding() -> None:
    for label in ("ddp", "fsdp", "zero2"):
        assert finding_of(make_volume_record(label, accumulation_steps=4)) is None


def test_synchronising_every_micro_step_is_named() -> None:
    record = make_volume_record("ddp", accumulation_steps=4)
    often = with_rows(
        record, backward(lambda row: row.model_copy(update={"payload_bytes": 4 * row.payload_bytes}))
    )
    found = finding_of(often)
    assert found.backends == ("ddp",)
    assert found.message.startswith("ddp on 2 ranks: synchronised at every micro-step: all_reduce")
    assert "4 times as much" in found.message


def test_another_dtype_is_named_with_both() -> None:
    record = make_volume_record("fsdp", precision="bf16-mixed")
    halved = with_rows(
        record,
        backward(
            lambda row: row.model_copy(update={"dtype": "bfloat16", "payload_bytes": row.payload_bytes // 2})
        ),
    )
    found = finding_of(halved)
    assert "reduce_scatter in backward runs in bfloat16, expected float32" in found.message
    assert len(found.values["differences"]) == 2


def test_replicas_that_never_reduce_are_named() -> None:
    record = with_rows(make_volume_record("fsdp-hybrid"), backward(lambda row: None, role="replica"))
    found = finding_of(record)
    assert "never reduces across replicas" in found.message


@pytest.mark.parametrize(
    ("padding", "gathered", "is_claimed", "is_named"),
    [
        (0, 0, True, False),
        (4, 4, True, False),
        (0, 0, False, True),
        (4096, 4096, True, True),
        (0, -4096, True, True),
    ],
    ids=["of a script", "padded", "of a library whose form is known", "of more", "not all is gathered"],
)
def test_an_all_reduce_may_run_as_its_two_halves(
    padding: int, gathered: int, is_claimed: bool, is_named: bool
) -> None:
    made = make_volume_record("ddp")
    record = changed(
        made, backend={"name": "observed-ddp", "claim": known_strategy(made)} if is_claimed else {}
    )
    rows = []
    for row in record.comm:
        if (row.phase, row.op) == ("backward", "all_reduce"):
            for op, more in (("reduce_scatter", padding), ("all_gather", gathered)):
                rows.append(row.model_copy(update={"op": op, "payload_bytes": row.payload_bytes + more}))
        else:
            rows.append(row)
    assert (finding_of(changed(record, comm=rows)) is not None) is is_named


@pytest.mark.parametrize(
    ("change", "is_named"), [({"phase": "between"}, False), ({"payload_bytes": 0}, True)]
)
def test_what_passes_between_steps_gathered_is_not_gathered_again(
    change: dict[str, Any], is_named: bool
) -> None:
    def altered(row: Any) -> Any:
        return row.model_copy(update=change) if (row.phase, row.op) == ("forward", "all_gather") else row

    assert (finding_of(with_rows(make_volume_record("fsdp1-grad-op"), altered)) is not None) is is_named


def test_a_run_that_failed_is_not_judged() -> None:
    record = make_volume_record("ddp").model_copy(update={"comm": [], "status": "failed"})
    assert finding_of(record) is None


BLOCKS = ["a", "b", "c", "d"]
LAYOUT = Layout(
    parameters=[
        Tensor(name=name, shape=[100, 8], dtype="float32") for name in ("root", *(f"{b}.w" for b in BLOCKS))
    ],
    decaying=["root"],
    buffers=[],
    blocks=BLOCKS,
)
ONE = 3200
"""Bytes of each parameter."""
SLACK = 24
"""The padding that the limit leaves to the root and two blocks, on 2 ranks."""


def findings(
    units: list[str],
    *,
    most: int | None,
    least: int | None,
    kept: int = 0,
    prefetch: int | None = None,
    **details: Any,
) -> list[Finding]:
    options = {"prefetch": prefetch} if prefetch else {}
    effective = make_effective(wrap_units=units, details={"shard_size": 2} | details)
    part = BackendPart(
        label="mine", name="mine", options=options, effective=effective, native_config={}, versions={}
    )
    held = MemoryPart(
        step=1, moment="after_forward", allocated_bytes=50_000, peak_bytes=60_000,
        kinds={"weights": 8000, "gathered": kept}, gathered_peak_bytes=most, gathered_least_bytes=least,
    )  # fmt: skip
    ranks = make_ranks(2, memory=[[held]] * 2)
    record = make_record(label="mine", world_size=2, layout=LAYOUT, ranks=ranks, backend=part)
    return told([record], "one-wrap-unit")


def test_one_unit_for_several_blocks_is_a_finding_with_what_was_gathered() -> None:
    (finding,) = findings([""], most=5 * ONE, least=5 * ONE)
    assert finding.id == "one-wrap-unit"
    assert "root and 0 of 4 blocks" in finding.message
    assert finding.values == {
        "wrap_units": 0, "blocks": 4, "gathered_peak_bytes": 5 * ONE, "gathered_least_bytes": 5 * ONE,
        "root_and_largest_blocks_bytes": 3 * ONE + SLACK,
    }  # fmt: skip


def test_blocks_left_to_the_root_are_a_finding() -> None:
    (finding,) = findings(["c", ""], most=None, least=None)
    assert "root and 1 of 4 blocks" in finding.message


@pytest.mark.parametrize("kept", [0, 5 * ONE], ids=["given back", "root kept"])
def test_units_that_are_listed_but_not_there_are_a_finding(kept: int) -> None:
    (finding,) = findings([*BLOCKS, ""], most=5 * ONE, least=5 * ONE, kept=kept)
    assert f"{5 * ONE:,} bytes of weights at once" in finding.message
    assert finding.values["wrap_units"] == 4


@pytest.mark.parametrize(
    ("gathered", "count"),
    [
        pytest.param({"most": 3 * ONE, "least": ONE}, 0, id="a unit per block"),
        pytest.param({"most": 4 * ONE, "least": ONE}, 1, id="units larger than blocks"),
        pytest.param({"most": 5 * ONE, "least": ONE, "kept": 5 * ONE}, 0, id="kept for the backward pass"),
        pytest.param({"most": 4 * ONE, "least": 2 * ONE, "prefetch": 1}, 0, id="prefetched"),
        pytest.param({"most": 5 * ONE, "least": 5 * ONE, "shard_size": 1}, 0, id="nothing is cut"),
        pytest.param({"most": None, "least": None}, 0, id="nothing gathered"),
    ],
)
def test_only_more_than_units_could_hold_at_once_is_a_finding(gathered: dict[str, Any], count: int) -> None:
    assert len(findings([*BLOCKS, ""], **gathered)) == count
