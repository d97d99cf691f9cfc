"""The two ends of a transfer between stages: who sends which share of a microbatch to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.mesh.links import Link
from hetjax.planner.plan.stage_plan import StagePlan

End = tuple[tuple[SubMesh, float], ...]
"""The submeshes of a stage, in the order of the examples that they have, and their shares."""


@dataclass(frozen=True)
class CrossingPart:
    """What one submesh sends to another one.

    Args:
        sender: the one.
        receiver: the other.
        share: of a microbatch's examples.
        link: what is between them.
    """

    sender: SubMesh
    receiver: SubMesh
    share: float
    link: Link


def end_of(stage: StagePlan) -> End:
    """The end of a transfer that a stage is.

    Members that share the context have tokens in the place of examples, in one order in all stages.
    Those of a program of modules have all examples each where it says nothing of them.

    Args:
        stage: the stage.
    """
    context = stage.shares.context
    tokens = () if context is None else context.tokens
    batch = stage.shares.batch or tokens
    if stage.shares.modules and not batch:
        return tuple((submesh, 1.0) for submesh in stage.submeshes)
    batch = batch or (1,) * len(stage.members)
    total = sum(batch)
    return tuple((s, size / total) for s, size in zip(stage.submeshes, batch, strict=True))


def _is_whole(end: End) -> bool:
    """Whether each submesh has all examples."""
    return len(end) > 1 and all(share == 1.0 for _, share in end)


def crossing_parts(cluster: Cluster, sender: End, receiver: End) -> tuple[CrossingPart, ...]:
    """What goes from whom to whom: the examples that both have.

    Of submeshes that have all examples each, each sends as many; each receives all.

    Args:
        cluster: the devices.
        sender: who has a microbatch.
        receiver: who shall have it.

    Returns:
        One for each two submeshes that have examples in common.

    Example:
        >>> from hetjax.mesh import Subcluster, kind
        >>> near, far = Link(25e9, 1e-5), Link(1e9, 1e-4)
        >>> pair = [Subcluster(name, kind("T4"), 1, 1, near, near) for name in ("a", "b")]
        >>> cluster = Cluster("two", tuple(pair), (("a", "b", far),))
        >>> a, b = SubMesh("a", 0, (1, 1)), SubMesh("b", 0, (1, 1))
        >>> for part in crossing_parts(cluster, ((a, 0.75), (b, 0.25)), ((a, 0.5), (b, 0.5))):
        ...     print(part.sender, part.receiver, part.share, part.link.bandwidth)
        a[0:1] 1x1 a[0:1] 1x1 0.5 25000000000.0
        a[0:1] 1x1 b[0:1] 1x1 0.25 1000000000.0
        b[0:1] 1x1 b[0:1] 1x1 0.25 25000000000.0
    """
    if _is_whole(sender):
        sender = tuple((submesh, 1 / len(sender)) for submesh, _ in sender)
    if _is_whole(receiver):
        return tuple(
            CrossingPart(a, b, mine, transfer_link(cluster, a, b))
            for a, mine in sender
            for b, _ in receiver
        )
    found = []
    begin = 0.0
    for a, mine in sender:
        start = 0.0
        for b, theirs in receiver:
            share = min(begin + mine, start + theirs) - max(begin, start)
            if share > 1e-9:
                found.append(CrossingPart(a, b, share, transfer_link(cluster, a, b)))
            start += theirs
        begin += mine
    return tuple(found)


def transfer_link(cluster: Cluster, sender: SubMesh, receiver: SubMesh) -> Link:
    """The link over which one submesh sends a microbatch's values to another one.

    Nodes divide the examples of a microbatch among them, so that each sends its part, and those of
    all go side by side.

    Args:
        cluster: the devices.
        sender: who has the values.
        receiver: who shall have them.

    Returns:
        Between nodes, as many links at once as both have network cards in all their nodes.

    Example:
        >>> from hetjax.mesh import Subcluster, kind
        >>> near, far = Link(25e9, 1e-5), Link(1e9, 1e-4)
        >>> cluster = Cluster("four", (Subcluster("all", kind("T4"), 4, 8, near, far),))
        >>> first, last = SubMesh("all", 0, (2, 8)), SubMesh("all", 16, (2, 8))
        >>> transfer_link(cluster, first, last).bandwidth
        2000000000.0
    """
    if is_in_one_node(cluster, sender, receiver):
        return cluster.link_between(sender, receiver)
    link = cluster.link(sender.subcluster, receiver.subcluster)
    cards = min(len(cluster.cards(each)) for each in (sender, receiver))
    return Link(cards * link.bandwidth, link.latency)


def is_in_one_node(cluster: Cluster, a: SubMesh, b: SubMesh) -> bool:
    """Whether two submeshes have the same nodes, so that no network card is between them.

    Args:
        cluster: the cluster.
        a: a submesh.
        b: another.
    """
    return a.subcluster == b.subcluster and cluster.nodes(a) == cluster.nodes(b)


def joined_link(parts: Sequence[CrossingPart]) -> Link:
    """One link that takes as long as parts do that move at once.

    Each submesh sends one part after the other, and so are they received.

    Args:
        parts: what goes from whom to whom.

    Returns:
        The link between the two, where there is one part.
    """
    if len(parts) == 1:
        return parts[0].link
    busy: dict[tuple[str, SubMesh], float] = {}
    for part in parts:
        for end in (("out", part.sender), ("in", part.receiver)):
            busy[end] = busy.get(end, 0.0) + part.share / part.link.bandwidth
    return Link(1 / max(busy.values()), max(part.link.latency for part in parts))
