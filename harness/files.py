"""Files that are written and read safely, and locks of files."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from filelock import BaseFileLock, FileLock, Timeout
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from harness.bounds import MOST_CONFIGURATION_BYTES, MOST_SPARSE_BYTES
from harness.errors import HarnessError

STANDARD_OUTPUT = Path("/dev/stdout")
STREAMS = {str(STANDARD_OUTPUT): 1, "/dev/stderr": 2}
STREAM_FOLDERS = ("/dev/fd", "/proc/self/fd")
"""What a shell connects, by name or by number."""


class Stored(BaseModel):
    """What is written into a file and read again: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def added_later(default: Any, **of: Any) -> Any:
    """A field that documents leave out while it has its default: earlier ones stay as they are."""
    return Field(default, exclude_if=lambda value: value == default, **of)


LONGEST_NAME = 200
"""Bytes; file systems allow 255, of which temporary names need some."""
ALLOWED = (
    f"the name of one folder or file: at most {LONGEST_NAME} bytes, without slashes, backslashes and "
    "control characters, and without a dot in front"
)


def plain_name(name: str) -> str:
    """The name itself. Raises ValueError if it could lead out of the folder in which it stands."""
    size = len(name.encode(errors="replace"))  # of lone surrogates too, which are not printable
    if not 0 < size <= LONGEST_NAME or name[0] == "." or not name.isprintable() or {*name} & {*"/\\"}:
        raise ValueError(f"it must be {ALLOWED}")
    return name


PlainName = Annotated[str, AfterValidator(plain_name)]


def stream_number(path: Path) -> int | None:
    """The file descriptor that /dev/stdout and its like name; None: another path."""
    text = str(path)
    if text in STREAMS:
        return STREAMS[text]
    return int(path.name) if str(path.parent) in STREAM_FOLDERS and path.name.isdecimal() else None


def try_writing(path: Path) -> None:
    """Open a file for writing and leave it as it was. Raises OSError where that cannot be done.

    A stream of the shell is open already.
    """
    if stream_number(path) is not None:
        return
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file so that a reader sees all of it or what was there before; text is UTF-8.

    A link is replaced, never followed; what is no file is written to, /dev/stdout through its open
    descriptor: a pipe whose reader is gone could not be opened again. Raises OSError.
    """
    write_all_atomically({path: content})


def write_all_atomically(contents: Mapping[Path, str | bytes]) -> None:
    """Replace files that belong together: none before all of them are on the disk (fsync).

    Raises OSError with the name of the file that could not be written.
    """
    written: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            data = content.encode() if isinstance(content, str) else content
            if (number := stream_number(path)) is not None:
                with _named(path), os.fdopen(os.dup(number), "wb") as stream:
                    stream.write(data)
                continue
            if path.exists() and not path.is_file() and not path.is_symlink():
                with _named(path):
                    path.write_bytes(data)
                continue
            target = Path(os.path.realpath(path.parent), path.name)
            temporary = _temporary(target)
            written[temporary] = target
            with _named(path):
                _write_new(temporary, data)
        for temporary, target in written.items():
            with _named(target):
                os.replace(temporary, target)
        for folder in {target.parent for target in written.values()}:
            _sync_folder(folder)
    finally:
        for temporary in written:
            temporary.unlink(missing_ok=True)


def make_atomically(path: Path, make: Callable[[Path], object]) -> None:
    """Replace a file by what `make` writes under the temporary name that it is given. Raises OSError."""
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)
    try:
        make(temporary)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}")


def _write_new(path: Path, data: bytes) -> None:
    """Write a file of its own, never through a link that somebody put there."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Put a folder's entries on the disk, where its file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """A full disk names no file: add it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def refusing(what: str, then: str = "") -> Iterator[None]:
    """Raise HarnessError for an OSError: what was not possible, why, and what to do."""
    try:
        yield
    except OSError as error:
        raise HarnessError(f"{what}: {error.strerror}{then}") from error


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """A file to read. Raises OSError, also for what is no plain file: the writer of a pipe may never come."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(None, "it is not a plain file", str(path))
        yield file


def read_plain(path: Path, most_bytes: int) -> bytes:
    """The bytes of a file. Raises OSError, also for what is no plain file or larger than allowed."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(None, f"it has {size:,} bytes; at most {most_bytes:,} are read", str(path))
        return file.read(size or most_bytes)  # as many are allocated; /proc tells no size


def read_settings(path: Path, what: str, advice: str = "", most_bytes: int = MOST_CONFIGURATION_BYTES) -> str:
    """The text of a file; `what` names its kind. Raises HarnessError, which ends in `advice`."""
    try:
        return read_plain(path, most_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise HarnessError(f"{what} {path} is not UTF-8 text{advice}") from error
    except (OSError, ValueError) as error:  # a name with a zero byte is none
        reason = getattr(error, "strerror", None) or error
        raise HarnessError(f"{what} {path} cannot be read: {reason}{advice}") from error


def require_plain_input(path: Path, what: str) -> None:
    """Raise HarnessError for a pipe or device, which would be read for ever, and a file that is all holes."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise HarnessError(f"{what} '{path}' is a pipe or device; give what it holds as a plain file")
        status = path.stat() if path.is_file() else None
    except (OSError, ValueError) as error:  # a loop of links, a name that is none
        raise HarnessError(
            f"{what} '{path}' cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    if status is not None and MOST_SPARSE_BYTES < status.st_size > 100 * 512 * status.st_blocks:
        raise HarnessError(
            f"{what} '{path}' has {status.st_size:,} bytes, of which {512 * status.st_blocks:,} are on the "
            "disk; give a file that is not sparse"
        )


def require_plain_output(path: Path, what: str) -> None:
    """Raise HarnessError for a link, and a pipe or device that is not standard output or of the shell."""
    if stream_number(path) is not None:
        return
    if path.is_symlink():
        raise HarnessError(f"{what} '{path}' is a symbolic link; give the file itself that is to be written")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise HarnessError(f"{what} '{path}' is a pipe or device; give a file, or /dev/stdout")


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""What file systems without locks say."""


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[BaseFileLock]:
    """Hold a lock where the file system has locks; `on_wait` is called once if another process holds it.

    Raises OSError where the file cannot be written.
    """
    lock = FileLock(path, fallback_to_soft=False)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            on_wait()
            lock.acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    try:
        yield lock
    finally:
        with suppress(OSError):
            lock.release()


def user_cache() -> Path:
    """The folder for what can be made again, of this user."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sharding-harness"


PREFIX = "harness-"
SHORT_PLACES = ("/tmp", "/var/tmp", "/dev/shm")
"""For sockets where the folder for temporary files is full or its name too long."""
LONGEST_PLACE = 36
"""Bytes of the folder for temporary files: the path of a socket has at most 107 bytes."""
_NAME = re.compile(rf"{PREFIX}[a-z]+-([0-9a-f]+)-(\d+)-\w+")


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A new folder, removed at the end; `purpose` is a word for its name.

    Folders of this kind that belong to this user and whose processes are gone are removed first.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=scratch_prefix(purpose)) as folder:
        yield Path(folder)


def process_namespace() -> str:
    """Where process ids count, in hexadecimal: each container has its own. '0': unknown."""
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return "0"


def scratch_prefix(purpose: str) -> str:
    """Prefix of the names of folders that belong to this process."""
    return f"{PREFIX}{purpose}-{process_namespace()}-{os.getpid()}-"


def _remove_abandoned(place: Path) -> None:
    here = process_namespace()
    for folder in place.glob(f"{PREFIX}*-{here}-*-*"):
        found = _NAME.fullmatch(folder.name)
        try:
            if found and not _lives(int(found[2])) and folder.lstat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # somebody else removed it


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _socket_folder() -> str:
    """A new folder whose name leaves room for that of a socket. Raises HarnessError."""
    given = tempfile.gettempdir()
    for place in (given, *SHORT_PLACES):
        if len(os.fsencode(place)) <= LONGEST_PLACE:
            _remove_abandoned(Path(place))
            with suppress(OSError):
                return tempfile.mkdtemp(prefix=scratch_prefix("mp"), dir=place)
    raise HarnessError(
        f"no folder for the sockets of ranks: '{given}' (TMPDIR) is longer than {LONGEST_PLACE} bytes or "
        f"cannot be written, nor can {', '.join(SHORT_PLACES)}; set TMPDIR to a short path with room"
    )


def name_multiprocessing_folder() -> None:
    """Have multiprocessing keep its sockets in such a folder too: its own name does not tell whose it is."""
    folder = _socket_folder()
    before = tempfile.tempdir
    tempfile.tempdir = folder
    try:
        chosen = util.get_temp_dir()
    finally:
        tempfile.tempdir = before
    if Path(chosen).parent == Path(folder):
        # After multiprocessing itself, which removes its own with priority -100.
        util.Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-200)
    else:  # it had one already
        os.rmdir(folder)
