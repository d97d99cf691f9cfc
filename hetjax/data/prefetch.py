"""Batches prepared ahead, while the devices work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

BatchT = TypeVar("BatchT")


class Prefetcher(Generic[BatchT]):
    """An endless iterator over the batches from a step on, made in a background thread.

    At most ``depth`` batches wait. What goes wrong in the thread is raised by ``next``, after which
    the prefetcher is closed.

    Args:
        batch_of: step -> batch; called in order, never twice at a time.
        start: the first step.
        depth: how many batches are made ahead, at least 1.

    Example:
        >>> with Prefetcher(lambda step: step * step, start=3) as batches:
        ...     [next(batches), next(batches)]
        [9, 16]
    """

    def __init__(self, batch_of: Callable[[int], BatchT], start: int = 0, depth: int = 2):
        self._batch_of = batch_of
        self._next_step = start
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._ahead: deque[Future[BatchT]] = deque()
        for _ in range(depth):
            self._prepare_another()

    def __iter__(self) -> Iterator[BatchT]:
        return self

    def __next__(self) -> BatchT:
        if not self._ahead:
            raise StopIteration
        try:
            batch = self._ahead.popleft().result()
        except BaseException:
            self.close()
            raise
        self._prepare_another()
        return batch

    def __enter__(self) -> Prefetcher[BatchT]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, and wait for the batch that is being made. Closing twice does no harm."""
        self._ahead.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _prepare_another(self) -> None:
        self._ahead.append(self._thread.submit(self._batch_of, self._next_step))
        self._next_step += 1
