"""When updates go on that wait for what all stages tell: the loss, and the gradients' norm."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence

from hetjax.mesh.cluster import Cluster, SubMesh


def told_latency(cluster: Cluster, stages: Sequence[Collection[SubMesh]]) -> float:
    """The longest latency, in seconds, of a message of a few numbers between two stages.

    Args:
        cluster: the devices.
        stages: the submeshes of each stage.
    """
    counts: Counter[str] = Counter()
    nodes: dict[str, set[int]] = {}
    for stage in stages:
        counts.update({submesh.subcluster for submesh in stage})
        for submesh in stage:
            nodes.setdefault(submesh.subcluster, set()).update(cluster.nodes(submesh))
    latencies = [cluster.link(a, b).latency for a, b in itertools.combinations(nodes, 2)]
    for name, count in counts.items():
        if count > 1:
            part = cluster.subcluster(name)
            inside = part.intra_node if len(nodes[name]) == 1 else part.inter_node
            latencies.append(inside.latency)
    return max(latencies, default=0.0)


def told_moments(ready: Sequence[float], latency: float) -> list[float]:
    """When each stage has been told what it needs of all others for the last phase of its update.

    A step is applied where its loss and the norm of its gradients are finite, and an optimizer may
    clip by the norm, of which every stage has a part: no update ends before the last stage has
    computed.

    Args:
        ready: when each stage has summed its gradients, in seconds.
        latency: of a message.

    Returns:
        Seconds; 0 of the only stage.

    Example:
        >>> told_moments([7.0, 4.0, 5.0], latency=0.5)
        [5.5, 7.5, 7.5]
    """
    if len(ready) < 2:
        return [0.0] * len(ready)
    *_, second, last = sorted(ready)
    return [(second if each == last else last) + latency for each in ready]
