"""A file that is only appended to, and that outlives a disk that is full for a while."""

from __future__ import annotations

import contextlib
import os

from hetjax.errors import reason_of


class AppendedFile:
    """Appends records; those that cannot be written now wait, and are written before the next one.

    The file never ends in half a record: what was written of one is taken back. Records that do not
    wait are in the file, as other processes see it, when `append` returns.

    Args:
        path: the file; it is made where it is not there.

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

    def __init__(self, path: str | os.PathLike[str]):
        self.failure: str | None = None
        self._handle: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._end = os.fstat(self._handle).st_size
        self._waiting = bytearray()

    def append(self, record: bytes) -> None:
        """Append a record, after those that wait.

        Args:
            record: the bytes of one whole record.
        """
        assert self._handle is not None, "the file is closed"
        self._waiting += record
        written, wanted = 0, bytes(self._waiting)
        try:
            while written < len(wanted):
                written += os.pwrite(self._handle, wanted[written:], self._end + written)
        except OSError as error:
            self.failure = reason_of(error)
            # Where not even that can be done, the next record is written over what is there.
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._end)
        else:
            self._end += written
            self._waiting.clear()
            self.failure = None

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
