"""The carriers of a run: measured on every link when the workers are connected, and then chosen.

Two workers that exchange something send messages to and fro, from device to device, as they will in
training. Links of which no two have a host in common are measured at the same time, and all within
two seconds: one that is too slow for large messages is measured with small ones alone, and
one that is fast again and again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from hetjax.runtime.moves.carrier_curves import CarrierCurves, LinkEnd, MeasuredLink
from hetjax.runtime.moves.carriers import BETWEEN_PROCESSES, CarrierName, Curve
from hetjax.runtime.moves.peers import Peer
from hetjax.runtime.ray.ray_workers import RayWorkers

MEASURING_SECONDS = 2.0
"""How long all measurements of a run may take."""

SIZES = tuple(2**power for power in range(12, 25, 2))
"""Bytes of the messages that are measured: 4 KB to 16 MB."""

_PASSES = 3
"""How often each size is measured, where there is time."""

_REPEATS, _LARGE = 3, 2**21
"""How many messages of a size count, but of larger ones a single one; one before them warms up."""


class LinkWorkers(NamedTuple):
    """A link, and two workers that exchange something over it.

    Args:
        ends: the link's ends.
        pair: the workers.
        carriers: what joins them.
    """

    ends: tuple[LinkEnd, LinkEnd]
    pair: tuple[Peer, Peer]
    carriers: tuple[CarrierName, ...] = BETWEEN_PROCESSES

    @property
    def hosts(self) -> set[str]:
        """The addresses of its ends."""
        return {end.address for end in self.ends}


Exchange = Callable[[Sequence[LinkWorkers], CarrierName, int], Mapping[LinkWorkers, float]]
"""Has messages of a size go over links by a carrier; the seconds that one takes on each."""


Joined = Mapping[Peer, Mapping[Peer, tuple[CarrierName, ...]]]
"""For workers, for those that each exchanges something with, the carriers that join the two."""


def joined_both_ways(reached: Joined) -> Joined:
    """The carriers by which each of two workers has reached the other.

    Args:
        reached: for workers, by which carriers each has reached its partners.

    Example:
        >>> wire, stream = CarrierName.WIRE, CarrierName.STREAM
        >>> one, other = (0, 0), (1, 0)
        >>> reached = {one: {other: (wire, stream)}, other: {one: (stream,)}}
        >>> [str(name) for name in joined_both_ways(reached)[one][other]]
        ['stream']
    """
    return {
        peer: {
            partner: tuple(name for name in names if name in reached[partner][peer])
            for partner, names in each.items()
        }
        for peer, each in reached.items()
    }


def choose_carriers(
    workers: RayWorkers,
    joined: Joined,
    ends: Mapping[Peer, LinkEnd],
    known: CarrierCurves,
) -> CarrierCurves:
    """Have workers choose the fastest carrier for every message, by what is measured of each link.

    Args:
        workers: the workers, connected.
        joined: for each of them those that it exchanges something with, and what joins the two.
        ends: where each of them is.
        known: what was measured of links before, which is not measured again.

    Returns:
        What is known of links now; a link for which there was no time is left out.

    Raises:
        WorkerLostError: a worker died or does not answer.
    """
    links: dict[frozenset[LinkEnd], LinkWorkers] = {}
    for peer, each in joined.items():
        for partner, names in each.items():
            between = ends[peer], ends[partner]
            pair = min(peer, partner), max(peer, partner)
            if len(names) > 1 and not known.of(*between).keys() >= {*names}:
                links.setdefault(frozenset(between), LinkWorkers(between, pair, names))
    curves = known.with_links(measured_links([*links.values()], _exchange_of(workers)))
    told = {
        peer: {partner: curves.of(ends[peer], ends[partner]) for partner in each}
        for peer, each in joined.items()
    }
    workers.wait(
        {
            peer: workers.actor(peer).choose_by.remote(each, joined[peer])
            for peer, each in told.items()
        }
    )
    return curves


def _exchange_of(workers: RayWorkers) -> Exchange:
    numbers = itertools.count()

    def exchange(
        links: Sequence[LinkWorkers], carrier: CarrierName, size: int
    ) -> Mapping[LinkWorkers, float]:
        rounds = list(itertools.islice(numbers, _messages(size)))
        calls = {
            one: workers.actor(one).exchange.remote(other, carrier, size, rounds)
            for link in links
            for one, other in (link.pair, link.pair[::-1])
        }
        seconds = workers.wait(calls)
        # The one that comes first begins, and sees a message and its answer.
        return {link: median(seconds[link.pair[0]][1:]) / 2 for link in links}

    return exchange


def measured_links(
    links: Sequence[LinkWorkers], exchange: Exchange, clock: Callable[[], float] = time.monotonic
) -> Iterator[MeasuredLink]:
    """Measure what every carrier takes on links.

    Args:
        links: the links.
        exchange: has messages go over links of which no two have a host in common.
        clock: the time in seconds.

    Yields:
        The links for which there was time.
    """
    end = clock() + MEASURING_SECONDS
    turns = _turns(links)
    for place, turn in enumerate(turns):
        now = clock()
        until = now + (end - now) / (len(turns) - place)
        found: _Found = {(link, name): [] for link in turn for name in link.carriers}
        # Several times, since what else runs there disturbs one message or another.
        for passing in range(_PASSES):
            for count, carrier in itertools.product(range(len(SIZES)), BETWEEN_PROCESSES):
                left = (until if passing or count > 1 else end) - clock()
                going = [
                    link
                    for link in turn
                    if carrier in link.carriers
                    and (expected := _expected(found[link, carrier], count)) is not None
                    and expected * 2 * _messages(SIZES[count]) < left
                ]
                for link, taken in exchange(going, carrier, SIZES[count]).items() if going else ():
                    times = found[link, carrier]
                    if count == len(times):
                        times.append([])
                    times[count].append(taken)
        for link in turn:
            known = {name: found[link, name] for name in link.carriers}
            if all(len(each) > 1 for each in known.values()):
                yield MeasuredLink(link.ends, {name: _curve(each) for name, each in known.items()})


def _messages(size: int) -> int:
    """How many messages of a size one worker sends another, the one that warms up among them."""
    return 1 + (_REPEATS if size < _LARGE else 1)


_Found = dict[tuple[LinkWorkers, CarrierName], list[list[float]]]
"""For each carrier on each link, for each size so far, the seconds that were measured."""


def _curve(found: Sequence[Sequence[float]]) -> Curve:
    # Of several passes the fastest: what else runs there only ever adds to it.
    return Curve(SIZES[: len(found)], tuple(min(seconds) for seconds in found))


def _turns(links: Iterable[LinkWorkers]) -> list[list[LinkWorkers]]:
    """Links in groups in which no two have a host in common."""
    turns: list[list[LinkWorkers]] = []
    for link in links:
        free = (turn for turn in turns if all(link.hosts.isdisjoint(one.hosts) for one in turn))
        turn = next(free, None)
        if turn is None:
            turns.append([link])
        else:
            turn.append(link)
    return turns


def _expected(found: Sequence[Sequence[float]], count: int) -> float | None:
    """What a message of a size takes: by what is known, or by the last two sizes before it.

    Of the second size it is as much more as that is larger; None where the size before it is not
    known either.
    """
    if count > len(found):
        return None
    known = [median(seconds) for seconds in found[: count + 1]]
    if count < len(known):
        return known[count]
    if count < 2:
        return sum(known) * SIZES[1] / SIZES[0]
    size, before, last = SIZES[count], SIZES[count - 2], SIZES[count - 1]
    slope = (known[-1] - known[-2]) / (last - before)
    return known[-1] + max(0.0, slope) * (size - last)
