"""Reports that were written before pictures named their renderer are still read."""

import json
from pathlib import Path

from harness.tell.manifest import MARK, Manifest, read_manifest


def test_a_report_that_matplotlib_drew_is_read() -> None:
    earlier = {"name": "r.md", "format": "md", "harness": "0.1.0", "matplotlib": "3.11.2", "records": []}
    manifest, _ = read_manifest(f"<!-- {MARK}{json.dumps(earlier)} -->", Path("r.md"))
    assert manifest.drawing == "matplotlib 3.11.2"


def test_a_manifest_reads_back_as_written() -> None:
    manifest = Manifest(name="r.md", format="md", harness="1", drawing="renderer 3", records=[])
    assert read_manifest(f"<!-- {manifest.line()} -->", Path("r.md")) == (manifest, 1)
