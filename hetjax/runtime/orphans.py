"""A process that ends what a killed driver leaves of the Ray cluster that it had started.

Ray's first processes end with the driver, and so suddenly that they leave others behind: agents
that look after a raylet, and workers that are stopped. What a driver starts inherits a mark in its
environment. A process outside of all this waits until the driver is gone, and then ends whatever
has the mark. That process runs this file, which imports nothing of hetjax.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_MARK = "HETJAX_DRIVER"
_LOOK_SECONDS, _LAST_SECONDS = 0.2, 20.0


@contextlib.contextmanager
def ending_with_this_process() -> Iterator[None]:
    """Let all that is started in the block end with this process, however it ends."""
    mark = uuid.uuid4().hex
    reading, _ = os.pipe()  # The other end closes when this process is gone.
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", __file__, f"{_MARK}={mark}"],
        {name: value for name, value in os.environ.items() if name != _MARK},
        file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)],
        setsid=True,
    )
    os.close(reading)
    before = os.environ.get(_MARK)
    os.environ[_MARK] = mark
    try:
        yield
    finally:
        os.environ.pop(_MARK)
        if before is not None:
            os.environ[_MARK] = before


def marked(mark: str) -> list[int]:
    """The processes that have a mark in their environment.

    Args:
        mark: ``NAME=VALUE``.

    Returns:
        Their numbers; none where there is no ``/proc``.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # It may have ended meanwhile, or be another user's.
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _end(mark: str) -> None:
    end = time.monotonic() + _LAST_SECONDS
    while (processes := marked(mark)) and time.monotonic() < end:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    while os.read(0, 1):
        pass
    _end(sys.argv[1])
