from harness.judge.comparison import Comparison
from harness.tell.document import Table
from harness.tell.sections.amounts import memory_section
from tests.records import make_record


def test_a_kind_that_holds_nothing_anywhere_has_no_column() -> None:
    section = memory_section(Comparison([make_record(), make_record(label="ddp")]))
    assert section is not None
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    keys = [column.key for column in table.columns]
    assert keys[:5] == ["backend", "world_size", "weights_bytes", "gradients_bytes", "optimizer_bytes"]
    assert "gathered_bytes" not in keys
    assert table.texts()[0][:5] == ["single", "1", "0.004", "0.004", "0.008"]
