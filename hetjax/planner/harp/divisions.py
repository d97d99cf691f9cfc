"""How a cluster is divided among several pipelines."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetjax.mesh.cluster import Cluster
from hetjax.mesh.groupings import set_partitions
from hetjax.planner.harp.many_subclusters import Grouping, fastest_first, few_groupings
from hetjax.planner.harp.table_making import ALL_ORDERS_UP_TO

_PIECES = 6
"""Into so many pieces a group is divided at most, of which unlike parts have some each."""


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


def divisions(
    cluster: Cluster, most: int, dtype: str = "float32"
) -> Iterator[tuple[ClusterPart, ...]]:
    """The ways to divide a cluster among several pipelines.

    All subclusters or some of them are put into groups in every way (where there are many: all in
    one group; by kind or into groups that compute alike much, also without the slowest ones; or the
    fastest ones alone), and each group is cut into parts: of its nodes, or of the devices of a node
    that is alone in its subcluster. Parts are equal or, in whole numbers of thirds to sixths,
    unlike, where no other group is cut; of several subclusters a part has the same share.

    Args:
        cluster: the cluster.
        most: how many pipelines there are at most.
        dtype: the dtype whose rate tells which devices are fast.

    Yields:
        The parts that pipelines get, two or more.

    Example:
        >>> from hetjax.mesh import Link, Subcluster, kind
        >>> near = Link(25e9, 10e-6)
        >>> cluster = Cluster("home", (Subcluster("fast", kind("RTX4090"), 2, 4, near, near),))
        >>> for parts in divisions(cluster, 4):
        ...     print([(taken.start, taken.nodes) for part in parts for taken in part])
        [(0, 1), (4, 1)]
    """
    for groups in _groupings(cluster, most, dtype):
        choices = [
            [cut for cut in _cuts(most) if _divides(cluster, group, cut)] for group in groups
        ]
        for cuts in itertools.product(*choices):
            if 1 < sum(map(len, cuts)) <= most and _is_simple(cuts):
                yield tuple(
                    part
                    for group, cut in zip(groups, cuts, strict=True)
                    for part in _parts(cluster, group, cut)
                )


def devices_of(part: ClusterPart) -> dict[str, int]:
    """How many devices of each subcluster a part has."""
    return {taken.subcluster: taken.nodes * taken.devices_per_node for taken in part}


def _groupings(cluster: Cluster, most: int, dtype: str) -> Iterator[Grouping]:
    """The ways to put subclusters into groups."""
    places = tuple(range(len(cluster.subclusters)))
    if len(places) <= ALL_ORDERS_UP_TO:
        for count in range(len(places), 0, -1):
            for chosen in itertools.combinations(places, count):
                yield from set_partitions(chosen)
        return
    yield (places,)
    yield from few_groupings(cluster, dtype, most)
    fastest = fastest_first(cluster, dtype)
    for count in range(1, min(most, len(places)) + 1):
        yield tuple((place,) for place in sorted(fastest[:count]))


Cut = tuple[int, ...]
"""How a group is cut: what each part has, in units of one over their sum."""


@functools.cache
def _cuts(most: int) -> tuple[Cut, ...]:
    """The ways to cut a group, those into equal parts first."""
    equal = [(1,) * count for count in range(1, most + 1)]
    unlike = [
        cut
        for pieces in range(3, _PIECES + 1)
        for cut in _partitions(pieces, most, pieces)
        if len(set(cut)) > 1 and math.gcd(*cut) == 1
    ]
    return (*equal, *unlike)


def _is_simple(cuts: Sequence[Cut]) -> bool:
    """Whether groups beside one that is cut into unlike parts are whole."""
    unlike = sum(len(set(cut)) > 1 for cut in cuts)
    return unlike == 0 or (unlike == 1 and sum(len(cut) > 1 for cut in cuts) == 1)


def _partitions(total: int, most: int, largest: int) -> Iterator[Cut]:
    """The ways to write a number as a sum of few numbers, the largest first."""
    if total == 0:
        yield ()
    elif most:
        for first in range(min(total, largest), 0, -1):
            for rest in _partitions(total - first, most - 1, first):
                yield (first, *rest)


def _divides(cluster: Cluster, group: Sequence[int], cut: Cut) -> bool:
    """Whether a group of subclusters can be cut so."""
    pieces, subclusters = sum(cut), [cluster.subclusters[place] for place in group]
    return all(
        s.nodes % pieces == 0 or (s.nodes == 1 and s.devices_per_node % pieces == 0)
        for s in subclusters
    )


def _parts(cluster: Cluster, group: Sequence[int], cut: Cut) -> Iterator[ClusterPart]:
    pieces, before = sum(cut), 0
    for share in cut:
        part = []
        for subcluster in (cluster.subclusters[place] for place in group):
            nodes, per_node = subcluster.nodes, subcluster.devices_per_node
            start = nodes * per_node // pieces * before
            if nodes % pieces == 0:
                nodes = nodes // pieces * share
            else:
                per_node = per_node // pieces * share
            part.append(SubclusterPart(subcluster.name, nodes, per_node, start))
        yield tuple(part)
        before += share
