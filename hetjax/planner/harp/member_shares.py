"""How unlike members best share the examples of a microbatch, in whole numbers."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.planner.work.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class MemberRate:
    """How long a member takes, and how much it can have.

    Args:
        start: seconds that it takes whatever it has.
        example: seconds of each example more.
        multiple: its data axis, which divides what it has.
        most: how many examples fit into its memory.
    """

    start: float
    example: float
    multiple: int
    most: int

    def seconds(self, examples: IntArray | int) -> FloatArray:
        """What so many examples take."""
        return np.asarray(self.start + self.example * examples)

    def times(self, total: int) -> FloatArray:
        """What one, two and more multiples take, of those that fit and of so many examples."""
        return self.seconds(
            np.arange(1, min(self.most, total) // self.multiple + 1) * self.multiple
        )


def best_shares(total: int, members: Sequence[MemberRate]) -> tuple[int, ...] | None:
    """The shares with which the slowest member is as fast as it can be.

    Each member has something. The least time is found by bisection among all times that a member
    may take; whether it is enough, by the sums that whole multiples make.

    Args:
        total: examples in a microbatch.
        members: the members.

    Returns:
        The examples of each; None where no shares fit, or none add up.

    Example:
        >>> fast, slow = MemberRate(0.0, 1.0, 2, 64), MemberRate(0.0, 3.0, 2, 64)
        >>> best_shares(16, [fast, slow]), best_shares(16, [fast, MemberRate(0.0, 1.0, 1, 5)])
        ((12, 4), (12, 4))
    """
    if any(member.most < member.multiple for member in members):
        return None
    of_members = [member.times(total) for member in members]
    times = np.unique(np.concatenate(of_members))
    if not len(times) or _reached_in(total, members, of_members, times[-1]) is None:
        return None
    least = bisect.bisect_left(
        times,
        True,
        key=lambda seconds: _reached_in(total, members, of_members, seconds) is not None,
    )
    reached = _reached_in(total, members, of_members, times[least])
    assert reached is not None, "the last time is enough"
    found, left = [], total
    for member, before in zip(reversed(members), reached[-2::-1], strict=True):
        most = int(np.searchsorted(member.times(left), times[least], side="right"))
        sizes = (size * member.multiple for size in range(most, 0, -1))
        size = next(size for size in sizes if before >> (left - size) & 1)
        found.append(size)
        left -= size
    return tuple(reversed(found))


def _reached_in(
    total: int, members: Sequence[MemberRate], times: Sequence[FloatArray], seconds: float
) -> list[int] | None:
    """The examples that members can have of which none takes longer than some seconds.

    Args:
        total: examples in a microbatch.
        members: the members.
        times: what one, two and more multiples of each take.
        seconds: the seconds.

    Returns:
        For none of the members, the first, the first two and so on: bit n says whether they can
        have n examples together; None where all cannot have what is to be shared.
    """
    known, limit = [1], (1 << (total + 1)) - 1
    for member, each in zip(members, times, strict=True):
        count = int(np.searchsorted(each, seconds, side="right"))
        if not count:
            return None
        known.append(_sums(known[-1] << member.multiple, member.multiple, count - 1) & limit)
    return known if known[-1] >> total & 1 else None


def _sums(reached: int, multiple: int, count: int) -> int:
    """What is reached with up to so many multiples more."""
    # With twice as many at a time: 1, 2, 4 and so on, and the rest.
    for power in itertools.count():
        step = min(1 << power, count)
        if step == 0:
            return reached
        reached |= reached << (step * multiple)
        count -= step
    raise AssertionError("counts end")
