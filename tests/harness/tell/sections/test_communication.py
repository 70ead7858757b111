import pytest

from harness.forms.terms import Collective, Volume
from harness.judge.comparison import Comparison
from harness.record import Record
from harness.record.workload import of_record
from harness.tell.document import Table
from harness.tell.sections import amounts
from harness.tell.sections.amounts import communication_section
from tests.records import make_record
from tests.volumes import make_layout


def lines(record: Record) -> list[list[object]]:
    section = communication_section(Comparison([record]))
    assert section is not None
    table = section.blocks[1]
    assert isinstance(table, Table)
    keys = [column.key for column in table.columns]
    wanted = [keys.index(key) for key in ("phase", "op", "dtype", "role", "expected_payload_bytes")]
    return [[row[index] for index in wanted] for row in table.values()]


def test_every_kind_of_collective_stands_beside_its_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record(label="ddp", layout=make_layout())
    part = Collective(
        phase="backward", op="all_reduce", dtype="float32", term="gradients", payload_bytes=100
    )  # fmt: skip
    forms = Volume(collectives=(part,))
    monkeypatch.setattr(amounts, "volume_of", lambda record: (of_record(record), forms))
    assert record.windows is not None
    found = {line[0]: line[-1] for line in lines(record)}
    assert found["backward"] == 100 / record.windows.probed


def test_a_backend_without_a_closed_form_has_none() -> None:
    record = make_record(label="ddp")
    part = record.backend.model_copy(update={"label": "own", "name": "own"})
    assert {line[-1] for line in lines(record.model_copy(update={"backend": part}))} == {None}
