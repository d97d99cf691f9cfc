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
    """

    subclusters: tuple[str, ...]
    num_devices: int
    step_time: float | None


def parts_alone(
    cluster: Cluster, plan_on: Callable[[Cluster], Plan | None]
) -> tuple[PartAlone, ...]:
    """Plan on parts of a cluster.

    Args:
        cluster: the whole.
        plan_on: the plan for a part, with its prediction; None where the model does not fit.

    Returns:
        Each combination of subclusters but all of them, or each alone where there are many; the
        fastest first.
    """
    found: list[PartAlone] = []
    for names in combinations(cluster):
        part = cluster.part(names)
        plan = plan_on(part)
        step_time = plan.prediction.step_time if plan and plan.prediction else None
        found.append(PartAlone(names, part.num_devices, step_time))
    return tuple(sorted(found, key=lambda part: part.step_time or float("inf")))


def side_by_side(alone: Sequence[PartAlone]) -> float | None:
    """Seconds in which all kinds, each with a plan of its own, do a step's examples together.

    Each does as many of them as it is fast; over the step time of the whole it is H2's
    HeteroSpeedupRatio.

    Args:
        alone: parts of a cluster, among them each of its subclusters.

    Returns:
        The seconds; None where the model fits on none of them.

    Source: H2, section 6.2.

    Example:
        >>> side_by_side([PartAlone(("new",), 4, 3.0), PartAlone(("old",), 4, 6.0)])
        2.0
    """
    single = (part.step_time for part in alone if len(part.subclusters) == 1)
    rate = sum(1 / seconds for seconds in single if seconds is not None)
    return 1 / rate if rate else None


def combinations(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """The names of each combination of subclusters but all of them; each alone where many.

    Args:
        cluster: the whole.
    """
    names = [subcluster.name for subcluster in cluster.subclusters]
    largest = len(names) - 1 if len(names) <= ALL_ORDERS_UP_TO else 1
    for count in range(1, min(largest, len(names) - 1) + 1):
        yield from itertools.combinations(names, count)
