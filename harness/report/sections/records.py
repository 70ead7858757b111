"""The records that the report was computed from."""

from __future__ import annotations

from harness.report.document import Block, Code, Column, Folded, Paragraph, Section, Table
from harness.report.manifest import Manifest

COLUMNS = (
    Column("run_id", "run", align="left"),
    Column("status", "status", align="left"),
    Column("path", "record", align="left"),
    Column("sha256", "SHA-256 (first 16)", lambda digest: str(digest)[:16], align="left"),
)
SIDE = Column("side", "side", align="left")


def records_section(manifest: Manifest) -> Section:
    """Each record's path from the report's folder, its digest, and what was left out."""
    sides = manifest.kind == "baseline"
    body = [
        [*(["before" if entry.before else "after"] if sides else []),
         entry.run_id, entry.status, entry.path, entry.sha256]
        for entry in manifest.records
    ]  # fmt: skip
    columns = (SIDE, *COLUMNS) if sides else COLUMNS
    sums = "\n".join(f"{entry.sha256}  {entry.path}" for entry in manifest.records)
    blocks: list[Block] = [
        Paragraph(
            f"Written by sharding-harness {manifest.harness}, pictures by matplotlib {manifest.matplotlib}. "
            "harness verify on this file computes it again from these records and names every line that "
            "differs."
        ),
        Table(key="records", columns=columns, rows=body),
        Folded("Digests, as sha256sum --check reads them", [Code("text", sums)]),
    ]
    if manifest.left_out:
        count = len(manifest.left_out)
        what = "1 other record lies" if count == 1 else f"{count} other records lie"
        blocks.append(Paragraph(f"{what} in the same folder, not part of this report."))
    return Section("records", "Records", blocks)
