"""Every notebook of the documentation runs from its first cell to its last, and shows what it must."""

import os
from pathlib import Path
from unittest.mock import patch

import nbformat
import pytest
from nbclient import NotebookClient

from tests import patience
from tests.docs.markdown import ROOT
from tests.harness.cli.command_line import environment

pytestmark = [pytest.mark.documented, pytest.mark.long(seconds=30)]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))


def test_there_is_a_notebook_and_none_has_outputs() -> None:
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        assert [cell for cell in cells if cell.cell_type == "code" and cell.outputs] == []


def test_the_notebook_compares_ddp_with_fsdp(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / "compare.ipynb", as_version=4)
    seconds = int(4 * patience.SECONDS)
    client = NotebookClient(notebook, timeout=seconds, resources={"metadata": {"path": str(tmp_path)}})
    with patch.dict(os.environ, environment(PYTHONPATH=str(ROOT)), clear=True):
        client.execute()
    shown = {cell.source: text(cell) for cell in notebook.cells if cell.cell_type == "code"}
    (ratios,) = (text for source, text in shown.items() if "fsdp.model_state_bytes / ddp" in source)
    states, sent = (float(part.split("(")[-1].rstrip(")")) for part in ratios.split(","))
    assert states == pytest.approx(0.5, rel=0.01)
    assert sent == pytest.approx(1.5, rel=0.01)
    assert "report.md" in os.listdir(tmp_path)
    assert "# " in shown[notebook.cells[-1].source]


def text(cell: nbformat.NotebookNode) -> str:
    """What a cell shows as its result."""
    found = [out.data for out in cell.outputs if out.output_type == "execute_result"]
    return "".join(data.get("text/markdown", data.get("text/plain", "")) for data in found)
