"""In what proportion the members of a stage update what all of them have."""

from __future__ import annotations

from hetjax.mesh.cluster import Cluster
from hetjax.planner.plan.stage_plan import StagePlan


def update_weights(stage: StagePlan, cluster: Cluster) -> tuple[int, ...]:
    """In what proportion members keep the optimizer's state of a parameter, and update it.

    As they share the examples. Where they share the context, the tokens that fill a fast device
    leave room on a slow one, so it goes by the memory of their devices.

    Args:
        stage: the stage.
        cluster: its devices.

    Returns:
        A weight of each member, in order; not all are 0.

    Example:
        >>> from hetjax.mesh import KINDS, Link, Subcluster, SubMesh
        >>> from hetjax.planner import Member, Shares, StagePlan
        >>> from hetjax.sharding.context import ContextGroup, ContextSplit
        >>> link = Link(1e9, 1e-5)
        >>> chips = [Subcluster(name, KINDS[name], 1, 1, link, link) for name in ("H100", "T4")]
        >>> cluster = Cluster("two", tuple(chips), links=(("H100", "T4", link),))
        >>> members = tuple(Member(SubMesh(each.name, 0, (1, 1)), (1, 1)) for each in chips)
        >>> groups = tuple(ContextGroup((i,), (n,), ((0, 4),)) for i, n in enumerate((900, 100)))
        >>> split = ContextSplit(1000, 4, 4, groups)
        >>> stage = StagePlan((0, 1), members, shares=Shares(context=split))
        >>> update_weights(stage, cluster)
        (80000000000, 16000000000)
    """
    if stage.shares.batch:
        return stage.shares.batch
    devices = tuple(member.submesh.num_devices for member in stage.members)
    if stage.shares.context is None:
        return devices
    kinds = (cluster.subcluster(member.submesh.subcluster).kind for member in stage.members)
    return tuple(n * kind.memory_bytes for n, kind in zip(devices, kinds, strict=True))
