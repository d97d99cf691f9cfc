"""How a cluster is divided among several pipelines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetjax.mesh.cluster import Cluster
from hetjax.planner.harp.table_making import ALL_ORDERS_UP_TO


@dataclass(frozen=True)
class SubclusterPart:
    """What a pipeline gets of a subcluster.

    Args:
        subcluster: its name.
        nodes: how many nodes.
        devices_per_node: how many devices of each.
        start: the first device, counted in the subcluster.
    """

    subcluster: str
    nodes: int
    devices_per_node: int
    start: int


ClusterPart = tuple[SubclusterPart, ...]
"""What one pipeline gets of a cluster."""


def divisions(cluster: Cluster, most: int) -> Iterator[tuple[ClusterPart, ...]]:
    """The ways to divide a cluster among several pipelines.

    All subclusters or some of them are put into groups in every way (where there are many: all in
    one group, or each alone), and each group is cut into equal parts: of its nodes, or of the
    devices of a node that is alone in its subcluster.

    Args:
        cluster: the cluster.
        most: how many pipelines there are at most.

    Yields:
        The parts that pipelines get, two or more.

    Example:
        >>> from hetjax.mesh import Link, Subcluster, kind
        >>> near = Link(25e9, 10e-6)
        >>> cluster = Cluster("home", (Subcluster("fast", kind("RTX4090"), 2, 4, near, near),))
        >>> for parts in divisions(cluster, 4):
        ...     print([taken.start for part in parts for taken in part])
        [0, 4]
    """
    for groups in _groupings(range(len(cluster.subclusters))):
        choices = [
            [n for n in range(1, most + 1) if _divides(cluster, group, n)] for group in groups
        ]
        for counts in itertools.product(*choices):
            if 1 < sum(counts) <= most:
                yield tuple(
                    part
                    for group, count in zip(groups, counts, strict=True)
                    for part in _equal_parts(cluster, group, count)
                )


def devices_of(part: ClusterPart) -> dict[str, int]:
    """How many devices of each subcluster a part has."""
    return {taken.subcluster: taken.nodes * taken.devices_per_node for taken in part}


def _groupings(places: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The ways to put subclusters into groups."""
    if len(places) <= ALL_ORDERS_UP_TO:
        for count in range(len(places), 0, -1):
            for chosen in itertools.combinations(places, count):
                yield from _set_partitions(chosen)
    else:
        yield (tuple(places),)
        yield tuple((place,) for place in places)


def _set_partitions(places: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    if not places:
        yield ()
        return
    first, rest = places[0], places[1:]
    for others in _set_partitions(rest):
        yield ((first,), *others)
        for at, group in enumerate(others):
            yield (*others[:at], (first, *group), *others[at + 1 :])


def _divides(cluster: Cluster, group: Sequence[int], count: int) -> bool:
    """Whether a group of subclusters can be cut into so many equal parts."""
    subclusters = [cluster.subclusters[place] for place in group]
    return all(
        s.nodes % count == 0 or (s.nodes == 1 and s.devices_per_node % count == 0)
        for s in subclusters
    )


def _equal_parts(cluster: Cluster, group: Sequence[int], count: int) -> Iterator[ClusterPart]:
    for number in range(count):
        part = []
        for subcluster in (cluster.subclusters[place] for place in group):
            nodes, per_node = subcluster.nodes, subcluster.devices_per_node
            if nodes % count == 0:
                nodes //= count
            else:
                per_node //= count
            part.append(SubclusterPart(subcluster.name, nodes, per_node, number * nodes * per_node))
        yield tuple(part)
