"""Waiting for arrays with a deadline, which JAX's own waiting has not."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

import jax

from hetjax.errors import WorkerLostError


class Watched:
    """Arrays on their way, seen from outside.

    Attributes:
        done: is set when they are there, or will never be.
        arrived: when that was, in seconds of `time.time`.
        error: why they will never be there; None if they are.
    """

    def __init__(self) -> None:
        self.done = threading.Event()
        self.arrived = 0.0
        self.error: Exception | None = None


class Watcher:
    """A thread that waits for arrays, for one lot after another.

    Args:
        name: the thread's name.

    Example:
        >>> import jax.numpy as jnp
        >>> watcher = Watcher("example")
        >>> watched = watcher.watch([jnp.ones(3)])
        >>> watched.done.wait(timeout=60), watched.error
        (True, None)
        >>> watcher.close()
    """

    def __init__(self, name: str):
        self._waiting: queue.SimpleQueue[tuple[Sequence[jax.Array], Watched] | None]
        self._waiting = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def watch(self, arrays: Sequence[jax.Array]) -> Watched:
        """Wait for arrays in the thread.

        Args:
            arrays: the arrays; they are forgotten when they are there.

        Returns:
            What tells that they are.
        """
        watched = Watched()
        self._waiting.put((arrays, watched))
        return watched

    def close(self) -> None:
        """End the thread, when all that it waits for is there."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            arrays, watched = item
            try:
                jax.block_until_ready(arrays)
            except Exception as error:  # Whatever it is, the receiver must hear of it.
                watched.error = error
            watched.arrived = time.time()
            # Until the next lot comes, this thread would keep them alive.
            del item, arrays
            watched.done.set()
            del watched


def wait_for(
    watched: Watched, worker: str, what: str, end: float, seconds: float, besides: str = ""
) -> None:
    """Wait for arrays until a moment of `time.monotonic`.

    Args:
        watched: the arrays.
        worker: who is lost where they do not come.
        what: what is told then.
        end: the moment.
        seconds: how long that is.
        besides: what is told after it.

    Raises:
        WorkerLostError: the moment has passed, or the arrays will never be there.
    """
    if not watched.done.wait(max(0.0, end - time.monotonic())):
        raise WorkerLostError(worker, f"{what} within {seconds:g} s{besides}")
    if watched.error is not None:
        raise WorkerLostError(worker, str(watched.error).partition("\n")[0])
