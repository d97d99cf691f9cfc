"""What it takes to change how a value lies along one axis of a logical mesh.

Along an axis a value is whole on every device, divided along one of its dimensions, or a sum of
which every device has a part. All collectives are rings between neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetjax.mesh.links import Link
from hetjax.planner.work.rates import ring_seconds

Layout = int | None
"""The dimension that an axis divides; None where every device has the value whole."""


@dataclass(frozen=True)
class Ring:
    """The devices along one axis of a logical mesh.

    Args:
        link: what joins neighbours.
        devices: how many there are.
        scatters: whether the compiler has a reduce-scatter where a sum is wanted divided; XLA for
            CPUs has an all-reduce there, and each device then takes its share.

    Example:
        >>> ring = Ring(Link(bandwidth=1e9, latency=0.0), devices=4)
        >>> ring.all_reduce(4e9), ring.all_gather(4e9), ring.all_to_all(4e9)
        (6.0, 3.0, 0.75)
    """

    link: Link
    devices: int
    scatters: bool = True

    def all_gather(self, size: float) -> float:
        """Seconds to make a divided value of so many bytes whole."""
        return ring_seconds(self.link, size, self.devices)

    def reduce_scatter(self, size: float) -> float:
        """Seconds to add up a value of so many bytes and divide the sum."""
        return self.all_gather(size)

    def all_reduce(self, size: float) -> float:
        """Seconds to add up a value of so many bytes."""
        return self.reduce_scatter(size) + self.all_gather(size)

    def all_to_all(self, size: float) -> float:
        """Seconds to divide a divided value of so many bytes along another dimension."""
        return self.all_gather(size / self.devices)

    def move(self, size: float, source: Layout, target: Layout) -> float:
        """Seconds to bring a value from one layout to another.

        Args:
            size: bytes of the whole value.
            source: how it lies.
            target: how it is to lie.

        Returns:
            Seconds; none where every device has what it needs.
        """
        if source is None or source == target:
            return 0.0
        return self.all_gather(size) if target is None else self.all_to_all(size)

    def add_up(self, size: float, target: Layout) -> float:
        """Seconds to add up a partial sum, whole or divided.

        Args:
            size: bytes of the whole value.
            target: how the sum is to lie.

        Returns:
            Seconds of an all-reduce or a reduce-scatter.
        """
        if target is None or not self.scatters:
            return self.all_reduce(size)
        return self.reduce_scatter(size)
