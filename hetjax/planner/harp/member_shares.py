"""How unlike members best share the examples of a microbatch, in whole numbers."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass


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

    def seconds(self, examples: int) -> float:
        """What so many examples take."""
        return self.start + self.example * examples

    def most_in(self, seconds: float) -> int:
        """How many multiples it computes in a time, of those that fit."""
        counts = range(1, self.most // self.multiple + 1)
        return bisect.bisect_right(
            counts, seconds, key=lambda count: self.seconds(count * self.multiple)
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
    times = sorted(
        {
            member.seconds(examples)
            for member in members
            for examples in range(member.multiple, min(member.most, total) + 1, member.multiple)
        }
    )
    if not times or _shares_in(total, members, times[-1]) is None:
        return None
    place = bisect.bisect_left(
        times, True, key=lambda seconds: _shares_in(total, members, seconds) is not None
    )
    return _shares_in(total, members, times[place])


def _shares_in(total: int, members: Sequence[MemberRate], seconds: float) -> tuple[int, ...] | None:
    """Shares that no member takes longer for than some seconds."""
    most = [member.most_in(seconds) for member in members]
    if min(most) == 0:
        return None
    # Bit n of a number says whether the members up to one can have n examples together.
    known, limit = [1], (1 << (total + 1)) - 1
    for member, count in zip(members, most, strict=True):
        known.append(_sums(known[-1] << member.multiple, member.multiple, count - 1) & limit)
    if not known[-1] >> total & 1:
        return None
    found, left = [], total
    pairs = list(zip(members, most, known, strict=False))
    for member, count, before in reversed(pairs):
        sizes = (size * member.multiple for size in range(count, 0, -1))
        size = next(size for size in sizes if size <= left and before >> (left - size) & 1)
        found.append(size)
        left -= size
    return tuple(reversed(found))


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
