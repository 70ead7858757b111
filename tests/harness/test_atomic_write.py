"""A reader of a file that is written again sees all of it or what was there before."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from harness.files import write_atomically


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "before")
    before = path.open(encoding="utf-8")
    write_atomically(path, "größe\r\n")
    assert (before.read(), path.read_bytes()) == ("before", "größe\r\n".encode())
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_text("before")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    target.write_text("before")
    link.symlink_to(target)
    write_atomically(link, "text")
    assert not link.is_symlink()
    assert (link.read_text(), target.read_text()) == ("text", "before")


def test_a_file_in_a_linked_folder_is_written_there(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    write_atomically(tmp_path / "link" / "file", "text")
    assert (tmp_path / "folder" / "file").read_text() == "text"


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    (tmp_path / f".a.json.{os.getpid()}").symlink_to(victim)
    write_atomically(tmp_path / "a.json", "own")
    assert (victim.read_text(), (tmp_path / "a.json").read_text()) == ("theirs", "own")


def test_files_have_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a.json", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o640


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    script = "from pathlib import Path; from harness.files import write_atomically as w; w(Path('{}'), 'x')"
    done = subprocess.run(
        [sys.executable, "-c", script.format("/dev/stdout")], capture_output=True, text=True, check=True
    )
    assert done.stdout == "x"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen([sys.executable, "-c", script.format(pipe)]):
        assert pipe.read_text() == "x"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
