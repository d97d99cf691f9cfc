"""Who sends a slice that several devices hold: the policies of batched send-receive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from hetjax.sharding.resolution.network import Network


class Senders(Protocol):
    """A way to choose a sender; it may remember what it chose before."""

    def choose(self, owners: Sequence[int], receiver: int, num_bytes: int) -> int:
        """The owner that sends to a receiver, which is none of them."""
        ...


class BestLink:
    """The owner with the best link to the receiver; of several, the one that has least to send.

    What each device has to send over links of a bandwidth is remembered, so that one object for
    many arrays balances all of them together.

    Args:
        network: the links.

    Source: Hetu v2, section 4.3, heuristics II and III.

    Example:
        >>> senders = BestLink(Network.alike())
        >>> [senders.choose((0, 1), receiver, 100) for receiver in (2, 3)]
        [0, 1]
    """

    def __init__(self, network: Network):
        self.network = network
        self.load: defaultdict[tuple[int, float], int] = defaultdict(int)

    def choose(self, owners: Sequence[int], receiver: int, num_bytes: int) -> int:
        """The owner that sends; its load grows."""

        def rank(owner: int) -> tuple[float, int, int]:
            bandwidth = self.network.link(owner, receiver).bandwidth
            return -bandwidth, self.load[owner, bandwidth], owner

        chosen = min(owners, key=rank)
        self.load[chosen, self.network.link(chosen, receiver).bandwidth] += num_bytes
        return chosen


class MinRank:
    """The owner with the lowest number: what Hetu compares its heuristics with.

    Source: Hetu v2, section 8 (strategies transition overhead).
    """

    def choose(self, owners: Sequence[int], receiver: int, num_bytes: int) -> int:
        """The lowest owner."""
        return min(owners)
