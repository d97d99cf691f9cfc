"""Pipelines, found from annotations alone: who hands values on to whom."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hetjax.errors import InputError
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.resolution.resolve import resolve

Pipeline = tuple[tuple[int, ...], ...]
"""The devices of each stage."""


def find_pipelines(annotations: Sequence[HSharding], shape: Sequence[int]) -> tuple[Pipeline, ...]:
    """The pipelines that a value runs through.

    Args:
        annotations: how the value lies, one after the other.
        shape: its shape.

    Returns:
        For each pipeline the devices of its stages, in order.

    Raises:
        InputError: a submesh hands on to several others or to none, or gets from several: that is
            no pipeline.

    Source: Hetu v2, section 5.4.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from hetjax.sharding import Subgroup
        >>> first, last = (Subgroup((device,), (), P()) for device in (0, 3))
        >>> find_pipelines([HSharding((first,)), HSharding((first,)), HSharding((last,))], (4,))
        (((0,), (3,)),)
    """
    if not annotations:
        raise InputError("annotations: none is given; a pipeline has one or more stages")
    pipelines = [[group.devices] for group in annotations[0].subgroups]
    for step, (source, destination) in enumerate(itertools.pairwise(annotations)):
        followers = dict(_handed_on(source, destination, shape, step))
        for pipeline in pipelines:
            after = followers.get(pipeline[-1])
            if after is None:
                raise InputError(
                    f"annotations[{step}] and [{step + 1}]: devices {list(pipeline[-1])} hand on "
                    f"to no submesh, and a pipeline goes on to its end"
                )
            if after != pipeline[-1]:
                pipeline.append(after)
    return tuple(map(tuple, pipelines))


def _handed_on(
    source: HSharding, destination: HSharding, shape: Sequence[int], step: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each submesh the one that it hands on to."""
    givers = {device: group.devices for group in source.subgroups for device in group.devices}
    takers = {device: group.devices for group in destination.subgroups for device in group.devices}
    edges = {
        (givers[sender], takers[receiver])
        for phase in resolve(source, destination, shape).phases
        for part in phase
        for sender in part.senders
        for receiver in part.receivers
        if sender in givers and receiver in takers
    }
    for side in (0, 1):
        ends = [edge[side] for edge in edges]
        several = next((end for end in ends if ends.count(end) > 1), None)
        if several is not None:
            raise InputError(
                f"annotations[{step}] and [{step + 1}]: devices {list(several)} "
                f"{'hand on to' if side == 0 else 'get from'} several submeshes, and a pipeline "
                f"has one"
            )
    yield from edges
