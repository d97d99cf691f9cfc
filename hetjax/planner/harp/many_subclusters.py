"""Ways to put many subclusters into few groups, where all ways would be too many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetjax.mesh.cluster import Cluster

Grouping = tuple[tuple[int, ...], ...]
"""Groups of subclusters, by their places in the cluster."""

MOST_GROUPS = 4
"""Into so many groups subclusters are joined at most, where there are many."""


def fastest_first(cluster: Cluster, dtype: str) -> list[int]:
    """The places of subclusters, those first that compute most.

    Args:
        cluster: the cluster.
        dtype: the dtype whose rate counts.
    """
    rates = _rates(cluster, dtype)
    return sorted(range(len(rates)), key=lambda place: -rates[place])


def few_groupings(cluster: Cluster, dtype: str, most: int) -> Iterator[Grouping]:
    """Some ways to put subclusters into several groups: by kind, or that compute alike much.

    All subclusters are, or all but those that compute least.

    Args:
        cluster: the cluster.
        dtype: the dtype whose rate counts.
        most: how many groups there are at most.

    Yields:
        Groupings, each once.

    Example:
        >>> from hetjax.mesh import Link, Subcluster, kind
        >>> link = Link(25e9, 1e-5)
        >>> names = {"a": "T4", "b": "V100", "c": "T4", "d": "V100", "e": "T4", "f": "T4"}
        >>> parts = [Subcluster(name, kind(of), 1, 1, link, link) for name, of in names.items()]
        >>> pairs = [(a, b, link) for a in names for b in names if a < b]
        >>> cluster = Cluster("six", tuple(parts), tuple(pairs))
        >>> list(few_groupings(cluster, "float32", 2))
        [((0, 2, 4, 5), (1, 3)), ((0, 1, 4), (2, 3, 5)), ((1,), (3,))]
    """
    rates, fastest = _rates(cluster, dtype), fastest_first(cluster, dtype)
    found: list[Grouping] = []
    for slowest in sorted(set(rates)):
        places = [place for place in fastest if rates[place] >= slowest]
        by_kind = _by_kind(cluster, places)
        found += [by_kind] if 1 < len(by_kind) <= most else []
        last = min(most, len(places))
        found += [_balanced(rates, places, count) for count in range(2, last + 1)]
    yield from dict.fromkeys(found)


def _by_kind(cluster: Cluster, places: Sequence[int]) -> Grouping:
    groups: dict[str, list[int]] = {}
    for place in sorted(places):
        groups.setdefault(cluster.subclusters[place].kind.name, []).append(place)
    return tuple(map(tuple, groups.values()))


def _balanced(rates: Sequence[float], places: Sequence[int], count: int) -> Grouping:
    """So many groups, each subcluster in that which has least, the fastest ones first."""
    groups: list[list[int]] = [[] for _ in range(count)]
    for place in places:
        least = min(groups, key=lambda group: sum(rates[each] for each in group))
        least.append(place)
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _rates(cluster: Cluster, dtype: str) -> Sequence[float]:
    return [each.num_devices * each.kind.flops(dtype) for each in cluster.subclusters]
