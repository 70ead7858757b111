from harness.tell.document import Paragraph, Table
from harness.tell.manifest import Manifest, RecordEntry
from harness.tell.sections.results import records_section


def test_a_path_is_told_once_and_by_the_run_where_its_folder_has_that_name() -> None:
    entries = [
        RecordEntry(
            path=f"runs/{folder}/record.json", sha256="0123456789abcdef" * 4, run_id="r1", status="ok"
        )
        for folder in ("r1", "renamed")
    ]
    manifest = Manifest(name="r.md", format="md", harness="1", drawing="renderer 3", records=entries)
    text, table = records_section(manifest).blocks
    assert isinstance(text, Paragraph)
    assert isinstance(table, Table)
    assert "runs/RUN/record.json" in text.text
    assert [row[0] for row in table.texts()] == ["r1", "runs/renamed/record.json"]
    assert [row[0] for row in table.values()] == [entry.path for entry in entries]
    assert {row[2] for row in table.texts()} == {"0123456789abcdef"}
