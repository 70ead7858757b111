"""What must hold of a planted trap: its finding comes first, and nothing untrue is said."""

from __future__ import annotations

from .matrix import Matrix, padded_documents
from .planted import Trap


def assert_named(trap: Trap, matrix: Matrix, tally: dict[str, list[int]]) -> None:
    """Run it; the finding must be of its kind, about its backend, and no other cause be named."""
    tally["planted"][1] += 1
    settings = trap.settings
    if trap.padded:
        path = matrix.store.root.parent / "documents.jsonl"
        settings += ("data.source=jsonl", f"data.path={padded_documents(path)}")
    found = matrix.findings([*trap.compared_with, trap.label], trap.world_size, settings)
    named = [f for f in found if f.id == trap.finding and trap.says in f.message]
    label = trap.label.replace("=true", "=True")
    assert named, [(f.id, f.message) for f in found]
    assert all(f.backends == (label,) for f in found), found
    ids = [f.id for f in found if f.id != "diverged" or trap.finding == "diverged"]
    assert ids[0] == trap.finding
    assert set(ids) <= {trap.finding, *trap.also}, [f.message for f in found]
    tally["planted"][0] += 1
