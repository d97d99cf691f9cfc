"""What pipelines beside each other get of a batch: how many microbatches, and of which size.

A pipeline's time is learned by planning it, which takes long. So what is not known is bounded and
guessed, and what is planned next is what the best shares by the guesses hang on, until the bounds
tell that no others are better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

_HALVINGS = 40
"""So often is the interval halved in which the least time by the guesses is."""


@dataclass(frozen=True)
class BatchShare:
    """What a pipeline gets of a batch.

    Args:
        count: how many microbatches.
        size: examples in each.
    """

    count: int
    size: int


class Seconds(Protocol):
    """Tells what a pipeline takes."""

    def __call__(self, pipeline: int, share: BatchShare, most: float) -> float:
        """Seconds of a step of one pipeline; `most` or more where it takes that or more.

        Args:
            pipeline: which one.
            share: its microbatches; more of a size never take less.
            most: seconds from which on it does not matter how many more there are.
        """
        ...


def share_out(
    total: int,
    sizes: Sequence[Sequence[int]],
    least: Sequence[Sequence[float]],
    seconds: Seconds,
    most: float = float("inf"),
) -> tuple[BatchShare, ...] | None:
    """Share out a batch so that the slowest pipeline is as fast as it can be.

    That is exact where more microbatches of a size never take less.

    Args:
        total: examples in the batch.
        sizes: for each pipeline the sizes that its microbatches may have.
        least: for each of these what a microbatch takes at least, in seconds.
        seconds: tells what a pipeline takes.
        most: shares are only wanted with which all pipelines take less than this.

    Returns:
        What each pipeline gets, a microbatch or more; None where nothing is as it is wanted.

    Example:
        >>> def seconds(pipeline, share, most):
        ...     return share.count * [1.0, 2.0][pipeline]
        >>> share_out(9, [[1], [1]], [[0.5], [0.5]], seconds)
        (BatchShare(count=6, size=1), BatchShare(count=3, size=1))
    """
    search = _KnownTimes(total, sizes, least)
    best = None
    while True:
        shares = search.promising(most)
        if shares is None:
            return best
        unknown = [place for place, share in enumerate(shares) if not search.knows(place, share)]
        if not unknown:
            best = shares
            most = max(search.guess(place, share) for place, share in enumerate(shares))
            continue
        # What takes the longest is the first to rule the shares out.
        _, slowest = max((search.guess(place, shares[place]), place) for place in unknown)
        share = shares[slowest]
        takes = seconds(slowest, share, most)
        search.learn(slowest, share, takes, most)
        one = BatchShare(1, share.size)
        if takes == float("inf") and share.count > 1:
            # It may fit with no number, of which there may be thousands.
            search.learn(slowest, one, seconds(slowest, one, most), most)


class _OfSize:
    """What is known of one pipeline's time with microbatches of one size.

    Args:
        size: examples in a microbatch.
        most: how many microbatches there may be.
        least: what one takes at least.
    """

    def __init__(self, size: int, most: int, least: float):
        self.size, self._counts = size, np.arange(1, most + 1)
        self._known: dict[int, float] = {}
        self._floors: Any = self._counts * least
        self._excess = 1.0
        self.guesses: Any = self._floors

    def knows(self, count: int) -> bool:
        """Whether the time of a number of microbatches is known."""
        return count in self._known

    def learn(self, count: int, seconds: float, *, exact: bool) -> None:
        """Keep what a number of microbatches takes, exactly or at least."""
        self._floors = self._floors.copy()
        self._floors[count - 1 :] = np.maximum(self._floors[count - 1 :], seconds)
        if exact:
            self._known[count] = float(self._floors[count - 1])
        self._guess()

    def longer_by(self, excess: float) -> None:
        """Guess that what is not known takes so many times as long as it must."""
        self._excess = excess
        if not self._known:
            self._guess()

    def below(self, most: float) -> int:
        """Up to how many microbatches may take less."""
        return int(np.searchsorted(self._floors, most))

    def guessed_within(self, seconds: float, most: float) -> int:
        """Up to how many microbatches may take less than most, and no longer by the guesses."""
        within = int(np.searchsorted(self.guesses, seconds, side="right"))
        return min(within, self.below(most))

    def _guess(self) -> None:
        guesses = self._floors * self._excess
        if self._known:
            counts = [0, *sorted(self._known)]
            times = [0.0, *(self._known[count] for count in counts[1:])]
            pace = (times[-1] - times[-2]) / (counts[-1] - counts[-2])
            guesses: Any = np.interp(self._counts, counts, times)
            guesses += pace * np.maximum(0, self._counts - counts[-1])
        self.guesses = np.maximum.accumulate(np.maximum(guesses, self._floors))


class _KnownTimes:
    """What is known of all pipelines, and the shares that look best by it."""

    def __init__(
        self, total: int, sizes: Sequence[Sequence[int]], least: Sequence[Sequence[float]]
    ):
        self._total = total
        self._pipelines = [
            {size: _OfSize(size, total // size, takes) for size, takes in zip(*pair, strict=True)}
            for pair in zip(sizes, least, strict=True)
        ]
        self._least = [dict(zip(*pair, strict=True)) for pair in zip(sizes, least, strict=True)]

    def knows(self, place: int, share: BatchShare) -> bool:
        """Whether it is known what a pipeline takes."""
        return self._pipelines[place][share.size].knows(share.count)

    def guess(self, place: int, share: BatchShare) -> float:
        """What a pipeline takes, as far as it is known."""
        return float(self._pipelines[place][share.size].guesses[share.count - 1])

    def learn(self, place: int, share: BatchShare, seconds: float, most: float) -> None:
        """Keep what a pipeline takes; `most` or more is only a floor."""
        of_sizes = self._pipelines[place]
        of_sizes[share.size].learn(share.count, seconds, exact=seconds < most)
        if seconds < most:
            excess = seconds / (share.count * self._least[place][share.size])
            for each in of_sizes.values():
                each.longer_by(excess)

    def promising(self, most: float) -> tuple[BatchShare, ...] | None:
        """The best shares by the guesses of those that may take less; None where there are none."""
        pipelines = [list(each.values()) for each in self._pipelines]
        caps = [[each.below(most) for each in of_sizes] for of_sizes in pipelines]
        if not self._is_shared(caps):
            return None
        low = max(
            min(each.guesses[0] for each in of_sizes if len(each.guesses)) for of_sizes in pipelines
        )
        high = max(
            float(each.guesses[cap - 1])
            for of_sizes, row in zip(pipelines, caps, strict=True)
            for each, cap in zip(of_sizes, row, strict=True)
            if cap
        )
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            tried = self._caps(middle, most)
            if self._is_shared(tried):
                caps, high = tried, middle
            else:
                low = middle
        return self._shares(caps)

    def _caps(self, seconds: float, most: float) -> list[list[int]]:
        """How many microbatches of each size each pipeline computes in some time, by guesses."""
        return [
            [each.guessed_within(seconds, most) for each in of_sizes.values()]
            for of_sizes in self._pipelines
        ]

    def _is_shared(self, caps: Sequence[Sequence[int]]) -> bool:
        """Whether the whole batch is shared out by some numbers up to these."""
        *_, last = self._reached(caps)
        return bool(last >> self._total & 1)

    def _reached(self, caps: Sequence[Sequence[int]]) -> Iterator[int]:
        """How many examples the first few pipelines may have together: a set, as bits."""
        reached, within = 1, (1 << self._total + 1) - 1
        yield reached
        for of_sizes, row in zip(self._pipelines, caps, strict=True):
            following = 0
            for size, cap in zip(of_sizes, row, strict=True):
                following |= _one_or_more(reached, size, cap, within)
            reached = following
            yield reached

    def _shares(self, caps: Sequence[Sequence[int]]) -> tuple[BatchShare, ...]:
        """Shares of the whole batch by some numbers up to these."""
        *before, _ = self._reached(caps)
        left, found = self._total, []
        for of_sizes, row, reached in reversed(
            list(zip(self._pipelines, caps, before, strict=True))
        ):
            share = next(
                BatchShare(count, size)
                for size, cap in zip(of_sizes, row, strict=True)
                for count in range(min(cap, left // size), 0, -1)
                if reached >> left - count * size & 1
            )
            left -= share.count * share.size
            found.append(share)
        return tuple(reversed(found))


def _one_or_more(reached: int, size: int, cap: int, within: int) -> int:
    """The sums of a number that is reached and a size, once or more often, up to a cap."""
    if not cap:
        return 0
    sums, times = reached << size & within, 1
    while times < cap:
        more = min(times, cap - times)
        sums |= sums << more * size & within
        times += more
    return sums
