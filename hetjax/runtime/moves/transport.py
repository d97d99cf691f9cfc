"""How arrays travel between stages: the interface, and the transport inside one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax

from hetjax.errors import WorkerLostError
from hetjax.runtime.instructions.instruction import Tag


class Arrival(NamedTuple):
    """A transfer that was received.

    Args:
        at: when it was there, in seconds of `time.time`.
        num_bytes: how many bytes this process took in for it.
    """

    at: float
    num_bytes: int


class Transport(Protocol):
    """Moves the arrays of tagged transfers from one stage to another.

    Within a step each tag is sent once and received once. Nothing here waits for the other end but
    `receive`, which gives up at a deadline.
    """

    def expect(self, step: int, tag: Tag) -> None:
        """Ask for a transfer, so that it can come while the worker computes."""
        ...

    def send(self, step: int, tag: Tag, arrays: Sequence[jax.Array]) -> None:
        """Offer the arrays of a transfer; they may be forgotten by the caller at once."""
        ...

    def ready(self, step: int, tag: Tag) -> bool:
        """Whether `receive` would return, or raise, at once."""
        ...

    def receive(self, step: int, tag: Tag) -> list[jax.Array]:
        """Wait for a transfer.

        Returns:
            Its arrays, sharded as the receiving stage wants them.

        Raises:
            WorkerLostError: nothing came before the deadline, or the other end is gone.
        """
        ...

    def arrival(self, step: int, tag: Tag) -> Arrival:
        """When a transfer that was received was there, and its size; told once."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class InProcessTransport:
    """A transport between the stages of one process: shared memory, one copy from device to device.

    Args:
        shardings: from a tag to the shardings that its receiver wants.
        deadline: seconds after which a transfer that does not come is an error.
    """

    def __init__(
        self, shardings: Callable[[Tag], Sequence[jax.sharding.Sharding]], deadline: float
    ):
        self._shardings, self._deadline = shardings, deadline
        self._arrived: dict[tuple[int, Tag], list[jax.Array]] = {}
        self._sizes: dict[tuple[int, Tag], int] = {}
        self._changed = threading.Condition()
        self.failure: BaseException | None = None

    def expect(self, step: int, tag: Tag) -> None:
        """Nothing to do: what is sent is already there."""

    def send(self, step: int, tag: Tag, arrays: Sequence[jax.Array]) -> None:
        """Copy the arrays to the devices of the receiving stage, without waiting."""
        moved = jax.device_put(list(arrays), list(self._shardings(tag)))
        with self._changed:
            self._arrived[step, tag] = moved
            self._sizes[step, tag] = sum(array.nbytes for array in moved)
            self._changed.notify_all()

    def ready(self, step: int, tag: Tag) -> bool:
        """Whether the sending stage has sent, or will never."""
        return (step, tag) in self._arrived or self.failure is not None

    def receive(self, step: int, tag: Tag) -> list[jax.Array]:
        """Wait until the sending stage has sent."""
        end = time.monotonic() + self._deadline
        with self._changed:
            while (step, tag) not in self._arrived:
                if self.failure is not None:
                    raise WorkerLostError(f"stage {tag.route.source}", str(self.failure))
                if not self._changed.wait(timeout=max(0.0, end - time.monotonic())):
                    raise WorkerLostError(
                        f"stage {tag.route.source}",
                        f"its {tag.route.kind} did not come within {self._deadline:g} s",
                    )
            return self._arrived.pop((step, tag))

    def arrival(self, step: int, tag: Tag) -> Arrival:
        """Now: the copy runs on the receiving devices' own queue."""
        return Arrival(time.time(), self._sizes.pop((step, tag)))

    def fail(self, error: BaseException) -> None:
        """Wake all who wait: a stage has failed and will send nothing more.

        Args:
            error: what it failed with; the first one is kept, since the others follow from it.
        """
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def close(self) -> None:
        """Forget what was not fetched."""
        with self._changed:
            self._arrived.clear()
            self._sizes.clear()
