"""Checks the records of a report against its list of them: none changed, missing, doubled or added."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from harness.errors import HarnessError
from harness.record import Record
from harness.record_files import RecordFiles
from harness.report.manifest import Manifest, RecordEntry, digest, neighbours
from harness.report.verification import Problem, Verification
from harness.store import parse_record, read_record


def check_records(
    report: Path, text: str, manifest: Manifest, manifest_line: int, result: Verification
) -> dict[str, Record]:
    """Records by path, those left out that are missing or cannot be read."""
    check = _Check(report, text.split("\n"), manifest, manifest_line, RecordFiles(), result)
    records: dict[str, Record] = {}
    runs: dict[tuple[str, bool], str] = {}
    for entry in manifest.records:
        if (record := check.read(entry)) is None:
            continue
        records[entry.path] = record
        if (run := (record.run_id, entry.before)) in runs:
            same = f"record {entry.path} is of the same run as {runs[run]}, so that one run counts twice"
            check.tell(entry, same)
        runs.setdefault(run, entry.path)
    check.neighbours({record.job_id for record in records.values()})
    return records


@dataclass(frozen=True)
class _Check:
    report: Path
    lines: list[str]
    manifest: Manifest
    manifest_line: int
    files: RecordFiles
    result: Verification

    def tell(self, entry: RecordEntry, what: str) -> None:
        """Add a problem, at the first line that names the run."""
        lines = enumerate(self.lines, 1)
        named = (n for n, text in lines if entry.run_id in text and n != self.manifest_line)
        line = next(named, self.manifest_line)
        self.result.problems.append(Problem(self.report.name, line, what))

    def read(self, entry: RecordEntry) -> Record | None:
        """A listed record, compared with what is listed; None if it is missing or cannot be read."""
        path = self.report.parent / entry.path
        if not self.files.exists(path):
            self.tell(entry, f"record {entry.path} is missing")
            return None
        data = self.files.read(path)
        if (found := digest(data)) != entry.sha256:
            what = f"record {entry.path} was changed: SHA-256 {found[:16]}, listed {entry.sha256[:16]}"
            self.tell(entry, what)
        try:
            record = parse_record(data, path)
        except HarnessError as error:
            self.tell(entry, str(error))
            return None
        if (entry.run_id, entry.status) != (record.run_id, record.status):
            listed = f"listed as run {entry.run_id}, {entry.status}"
            self.tell(entry, f"record {entry.path} is of run {record.run_id}, {record.status}; {listed}")
        return record

    def neighbours(self, jobs: set[str]) -> None:
        """Records that appeared after the report was written."""
        known = {entry.path for entry in self.manifest.records} | set(self.manifest.left_out)
        for path in neighbours(self.manifest.records, self.report.parent, self.files):
            if path in known:
                continue
            try:
                same_job = read_record(self.report.parent / path, self.files).job_id in jobs
            except HarnessError:
                same_job = True
            if same_job or PurePosixPath(path).parent.parent.as_posix() in self.manifest.folders:
                what = f"record {path} lies next to the records of the report and is not in it"
                self.result.problems.append(Problem(self.report.name, self.manifest_line, what))
            else:
                what = f"record {path}, of another job, lies next to the records of the report"
                self.result.notes.append(what)
