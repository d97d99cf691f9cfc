"""What communication steps cost, by the links that they use."""

from __future__ import annotations

from collections import defaultdict

from hetjax.sharding.annotation.bounds import volume
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.steps import Phase, Resolution


def resolution_seconds(resolution: Resolution, network: Network, itemsize: int) -> float:
    """The time of a resolution, on links that carry nothing else.

    Args:
        resolution: the steps.
        network: the links.
        itemsize: bytes of an element.

    Returns:
        Seconds: the phases' times one after the other.
    """
    return sum(phase_seconds(phase, network, itemsize) for phase in resolution.phases)


def phase_seconds(phase: Phase, network: Network, itemsize: int) -> float:
    """The time of one phase: that of the device that sends or receives longest.

    Messages between the same two devices are one. A device sends over links of one bandwidth one
    message after the other, and over unlike ones, or in both directions, at once.
    """
    num_bytes: defaultdict[tuple[int, int], int] = defaultdict(int)
    for part in phase:
        for pair in part.messages:
            num_bytes[pair] += volume(part.bounds) * itemsize
    busy: defaultdict[tuple[str, int, float], float] = defaultdict(float)
    for (sender, receiver), count in num_bytes.items():
        link = network.link(sender, receiver)
        for end, device in (("out", sender), ("in", receiver)):
            busy[end, device, link.bandwidth] += link.seconds(count)
    return max(busy.values(), default=0.0)
