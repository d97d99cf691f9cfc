"""The machine that a lab is on: its commands, each with a deadline, and what it must have."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hetjax.errors import InputError

COMMAND_SECONDS = 10.0
"""How long a command of the system may take."""

LOCK_SECONDS = 60.0
"""How long to wait for another command that changes the same lab."""

# The kernel's numbers of the capabilities to make namespaces and to join them by links.
_CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_NET_ADMIN": 12}
_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "taskset": "util-linux",
    "nsenter": "util-linux",
}
_POLL_SECONDS = 0.05


class LabError(RuntimeError):
    """The system did not do what the lab asked of it; the message says what."""


def check_machine() -> None:
    """Check that this machine can hold a lab.

    Raises:
        InputError: it cannot; the message says why.
    """
    if os.geteuid() != 0:
        raise InputError("the lab makes network namespaces and cgroups, and only root may")
    effective = re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())
    for capability, bit in _CAPABILITIES.items():
        if effective and not int(effective[1], 16) >> bit & 1:
            raise InputError(f"root may not make network namespaces here: {capability} is missing")
    for tool, package in _PACKAGES.items():
        if shutil.which(tool) is None:
            raise InputError(f"the command {tool!r} is missing; install the package {package}")


def check_cores(cores: Sequence[int], field: str) -> None:
    """Check that this machine has these processor cores.

    Raises:
        InputError: it has not; the message names the field.
    """
    available = sorted(os.sched_getaffinity(0))
    missing = [core for core in cores if core not in available]
    if missing:
        raise InputError(f"{field}: {missing[0]} is no core of this machine. Allowed: {available}")


def run_command(
    arguments: Sequence[str],
    *,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
    deadline: float = COMMAND_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run a command of the system to its end.

    Args:
        arguments: the command.
        check: whether it must succeed.
        environment: its environment; this process's unless given.
        deadline: seconds that it may take.

    Returns:
        What it printed and how it ended.

    Raises:
        LabError: it failed or took too long.
    """
    name = " ".join(arguments)
    try:
        # In a session of its own: a Ctrl-C is for this process to deal with.
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline,
            env=environment,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"`{name}` did not end within {deadline:g} s") from None
    if check and done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise LabError(f"`{name}` failed with {done.returncode}: {said[-1] if said else ''}")
    return done


def wait_until(condition: Callable[[], bool], deadline: float) -> bool:
    """Wait for a condition.

    Args:
        condition: what is asked again and again.
        deadline: seconds to wait at most.

    Returns:
        Whether it came true.
    """
    end = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


@contextlib.contextmanager
def only_one(name: str, deadline: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold the right to do something that one process may do at a time.

    It is a socket without a file, which ends with its process and leaves nothing behind.

    Args:
        name: what is done.
        deadline: seconds to wait for another process that does it.

    Raises:
        LabError: another process does it for longer.
    """
    with socket.socket(socket.AF_UNIX) as lock:

        def taken() -> bool:
            try:
                lock.bind(f"\0{name}")
            except OSError:
                return False
            return True

        if not wait_until(taken, deadline):
            raise LabError(f"another command has been changing {name!r} for {deadline:g} s")
        yield


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait: what is done inside is bounded in time, and must be done whole.

    Signals reach the main thread alone; in another this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)
