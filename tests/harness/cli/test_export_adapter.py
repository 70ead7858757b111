from pathlib import Path

from .command_line import refused


def test_files_in_the_folder_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"mine")
    assert "'out' exists and is not empty" in refused(tmp_path, "export", "adapter", "run", "-o", "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"mine"
