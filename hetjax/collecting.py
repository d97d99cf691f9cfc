"""How often Python looks for what nothing refers to any more, while something is traced."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SELDOM = (200_000, 50, 100)

_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []
"""The thresholds to go back to: one for each block that has begun and not ended."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Look seldom: what planning, tracing and compiling make lives until their end.

    Traces are millions of objects. To walk them again and again took a third of the time until a
    model of 80 blocks trained. Blocks may lie in each other, and in several threads.
    """
    with _lock:
        _before.append(gc.get_threshold())
        gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        with _lock:
            last = _before.pop()
            if not _before:
                gc.set_threshold(*last)
