"""The one way in for files that people name: regular, of a size that can be held, and whole.

A path may lead to anything: a folder, a pipe that nobody writes to, a device without an end, a file
that another program is writing. All of these are told apart before a byte is read.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetjax.errors import InputError

MAX_WRITTEN_BYTES = 2**18
"""The largest file that a person writes by hand: a configuration, a cluster, a lab."""

MAX_MADE_BYTES = 2**26
"""The largest file of text that a program makes: a plan, a manifest, a tokenizer."""

_KINDS = {
    stat.S_IFDIR: os.strerror(errno.EISDIR),
    stat.S_IFIFO: "it is a pipe, not a file",
    stat.S_IFSOCK: "it is a socket, not a file",
    stat.S_IFCHR: "it is a device, not a file",
    stat.S_IFBLK: "it is a device, not a file",
}


@contextmanager
def opened(path: str | os.PathLike[str], subject: str) -> Iterator[int]:
    """Opens a regular file for reading; nothing that could be waited for.

    Args:
        path: the file.
        subject: how the error's sentence begins, such as ``"configuration run.gin"``.

    Yields:
        The file's descriptor, which is closed at the end.

    Raises:
        InputError: it is not there, may not be read, or is no regular file.

    Example:
        >>> with opened("/dev/zero", "--plan /dev/zero"):
        ...     pass
        Traceback (most recent call last):
        hetjax.errors.InputError: --plan /dev/zero cannot be read: it is a device, not a file
    """
    try:
        # Without O_NONBLOCK, to open a pipe is to wait for whoever writes to it.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise InputError(f"{subject} cannot be read: {error.strerror}") from None
    except ValueError:  # A NUL, or what UTF-8 has no bytes for.
        raise InputError(f"{subject} cannot be read: no file can have that name") from None
    try:
        check_regular(handle, f"{subject} cannot be read")
        yield handle
    finally:
        os.close(handle)


def check_regular(handle: int, refused: str) -> None:
    """Checks that what was opened is a regular file.

    Args:
        handle: its descriptor.
        refused: how the error's sentence begins, such as ``"--plan p.json cannot be read"``.

    Raises:
        InputError: it is a folder, a pipe, a socket or a device.
    """
    if other := _KINDS.get(stat.S_IFMT(os.fstat(handle).st_mode)):
        raise InputError(f"{refused}: {other}")


def read_bytes(
    path: str | os.PathLike[str], subject: str, max_bytes: int = MAX_WRITTEN_BYTES
) -> bytes:
    """Reads a file whole.

    Args:
        path: the file.
        subject: how the error's sentence begins, such as ``"configuration run.gin"``.
        max_bytes: the largest size that is allowed.

    Returns:
        Its content.

    Raises:
        InputError: it is not there, may not be read, is no regular file or too large, or it changed
            while it was read.
    """
    with opened(path, subject) as handle:
        before = os.fstat(handle)
        if before.st_size > max_bytes:
            raise InputError(
                f"{subject} cannot be read: it has {before.st_size} bytes, and at most {max_bytes} "
                f"are allowed"
            )
        try:
            with os.fdopen(handle, "rb", closefd=False) as file:
                content = file.read(before.st_size + 1)
        except OSError as error:
            raise InputError(f"{subject} cannot be read: {error.strerror}") from None
        after = os.fstat(handle)
    if len(content) != before.st_size or before.st_mtime_ns != after.st_mtime_ns:
        raise InputError(f"{subject} cannot be read: it changed while it was read")
    return content


def read_text(
    path: str | os.PathLike[str], subject: str, max_bytes: int = MAX_WRITTEN_BYTES
) -> str:
    """Reads a text file whole; a byte order mark at its beginning is left out.

    Args:
        path: the file.
        subject: how the error's sentence begins, such as ``"configuration run.gin"``.
        max_bytes: the largest size that is allowed.

    Returns:
        Its text.

    Raises:
        InputError: as `read_bytes`; or it is not UTF-8, or has a NUL.
    """
    content = read_bytes(path, subject, max_bytes)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: the text is not UTF-8, from byte {error.start} on") from None
    if (place := content.find(b"\0")) >= 0:
        raise InputError(f"{path}: the text has a NUL, which no text has, at byte {place}")
    return text


def check_path(path: str | os.PathLike[str], subject: str) -> None:
    """Checks that there could be a file of a name; it need not be there.

    Args:
        path: the name.
        subject: how the error's sentence begins, such as ``"--workdir runs"``.

    Raises:
        InputError: the name is too long, has a NUL, or leads through links without an end.

    Example:
        >>> check_path("n" * 300, "--workdir")
        Traceback (most recent call last):
        hetjax.errors.InputError: --workdir is no possible path: File name too long
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except OSError as error:
        raise InputError(f"{subject} is no possible path: {error.strerror}") from None
    except ValueError:
        raise InputError(f"{subject} is no possible path: no file can have that name") from None


def check_plain(path: str | os.PathLike[str], what: str) -> None:
    """Checks that a folder of checkpoints has a path that Orbax takes as it is.

    It takes brackets for a pattern, "gs:" for a store in a cloud and a backslash for a slash, and
    leaves out what it has written, or fails.

    Args:
        path: the folder; it need not be there.
        what: the option or argument that names it.

    Raises:
        InputError: it has not.

    Example:
        >>> check_plain("/runs/first[1]", "workdir")
        Traceback (most recent call last):
        hetjax.errors.InputError: workdir /runs/first[1]: no checkpoint can be written into \
a folder with '[' or ']' in its path; name another one
    """
    real = str(real_path(path))
    odd = {
        "'[' or ']'": not {"[", "]"}.isdisjoint(real),
        "a backslash": "\\" in real,
        "a name that ends in 'gs:'": "gs:/" in f"{real}/",
        "a name that is not UTF-8": not _is_unicode(real),
    }
    if found := next((each for each, is_there in odd.items() if is_there), None):
        raise InputError(
            f"{what} {path}: no checkpoint can be written into a folder with {found} in its path; "
            f"name another one"
        )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def real_path(path: str | os.PathLike[str]) -> Path:
    r"""Where a path leads, links followed as far as they can be; it need not be there.

    Unlike `Path.resolve` it never fails.

    Args:
        path: any path.

    Returns:
        An absolute path; the path itself where no file can have its name.

    Example:
        >>> real_path("no\0such")
        PosixPath('no\x00such')
    """
    try:
        return Path(os.path.realpath(path))
    except ValueError:
        return Path(path)
