"""Replays frozen records and questions through a tree, and compares what two trees say.

python -m tests.oracle capture FOLDER [--tree TREE] [--only PATTERN]   one file for each output
python -m tests.oracle compare BEFORE AFTER [--only PATTERN]           what differs; exits 1 if anything does
python -m tests.oracle axes ARCHIVE [--tree TREE]                      runs and packs one cell of each axis

PATTERN is a regular expression that the name of an output contains. TREE (default: this one) is run by its
own interpreter (.venv). `allowed.toml` lists outputs known to be wrong, or changed on purpose, and why.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.oracle.commands import ARCHIVES, OF_A_RUN, OF_RECORDS, OTHERS, PLANS, ROOT

AXES = Path(__file__).with_name("axes.toml")
ALLOWED = Path(__file__).with_name("allowed.toml")
LINES = 12
"""Of each difference that are shown."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("capture", "compare", "axes"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.action == "capture":
        return capture(options.paths[0], options.tree.resolve(), options.only, options.jobs)
    if options.action == "axes":
        return run_axes(options.paths[0], options.tree.resolve(), options.only)
    return compare(*options.paths, options.only)


def capture(folder: Path, tree: Path, only: str, jobs: int) -> int:
    """Every output below `folder`, in files named after their commands; what they write lies beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="oracle-") as scratch:
        tasks = list(outputs(Path(scratch), only))
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda task: replay(*task, tree=tree, folder=folder.resolve()), tasks))
    sys.stdout.write(f"{len(tasks)} outputs\n")
    return 0


def outputs(scratch: Path, only: str) -> Iterator[tuple[str, list[str]]]:
    """Name and commands of each output; all runs of an archive are shown by one process."""
    for name, archive in ARCHIVES.items():
        forms = {
            slug(f"records/{name}/{form}".replace("{ARCHIVE}", "").replace("{OUT}/", "")): form
            for form in OF_RECORDS
        }
        shows = slug(f"records/{name}/show")
        wanted = [output for output in (*forms, shows) if re.search(only, output)]
        if not wanted or not archive.exists():
            continue
        with tarfile.open(archive) as packed:
            packed.extractall(scratch / name, filter="data")
        records = sorted((scratch / name).rglob("record.json"))
        shown = [form.replace("{RUN}", str(path.parent)) for path in records for form in OF_A_RUN]
        runs = str(records[0].parent.parent)
        for output in wanted:
            yield output, shown if output == shows else [forms[output].replace("{ARCHIVE}", runs)]
    for command in (*PLANS, *OTHERS):
        if re.search(only, slug(command)):
            yield slug(command), [command]


def slug(text: str) -> str:
    return re.sub(r"[^\w./=,-]+", "_", text).strip("_")


CALLS = """
import contextlib, io, json, sys
from harness.cli import main
for line in json.load(sys.stdin):
    sys.argv = ["harness", *line.split()]
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code
        except Exception as error:
            code = repr(error)
    print(f"$ {line}\\n{said.getvalue()}exit {code}")
"""


def replay(name: str, commands: list[str], *, tree: Path, folder: Path) -> None:
    """Run the commands of one output in one process; write what they print, and their text files."""
    out = folder / f"{name}.files"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    given = json.dumps([command.replace("{OUT}", str(out)) for command in commands])
    done = subprocess.run(
        [tree / ".venv/bin/python", "-W", "ignore", "-c", CALLS],
        cwd=tree, input=given, capture_output=True, text=True, check=False,
    )  # fmt: skip
    (folder / f"{name}.txt").parent.mkdir(parents=True, exist_ok=True)
    said = normalised(done.stdout + (done.stderr if done.returncode else ""), tree, folder)
    (folder / f"{name}.txt").write_text(said, encoding="utf-8")
    for path in filter(Path.is_file, out.rglob("*")):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        path.write_text(normalised(text, tree, folder), encoding="utf-8")
    if not any(out.iterdir()):
        out.rmdir()


def normalised(text: str, tree: Path, folder: Path) -> str:
    """Without what differs from call to call: folders, the commit of the tree, the time, signs of life."""
    text = text.replace(str(folder), "FOLDER").replace(str(tree), "TREE").replace(str(ROOT), "TREE")
    text = re.sub(r"^harness( \w+)?: (working$|\d+ s, ).*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"[./]*/(tmp/)?oracle-\w+", "RECORDS", text)
    text = re.sub(r"\b[0-9a-f]{64}\b", "DIGEST", text)
    return re.sub(r"\b20\d\d-\d\d-\d\dT[\d:.+Z]+", "TIME", text)


def compare(before: Path, after: Path, only: str) -> int:
    """Print how the outputs differ. Those in `allowed.toml` are counted, and shown with --only."""
    names = sorted(
        {str(p.relative_to(top)) for top in (before, after) for p in top.rglob("*") if p.is_file()}
    )
    names = [name for name in names if re.search(only, name)]
    allowed = tomllib.loads(ALLOWED.read_text(encoding="utf-8")).get("output", []) if not only else []
    differ, known = 0, 0
    for name in names:
        lines = list(difference(before / name, after / name))
        if not lines:
            continue
        if any(re.search(entry["name"], name) for entry in allowed):
            known += 1
            continue
        differ += 1
        sys.stdout.write(f"{name}: {len(lines)} lines differ\n")
        sys.stdout.writelines(f"    {line[:200]}\n" for line in lines[:LINES])
    sys.stdout.write(f"{len(names)} outputs, {differ} differ, {known} differ as allowed.toml says\n")
    return int(differ > 0)


def difference(before: Path, after: Path) -> Iterator[str]:
    """Lines that one text has more often; of JSON, paths with both values."""
    texts = [
        path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for path in (before, after)
    ]
    if texts[0] == texts[1]:
        return
    try:
        left, right = (json.loads(text[text.index("{") : text.rindex("}") + 1]) for text in texts)
    except ValueError:
        counts = [Counter(text.splitlines()) for text in texts]
        yield from (f"-{line}" for line in counts[0] - counts[1])
        yield from (f"+{line}" for line in counts[1] - counts[0])
        return
    yield from of_values(left, right, "")


def of_values(left: Any, right: Any, path: str) -> Iterator[str]:
    if isinstance(left, dict) and isinstance(right, dict):
        for key in left.keys() | right.keys():
            yield from of_values(left.get(key, "(none)"), right.get(key, "(none)"), f"{path}.{key}")
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, pair in enumerate(zip(left, right, strict=True)):
            yield from of_values(*pair, f"{path}[{index}]")
    elif left != right:
        yield f"{path}: {json.dumps(left)[:90]} -> {json.dumps(right)[:90]}"


def run_axes(archive: Path, tree: Path, only: str) -> int:
    """One run of each axis of `axes.toml` by real ranks, packed for `capture` beside older ones."""
    table = tomllib.loads(AXES.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="oracle-") as scratch:
        if archive.exists():
            with tarfile.open(archive) as packed:
                packed.extractall(scratch, filter="data")
        for name, sets in table["axis"].items():
            if not re.search(only, name):
                continue
            backend, nproc, *settings = sets.split()
            given = [part for setting in settings for part in ("--set", setting)]
            common = [part for setting in table["job"] for part in ("--set", setting)]
            command = [tree / ".venv/bin/harness", "run", "--backend", backend, "--nproc", nproc]
            done = subprocess.run(
                [*command, "--runs", f"{scratch}/runs", *common, *given], cwd=tree, check=False,
                capture_output=True, text=True,
            )  # fmt: skip
            sys.stdout.write(
                f"{name}: exit {done.returncode} {done.stderr[-200:] if done.returncode else ''}\n"
            )
            sys.stdout.flush()
        with tarfile.open(archive, "w:xz") as packed:
            for record in sorted(Path(scratch, "runs").rglob("record.json")):
                packed.add(record, str(record.relative_to(scratch)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
