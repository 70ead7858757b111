"""What a checkpoint says of itself, damaged."""

from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.run_directory.request import DESCRIPTION, SavedCheckpoint


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": 3}', b"\xff\xfe", b'{"schema_version": 2}'])
def test_damage_is_one_line_that_names_the_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / DESCRIPTION).write_bytes(content)
    with pytest.raises(HarnessError, match=f"{DESCRIPTION}' is damaged, or of another version") as raised:
        SavedCheckpoint.read(tmp_path)
    assert "\n" not in str(raised.value)
