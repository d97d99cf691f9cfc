"""What Orbax and TensorStore say of a file that failed them, which is told in a sentence.

Where a disk is full, or files go away, each thread that writes or reads logs its traceback, and
what ends after the first that failed finds its event loop closed and prints that. A reader of all
this would take a save that is tried again for the end of the run.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import sys
from collections.abc import Callable
from traceback import walk_tb
from typing import Any

from hetjax.errors import reason_of

_ORBAX = f"orbax{os.sep}checkpoint"
_NOT_FOUND = "NOT_FOUND: "
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


@functools.cache
def quieten() -> None:
    """Keep failed writes and reads of Orbax out of this process's log and standard error."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_no_failure)
    sys.unraisablehook = _without_late_ends(sys.unraisablehook)


def disk_reason(error: BaseException) -> str:
    """Why a write or a read failed, in one line.

    Args:
        error: what Orbax raised.

    Returns:
        The operating system's word for it where TensorStore tells its number, or finds no file.

    Example:
        >>> disk_reason(ValueError("RESOURCE_EXHAUSTED: many words [os_error_code='28']"))
        'No space left on device'
    """
    if number := _OS_ERROR.search(str(error)):
        return os.strerror(int(number[1]))
    return os.strerror(errno.ENOENT) if _NOT_FOUND in str(error) else reason_of(error)


def _is_no_failure(record: logging.LogRecord) -> bool:
    if not record.exc_info:
        return True
    # Of a write that nobody waits for any more asyncio tells, and the error alone says whose it is.
    files = [frame.f_code.co_filename for frame, _ in walk_tb(record.exc_info[2])]
    is_of_orbax = any(_ORBAX in file for file in (record.pathname, *files))
    return not (is_of_orbax or _OS_ERROR.search(str(record.exc_info[1])))


def _without_late_ends(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    def filtered(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            hook(unraisable)

    return filtered
