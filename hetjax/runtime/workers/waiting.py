"""No wait for other hosts is silent: after some seconds it is said what is awaited, and where."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from hetjax.errors import together

TELL_SECONDS = 8.0
"""After how long it is said: a process that imports JAX on a busy host takes less, mostly."""

PORTS = "; a closed port looks like this; docs/home_laboratory.md lists those that must be open"
"""What is said behind where another host is awaited."""

BUSY = "; this machine, the only one, is busy"
"""What is said behind where none is."""


def hint_of_nodes() -> str:
    """What is said behind where processes on the nodes of the connected Ray cluster are awaited."""
    import ray

    addresses = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return BUSY if addresses == {ray.util.get_node_ip_address()} else PORTS


class Awaited:
    """Something that is awaited, which is told once.

    Args:
        seconds: how long it may take in all.
        say: is told; the logger ``hetjax`` unless given, which prints to the standard error.
        hint: what is said behind.

    Example:
        >>> awaited = Awaited(120.0, say=print)
        >>> awaited.tell("a worker on 10.0.0.2")  # It is too early.
    """

    def __init__(self, seconds: float, say: Callable[[str], None] | None = None, hint: str = PORTS):
        self._seconds, self._began, self._hint = seconds, time.monotonic(), hint
        self._say = say or logging.getLogger("hetjax").warning
        self._told = False

    @property
    def silence(self) -> float:
        """Seconds until it is told; 0 when it is time, or it was."""
        return 0.0 if self._told else max(0.0, self._began + TELL_SECONDS - time.monotonic())

    def tell(self, what: str) -> None:
        """Say what is awaited, if it is time and it was not said.

        Args:
            what: what it is, with the addresses that it comes from.
        """
        if self._told or self.silence > 0:
            return
        self._told = True
        passed = time.monotonic() - self._began
        self._say(f"waiting for {what}: {passed:.0f} s of at most {self._seconds:g}{self._hint}")


def tell_of_late(
    calls: Mapping[str, Any], what: str, seconds: float, say: Callable[[str], None] | None = None
) -> None:
    """Wait some seconds for answers from Ray's actors, and say which are not there then.

    Args:
        calls: references to the answers, by the names of those that answer.
        what: what they are to do, after their names.
        seconds: how long it may take in all.
        say: is told; see `Awaited`.
    """
    import ray

    awaited = Awaited(seconds, say, hint_of_nodes())
    references = list(calls.values())
    _, late = ray.wait(
        references, num_returns=len(references), timeout=min(awaited.silence, seconds)
    )
    if late:
        names = [name for name, reference in calls.items() if reference in late]
        awaited.tell(f"{together(names)} {what}")
