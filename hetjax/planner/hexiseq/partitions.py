"""Stage I: partitions of the devices into groups, in the order of the ring.

Two ways to make groups are good, and lie at two ends. Devices that are joined by fast links
exchange heads quickly; then groups are of unlike kinds, and have tokens by their speed. And groups
that have of each kind as much as all others are alike, so that nobody waits in any step of the
ring, and what they hand on stays inside nodes; then exchanges cross nodes.

Source: HexiSeq, section 4.3, which has the first way alone.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from hetjax.mesh.groupings import set_partitions
from hetjax.planner.hexiseq.context_devices import ContextDevices

Partition = tuple[tuple[int, ...], ...]
"""The devices of each group."""

Members = Sequence[Sequence[int]]
"""The devices of each subcluster that is in use."""

SMALL = 6
"""Up to how many devices all partitions are tried, of all of them or some."""


def choices_of_devices(devices: ContextDevices) -> list[Members]:
    """Which devices may do the work: all, or some where others are only in the way.

    Args:
        devices: the cluster's devices.

    Returns:
        Choices, all devices first. Of few devices every one; of many those of the fastest
        subclusters, and those of the subclusters with the fastest links.

    Example:
        >>> from hetjax.mesh import Cluster, Link, Subcluster, kind
        >>> near, far = Link(450e9, 5e-6), Link(25e9, 1e-5)
        >>> parts = [Subcluster(n, kind(n), 1, 1, near, far) for n in ("T4", "V100")]
        >>> cluster = Cluster("two boxes", parts, [("T4", "V100", far)])
        >>> choices_of_devices(ContextDevices(cluster))
        [((0,), (1,)), ((0,),), ((1,),)]
    """
    parts, usable = devices.subcluster, devices.usable
    if len(usable) <= SMALL:
        chosen = _subsets(usable.tolist())
        return [
            tuple(tuple(of) for _, of in itertools.groupby(some, key=parts.__getitem__))
            for some in chosen
        ]
    left = np.unique(parts[usable])
    first = np.searchsorted(parts, left)
    found = [tuple(left.tolist())]
    for figures in (-devices.flops[first], devices.near_cost[first]):
        order = left[np.argsort(figures, kind="stable")].tolist()
        found += [tuple(sorted(order[:size])) for size in range(len(left) - 1, 0, -1)]
    return [
        tuple(tuple(usable[parts[usable] == part].tolist()) for part in each)
        for each in dict.fromkeys(found)
    ]


def partitions(devices: ContextDevices, members: Members, most_groups: int) -> list[Partition]:
    """Partitions of some devices that are worth trying.

    Args:
        devices: the cluster's devices.
        members: those in use, of each subcluster.
        most_groups: how many groups a partition has at most.

    Returns:
        Partitions of all of these devices, each once.

    Example:
        >>> from hetjax.mesh import Cluster, Link, Subcluster, kind
        >>> near, far = Link(450e9, 5e-6), Link(25e9, 1e-5)
        >>> island = Subcluster("h100", kind("H100"), 1, 2, near, far)
        >>> partitions(ContextDevices(Cluster("island", (island,))), [(0, 1)], 8)
        [((0,), (1,)), ((0, 1),)]
    """
    if len(devices.usable) <= SMALL:
        made = set_partitions(tuple(itertools.chain(*members)))
        made = (order for each in made for order in _ring_orders(each))
        # Of those that differ only by devices that are alike, the first.
        seen, found = set(), []
        for each in made:
            key = _likeness(devices, each)
            if len(each) <= most_groups and key not in seen:
                seen.add(key)
                found.append(each)
        return found
    made = [*_by_links(devices, members), *_alike(members), *_balanced(devices, members)]
    return [each for each in dict.fromkeys(made) if len(each) <= most_groups]


def _subsets(devices: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for size in range(len(devices), 0, -1):
        yield from itertools.combinations(devices, size)


def _ring_orders(partition: Partition) -> Iterator[Partition]:
    """A partition's groups in all orders of a ring, where nothing is first."""
    first, *rest = sorted(partition)
    yield from ((first, *each) for each in itertools.permutations(rest))


def _likeness(devices: ContextDevices, partition: Partition) -> tuple[object, ...]:
    """What is the same of partitions unlike only by alike devices of a node, or by a turn."""
    groups = [tuple(sorted(int(devices.node[each]) for each in group)) for group in partition]
    return min(tuple(groups[turn:] + groups[:turn]) for turn in range(len(groups)))


def _by_links(devices: ContextDevices, members: Members) -> Iterator[Partition]:
    """Groups of devices with the fastest links between them: parts of nodes, nodes, several nodes.

    Either all subclusters make groups of one size, or of the sizes that come nearest to one speed.
    """
    speed = [float(devices.flops[of[0]]) for of in members]
    sizes = []
    for of in members:
        number = int(devices.subcluster[of[0]])
        nodes = devices.cluster.subclusters[number].nodes
        sizes.append(_chunk_sizes(nodes, devices.per_node(number)))
    yield (tuple(sorted(itertools.chain(*members))),)
    for size in sorted({size for of in sizes for size in of}):
        yield _chunks(members, [max(each for each in of if each <= size) for of in sizes])
    targets = {size * rate for of, rate in zip(sizes, speed, strict=True) for size in of}
    for target in sorted(targets):
        nearest = [
            min(of, key=lambda size: (abs(np.log(size * rate / target)), size))
            for of, rate in zip(sizes, speed, strict=True)
        ]
        yield _chunks(members, nearest)


def _chunk_sizes(nodes: int, devices_per_node: int) -> list[int]:
    """Sizes of groups that divide nodes, or of whole nodes that divide a subcluster."""
    inside = [size for size in range(1, devices_per_node + 1) if devices_per_node % size == 0]
    across = [size * devices_per_node for size in range(2, nodes + 1) if nodes % size == 0]
    return inside + across


def _chunks(members: Members, sizes: Sequence[int]) -> Partition:
    return tuple(
        tuple(of[start : start + size])
        for of, size in zip(members, sizes, strict=True)
        for start in range(0, len(of), size)
    )


def _alike(members: Members) -> Iterator[Partition]:
    """Groups that have as many devices of each subcluster, as nearly as can be.

    Either a group's devices of a subcluster are neighbours, or far apart.
    """
    for count in _counts(members):
        yield _dealt(members, count)
        by_turns = [
            [device for first in range(count) for device in of[first::count]] for of in members
        ]
        yield _dealt(by_turns, count)


def _dealt(members: Sequence[Sequence[int]], count: int) -> Partition:
    """Runs of each list to so many groups; who has one more of some has none more of the next."""
    groups: list[list[int]] = [[] for _ in range(count)]
    first = 0
    for of in members:
        each, more = divmod(len(of), count)
        takers = {(first + number) % count for number in range(more)}
        at = 0
        for number in range(count):
            size = each + (number in takers)
            groups[number] += of[at : at + size]
            at += size
        first = (first + more) % count
    return _without_empty(groups)


def _balanced(devices: ContextDevices, members: Members) -> Iterator[Partition]:
    """Groups of about the same speed: the fastest devices first, each to the slowest group."""
    everyone = [device for of in members for device in of]
    order = sorted(everyone, key=lambda each: (-devices.flops[each], each))
    parts = devices.subcluster
    for count in _counts(members):
        groups: list[list[int]] = [[] for _ in range(count)]
        slowest = [(0.0, place) for place in range(count)]
        for device in order:
            speed, place = slowest[0]
            groups[place].append(device)
            heapq.heapreplace(slowest, (speed + devices.flops[device], place))
        # Groups with the same devices of each kind stand together, so that they are neighbours.
        yield _without_empty(sorted(groups, key=lambda of: ([int(parts[d]) for d in of], of)))


def _counts(members: Members) -> list[int]:
    """Numbers of groups to make: few, and those that divide some subcluster's devices."""
    total = sum(len(of) for of in members)
    found = set(range(2, 9))
    for size in {total, *(len(of) for of in members)}:
        found |= {count for count in range(2, size + 1) if size % count == 0}
    return sorted(count for count in found if count <= total)


def _without_empty(groups: Iterable[Sequence[int]]) -> Partition:
    return tuple(tuple(sorted(group)) for group in groups if group)
