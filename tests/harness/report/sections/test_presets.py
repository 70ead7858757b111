from harness.compare.comparison import Comparison
from harness.record import Record
from harness.report.document import Table
from harness.report.sections.presets import presets_section
from tests.records import make_effective, make_record


def run(name: str) -> Record:
    record = make_record(label=name)
    backend = record.backend.model_copy(update={"name": name, "effective": make_effective()})
    return record.model_copy(update={"backend": backend})


def test_a_change_stands_once_with_all_its_backends() -> None:
    section = presets_section(Comparison([make_record(), run("zero1"), run("zero2"), run("ddp")]))
    assert section is not None
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    backends = {line[0]: line[-1] for line in table.texts()}
    assert backends["reduce_bucket_size"] == "zero1; zero2"
    assert backends["gradient_as_bucket_view"] == "ddp"
