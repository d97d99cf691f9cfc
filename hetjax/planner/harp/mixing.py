"""Whether it pays to mix: what parts of a cluster would do alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hetjax.mesh.cluster import Cluster
from hetjax.planner.harp.table_making import ALL_ORDERS_UP_TO
from hetjax.planner.plan.plan import Plan


@dataclass(frozen=True)
class PartAlone:
    """What some of a cluster's subclusters would do without the others.

    Args:
        subclusters: their names.
        num_devices: how many devices they have.
        step_time: predicted seconds of a step; None where the model does not fit.
        kind: what kind its devices are, where they are all that the cluster has of it; None for any
            other part.
    """

    subclusters: tuple[str, ...]
    num_devices: int
    step_time: float | None
    kind: str | None = None


def parts_alone(
    cluster: Cluster, plan_on: Callable[[Cluster], Plan | None]
) -> tuple[PartAlone, ...]:
    """Plan on parts of a cluster.

    Args:
        cluster: the whole.
        plan_on: the plan for a part, with its prediction; None where the model does not fit.

    Returns:
        Those of `timed_parts`, the fastest first.
    """

    def step_time_on(part: Cluster) -> float | None:
        plan = plan_on(part)
        return plan.prediction.step_time if plan and plan.prediction else None

    return timed_parts(cluster, step_time_on)


def timed_parts(
    cluster: Cluster, step_time_on: Callable[[Cluster], float | None]
) -> tuple[PartAlone, ...]:
    """Time parts of a cluster.

    Args:
        cluster: the whole.
        step_time_on: predicted seconds of a step on a part; None where the model does not fit.

    Returns:
        Each combination of subclusters but all of them, or each alone and those of each kind where
        there are many; the fastest first.
    """
    kinds = _kinds(cluster)
    found: list[PartAlone] = []
    for names in dict.fromkeys((*combinations(cluster), *kinds)):
        part = cluster.part(names)
        found.append(PartAlone(names, part.num_devices, step_time_on(part), kinds.get(names)))
    return tuple(sorted(found, key=lambda part: part.step_time or float("inf")))


def _kinds(cluster: Cluster) -> dict[tuple[str, ...], str]:
    """The kinds of devices by the names of all their subclusters; none where there is one kind."""
    found: dict[str, tuple[str, ...]] = {}
    for each in cluster.subclusters:
        found[each.kind.name] = (*found.get(each.kind.name, ()), each.name)
    return {names: kind for kind, names in found.items()} if len(found) > 1 else {}


def side_by_side(alone: Sequence[PartAlone]) -> float | None:
    """Seconds in which all kinds, each with a plan of its own, do a step's examples together.

    Each does as many of them as it is fast; over the step time of the whole it is H2's
    HeteroSpeedupRatio.

    Args:
        alone: parts of a cluster, among them all devices of each kind.

    Returns:
        The seconds; None where the model fits on fewer than two kinds by themselves.

    Source: H2, section 6.2.

    Example:
        >>> side_by_side([PartAlone(("a",), 4, 3.0, "new"), PartAlone(("b",), 4, 6.0, "old")])
        2.0
    """
    kinds = [part.step_time for part in alone if part.kind is not None]
    fitting = [seconds for seconds in kinds if seconds is not None]
    return 1 / sum(1 / seconds for seconds in fitting) if len(fitting) > 1 else None


def combinations(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """The names of each combination of subclusters but all of them; each alone where many.

    Args:
        cluster: the whole.
    """
    names = [subcluster.name for subcluster in cluster.subclusters]
    largest = len(names) - 1 if len(names) <= ALL_ORDERS_UP_TO else 1
    for count in range(1, min(largest, len(names) - 1) + 1):
        yield from itertools.combinations(names, count)
