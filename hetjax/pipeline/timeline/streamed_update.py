"""An update whose optimizer state comes from the hosts' memory and goes back, group by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GroupTimes:
    """What a group of an update takes, in seconds.

    Args:
        fetch: its state's way to the device.
        update: computing it.
        store: its state's way back.
    """

    fetch: float
    update: float
    store: float


@dataclass(frozen=True)
class GroupSpan:
    """When something was done for a group, in seconds from the update's beginning.

    Args:
        what: what was done.
        group: for which group.
        start: its start.
        end: its end.
    """

    what: Literal["fetch", "update", "store"]
    group: int
    start: float
    end: float


def stream_update(groups: Sequence[GroupTimes], overlaps: bool = True) -> tuple[GroupSpan, ...]:
    """When the copies and the computation of an update's groups run.

    A group is updated when its state is there and the group before is updated; then its state goes
    back. Meanwhile the state of the next group comes, as soon as that of the group before has left.
    The two directions are independent.

    Args:
        groups: what each takes.
        overlaps: whether copies run beside each other and beside computation; where not, all is
            done one after another.

    Returns:
        What is done, in order of the groups.

    Example:
        >>> spans = stream_update([GroupTimes(2.0, 1.0, 2.0)] * 4)
        >>> [span.end for span in spans if span.what == "store"]
        [5.0, 7.0, 10.0, 12.0]
        >>> stream_update([GroupTimes(2.0, 1.0, 2.0)] * 4, overlaps=False)[-1].end
        20.0
    """
    spans: list[GroupSpan] = []
    fetched = updated = 0.0
    stored = [0.0, 0.0]
    for place, group in enumerate(groups):
        begin = max(fetched, stored[-2]) if overlaps else stored[-1]
        fetched = begin + group.fetch
        started = max(fetched, updated)
        updated = started + group.update
        leaving = max(updated, stored[-1])
        stored.append(leaving + group.store)
        spans += [
            GroupSpan("fetch", place, begin, fetched),
            GroupSpan("update", place, started, updated),
            GroupSpan("store", place, leaving, stored[-1]),
        ]
    return tuple(spans)


def stream_seconds(groups: Sequence[GroupTimes], overlaps: bool = True) -> float:
    """What an update of such groups takes, from the first copy to the last.

    Args:
        groups: as for `stream_update`.
        overlaps: as there.

    Example:
        >>> stream_seconds([GroupTimes(2.0, 1.0, 2.0)] * 4)
        12.0
    """
    return max((span.end for span in stream_update(groups, overlaps)), default=0.0)
