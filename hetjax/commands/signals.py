"""Ctrl-C, SIGTERM and SIGHUP for commands: heard at any moment, from the first line to the last.

A handler would run when the main thread comes to it: not while it compiles, and not at all once a
library has put another in its place. Ray does, with one that prints the native stacks of all
threads. So the signals are blocked in every thread, and a thread of their own waits for them.

The imports here are few, since nothing is heard before them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Set
from typing import Self

from hetjax.commands.command_line import NOT_WRITTEN
from hetjax.commands.output import all_written, open_closed
from hetjax.processes import end_descendants

HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that are heard, but for those that the process was started to ignore."""

EXIT_BASE = 128
"""What is added to a signal's number to make an exit code, as shells do."""

_SAME_REQUEST_SECONDS = 1.0
_SHOW_CURSOR = b"\x1b[?25h"


class StopRequest:
    """Turns a signal into a wish to stop after the step, while its block runs.

    A later signal ends the command at once. Signals that come together are one wish, since a
    process and its group are often signalled both.

    Args:
        clock: gives the time in seconds, from any zero.

    Attributes:
        signal: the signal that came; None as long as none has.

    Example:
        >>> stop = StopRequest()
        >>> stop.hear(signal.SIGTERM), stop()
        ('SIGTERM: stopping after this step; once more to end at once', True)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._came = clock, 0.0
        self.signal: int | None = None

    def __call__(self) -> bool:
        """Whether a stop was asked for."""
        return self.signal is not None

    def __enter__(self) -> Self:
        _PROCESS.request = self
        return self

    def __exit__(self, *_: object) -> None:
        _PROCESS.request = None

    def hear(self, number: int) -> str | None:
        """Take a signal as the wish, or as the same wish again.

        Args:
            number: the signal.

        Returns:
            What to say of it, perhaps nothing; None if the command is to end at once.
        """
        if self.signal is None:
            self.signal, self._came = number, self._clock()
            return f"{_name(number)}: stopping after this step; once more to end at once"
        return "" if self._clock() - self._came <= _SAME_REQUEST_SECONDS else None


class _ProcessSignals:
    """What this process does; a process has one set of signals, and so one of these."""

    def __init__(self) -> None:
        self.doing = "starting"
        self.request: StopRequest | None = None
        # Whoever has it decides how the process ends, and never gives it back.
        self._ending = threading.Lock()

    def listen(self) -> None:
        """Hear signals from now on."""
        # A shell has Ctrl-C ignored by what a script puts in the background.
        heard = {each for each in HEARD if signal.getsignal(each) != signal.SIG_IGN}
        # Before any other thread is there: threads take over the mask of the one that starts them.
        signal.pthread_sigmask(signal.SIG_BLOCK, heard)
        # Ray's processes must not take it over: they end by SIGTERM.
        os.register_at_fork(
            after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
        )
        threading.Thread(target=self._hear, args=(heard,), name="signals", daemon=True).start()

    def _hear(self, heard: Set[signal.Signals]) -> None:
        while True:
            number, request = signal.sigwait(heard), self.request
            said = None if request is None else request.hear(number)
            if said is None:
                self._end(number)
            elif said:
                _say(said)

    def _end(self, number: int) -> None:
        """End this process and all that it has started, whatever the other threads do."""
        if not self._ending.acquire(blocking=False):
            return  # The command is done, and the process is about to end.
        _say(f"{_name(number)}: ended while {self.doing}")
        # That was the last line: the main thread may see its workers end, and would tell of it.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):
            os.dup2(nowhere, output)
        end_descendants()
        os._exit(EXIT_BASE + number)

    def finish(self) -> None:
        """Let the command's own exit code be the process's, unless a signal is ending it."""
        self._ending.acquire()


_PROCESS = _ProcessSignals()


def run_process(main: Callable[[], int]) -> int:
    """Run a command as this process; a signal ends it with one line and 128 + its number.

    Args:
        main: the command.

    Returns:
        Its exit code; `NOT_WRITTEN` where that is 0 and what it printed could not be written.
    """
    open_closed()
    _PROCESS.listen()
    try:
        code = main()
        return code if all_written() else code or NOT_WRITTEN
    finally:
        _PROCESS.finish()


def doing(what: str) -> None:
    """Note what the command does from now on, for the line that a signal prints.

    Args:
        what: what it does, after "while", e.g. ``"planning"``.
    """
    _PROCESS.doing = what


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _say(text: str) -> None:
    """Prints a line without Python's buffers, which the main thread may hold."""
    # A bar may stand in the line, and hide the cursor.
    before = b"\n" + _SHOW_CURSOR if os.isatty(2) else b""
    with contextlib.suppress(OSError):
        os.write(2, before + f"{text}\n".encode())
