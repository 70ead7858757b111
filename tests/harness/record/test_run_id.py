import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli import harness
from harness.errors import HarnessError
from harness.record.store import as_name, plain_name, run_folder, write_record
from harness.slurm.matrix import read_matrix
from tests.harness.slurm.test_runs import a_matrix
from tests.records import make_record

OUTSIDE = [
    "../../x",
    "/tmp/x",
    "a/b",
    "..",
    ".",
    "",
    ".hidden",
    "a\\b",
    "nul\0",
    "two\nlines",
    "x" * 300,
    "\udc80",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_run_id_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(HarnessError, match="refused as a path"):
        run_folder(tmp_path, name)


def test_run_id_of_a_run_is_a_folder_in_the_runs_folder(tmp_path: Path) -> None:
    assert (
        run_folder(tmp_path, "20260102-030405-zero3-n2-r0-abc")
        == tmp_path / "20260102-030405-zero3-n2-r0-abc"
    )
    assert plain_name(f"n-{as_name('../my backend')}") == "n-.._my_backend"


@pytest.mark.parametrize("name", ["../../planted", "/tmp/planted"])
def test_export_of_a_record_whose_run_id_leads_outside_is_refused(tmp_path: Path, name: str) -> None:
    write_record(tmp_path, make_record(run_id=name))
    board = tmp_path / "a" / "b" / "board"
    arguments = ["export", "tracking", str(tmp_path / "record.json"), "--to", "tensorboard", "-o", str(board)]
    done = CliRunner().invoke(harness, arguments)
    assert done.exit_code == 1
    assert "refused as a path" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize(("key", "value"), [("run_id", "../../planted"), ("script", "/tmp/planted.sbatch")])
def test_matrix_whose_names_lead_outside_is_refused(tmp_path: Path, key: str, value: str) -> None:
    folder, _ = a_matrix(tmp_path)
    document = json.loads((folder / "matrix.json").read_text())
    run = document["runs"][0]
    (run["request"] if key == "run_id" else run)[key] = value
    (folder / "matrix.json").write_text(json.dumps(document))
    with pytest.raises(HarnessError, match=f"{key}.*must be the name of one folder or file"):
        read_matrix(folder)
