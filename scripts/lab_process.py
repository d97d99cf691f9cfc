"""The process on a lab's first host that does what it is asked, by the names of its methods."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from benchmarking import KEPT_MEMORY, Child
from lab import Lab

UNCOUNTED = 1e11
"""Bytes of memory, more than any machine: a limit that only has what is used counted."""


class FirstHost:
    """A script that runs on the first host of a lab, and answers by a `RequestServer`.

    Args:
        lab: the lab, which is up.
        script: the script.
        flags: of its command line.
        ends: what ends it.
        seconds: what an answer may take.
    """

    def __init__(
        self,
        lab: Lab,
        script: str,
        flags: Sequence[str],
        ends: contextlib.ExitStack,
        seconds: float,
    ):
        first, environment = lab.specification.hosts[0].name, {**lab.environment(), **KEPT_MEMORY}
        self._child = Child(
            script, list(flags), environment, lambda command: lab.command(first, command)
        )
        self._seconds = seconds
        ends.enter_context(contextlib.closing(self._child))

    def __call__(self, do: str, **arguments: Any) -> Any:
        """Have something done by a method of the script's server."""
        self._child.ask({"do": do, **arguments})
        return self._child.answer(self._seconds)
