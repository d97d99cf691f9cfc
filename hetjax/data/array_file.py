"""An array as `numpy.save` writes it, of which rows are read when they are asked for.

A file that is mapped into memory ends the process when another program shortens it. Here one that
changes is an error.
"""

from __future__ import annotations

import math
import os
import weakref
from pathlib import Path

import numpy as np

from hetjax.errors import InputError, shown
from hetjax.reading import opened

_ARRAY, _SEVERAL = b"\x93NUM", b"PK\x03\x04"


class ArrayFile:
    """The rows of an array file, which stays open.

    Args:
        path: the file.

    Attributes:
        dtype: of the elements.
        shape: of the whole array.

    Raises:
        InputError: the file is not there, is no array, or not whole.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "rows.npy"
        ...     np.save(path, np.arange(6).reshape(3, 2))
        ...     ArrayFile(path)[1:].tolist()
        [[2, 3], [4, 5]]
    """

    def __init__(self, path: Path):
        self._path = path
        with opened(path, str(path)) as handle:
            self._state = _state(handle)
            self.shape, self.dtype, self._start, is_turned = _header(handle, path)
            self._handle = os.dup(handle)
        weakref.finalize(self, os.close, self._handle)
        size, _ = self._state
        if size < self._start + self.nbytes:
            raise _no_array(path, f"it has {size} bytes, {self._start + self.nbytes} are needed")
        if is_turned:
            raise InputError(
                f"{path} is in Fortran's order, in which no row is in one piece; it must be in "
                f"C's: save numpy.ascontiguousarray of it"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Read some rows.

        Args:
            rows: those that follow each other.

        Returns:
            A new array of them.

        Raises:
            InputError: they cannot be read, or the file is another than when it was opened.
        """
        first, stop, step = rows.indices(len(self))
        assert step == 1, "rows that follow each other"
        found = np.empty((max(0, stop - first), *self.shape[1:]), self.dtype)
        row = self.nbytes // max(1, len(self))
        self._fill(found.reshape(-1).view(np.uint8), self._start + first * row)
        return found

    def _fill(self, content: np.ndarray, place: int) -> None:
        filled = 0
        try:
            # A call reads two gigabytes at most, and nothing behind the end.
            while read := os.preadv(self._handle, [content.data[filled:]], place + filled):
                filled += read
        except OSError as error:
            raise InputError(f"{self._path} cannot be read: {error.strerror}") from None
        if _state(self._handle) != self._state:
            raise InputError(f"{self._path} cannot be read: it changed after it was opened")
        assert filled == len(content), "a file of its size has all rows"


def _state(handle: int) -> tuple[int, int]:
    """What changes when a file does: its size in bytes and its time in nanoseconds."""
    found = os.fstat(handle)
    return found.st_size, found.st_mtime_ns


def _header(handle: int, path: Path) -> tuple[tuple[int, ...], np.dtype, int, bool]:
    """Shape, dtype, the place of the first element, and whether it is in Fortran's order."""
    with os.fdopen(handle, "rb", closefd=False) as file:
        start = file.read(len(_SEVERAL))
        if start == _SEVERAL:
            raise InputError(
                f"{path} holds several arrays; it must be one, as numpy.save writes it"
            )
        if start != _ARRAY:
            raise InputError(f"{path} is no array as numpy.save writes it")
        file.seek(0)
        try:
            version = np.lib.format.read_magic(file)
            shape, is_turned, dtype = _READERS[version](file)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
        # A header is Python's text of a dict; damaged, it raises what Python's own parser does.
        except Exception as error:
            raise _no_array(path, shown(" ".join(str(error).split()), 200)) from None
        place = file.tell()
    if dtype.hasobject:
        raise _no_array(path, "it holds Python's objects")
    if not all(length >= 0 for length in shape):
        raise _no_array(path, f"its shape is {shown(shape)}")
    return shape, dtype, place, is_turned


_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
"""By the version of a file; the third is of arrays with names of fields in other alphabets."""


def _no_array(path: Path, problem: str) -> InputError:
    return InputError(f"{path} is no array as numpy.save writes it: {problem}")
