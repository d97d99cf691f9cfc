"""A link between devices, and the time that it takes to carry a message."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetjax.errors import InputError


@dataclass(frozen=True)
class Link:
    """What joins two devices, in one direction.

    A message of ``n`` bytes takes ``latency + n / bandwidth``: the alpha-beta model, in which
    both directions are independent (full duplex).

    Args:
        bandwidth: bytes/s, more than 0.
        latency: seconds before the first byte arrives, 0 or more.

    Raises:
        InputError: a figure is out of range.

    Example:
        >>> gigabit = Link(bandwidth=125e6, latency=0.5e-3)
        >>> gigabit.seconds(1.25e6)
        0.0105
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise InputError(
                f"bandwidth: {self.bandwidth!r} is not allowed: it must be more than 0 and finite"
            )
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise InputError(
                f"latency: {self.latency!r} is not allowed: it must be 0 or more and finite"
            )

    def seconds(self, num_bytes: float) -> float:
        """The time to carry one message.

        Args:
            num_bytes: the size of the message in bytes.

        Returns:
            Seconds from the start of sending to the arrival of the last byte.
        """
        return self.latency + num_bytes / self.bandwidth
