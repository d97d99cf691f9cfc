"""A file that is only appended to, and that outlives a disk that is full for a while."""

from __future__ import annotations

import contextlib
import os

from hetjax.errors import reason_of


class AppendedFile:
    """Appends records; those that cannot be written now wait, and are written before the next one.

    The file never ends in half a record: what was written of one is taken back. Records that do not
    wait are in the file, as other processes see it, when `append` returns. What another program
    makes of the file is kept: records are added to the end of what is there.

    Args:
        path: the file; it is made where it is not there.
        ending: what every record ends with. It is put in where another program left the file
            without, so that the next record is not taken for a part of what is there.

    Attributes:
        failure: why records wait; None where none do.

    Raises:
        OSError: the file cannot be opened.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = AppendedFile(f"{folder}/records")
        ...     for record in (b"one ", b"two"):
        ...         file.append(record)
        ...     file.close()
        ...     Path(f"{folder}/records").read_bytes()
        b'one two'
    """

    def __init__(self, path: str | os.PathLike[str], ending: bytes = b""):
        self.failure: str | None = None
        self._path, self._ending = os.path.abspath(path), ending
        self._handle: int | None = self._opened()
        self._end = os.fstat(self._handle).st_size
        self._half = 0  # Bytes of a record behind the end, which could not be taken back.
        self._waiting = bytearray()

    def append(self, record: bytes) -> None:
        """Append a record, after those that wait.

        Args:
            record: the bytes of one whole record.
        """
        assert self._handle is not None, "the file is closed"
        self._waiting += record
        try:
            self._follow()
            self._write(bytes(self._waiting))
        except OSError as error:
            self.failure = reason_of(error)
        else:
            self._waiting.clear()
            self.failure = None

    def _opened(self) -> int:
        # Without O_NONBLOCK, to open a pipe is to wait for whoever reads from it.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(self._path, flags, 0o666)

    def _follow(self) -> None:
        """Go to the end of what is there now, if another program changed or replaced the file."""
        assert self._handle is not None
        if not self._is_there():
            gone, self._handle = self._handle, self._opened()
            with contextlib.suppress(OSError):
                os.close(gone)
        elif os.fstat(self._handle).st_size == self._end + self._half:
            return
        self._end, self._half = os.fstat(self._handle).st_size, 0
        length = len(self._ending)
        last = os.pread(self._handle, length, max(0, self._end - length))
        if self._end and last != self._ending:
            self._waiting[:0] = self._ending

    def _is_there(self) -> bool:
        """Whether the file that is open has its name still."""
        assert self._handle is not None
        try:
            return os.path.samestat(os.fstat(self._handle), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _write(self, wanted: bytes) -> None:
        """Write at the end; where that fails, what was written is taken back."""
        assert self._handle is not None
        written = 0
        try:
            while written < len(wanted):
                written += os.pwrite(self._handle, wanted[written:], self._end + written)
        except OSError:
            self._half = max(self._half, written)
            # Where not even that can be done, the next record is written over what is there.
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._end)
                self._half = 0
            raise
        self._end, self._half = self._end + written, 0

    def close(self) -> None:
        """Try once more to write what waits, and close; closing twice is harmless."""
        if self._handle is None:
            return
        if self._waiting:
            self.append(b"")
        handle, self._handle = self._handle, None
        try:
            os.close(handle)
        except OSError as error:  # Some network file systems tell only now.
            self.failure = self.failure or reason_of(error)
