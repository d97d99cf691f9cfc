"""The processes that this one has started, and their end.

A driver that starts a Ray cluster is the parent of its first processes. They end with it, and when
it is killed so suddenly that they leave others behind: agents that look after a raylet, and workers
that are stopped. So a process outside of all this, the guard, waits until the driver is gone, and
ends what is left; so it does when it is dismissed. What another thread of the driver has started
meanwhile is left alone. The guard runs this file, which therefore imports nothing of hetjax.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_MARK = "HETJAX_DRIVER"
"""What is started in `ending_with_this_process` has this in its environment."""

_WORKER = "RAY_RAYLET_PID"
"""What a raylet starts has this in its environment, and so has all that its workers start."""

_END_SECONDS, _LOOK_SECONDS = 2.0, 0.01
_GUARD_SECONDS, _GUARD_LOOK_SECONDS = 20.0, 0.2


class Process(NamedTuple):
    """A process.

    Args:
        number: its number, which another may have when it has ended.
        began: when it began, in the kernel's ticks.
    """

    number: int
    began: int


def descendants(ancestor: int) -> list[Process]:
    """The processes that a process has started, those that they have started, and so on.

    Args:
        ancestor: the number of the process.

    Returns:
        Processes that run, parents first; none where there is no ``/proc``.
    """
    children: dict[int, list[Process]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        found = _running(int(folder.name))
        if found is not None:
            parent, process = found
            children.setdefault(parent, []).append(process)
    found = list(children.get(ancestor, ()))
    for process in found:
        found += children.get(process.number, ())
    return found


def running(number: int) -> Process | None:
    """The process that has a number now; None where none has, or it has ended."""
    found = _running(number)
    return None if found is None else found[1]


def is_running(process: Process) -> bool:
    """Whether a process has not ended."""
    return running(process.number) == process


def has_driver(number: int) -> bool:
    """Whether a process was started in the block of `ending_with_this_process` of any process."""
    return any(each.startswith(f"{_MARK}=".encode()) for each in _environment(number))


def end_descendants() -> None:
    """End the processes that this one has started, those that they have started, and so on."""
    end = time.monotonic() + _END_SECONDS
    while (found := descendants(os.getpid())) and time.monotonic() < end:
        _kill(found)
        time.sleep(_LOOK_SECONDS)


class Guard(NamedTuple):
    """The process that ends what a block of `ending_with_this_process` has started.

    Args:
        process: its number.
        pipe: what it listens to.
    """

    process: int
    pipe: int

    def dismiss(self) -> None:
        """Let it end what is left of that, and then itself; it is called once."""
        # It may have been ended by somebody else.
        with contextlib.suppress(BrokenPipeError):
            os.write(self.pipe, b"1")
        os.close(self.pipe)
        # Nobody waits for it, and without an end that is seen it would stay a zombie.
        threading.Thread(target=os.waitpid, args=(self.process, 0), daemon=True).start()


@contextlib.contextmanager
def ending_with_this_process(programs: Path) -> Iterator[Guard]:
    """Let the Ray cluster that is started in the block end with this process, however it ends.

    Args:
        programs: the folder of Ray's own programs. What this process runs of it ends, with all that
            it has started.

    Yields:
        What sees to it, and can be dismissed after the block.
    """
    mark = uuid.uuid4().hex
    earlier = [str(each.number) for each in descendants(os.getpid())]
    command = [sys.executable, "-I", "-S", __file__]
    reading, writing = os.pipe()
    guard = os.posix_spawn(
        sys.executable,
        [*command, f"{_MARK}={mark}", str(os.getpid()), str(programs), *earlier],
        {name: value for name, value in os.environ.items() if name != _MARK},
        file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)],
        setsid=True,
    )
    os.close(reading)
    before = os.environ.get(_MARK)
    os.environ[_MARK] = mark
    try:
        yield Guard(guard, writing)
    finally:
        os.environ.pop(_MARK)
        if before is not None:
            os.environ[_MARK] = before
        # It stays open as long as this process is there: its end is what the guard waits for.
        os.write(writing, b"1")


def _running(number: int) -> tuple[int, Process] | None:
    """The parent of a process, and the process; None where it has ended."""
    try:
        # The name, in parentheses, may have spaces.
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), Process(number, int(fields[19])))


def _kill(processes: Iterable[Process]) -> None:
    for process in processes:
        # It may have ended meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.number, signal.SIGKILL)


def _environment(number: int) -> list[bytes]:
    # It may have ended meanwhile, or be another user's.
    with contextlib.suppress(OSError):
        return Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
    return []


def _runs_one_of(programs: str, number: int) -> bool:
    """Whether a process runs a program of a folder, by itself or by an interpreter."""
    with contextlib.suppress(OSError):
        words = os.fsdecode(Path(f"/proc/{number}/cmdline").read_bytes()).split("\0")
        # Options of an interpreter may come before its program.
        return any(each.startswith(f"{programs}{os.sep}") for each in words[:3])
    return False


def _started_by(driver: int, programs: str) -> list[Process]:
    """What a driver runs of a folder of programs, and all that it has started."""
    roots = [
        each
        for each in descendants(driver)
        if (found := _running(each.number)) is not None
        and found[0] == driver
        and _runs_one_of(programs, each.number)
    ]
    return [*roots, *(found for each in roots for found in descendants(each.number))]


def _marked(mark: str, programs: str) -> list[Process]:
    """What has a mark and runs a program of a folder, or is a worker or started by one."""
    found = []
    # The driver may be a worker itself.
    own = f"{_WORKER}={os.environ.get(_WORKER)}".encode()
    for number in [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]:
        variables = _environment(number)
        workers = [each for each in variables if each.startswith(f"{_WORKER}=".encode())]
        is_worker = bool(workers) and own not in workers
        if mark.encode() in variables and (is_worker or _runs_one_of(programs, number)):
            found.append(running(number))
    return [each for each in found if each is not None]


def _guard(mark: str, driver: int, programs: str, spared: Sequence[int]) -> None:
    """Wait until a driver is gone, and end the cluster that it has started.

    A process that gives itself a title may lose its environment, and so the mark: those that are
    there when the driver has started them are noted.
    """
    known: list[Process] = []
    while True:
        ready, _, _ = select.select([0], [], [], _GUARD_LOOK_SECONDS)
        if ready and not os.read(0, 1):
            break
        known = _started_by(driver, programs) or known
        if ready:
            os.read(0, 1)  # Until the driver is gone, or dismisses it.
            break
    end = time.monotonic() + _GUARD_SECONDS
    while time.monotonic() < end:
        # Each is looked at again: another process may have its number by now.
        left = [each for each in {*known, *_marked(mark, programs)} if is_running(each)]
        left = [each for each in left if each.number not in (os.getpid(), *spared)]
        if not left:
            break
        _kill(left)
        time.sleep(_GUARD_LOOK_SECONDS)


if __name__ == "__main__":
    _guard(sys.argv[1], int(sys.argv[2]), sys.argv[3], [int(each) for each in sys.argv[4:]])
