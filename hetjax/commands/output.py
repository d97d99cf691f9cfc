"""What a command prints to, which may fail: its disk is full, or its reader went away."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO


class Output:
    """A text file that ends no command: once the one below has failed, it takes all and keeps none.

    Args:
        file: the one below, such as the standard output.
        tell: is told of the failure, once.

    Attributes:
        file: as given; another one may be put in its place.
        failure: what was raised below; None where all was written.
    """

    def __init__(self, file: TextIO, tell: Callable[[OSError], None] = lambda _: None):
        self.file, self._tell = file, tell
        self.failure: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, text: str) -> int:
        """Write a text, as far as the file below takes it."""
        self._try(lambda: self.file.write(text))
        return len(text)

    def flush(self) -> None:
        """Have all written that was not yet, as far as the file below takes it."""
        self._try(self.file.flush)

    def _try(self, work: Callable[[], object]) -> None:
        if self.failure is not None:
            return
        try:
            work()
        except OSError as error:
            self.failure = error
            self._tell(error)


def tell_places(**files: str | None) -> None:
    """Tell on the standard error where files are that were written before the results are printed.

    Args:
        files: their paths by what they are; None for those that were not asked for.
    """
    for what, path in files.items():
        if path:
            print(f"the {what} is in {path}", file=sys.stderr)


def open_closed() -> None:
    """Have the standard streams that the process began without lead nowhere.

    Python has None in their place, and the next file to be opened would be taken for one of them.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, which is this one.
            nowhere = os.open(os.devnull, os.O_RDWR)
            assert nowhere == number, nowhere
            os.set_inheritable(nowhere, True)
            mode = "r" if name == "stdin" else "w"
            stream = os.fdopen(
                nowhere, mode, encoding="utf-8", errors="backslashreplace", closefd=False
            )
            setattr(sys, name, stream)


def all_written() -> bool:
    """Write what the standard streams still hold, before Python does at the process's end.

    What cannot be written goes nowhere: Python would try once more, and end with a code of its own.

    Returns:
        Whether the standard output took it.
    """
    failed = [stream for stream in (sys.stdout, sys.stderr) if not _takes_all(stream)]
    for stream in failed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    return sys.stdout not in failed


def _takes_all(stream: TextIO) -> bool:
    try:
        stream.flush()
    except OSError:
        return False
    return True
