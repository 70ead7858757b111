"""Reports name their records in their text or in a file next to it."""

from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.tell.manifest import Manifest, read_manifest


def test_a_manifest_reads_back_as_written() -> None:
    manifest = Manifest(name="r.md", format="md", harness="1", drawing="renderer 3", records=[])
    assert read_manifest(f"<!-- {manifest.line()} -->", Path("r.md")) == (manifest, 1, "", False)


def test_a_manifest_next_to_its_report_reads_back_as_written(tmp_path: Path) -> None:
    manifest = Manifest(name="r.md", format="md", harness="1", drawing="renderer 3", records=[])
    text, file = f"<!-- {manifest.pointer()} -->", tmp_path / "r.manifest.json"
    assert len(text) < 200
    with pytest.raises(HarnessError, match=r"needs '.*r\.manifest\.json', which lists its records"):
        read_manifest(text, tmp_path / "r.md")
    file.write_text(manifest.file())
    assert read_manifest(text, tmp_path / "r.md") == (manifest, 1, file.name, False)
    file.write_text(f"{manifest.file()} ")
    assert read_manifest(text, tmp_path / "r.md").is_changed
