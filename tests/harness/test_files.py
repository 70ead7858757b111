"""Files are written whole or not at all; folders of processes that are gone are removed."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from harness import files
from harness.cli import remove_empty_cache
from harness.errors import HarnessError
from harness.files import (
    name_multiprocessing_folder,
    process_namespace,
    scratch_folder,
    write_atomically,
)


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


def test_folder_of_a_killed_process_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os\nfrom harness.files import scratch_folder\n"
        "with scratch_folder('check') as folder:\n    (folder / 'log').touch()\n    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, check=False)
    (left,) = tmp_path.iterdir()
    mine = tmp_path / f"harness-check-{process_namespace()}-{os.getpid()}-living"
    others = tmp_path / "harness-of-somebody-else"
    of_another_container = tmp_path / left.name.replace(process_namespace(), "1")
    for folder in (mine, others, of_another_container):
        folder.mkdir()
    with scratch_folder("doctor") as folder:
        assert not left.exists()
        assert folder.is_dir()
    assert sorted(tmp_path.iterdir()) == sorted([mine, others, of_another_container])


@pytest.mark.parametrize("used", [False, True])
def test_the_folder_of_compiled_code_stays_only_if_something_is_in_it(
    used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = Path(default_cache_dir())
    (folder / "triton" if used else folder).mkdir(parents=True)
    remove_empty_cache()
    assert folder.exists() is used


@pytest.mark.parametrize("place", ["a" * 150, "missing", "file", "read-only"])
def test_sockets_lie_in_a_short_folder_whatever_tmpdir_is(place: str, tmp_path: Path) -> None:
    folder = tmp_path / place
    if place == "file":
        folder.touch()
    elif place != "missing":
        folder.mkdir(mode=0o500 if place == "read-only" else 0o700)
    code = (
        "from multiprocessing.connection import Listener\n"
        "from harness.files import name_multiprocessing_folder\n"
        "name_multiprocessing_folder()\nwith Listener(family='AF_UNIX') as made:\n    print(made.address)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(folder)},
    )  # fmt: skip
    assert "harness-mp-" in done.stdout


def test_where_no_folder_takes_sockets_tmpdir_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("a" * 150)))
    monkeypatch.setattr(files, "SHORT_PLACES", ("/nosuch",))
    with pytest.raises(HarnessError, match="set TMPDIR to a short path"):
        name_multiprocessing_folder()


@pytest.mark.parametrize(("ending", "left"), [("", 0), ("os.kill(os.getpid(), 9)", 1)])
def test_sockets_of_multiprocessing_are_removed_too(ending: str, left: int) -> None:
    """Pytest's folders are too long for sockets, so this looks into the usual place."""
    code = (
        "import os\nfrom multiprocessing import util\n"
        "from harness.files import name_multiprocessing_folder\n"
        f"name_multiprocessing_folder()\nprint(util.get_temp_dir(), flush=True)\n{ending}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    folder = Path(done.stdout.strip()).parent
    assert folder.name.startswith("harness-mp-")
    assert folder.exists() == bool(left)
    with scratch_folder("check"):
        assert not folder.exists()
