"""Writing a file whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetjax.errors import InputError, shown
from hetjax.reading import check_path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary path to write to, and renames it to `path` if the block succeeds.

    Readers see the old file or the new one, never half of one. The folder is made where it is
    not there; of a link it is the file that it leads to.

    Args:
        path: the file to write.

    Yields:
        A path in the same folder; it is removed if the block raises.

    Raises:
        OSError: it cannot be written, or is there and is no file: a device would be replaced for
            all who use it. The error names the file.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(f"{folder}/figures.txt") as temporary:
        ...         _ = temporary.write_text("whole")
        ...     Path(f"{folder}/figures.txt").read_text()
        'whole'
    """
    target = Path(os.path.realpath(path))
    if _is_no_file(target):
        raise OSError(errno.EINVAL, _NO_FILE, str(path))
    with _naming(path, target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Of a fixed length: names may be as long as the file system has them.
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=_TEMPORARY)
        os.close(handle)
        temporary = Path(name)
        try:
            # mkstemp's files are for their owner alone; reports are as readable as any new file.
            temporary.chmod(0o666 & ~_umask())
            yield temporary
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def check_writable(path: str | os.PathLike[str], what: str) -> None:
    """Checks that a file could be written, before work is done for it.

    Args:
        path: the file, which need not be there; nor need its folder.
        what: the option that names it.

    Raises:
        InputError: it is a folder or a device, or its folder cannot be made or written to.

    Example:
        >>> check_writable("/dev/null/a", "--out")
        Traceback (most recent call last):
        hetjax.errors.InputError: --out /dev/null/a cannot be written: /dev/null is no folder
    """
    check_path(path, f"{what} {shown(str(path), 200)}")
    target = Path(path)
    if target.is_dir():
        raise InputError(f"{what} {path} cannot be written: it is a folder; name a file")
    target = Path(os.path.realpath(target))
    if _is_no_file(target):
        raise InputError(f"{what} {path} cannot be written: {_NO_FILE}; name another one")
    folder = _nearest(target.absolute().parent)
    if not folder.is_dir():
        raise InputError(f"{what} {path} cannot be written: {folder} is no folder")
    _check_takes_files(folder, f"{what} {path} cannot be written: {folder}")


def check_folder(path: str | os.PathLike[str], what: str) -> None:
    """Checks that files could be written into a folder, before work is done for them.

    Args:
        path: the folder, which need not be there.
        what: the option that names it.

    Raises:
        InputError: it is a file, or cannot be made or written to.

    Example:
        >>> check_folder("/dev/null/a", "--workdir")
        Traceback (most recent call last):
        hetjax.errors.InputError: --workdir /dev/null/a: /dev/null is a file, not a folder
    """
    check_path(path, f"{what} {shown(str(path), 200)}")
    there = _nearest(Path(path).absolute())
    if not there.is_dir():
        raise InputError(f"{what} {path}: {there} is a file, not a folder")
    _check_takes_files(there, f"{what} {path}: {there} cannot be written to")


_NO_FILE = "it is no regular file"

_TEMPORARY = ".hetjax-"
"""What names of temporary files begin with."""


@contextmanager
def _naming(path: str | os.PathLike[str], folder: Path) -> Iterator[None]:
    """Errors of writing a file into a folder name it: those of a full disk name none."""
    try:
        yield
    except OSError as error:
        if error.filename is None or str(error.filename).startswith(str(folder / _TEMPORARY)):
            error.filename = os.fspath(path)
        raise


def _is_no_file(target: Path) -> bool:
    return os.path.exists(target) and not os.path.isfile(target)


def _nearest(place: Path) -> Path:
    """The place, or the nearest above it that is there."""
    return next(each for each in (place, *place.parents) if os.path.exists(each))


def _check_takes_files(folder: Path, refused: str) -> None:
    """Check it by a file: some folders that may be written to take none."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{refused}: {error.strerror}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
