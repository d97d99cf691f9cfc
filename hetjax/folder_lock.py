"""One writer to a folder: a lock that the operating system gives back, and that names its holder.

The lock is `flock` on a file in the folder, so it ends with its process, however that ends. The
file says who holds it. Network file systems pass such locks on to their server (NFS, Lustre, GPFS,
CephFS), but some mounts know them on one host alone. So the holder also touches the file every few
seconds, and where the last holder was on another host and left without a word, the file is watched
before its folder is taken over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from hetjax.errors import InputError
from hetjax.reading import check_regular

LOCK_FILE = ".lock"
"""The name of the lock's file in its folder; it stays there, empty, when the lock is released."""

TOUCH_SECONDS = 5.0
"""How often a holder touches the file."""

WATCH_SECONDS = 3 * TOUCH_SECONDS
"""How long the file of a holder on another host must lie untouched to be taken over."""

_RETRY_SECONDS = 0.5
# Without O_NONBLOCK, to open a pipe is to wait for its other end.
_OPENED = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_HELD = (errno.EWOULDBLOCK, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class Holder:
    """Who holds a lock.

    Args:
        host: the host's name.
        pid: the process on it.
        since: when it took the lock, by its own clock, to the second.
        boot: what tells the running system of the host from all others.
    """

    host: str
    pid: int
    since: str
    boot: str

    def __str__(self) -> str:
        if self.boot == _boot() and self.pid == os.getpid():
            return f"this very process, since {self.since}"
        return f"process {self.pid} on host {self.host}, since {self.since}"

    @classmethod
    def me(cls) -> Holder:
        """This process, now."""
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return cls(socket.gethostname(), os.getpid(), now, _boot())


_UNNAMED = Holder("", 0, "", "")


class FolderLock:
    """Keeps other processes, and others in this one, from writing to a folder.

    Args:
        folder: the folder; it is made where it is not there.
        what: what errors call the folder.

    Attributes:
        taken_over: where the last holder ended without releasing the lock, a sentence that says
            so; else None.

    Raises:
        InputError: another one holds the lock, who is named; or the folder cannot be written to, or
            what has the name of the lock is no regular file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with FolderLock(folder, "the folder"):
        ...         held = holder_of(folder)
        ...     held.pid == os.getpid(), holder_of(folder)
        (True, None)
    """

    def __init__(self, folder: str | os.PathLike[str], what: str):
        # Its thread goes on where the process changes its folder.
        self.path = Path(folder).absolute() / LOCK_FILE
        self.taken_over: str | None = None
        self._what = f"{what} {folder}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, _OPENED | os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise InputError(f"{self._what} cannot be written to: {error.strerror}") from None
        try:
            check_regular(handle, f"{self.path} cannot be locked")
            self._take(handle)
        except BaseException:
            os.close(handle)
            raise
        ended = threading.Event()
        self._release = weakref.finalize(self, _release, handle, ended)
        threading.Thread(
            target=_touch, args=(self.path, ended), name="touch lock", daemon=True
        ).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let others write. Releasing twice does no harm; a lock that is forgotten is released."""
        self._release()

    def _take(self, handle: int) -> None:
        is_certain = self._lock(handle)
        before = _read(handle)
        if before is not None:
            if not is_certain or before.boot != _boot():
                self._watch(before)
            self.taken_over = (
                f"the run of {before}, ended without a word; this one has taken its folder over"
            )
        # A holder without room for its name holds the lock all the same.
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(asdict(Holder.me())).encode(), 0)

    def _lock(self, handle: int) -> bool:
        """Take the lock, or raise. False where the file system has none."""
        end = time.monotonic() + _RETRY_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return False
                if error.errno not in _HELD:
                    raise InputError(f"{self._what} cannot be locked: {error.strerror}") from None
                # Someone who only asks who holds the lock is gone in a moment.
                if time.monotonic() > end:
                    raise in_use(self._what, _read(handle) or _UNNAMED) from None
                time.sleep(_RETRY_SECONDS / 10)
            else:
                return True

    def _watch(self, before: Holder) -> None:
        """Wait for a sign of life of a holder of whom no lock tells; raise if there is one."""
        touched, end = _touched(self.path), time.monotonic() + WATCH_SECONDS
        while time.monotonic() < end:
            time.sleep(WATCH_SECONDS / 50)
            if _touched(self.path) != touched:
                raise in_use(self._what, before)


def holder_of(folder: str | os.PathLike[str]) -> Holder | None:
    """Who holds the lock of a folder; nothing is written.

    Args:
        folder: the folder; it need not be there.

    Returns:
        The holder; None where the lock is free, as far as locks reach, and where nobody can tell.

    Raises:
        InputError: what has the name of the lock is no regular file.
    """
    path = Path(folder) / LOCK_FILE
    try:
        handle = os.open(path, _OPENED | os.O_RDONLY)
    except OSError:
        return None
    try:
        check_regular(handle, f"{path} cannot be locked")
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return (_read(handle) or _UNNAMED) if error.errno in _HELD else None
    else:
        return None
    finally:
        os.close(handle)


def in_use(what: str, holder: Holder) -> InputError:
    """The error for a folder that another one writes to.

    Args:
        what: the folder, as errors call it.
        holder: who holds its lock.

    Returns:
        The error, which names the holder.
    """
    who = "another process" if holder == _UNNAMED else str(holder)
    return InputError(
        f"{what} is in use by {who}; wait until that run has ended, or name another folder"
    )


def _read(handle: int) -> Holder | None:
    """Who is named in a lock's file."""
    try:
        record = json.loads(os.pread(handle, 4096, 0))
        return Holder(
            str(record["host"]), int(record["pid"]), str(record["since"]), str(record["boot"])
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _release(handle: int, ended: threading.Event) -> None:
    ended.set()
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
    os.close(handle)


def _touch(path: Path, ended: threading.Event) -> None:
    while not ended.wait(TOUCH_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(path)


def _touched(path: Path) -> int | None:
    """When a file was touched; it is opened, since network file systems look anew only then."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _boot() -> str:
    """What tells this system, since it was started, from all others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
