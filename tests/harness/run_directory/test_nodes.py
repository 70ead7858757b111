from datetime import UTC, datetime
from pathlib import Path

from harness.run_directory.assemble import run_environment, write_node


def test_a_node_says_when_the_run_began_on_it(tmp_path: Path) -> None:
    """A scheduler begins it long after it was asked for."""
    assert run_environment(tmp_path).started_at is None
    write_node(tmp_path, 0)
    found = run_environment(tmp_path)
    assert found.started_at is not None
    assert abs((datetime.now(UTC) - datetime.fromisoformat(found.started_at)).total_seconds()) < 60
    assert len(found.nodes) == 1
