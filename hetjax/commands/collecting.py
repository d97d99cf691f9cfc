"""How often Python looks for what nothing refers to any more, while something is planned."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_SELDOM = (200_000, 50, 100)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Look seldom: what planning makes lives until its end.

    Traces are millions of objects. To walk them again and again took a tenth of all planning.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)
