"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary path to write to, and renames it to `path` if the block succeeds.

    Readers see the old file or the new one, never half of one. The folder is made where it is
    not there.

    Args:
        path: the file to write.

    Yields:
        A path in the same folder; it is removed if the block raises.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(f"{folder}/figures.txt") as temporary:
        ...         _ = temporary.write_text("whole")
        ...     Path(f"{folder}/figures.txt").read_text()
        'whole'
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        # mkstemp's files are for their owner alone; reports are as readable as any new file.
        temporary.chmod(0o666 & ~_umask())
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
