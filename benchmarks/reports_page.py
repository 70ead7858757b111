"""Writes the gallery of the published reports, and the results that README.md opens with.

Usage: python -m benchmarks.reports_page reports
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks.published_reports import MOST_MEGABYTES, PUBLISHED, Published
from benchmarks.sent_packages import section
from harness.errors import HarnessError

TEMPLATE = Path(__file__).with_name("reports_page.template")
HERE, MOST = "<!-- gallery -->", "<!-- most megabytes -->"
BEGIN, END = "<!-- results of reports/default -->", "<!-- end of results -->"
ANSWERS, ON_GPUS, MOST_ANSWERS = "## Answers", "On GPUs", 2
FIRST_PICTURE = "report.communication.svg"
COLUMNS = {
    "backend": "strategy",
    "states": "model states, MB",
    "sent MB": "sent per step, MB",
    "parity": "parity",
    "peak MB": "peak here, MB",
    "speed": "speed here / ddp",
}
"""The beginning of a column's name in the report -> its name in README.md."""
LEFT_OUT = ("fsdp1", "accelerate-")
"""Beginnings of rows that say nothing new to a stranger."""
_LINK = re.compile(r" \[[^\]]*\]\([^)]*\)$")
_PICTURE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<file>[^)]+\.svg)\)")


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "README.md").write_text(page(folder), encoding="utf-8")
    readme = folder.parent / "README.md"
    readme.write_text(with_results(readme.read_text(encoding="utf-8"), folder), encoding="utf-8")


def page(folder: Path) -> str:
    """The page of a folder of published reports; those that are not there are left out."""
    entries = [_entry(folder, published) for published in PUBLISHED if (folder / published.name).is_dir()]
    text = TEMPLATE.read_text(encoding="utf-8").replace(MOST, str(MOST_MEGABYTES))
    return text.replace(HERE, "\n\n".join([*entries, section(folder)]))


def with_results(readme: str, folder: Path) -> str:
    """The text with facts, table and picture of traffic of the default report between its marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = (folder / "default" / "report.md").read_text(encoding="utf-8").split("\n")
    facts = _LINK.sub("", next(lines[n + 2] for n, line in enumerate(lines) if line == ANSWERS))
    elsewhere = _answers(lines)[ON_GPUS].partition("; predict: ")[0]
    first = next(n for n, line in enumerate(lines) if line.startswith("| backend "))
    table = _for_strangers(lines[first : lines.index("", first)])
    picture = next(found for line in lines if (found := _PICTURE.match(line)) and FIRST_PICTURE in line)
    image = f"![{picture['alt']}](reports/default/{picture['file']})"
    link = f"{facts} {ON_GPUS}: {elsewhere}. [The report](reports/default/report.md)."
    return f"{before}{BEGIN}\n{link}\n\n" + "\n".join([*table, "", image]) + f"\n{END}{after}"


def _for_strangers(table: list[str]) -> list[str]:
    """The columns that carry over to other machines first, under names that need no legend."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]
    order = [next(n for n, name in enumerate(rows[0]) if name.startswith(begin)) for begin in COLUMNS]
    chosen = [[row[n] for n in order] for row in rows if not row[0].startswith(LEFT_OUT)]
    chosen[0] = list(COLUMNS.values())
    return [f"| {' | '.join(row)} |" for row in chosen]


def _entry(folder: Path, published: Published) -> str:
    path = folder / published.name / published.page
    lines = path.read_text(encoding="utf-8").split("\n")
    title = lines[0].removeprefix("# ")
    address = f"{published.name}/{published.page}"
    parts = [f"### [{title}]({address})", _answer(lines, path)]
    if (picture := _picture(folder, published, lines)) is not None:
        parts.append(picture)
    return "\n\n".join([*parts, f"`{published.command}`"])


def _answer(lines: list[str], path: Path) -> str:
    """The first answers of a report, or the first paragraph of a page."""
    if ANSWERS in lines:
        found = {name if name.endswith("?") else f"{name}:": of for name, of in _answers(lines).items()}
        first = list(found.items())[:MOST_ANSWERS]
        return f"{'; '.join(f'{question} {answer}' for question, answer in first).rstrip('.')}."
    for number, line in enumerate(lines[1:], 1):
        if line and line[0] not in "#|":
            end = lines.index("", number) if "" in lines[number:] else len(lines)
            return " ".join(lines[number:end])
    raise HarnessError(f"{path} has neither answers nor a first paragraph")


def _answers(lines: list[str]) -> dict[str, str]:
    """Answers of a report's first table by their questions; of one that is asked several times the first."""
    begin = next(n for n, line in enumerate(lines) if line.startswith("| question "))
    rows = [line.strip("| ").split(" | ") for line in lines[begin + 2 : lines.index("", begin)]]
    found: dict[str, str] = {}
    for question, answer, *_ in rows:
        found.setdefault(question, answer)
    return found


def _picture(folder: Path, published: Published, lines: list[str]) -> str | None:
    """The first picture, of a page the first of its first report, as a link of thumbnail width."""
    pages = [(published.name, "\n".join(lines))]
    pages += [
        (path.parent.relative_to(folder).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted((folder / published.name).rglob("report.md"))
    ]
    for place, text in pages:
        if (found := _PICTURE.search(text)) is not None:
            alt = found["alt"].replace("\\", "").replace('"', "'")
            address = f"{published.name}/{published.page}"
            return f'<a href="{address}"><img src="{place}/{found["file"]}" width="420" alt="{alt}"></a>'
    return None


if __name__ == "__main__":
    main()
