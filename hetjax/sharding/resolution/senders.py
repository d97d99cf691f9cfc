"""Who sends a slice that several devices hold: the policies of batched send-receive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, Protocol

from hetjax.sharding.annotation.bounds import Bounds, volume
from hetjax.sharding.resolution.network import Network

Shares = Sequence[tuple[int, Bounds]]
"""Owners, each with the piece of a slice that it sends; together they are the slice."""


class Senders(Protocol):
    """A way to choose senders; it may remember what it chose before."""

    relays: ClassVar[bool]
    """Whether receivers may pass pieces on to others, and so send what they did not own."""

    def choose(self, owners: Sequence[int], receiver: int, num_bytes: int) -> int:
        """The owner that sends to a receiver, which is none of them."""
        ...

    def shares(self, owners: Sequence[int], receiver: int, bounds: Bounds, itemsize: int) -> Shares:
        """Who sends a slice to a receiver: one of the owners, or several a piece each."""
        ...


class BestLink:
    """The owner with the best link to the receiver; of several, the one that has least to send.

    An owner in the receiver's node is taken before all others. What each device has to send over
    links of a bandwidth is remembered, so that one object for many arrays balances all of them
    together.

    Args:
        network: the links.

    Source: Hetu v2, section 4.3, heuristics II and III.

    Example:
        >>> senders = BestLink(Network.alike())
        >>> [senders.choose((0, 1), receiver, 100) for receiver in (2, 3)]
        [0, 1]
    """

    relays: ClassVar[bool] = True

    def __init__(self, network: Network):
        self.network = network
        self.load: defaultdict[tuple[int, float], float] = defaultdict(float)

    def best(self, owners: Sequence[int], receiver: int) -> tuple[tuple[int, ...], float]:
        """The owners with the best link to a receiver, in their order, and its bandwidth."""
        network, node = self.network, self.network.node(receiver)
        near = [owner for owner in owners if network.node(owner) == node]
        links = {owner: network.link(owner, receiver).bandwidth for owner in near or owners}
        bandwidth = max(links.values())
        return tuple(sorted(each for each in links if links[each] == bandwidth)), bandwidth

    def choose(self, owners: Sequence[int], receiver: int, num_bytes: int) -> int:
        """The owner that sends; its load grows."""
        best, bandwidth = self.best(owners, receiver)
        chosen = min(best, key=lambda owner: (self.load[owner, bandwidth], owner))
        self.load[chosen, bandwidth] += num_bytes
        return chosen

    def shares(self, owners: Sequence[int], receiver: int, bounds: Bounds, itemsize: int) -> Shares:
        """That owner, with the whole slice."""
        return ((self.choose(owners, receiver, volume(bounds) * itemsize), bounds),)


class MinRank:
    """The owner with the lowest number, wherever it is: what Hetu compares its heuristics with.

    Source: Hetu v2, section 8 (strategies transition overhead).

    Example:
        >>> MinRank().choose((4, 1), 5, 100)
        1
    """

    relays: ClassVar[bool] = False

    def choose(self, owners: Sequence[int], receiver: int, num_bytes: int) -> int:
        """The lowest owner."""
        return min(owners)

    def shares(self, owners: Sequence[int], receiver: int, bounds: Bounds, itemsize: int) -> Shares:
        """The lowest owner, with the whole slice."""
        return ((min(owners), bounds),)
