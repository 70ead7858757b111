"""Computes a report again from the records that it lists and names what differs, by line.

Everything is compared with what the records give: text line by line, pictures by what they show.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path

from harness.bounds import MOST_REPORT_BYTES
from harness.errors import HarnessError
from harness.judge.wording import counted
from harness.plain_files import read_plain
from harness.report.document import Document
from harness.report.drawing import RENDERER, renderer
from harness.report.line_differences import line_differences
from harness.report.manifest import Manifest, digest, read_manifest
from harness.report.outline import PICTURE_KEYS
from harness.report.report import (
    IMAGE_FORMATS,
    Images,
    details_name,
    draw_all,
    make_document,
    picture_names,
    render,
)
from harness.report.same_picture import as_drawn_here, pictures_within, same_picture
from harness.report.verification import Problem, Verification
from harness.report.verify_records import check_records
from harness.report.writers.csv import MANIFEST


def verify(report: Path, *, pictures_by_digest: bool = False) -> Verification:
    """Check a report against the records next to it.

    Pictures that another renderer, or another version of it, drew cannot be drawn again byte by byte.
    That is a problem of its own, unless `pictures_by_digest` accepts those whose digest the report lists.
    Raises HarnessError if the file cannot be read or is no report.
    """
    if report.is_dir():
        raise HarnessError(f"'{report}' is a folder; give the report in it, such as {report / 'report.md'}")
    if (owner := _owner_of_details(report)) is not None:
        raise HarnessError(f"'{report}' is checked with the report it belongs to; verify {owner}")
    result = Verification()
    text = _read_text(report)
    if "\r\n" in text and report.suffix.lower() != ".csv":
        what = "lines end in CRLF, which `harness report` does not write; the rest was compared without"
        result.problems.append(Problem(report.name, text[: text.index("\r\n")].count("\n") + 1, what))
        text = text.replace("\r\n", "\n")
    manifest, manifest_line = _find_manifest(report, text)
    records = check_records(report, text, manifest, manifest_line, result)
    _check_unlisted_pictures(report, manifest, manifest_line, result)
    if manifest.left_out:
        count = counted(len(manifest.left_out), "record")
        result.notes.append(f"{count} in the same folder: not part of the report, as it says")
    if records.keys() < {entry.path for entry in manifest.records}:
        result.notes.append("tables and pictures were not computed again: records are missing or unreadable")
        return result
    document = make_document(manifest, records)
    redraw = manifest.drawing == renderer()
    if not redraw and IMAGE_FORMATS[manifest.format]:
        _report_other_drawing(report.name, manifest, manifest_line, pictures_by_digest, result)
    _compare(report, text, document, manifest, manifest_line, redraw, result)
    if manifest.harness != version("sharding-harness"):
        result.notes.append(
            f"written by sharding-harness {manifest.harness}, checked by {version('sharding-harness')}: "
            "lines may differ because the report itself changed between them"
        )
    result.summary = (
        f"{len(manifest.records)} records unchanged, {len(document.tables())} tables and "
        f"{len(document.pictures())} pictures {'computed again' if redraw else 'checked'}"
    )
    return result


def _compare(
    report: Path,
    text: str,
    document: Document,
    manifest: Manifest,
    manifest_line: int,
    redraw: bool,
    result: Verification,
) -> None:
    """Compare the text, and every file next to it, with what the records give."""
    name = report.parent / manifest.name
    images = draw_all(document, manifest.format)
    rendered = render(document, manifest, images, name)
    names = picture_names(images, name)
    shown = as_drawn_here(text, rendered.text) if redraw else text
    _compare_text(report.name, shown, rendered.text, redraw, result)
    within = _by_file(text, rendered.text, images, names)
    if not redraw and manifest.format == "html":
        if any(digest(given) != manifest.pictures.get(file) for file, given in within):
            result.problems.append(Problem(report.name, None, "holds a picture whose digest is not listed"))
    if redraw and not _lists_pictures(report.parent, manifest, images, names, dict(within)):
        what = "the list of the pictures' digests is not that of the pictures"
        result.problems.append(Problem(report.name, manifest_line, what))
    pictures = set(names.values())
    for file, expected in rendered.files.items():
        path = report.parent / file

        def report_problem(what: str, file: str = file) -> None:
            line = _line_showing(text, file, manifest_line)
            result.problems.append(Problem(report.name, line, f"{file} {what}"))

        if not path.is_file():
            report_problem("is missing next to the report")
        elif file not in pictures:
            _compare_text(file, _read_text(path), expected.decode(), redraw, result)
        elif redraw:
            if not same_picture(file, read_plain(path, MOST_REPORT_BYTES), expected):
                report_problem("is not the picture that the records give")
        elif digest(read_plain(path, MOST_REPORT_BYTES)) != manifest.pictures.get(file):
            report_problem("is not the picture whose digest the report lists")


def _by_file(
    page: str, expected: str, images: Images, names: Mapping[tuple[str, str], str]
) -> list[tuple[str, bytes]]:
    """Each picture of an HTML report, with the name under which its digest is listed; none of others."""
    here = {digest(images[key][form]): file for (key, form), file in names.items()}
    return [
        (here[digest(drawn)], given)
        for drawn, given in zip_longest(pictures_within(expected), pictures_within(page), fillvalue=b"")
        if digest(drawn) in here
    ]


def _line_showing(text: str, picture: str, manifest_line: int) -> int:
    """The line that shows a picture, be it in its other image format; else that which lists its digest."""
    of_any_format = str(Path(picture).with_suffix(""))
    lines = enumerate(text.split("\n"), 1)
    return next((n for n, t in lines if f"{of_any_format}." in t and n != manifest_line), manifest_line)


def _lists_pictures(
    folder: Path,
    manifest: Manifest,
    images: Images,
    names: Mapping[tuple[str, str], str],
    within: Mapping[str, bytes],
) -> bool:
    """Whether each picture's digest is as drawn here, or that of the file, or of what the page holds.

    PNGs are compressed otherwise elsewhere, and fonts move what SVGs show.
    """
    if manifest.pictures.keys() != set(names.values()):
        return False
    for (key, form), name in names.items():
        file = folder / name
        drawn = [images[key][form], within.get(name, b"")]
        drawn += [read_plain(file, MOST_REPORT_BYTES)] if file.is_file() else []
        if manifest.pictures[name] not in map(digest, drawn):
            return False
    return True


def _report_other_drawing(
    name: str, manifest: Manifest, line: int, by_digest: bool, result: Verification
) -> None:
    how = f"pictures were drawn by {manifest.drawing}, here is {renderer()}"
    if by_digest:
        result.notes.append(f"{how}: they were checked by their digests only")
        return
    name_and_version = manifest.drawing.partition(" ")
    same = name_and_version[0] == RENDERER
    mend = f"install {'=='.join(name_and_version[::2])}" if same else "write the report again"
    advice = f"{mend}, or accept their digests with --pictures-by-digest"
    result.problems.append(Problem(name, line, f"{how}, so they cannot be drawn again; {advice}"))


def _owner_of_details(report: Path) -> Path | None:
    """The report whose details the file is; None where it is none."""
    stem, mark, suffix = report.name.rpartition(".details.")
    owner = report.with_name(f"{stem}.{suffix}")
    return owner if mark and details_name(owner) == report.name and owner.is_file() else None


def _find_manifest(report: Path, text: str) -> tuple[Manifest, int]:
    """The manifest within the text; that of a CSV report is a file next to it."""
    of_csv = report.with_suffix(f".{MANIFEST}.csv")
    if of_csv.is_file():
        manifest, line = read_manifest(_read_text(of_csv), of_csv)
        if manifest.name == report.name:
            return manifest, line
    return read_manifest(text, report)


def _read_text(path: Path) -> str:
    try:
        return read_plain(path, MOST_REPORT_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HarnessError(f"report '{path}' cannot be read: {error}") from error


def _check_unlisted_pictures(
    report: Path, manifest: Manifest, manifest_line: int, result: Verification
) -> None:
    """Pictures with names of this report's that it does not show: left by an earlier one, or foreign."""
    if manifest.format not in ("md", "latex"):
        return
    possible = picture_names(
        {key: dict.fromkeys(IMAGE_FORMATS[manifest.format], b"") for key in PICTURE_KEYS}, report
    )
    for name in possible.values():
        if name not in manifest.pictures and (report.parent / name).exists():
            what = f"picture {name} is named as one of this report, which does not show it; remove it"
            result.problems.append(Problem(report.name, manifest_line, what))


def _compare_text(name: str, given: str, expected: str, pictures: bool, result: Verification) -> None:
    found = line_differences(given, expected, pictures=pictures)
    result.problems += [Problem(name, line, what) for line, what in found]
