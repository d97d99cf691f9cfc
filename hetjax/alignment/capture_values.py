"""The values of a capture: held once while operators run, written to archives, read from them."""

from __future__ import annotations

import contextlib
import io
import os
import tokenize
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.alignment.capture_file import DTYPES, NUMPY_DTYPES, Capture, SavedOperator, SavedValue
from hetjax.errors import InputError, shown, unknown_name
from hetjax.files import replacing
from hetjax.mesh.quantities import format_bytes
from hetjax.pipeline.program.loss import from_host, host_array, host_shape, is_key
from hetjax.reading import opened

_ARCHIVE_BYTES = 64 * 10**6
_HEADER_BYTES = 10_000


def over_limit(num_bytes: float, limit: float) -> InputError:
    """The error of a capture that is too large.

    Args:
        num_bytes: bytes that it has at least.
        limit: bytes that are allowed.
    """
    return InputError(
        f"--limit is {format_bytes(limit)}, and the operators to capture have "
        f"{format_bytes(num_bytes)} or more; capture fewer (--operators 0-99), a smaller batch "
        f"(train.batch_size), or raise the limit"
    )


class CapturedValues:
    """The values of a capture, each held once until they are written.

    Args:
        limit: the most bytes.
    """

    def __init__(self, limit: float) -> None:
        self.saved: list[SavedValue] = []
        self._arrays: list[np.ndarray] = []
        self._numbers: dict[int, int] = {}
        # While a value is held here no other one has its identity.
        self._held: list[Any] = []
        self._limit, self._bytes = limit, 0

    def number(self, value: Any) -> int:
        """The number of a value, a new one for one that is not held yet."""
        if id(value) not in self._numbers:
            array = host_array(value)
            if array.dtype.name not in DTYPES:
                what = "dtype of a value for --capture:"
                raise InputError(unknown_name(what, array.dtype.name, DTYPES))
            self._bytes += array.nbytes
            if self._bytes > self._limit:
                raise over_limit(self._bytes, self._limit)
            self._numbers[id(value)] = len(self.saved)
            self._held.append(value)
            archive = self._bytes // _ARCHIVE_BYTES
            self.saved.append(SavedValue(archive, array.shape, array.dtype.name))
            self._arrays.append(array)
        return self._numbers[id(value)]

    def leave_devices(self) -> None:
        """Let go of the values on devices: all are numbered, and hosts have them."""
        self._held.clear()
        self._numbers.clear()

    def write(self, folder: Path) -> None:
        """Write the values to archives in a folder."""
        for archive in sorted({each.archive for each in self.saved}):
            with (
                replacing(folder / _archive_name(archive)) as temporary,
                zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as file,
            ):
                for number, saved in enumerate(self.saved):
                    if saved.archive == archive:
                        stored = io.BytesIO()
                        np.save(stored, _plain(self._arrays[number]), allow_pickle=False)
                        file.writestr(f"{number}.npy", stored.getvalue())


class ValueArchives:
    """Reads values from a capture's archives."""

    def __init__(self, folder: Path, capture: Capture) -> None:
        self._folder, self._capture = folder, capture
        self._open: dict[int, zipfile.ZipFile] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ValueArchives:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(
        self, numbers: Sequence[int], shapes: Sequence[jax.ShapeDtypeStruct], run: SavedOperator
    ) -> list[Any]:
        """Values as an operator takes or gives them."""
        if len(numbers) != len(shapes):
            raise InputError(
                f"--replay {self._folder}: operator {run.number} has {len(numbers)} values in the "
                f"capture where the model has {len(shapes)}"
            )
        return [self._value(n, shape) for n, shape in zip(numbers, shapes, strict=True)]

    def _value(self, number: int, shape: jax.ShapeDtypeStruct) -> Any:
        saved, words = self._capture.values[number], host_shape(shape)
        if saved.shape != tuple(words.shape) or saved.dtype != np.dtype(words.dtype).name:
            raise InputError(
                f"--replay {self._folder}: value {number} is {saved.dtype}{list(saved.shape)}, and "
                f"the model has {words.dtype}{list(words.shape)} there"
            )
        stored = self._stored(number, saved).view(jnp.dtype(saved.dtype))
        return from_host(jnp.asarray(stored) if is_key(shape) else stored, shape)

    def _stored(self, number: int, saved: SavedValue) -> np.ndarray:
        path = self._folder / _archive_name(saved.archive)
        subject = f"--replay {shown(str(path), 200)}"
        try:
            file = self._archive(saved.archive, path, subject)
            member = file.getinfo(f"{number}.npy")
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError("it is compressed")
            if member.file_size > saved.num_bytes + _HEADER_BYTES:
                raise ValueError("it is larger than it should be")
            content = io.BytesIO(file.read(member))
            # Before anything of that size is allocated.
            np.lib.format.read_magic(content)
            shape, _, dtype = np.lib.format.read_array_header_1_0(content)
            if shape != saved.shape or dtype != _plain_dtype(saved.dtype):
                raise ValueError(f"it is {dtype}{list(shape)}")
            content.seek(0)
            array = np.load(content, allow_pickle=False)
        except _DAMAGES as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{subject}: value {number} cannot be read: {shown(str(error), 200)}"
            ) from None
        return array

    def _archive(self, number: int, path: Path, subject: str) -> zipfile.ZipFile:
        if number not in self._open:
            handle = self._stack.enter_context(opened(path, subject))
            file = self._stack.enter_context(os.fdopen(handle, "rb", closefd=False))
            self._open[number] = self._stack.enter_context(zipfile.ZipFile(file))
        return self._open[number]


_DAMAGES = (
    zipfile.BadZipFile,
    ValueError,
    EOFError,
    RuntimeError,
    KeyError,
    OSError,
    OverflowError,
    SyntaxError,
    tokenize.TokenError,
)
"""What zipfile and NumPy raise for content that they cannot read."""


def _archive_name(number: int) -> str:
    return f"values-{number:04d}.npz"


def _plain_dtype(name: str) -> np.dtype:
    """The dtype that NumPy stores one as: whole numbers for what it does not know."""
    dtype = jnp.dtype(name)
    return dtype if name in NUMPY_DTYPES else np.dtype(f"uint{8 * dtype.itemsize}")


def _plain(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(_plain_dtype(array.dtype.name)).reshape(array.shape)
