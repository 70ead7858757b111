"""The backend of docs/own-backend, as somebody who installed it would run it."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from harness.backends import registry
from harness.backends.registry import Entry
from harness.doctor.self_check import ABOUT_TIME
from harness.job.config import load_experiment
from harness.judge.comparison import Comparison
from harness.launch.cells import plan
from harness.record.provenance import module_fingerprint
from harness.tell.tables import WITHOUT_FORM
from harness.tell.terminal import terminal_table
from tests.harness.cli.command_line import SMALL, records, succeeds
from tests.plugins import register

UNCLAIMED = """
from all_reduce_backend import AllReduceBackend


class Unclaimed(AllReduceBackend):
    claims = None
"""
EXAMPLE = Path(__file__).parents[2] / "docs" / "own-backend"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("own-backend")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    register(folder, project["entry-points"]["harness.backends"], project["name"], project["version"])
    (folder / "unclaimed.py").write_text(UNCLAIMED)
    register(folder, {"unclaimed": "unclaimed:Unclaimed"}, "unclaimed")
    settings = ("training.steps=8", "training.gradient_clipping=0.5", "compare.noise_runs=false",
                "measure.traced_steps=0")  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for installed in (EXAMPLE, folder):
            patch.syspath_prepend(installed)
        done = succeeds(
            "compare", "--json", *SMALL, "--backends", "ddp,all-reduce,all-reduce:order=backward,unclaimed",
            "--nproc", "2", *(part for setting in settings for part in ("--set", setting)), cwd=folder,
        )  # fmt: skip
    return json.loads(done.stdout) | {"runs": folder / "runs"}


@pytest.mark.costly
def test_it_is_the_same_training(compared: dict) -> None:
    own = [row for row in compared["rows"] if row["backend"].startswith("all-reduce")]
    assert len(own) == 2
    assert {row["status"] for row in own} == {"ok"}
    assert {row["parity"] for row in own} <= {"exact", "tight"}


@pytest.mark.costly
def test_its_gradients_take_what_those_of_ddp_take(compared: dict) -> None:
    reduced = {
        record.backend.label: sum(
            row.payload_bytes for row in record.comm if (row.phase, row.op) == ("backward", "all_reduce")
        )
        for record in records(compared["runs"])
    }
    assert reduced["all-reduce"] == reduced["all-reduce:order=backward"] == reduced["ddp"] > 0


@pytest.mark.costly
def test_nothing_is_found_against_it(compared: dict) -> None:
    about = [f for f in compared["findings"] if any("all-reduce" in name for name in f["backends"])]
    assert [f for f in about if f["id"] not in ABOUT_TIME] == []


@pytest.mark.costly
def test_rows_without_a_closed_form_say_that_bytes_and_memory_are_not_judged(
    compared: dict, tmp_path: Path
) -> None:
    unjudged = {row["backend"]: row["not_judged"] for row in compared["rows"]}
    judged: list[str] = []
    assert unjudged == {
        "single": judged, "ddp": judged, "all-reduce": judged, "all-reduce:order=backward": judged,
        "unclaimed": ["bytes", "memory"],
    }  # fmt: skip
    shown = terminal_table(Comparison(records(compared["runs"])))
    marked = [line.split()[0] for line in shown.splitlines() if line.count(WITHOUT_FORM) == 2]
    assert marked == ["unclaimed"]
    assert f"{WITHOUT_FORM}: bytes and memory not judged" in " ".join(shown.split())
    succeeds("report", compared["runs"], "-o", tmp_path / "report.md", cwd=tmp_path)
    report = (tmp_path / "report.md").read_text()
    assert f"{WITHOUT_FORM}: bytes and memory not judged: the backend has no closed form." in report
    assert [line.split("|")[1].strip() for line in report.splitlines() if line.count(WITHOUT_FORM) > 1] == [
        "unclaimed"
    ]
    details = (tmp_path / "report.details.md").read_text()
    assert f"{WITHOUT_FORM}: bytes and memory not judged" in details
    (answer,) = (line for line in report.splitlines() if line.startswith("| States and bytes as calculated?"))
    assert "no closed form: unclaimed" in answer
    assert "states 3 of 3; bytes 3 of 3" in answer


def test_a_change_of_its_code_makes_another_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "all_reduce_backend", raising=False)  # that the comparison imported
    source = tmp_path / "all_reduce_backend.py"
    source.write_text((EXAMPLE / source.name).read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = Entry(name="mine", target="all_reduce_backend:AllReduceBackend", options=None)
    monkeypatch.setattr(registry, "entries", lambda: {"mine": entry})

    def key() -> str:
        module_fingerprint.cache_clear()
        return plan(load_experiment(None), ["mine"], [2], 1, "cpu")[-1].key

    before = key()
    assert key() == before
    source.write_text(source.read_text() + "# changed\n")
    assert key() != before
