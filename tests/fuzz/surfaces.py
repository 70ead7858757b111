"""What reads input from elsewhere, each with how hostile input for it is made and handed over."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from harness.backends import registry
from harness.fabric.result import read_fabric
from harness.imported.rows import exactly_as_given, like_for_like, read_files
from harness.job.config import load_experiment
from harness.job.experiment import Experiment
from harness.judge.comparison import Comparison
from harness.launch.cells import plan
from harness.plan.calibration import read_calibration
from harness.plan.hardware import load_hardware
from harness.record.store import read_runs, record_text
from harness.run_directory.request import find_checkpoint
from harness.slurm.matrix import Site, load_site, plan_nodes, render_matrix, write_matrix
from harness.tell.terminal import finding_lines, terminal_table
from tests.fuzz import files
from tests.fuzz.command_lines import command_lines, invoke
from tests.fuzz.documents import TEXTS, as_bytes, as_json, hostile, mutated, of_schema, settings, torn
from tests.records import make_record


@dataclass(frozen=True, kw_only=True)
class Surface:
    """One way in."""

    share: float
    """Of all inputs."""
    inputs: Callable[[], st.SearchStrategy[Any]]
    read: Callable[[Any], object]
    """Reads one input, in the working directory. Raises HarnessError to refuse it."""


def documents(valid: list[Any], texts: list[bytes] | None = None) -> st.SearchStrategy[bytes]:
    """Files that are nearly valid: documents with places changed, and torn text."""
    changed = mutated(valid).map(lambda document: as_bytes(as_json(document)))
    whole = texts or [as_json(document).encode() for document in valid]
    return st.one_of(changed, changed, changed, torn(st.sampled_from(whole)))


def jobs() -> st.SearchStrategy[bytes]:
    drawn = settings(Experiment.model_json_schema()).map(lambda document: as_bytes(as_json(document)))
    return st.one_of(drawn, drawn, documents(files.parsed(files.jobs()), files.jobs()))


def read_job(data: bytes) -> None:
    path = Path("job.yaml")
    path.write_bytes(data)
    _plan(load_experiment(path))


def assignments() -> st.SearchStrategy[list[str]]:
    names = [
        f"{section}.{key}"
        for section, field in Experiment.model_fields.items()
        for key in getattr(field.annotation, "model_fields", ())
    ]
    name = st.one_of(
        st.sampled_from(names), st.sampled_from(names), st.sampled_from(TEXTS), st.text(max_size=9)
    )
    value = st.one_of(hostile().map(as_json), st.sampled_from(TEXTS), st.text(max_size=12))
    return st.lists(
        st.tuples(name, st.sampled_from(["=", "=", "=", "", ".x="]), value).map("".join), max_size=4
    )


def read_assignments(given: list[str]) -> None:
    _plan(load_experiment(None, given))


def _plan(experiment: Experiment) -> None:
    compare = experiment.compare
    cells = plan(experiment, compare.backends, compare.world_sizes, compare.repeats, "cpu")
    assert all(math.isfinite(cell.world_size) for cell in cells)


def labels() -> st.SearchStrategy[list[str]]:
    names = [*registry.entries(), "all", "", "zero"]
    options = {name: list(entry.options_class().model_fields) for name, entry in registry.entries().items()}

    @st.composite
    def label(draw: st.DrawFn) -> str:
        name = draw(st.one_of(st.sampled_from(names), st.sampled_from(names), st.sampled_from(TEXTS)))
        keys = st.one_of(st.sampled_from(options.get(name) or ["preset"]), st.text(max_size=6))
        value = st.one_of(st.sampled_from(["cpu", "true", "1", "1e9", "gpu", "null"]), hostile().map(as_json))
        pairs = draw(st.lists(st.tuples(keys, st.sampled_from("==:"), value).map("".join), max_size=3))
        return name + draw(st.sampled_from(["", ":", ":", ":", ","])) + ",".join(pairs)

    return st.lists(label(), min_size=1, max_size=3)


def read_labels(given: list[str]) -> None:
    plan(load_experiment(None), given, [2], 1, "cpu")


def configurations(tool: str) -> st.SearchStrategy[bytes]:
    return documents(files.configurations(tool))


def read_configuration(tool: str) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        path = Path("accelerate.yaml" if tool == "accelerate" else "ds.json")
        path.write_bytes(data)
        given = ([path], []) if tool == "accelerate" else ([], [path])
        experiment = load_experiment(None)
        read_ones = read_files(*given)
        for row in [
            *like_for_like(read_ones, experiment)[1],
            *(exactly_as_given(f, experiment) for f in read_ones),
        ]:
            registry.parse(row.label)

    return read


def sites() -> st.SearchStrategy[bytes]:
    schema = Site.model_json_schema()
    drawn = st.fixed_dictionaries(
        {"name": st.just("s")},
        optional={
            key: st.one_of(of_schema(value, schema), hostile())
            for key, value in schema["properties"].items()
            if key != "name"
        },
    ).map(lambda document: as_bytes(as_json(document)))
    return st.one_of(drawn, documents(files.parsed(files.sites()), files.sites()))


def read_site(data: bytes) -> None:
    path = Path("site.yaml")
    path.write_bytes(data)
    site, experiment = load_site(path), load_experiment(None)
    cells = plan_nodes(experiment, site, ["ddp"], [1, 2], 2, 1)
    matrix, scripts = render_matrix(
        cells, experiment, site, folder=Path("jobs"), runs_folder=Path("runs"), job_name="h", arrays=False,
        command=["harness"],
    )  # fmt: skip
    Path("jobs/matrix.json").unlink(missing_ok=True)
    write_matrix(Path("jobs"), matrix, scripts)


def records() -> st.SearchStrategy[bytes]:
    return documents(files.records())


def put_records(data: bytes) -> Path:
    """A folder with a sound reference and a hostile record."""
    for name, content in (("sound", record_text(make_record(label="single")).encode()), ("hostile", data)):
        folder = Path("runs") / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "record.json").write_bytes(content)
    return Path("runs")


def read_records(data: bytes) -> None:
    runs, _ = read_runs([put_records(data)])
    comparison = Comparison(record for _, record in runs)
    terminal_table(comparison)
    finding_lines(comparison)
    as_json(comparison.as_json())


def report_records(given: tuple[str, str, bytes]) -> None:
    """What prints records and writes reports, as commands."""
    command, suffix, data = given
    runs = str(put_records(data))
    match command:
        case "report":
            invoke(["report", runs, "-o", f"out.{suffix}"])
        case "list" | "clean":
            invoke([command, "--runs", runs])
        case "compare":
            invoke(["compare", "--dry-run", "--backends", "ddp", "--runs", runs])
        case "show":
            invoke(["show", "hostile", "--runs", runs])
        case _:
            invoke(["report", "--baseline", f"{runs}/sound", f"{runs}/hostile", "-o", f"out.{suffix}"])


def reports() -> st.SearchStrategy[tuple[str, str, bytes]]:
    commands = st.sampled_from(["report", "report", "list", "show", "clean", "compare", "baseline"])
    return st.tuples(commands, st.sampled_from(["md", "html", "csv", "json", "tex"]), records())


def archives() -> st.SearchStrategy[bytes]:
    inside = torn(st.just(files.archive())).map(files.packed)
    return st.one_of(inside, inside, torn(st.just(files.packed(files.archive()))))


def read_archive(data: bytes) -> None:
    path = Path("runs.tar.xz")
    path.write_bytes(data)
    read_runs([path])


def read_hardware_file(data: bytes) -> None:
    path = Path("hardware.yaml")
    path.write_bytes(data)
    hardware = load_hardware(path)
    hardware.lines()
    for name in hardware.devices:
        hardware.device(name)
    for name in hardware.fabrics:
        hardware.fabric(name)


def read_small_file(kind: tuple[str, bytes]) -> None:
    """Documents that the harness itself writes."""
    name, data = kind
    path = Path("folder") / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    match name:
        case "calibration.json":
            calibration = read_calibration(path)
            assert calibration.origin
            calibration.time_constants(load_hardware().device(calibration.device))
        case "fabric.json":
            read_fabric(path).summary()
        case _:
            find_checkpoint("folder", Path("runs"))


def small_files() -> st.SearchStrategy[tuple[str, bytes]]:
    kinds = {
        "calibration.json": files.calibrations(),
        "fabric.json": files.fabrics(),
        "checkpoint.json": files.checkpoints(),
    }
    return st.one_of([st.tuples(st.just(name), documents(valid)) for name, valid in kinds.items()])


SURFACES = {
    "job files": Surface(share=0.2, inputs=jobs, read=read_job),
    "--set": Surface(share=0.1, inputs=assignments, read=read_assignments),
    "backends and their options": Surface(share=0.1, inputs=labels, read=read_labels),
    "Accelerate files": Surface(
        share=0.08, inputs=lambda: configurations("accelerate"), read=read_configuration("accelerate")
    ),
    "DeepSpeed files": Surface(
        share=0.08, inputs=lambda: configurations("deepspeed"), read=read_configuration("deepspeed")
    ),
    "site files": Surface(share=0.06, inputs=sites, read=read_site),
    "records": Surface(share=0.2, inputs=records, read=read_records),
    "reports of records": Surface(share=0.05, inputs=reports, read=report_records),
    "archives of records": Surface(share=0.03, inputs=archives, read=read_archive),
    "hardware files": Surface(
        share=0.02, inputs=lambda: documents(files.hardware()), read=read_hardware_file,
    ),
    "checkpoints, calibrations, fabrics": Surface(share=0.03, inputs=small_files, read=read_small_file),
    "command lines": Surface(share=0.05, inputs=command_lines, read=invoke),
}  # fmt: skip
