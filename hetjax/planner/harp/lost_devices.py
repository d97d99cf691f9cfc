"""Planning around devices that are gone: what is left of nodes, and where stages lie in them.

A search only counts how many devices a node has lost, as if they were its first ones. Here their
places become real: submeshes are contiguous, and lie around what is gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

from hetjax.errors import InputError, check_numbers
from hetjax.mesh.cluster import Cluster, SubMesh


def check_lost(cluster: Cluster, lost: Collection[int]) -> None:
    """Check the numbers of devices that are gone.

    Args:
        cluster: the cluster.
        lost: the devices, counted through the cluster.

    Raises:
        InputError: there is no such device, or none is left.
    """
    check_numbers("lost", lost)
    wrong = sorted(set(lost) - set(range(cluster.num_devices)))
    if wrong:
        raise InputError(
            f"lost: device {wrong[0]} is not in cluster {cluster.name!r}; allowed: 0 to "
            f"{cluster.num_devices - 1}"
        )
    if len(set(lost)) == cluster.num_devices:
        raise InputError(f"lost: no device of cluster {cluster.name!r} is left")


def lost_in_part(cluster: Cluster, part: Cluster, lost: Collection[int]) -> frozenset[int]:
    """The devices that are gone, in the numbers of a part of the cluster.

    Args:
        cluster: the whole.
        part: some of its subclusters.
        lost: the devices, counted through the whole.

    Returns:
        Those of them that are in the part, counted through it.

    Example:
        >>> from hetjax.mesh import Link, Subcluster, kind
        >>> link = Link(10e9, 1e-6)
        >>> two = [Subcluster(name, kind("V100"), 1, 4, link, link) for name in "ab"]
        >>> whole = Cluster("two", tuple(two), (("a", "b", link),))
        >>> lost_in_part(whole, whole.part(["b"]), {1, 6})
        frozenset({2})
    """
    of_part: dict[int, int] = {}
    first = 0
    for subcluster in part.subclusters:
        whole = cluster.device_ids(SubMesh(subcluster.name, 0, (1, 1)))[0]
        for place in range(subcluster.num_devices):
            of_part[whole + place] = first + place
        first += subcluster.num_devices
    return frozenset(of_part[device] for device in lost if device in of_part)


def lost_of_nodes(cluster: Cluster, lost: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """How many devices of each node cannot be used, for each subcluster.

    Args:
        cluster: the cluster.
        lost: the devices that are gone, counted through the cluster.

    Returns:
        Counts by subcluster and node. What is left of a node counts as far as submeshes that are no
        wider than `widest_of_nodes` says can surely be cut from it.

    Example:
        >>> from hetjax.mesh import Link, Subcluster, kind
        >>> link = Link(10e9, 1e-6)
        >>> cluster = Cluster("rack", (Subcluster("old", kind("V100"), 2, 8, link, link),))
        >>> lost_of_nodes(cluster, {3}), lost_of_nodes(cluster, {3, 4})
        (((1, 0),), ((4, 0),))
    """
    return _of_nodes(cluster, lost, _unusable)


def widest_of_nodes(cluster: Cluster, lost: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """How many devices of each node a submesh inside it may have, for each subcluster.

    Args:
        cluster: the cluster.
        lost: the devices that are gone, counted through the cluster.

    Returns:
        Numbers by subcluster and node.

    Example:
        >>> from hetjax.mesh import Link, Subcluster, kind
        >>> link = Link(10e9, 1e-6)
        >>> cluster = Cluster("rack", (Subcluster("old", kind("V100"), 2, 8, link, link),))
        >>> widest_of_nodes(cluster, {3}), widest_of_nodes(cluster, {2, 5})
        (((4, 8),), ((2, 8),))
    """
    return _of_nodes(cluster, lost, _widest)


def _of_nodes(
    cluster: Cluster, lost: Collection[int], told: Callable[[Sequence[int], int], int]
) -> tuple[tuple[int, ...], ...]:
    """What is told of each node by the places of what it has lost and its number of devices."""
    found = []
    first = 0
    for subcluster in cluster.subclusters:
        per_node = subcluster.devices_per_node
        nodes = range(first, first + subcluster.num_devices, per_node)
        gone = ([d - node for d in lost if 0 <= d - node < per_node] for node in nodes)
        found.append(tuple(told(places, per_node) for places in gone))
        first += subcluster.num_devices
    return tuple(found)


def _unusable(lost: Sequence[int], per_node: int) -> int:
    """How many devices of a node cannot be used, given the places of those that are gone."""
    if not lost:
        return 0
    # Around one place, aligned pieces of 1, 2, 4 ... devices hold any powers of two that are no
    # more than what is left.
    if len(lost) == 1 and is_power_of_two(per_node):
        return 1
    pieces, widest = _pieces(lost, per_node), _widest(lost, per_node)
    usable = len(pieces[0])
    if is_power_of_two(per_node):
        # Powers of two, the widest first, fill what each piece has room for of the widest.
        usable = max(usable, sum(len(each) // widest * widest for each in pieces))
    return per_node - usable


def _widest(lost: Sequence[int], per_node: int) -> int:
    """How many devices of a node a submesh may have, given the places of those that are gone."""
    longest = len(_pieces(lost, per_node)[0])
    if lost and longest and is_power_of_two(per_node):
        return 1 << (longest.bit_length() - 1)
    return longest


def is_power_of_two(count: int) -> bool:
    """Whether a count is 1, 2, 4, ...

    Example:
        >>> [count for count in range(1, 9) if is_power_of_two(count)]
        [1, 2, 4, 8]
    """
    return count & (count - 1) == 0


def _pieces(lost: Collection[int], per_node: int) -> list[range]:
    """What is left of a node between the devices that are gone, the longest piece first."""
    edges = [-1, *sorted(lost), per_node]
    pieces = (range(a + 1, b) for a, b in itertools.pairwise(edges))
    return sorted(pieces, key=len, reverse=True)


def around_lost(
    cluster: Cluster, submeshes: Sequence[SubMesh], lost: Collection[int]
) -> tuple[SubMesh, ...]:
    """Submeshes moved inside their nodes so that they are without the devices that are gone.

    Args:
        cluster: the cluster.
        submeshes: as a search places them, whose first devices of a node are the lost ones.
        lost: the devices that are gone, counted through the cluster.

    Returns:
        The submeshes, in the same order.
    """
    placed = list(submeshes)
    for node, members in _by_node(cluster, submeshes).items():
        subcluster = cluster.subcluster(node[0])
        per_node = subcluster.devices_per_node
        base = cluster.device_ids(SubMesh(subcluster.name, 0, (1, 1)))[0] + node[1] * per_node
        gone = {device - base for device in lost if 0 <= device - base < per_node}
        if not gone:
            continue
        largest_first = sorted(members, key=lambda place: -submeshes[place].num_devices)
        counts = [submeshes[place].num_devices for place in largest_first]
        offsets = _aligned(counts, gone, per_node) or _side_by_side(counts, gone, per_node)
        for place, offset in zip(largest_first, offsets, strict=True):
            start = node[1] * per_node + offset
            placed[place] = SubMesh(subcluster.name, start, submeshes[place].shape)
    return tuple(placed)


def _by_node(cluster: Cluster, submeshes: Sequence[SubMesh]) -> dict[tuple[str, int], list[int]]:
    """The places of the submeshes inside each node, by subcluster and node."""
    members: dict[tuple[str, int], list[int]] = {}
    for place, submesh in enumerate(submeshes):
        per_node = cluster.subcluster(submesh.subcluster).devices_per_node
        members.setdefault((submesh.subcluster, submesh.start // per_node), []).append(place)
    return members


def _aligned(counts: Sequence[int], gone: Collection[int], per_node: int) -> list[int] | None:
    """Where in a node submeshes begin, aligned to their size where they can be.

    None where alignment leaves no room for one: three devices do not divide what two leave.
    """
    taken, offsets = set(gone), []
    for count in counts:
        offset = _free_piece(taken, count, per_node)
        if offset is None:
            return None
        taken |= set(range(offset, offset + count))
        offsets.append(offset)
    return offsets


def _free_piece(taken: set[int], count: int, per_node: int) -> int | None:
    """The first of so many devices in a row, aligned to their number where that is possible."""
    for step in (count, 1):
        for offset in range(0, per_node - count + 1, step):
            if not taken & set(range(offset, offset + count)):
                return offset
    return None


def _side_by_side(counts: Sequence[int], gone: Collection[int], per_node: int) -> list[int]:
    """Where in a node submeshes begin that follow each other in its pieces, the longest first."""
    left = _pieces(gone, per_node)
    offsets = []
    for count in counts:
        place = next((p for p, piece in enumerate(left) if len(piece) >= count), None)
        assert place is not None, "the search counted more devices than there are"
        offsets.append(left[place].start)
        left[place] = left[place][count:]
    return offsets
