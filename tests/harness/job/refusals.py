"""Messages with which settings are refused."""

from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.job.config import load_experiment


def refused(*assignments: str) -> str:
    """The message about these assignments."""
    with pytest.raises(HarnessError) as caught:
        load_experiment(None, assignments)
    return str(caught.value)


def refused_file(tmp_path: Path, text: str) -> str:
    """The message about a file with this text."""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(HarnessError) as caught:
        load_experiment(path)
    return str(caught.value)
