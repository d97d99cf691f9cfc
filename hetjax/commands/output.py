"""What a command prints to, which may fail: its disk is full, or its reader went away."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from hetjax.errors import reason_of


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


class AskedFiles:
    """Files that a command was asked for, written before its results are printed, told after them.

    So a file is not lost where printing does not come to its end, nor are the results, or another
    file, where one cannot be written.
    """

    def __init__(self) -> None:
        self._places: dict[str, str] = {}
        self._failures: list[OSError] = []

    def write(self, what: str, path: str | None, write: Callable[[str], None]) -> None:
        """Write a file.

        Args:
            what: what it is, e.g. ``"plan"``.
            path: where it is asked for; None where it is not.
            write: writes it there.
        """
        if not path:
            return
        try:
            write(path)
        except OSError as error:
            self._failures.append(error)
        else:
            self._places[what] = path

    def tell(self) -> None:
        """Tell on the standard error where the files are.

        Raises:
            OSError: one could not be written; with a note for each other one.
        """
        for what, path in self._places.items():
            print(f"the {what} is in {path}", file=sys.stderr)
        if self._failures:
            first, *others = self._failures
            for error in others:
                first.add_note(reason_of(error))
            raise first


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
