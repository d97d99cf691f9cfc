"""Exchanges: who gives what to whom, so that devices come to hold other parts than before.

An array is cut into the finest slices, on which no part begins or ends. A slice that is not summed
goes from one of its owners to each device that wants it; one that is summed is first put together
piece by piece, on one device a piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetjax.errors import InputError
from hetjax.sharding.annotation.annotation import Shard, Summand
from hetjax.sharding.annotation.bounds import (
    Bounds,
    contains,
    even_ends,
    extent,
    finest_slices,
    volume,
)
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.senders import Senders
from hetjax.sharding.resolution.steps import Combination, Phase

DeviceNumbers = list[int]


@dataclass(frozen=True)
class _FinestSlice:
    """A finest slice: who has the value or a summand of it, and who shall have which."""

    bounds: Bounds
    owners: Mapping[Summand | None, DeviceNumbers]
    wanted: Mapping[Summand | None, DeviceNumbers]


def exchange(
    shape: Sequence[int],
    before: Sequence[Shard],
    after: Sequence[Shard],
    *,
    network: Network,
    senders: Senders,
    itemsize: int,
    relay: bool = True,
    preference: Mapping[int, int] | None = None,
) -> tuple[Phase, ...]:
    """Plan how devices come to hold other parts, and sums in place of summands.

    Args:
        shape: the array's shape.
        before: what devices hold.
        after: what devices shall hold: the same summands, or their sum.
        network: the links.
        senders: who sends what several hold.
        itemsize: bytes of an element.
        relay: whether devices of one node may take a piece each of what all of them want, and pass
            it on, where that is faster.
        preference: for each device a number; of several owners those with the lowest are taken, so
            that all parts are of one copy. None: any owner.

    Returns:
        What is combined, phase by phase.

    Raises:
        InputError: devices shall hold other summands than there are.

    Source: Hetu v2, section 4.3; H2, section 5 (a byte crosses a slow link once).
    """
    _check_sums(before, after)
    planner = _ExchangePlanner(network, senders, itemsize, relay=relay)
    for part in _slices(shape, before, after):
        planner.add(part if preference is None else _preferred(part, preference))
    return tuple(tuple(_merged(phase)) for phase in planner.phases if phase)


def _check_sums(before: Sequence[Shard], after: Sequence[Shard]) -> None:
    """Check that every sum that stays in summands has the same ones."""
    had, wanted = ({s.summand for s in side if s.summand is not None} for side in (before, after))
    for group in {summand.group for summand in wanted}:
        old, new = ({s.place for s in side if s.group == group} for side in (had, wanted))
        if old != new:
            raise InputError(
                f"destination: it has {len(new)} partial sums where the source has "
                f"{len(old) or 'none'}; they stay as they are or are added up"
            )


def _slices(
    shape: Sequence[int], before: Sequence[Shard], after: Sequence[Shard]
) -> Iterator[_FinestSlice]:
    sides = [_by_part(before), _by_part(after)]
    parts = {bounds for side in sides for bounds, _ in side}
    for bounds in finest_slices(parts, shape):
        owners, wanted = (_holding(side, bounds) for side in sides)
        if wanted:
            yield _FinestSlice(bounds, owners, wanted)


def _preferred(part: _FinestSlice, preference: Mapping[int, int]) -> _FinestSlice:
    owners = {}
    for summand, devices in part.owners.items():
        lowest = min(preference[device] for device in devices)
        owners[summand] = [device for device in devices if preference[device] == lowest]
    return replace(part, owners=owners)


def _by_part(shards: Sequence[Shard]) -> dict[tuple[Bounds, Summand | None], DeviceNumbers]:
    found: dict[tuple[Bounds, Summand | None], DeviceNumbers] = {}
    for shard in shards:
        found.setdefault((shard.bounds, shard.summand), []).append(shard.device)
    return found


def _holding(
    side: Mapping[tuple[Bounds, Summand | None], DeviceNumbers], part: Bounds
) -> dict[Summand | None, DeviceNumbers]:
    found: dict[Summand | None, DeviceNumbers] = {}
    for (bounds, summand), devices in side.items():
        if contains(bounds, part):
            found.setdefault(summand, []).extend(devices)
    return found


class _ExchangePlanner:
    def __init__(self, network: Network, senders: Senders, itemsize: int, *, relay: bool):
        self.network, self.senders, self.itemsize = network, senders, itemsize
        self.relay = relay
        self.phases: list[list[Combination]] = []

    def put(self, phase: int, bounds: Bounds, givers: DeviceNumbers, takers: DeviceNumbers) -> None:
        while len(self.phases) <= phase:
            self.phases.append([])
        self.phases[phase].append(Combination(bounds, tuple(givers), tuple(takers)))

    def add(self, part: _FinestSlice) -> None:
        if not part.owners:
            raise InputError(f"source: no device holds {part.bounds}")
        for summand, wanted in part.wanted.items():
            if summand in part.owners:
                self.deliver(0, part.bounds, part.owners[summand], wanted)
            elif summand is None:
                self.add_up(part, wanted)
            else:
                raise InputError(
                    f"destination: it has partial sums of {part.bounds}, of which the source has "
                    "the value or other sums; partial sums stay as they are or are added up"
                )

    def add_up(self, part: _FinestSlice, wanted: DeviceNumbers) -> None:
        """Each device adds up the group of which it has a summand, any other one the first."""
        groups: dict[int, dict[int, DeviceNumbers]] = {}
        for summand, owners in part.owners.items():
            assert summand is not None
            groups.setdefault(summand.group, {})[summand.place] = owners
        mine = {d: group for group, held in groups.items() for o in held.values() for d in o}
        takers: dict[int, DeviceNumbers] = {}
        for device in wanted:
            takers.setdefault(mine.get(device, min(groups)), []).append(device)
        for group, devices in takers.items():
            summands = groups[group]
            self.reduce(part.bounds, [summands[place] for place in sorted(summands)], devices)

    def deliver(
        self, phase: int, bounds: Bounds, owners: DeviceNumbers, wanted: DeviceNumbers
    ) -> None:
        """Bring a part from its owners to those who want it."""
        for device in wanted:
            if device in owners:
                self.put(phase, bounds, [device], [device])
        missing = self.network.by_node(device for device in wanted if device not in owners)
        for node, receivers in missing.items():
            near = [owner for owner in owners if self.network.node(owner) == node]
            if near or not self._relays(bounds, owners, receivers):
                for receiver in receivers:
                    owner = self._choose(near or owners, receiver, bounds)
                    self.put(phase, bounds, [owner], [receiver])
                continue
            pieces = cut(bounds, len(receivers))
            for receiver, piece in zip(receivers, pieces, strict=False):
                owner = self._choose(owners, receiver, piece)
                self.put(phase, piece, [owner], [receiver])
            for receiver, piece in zip(receivers, pieces, strict=False):
                others = [device for device in receivers if device != receiver]
                self.put(phase + 1, piece, [receiver], others)

    def reduce(
        self, bounds: Bounds, owners: Sequence[DeviceNumbers], wanted: DeviceNumbers
    ) -> None:
        """Bring a part's sum to those who want it."""
        if self._reduces_at_once(bounds, owners, wanted):
            for receiver in wanted:
                self._sum_at(bounds, owners, receiver)
            return
        pieces = cut(bounds, len(wanted))
        for home, piece in zip(wanted, pieces, strict=False):
            self._sum_at(piece, owners, home)
        for home, piece in zip(wanted, pieces, strict=False):
            self.deliver(1, piece, [home], [device for device in wanted if device != home])

    def _sum_at(self, bounds: Bounds, owners: Sequence[DeviceNumbers], home: int) -> None:
        givers = [
            home if home in holding else self._choose(holding, home, bounds) for holding in owners
        ]
        self.put(0, bounds, givers, [home])

    def _choose(self, owners: Sequence[int], receiver: int, bounds: Bounds) -> int:
        return self.senders.choose(owners, receiver, volume(bounds) * self.itemsize)

    def _relays(self, bounds: Bounds, owners: DeviceNumbers, receivers: DeviceNumbers) -> bool:
        """Whether pieces that are passed on inside a node arrive before whole parts."""
        if len(receivers) == 1 or not self.relay:
            return False
        num_bytes, count = volume(bounds) * self.itemsize, len(receivers)
        far = min(
            (self.network.link(owner, receivers[0]) for owner in owners),
            key=lambda link: link.seconds(num_bytes),
        )
        near = self.network.link(receivers[0], receivers[1])
        whole = far.latency + count * num_bytes / far.bandwidth
        passed = far.seconds(num_bytes) + near.seconds(num_bytes * (count - 1) / count)
        return passed < whole

    def _reduces_at_once(
        self, bounds: Bounds, owners: Sequence[DeviceNumbers], wanted: DeviceNumbers
    ) -> bool:
        """Whether each receiver adds up the whole part: less latency, more bytes."""
        if len(wanted) == 1:
            return True
        num_bytes, count = volume(bounds) * self.itemsize, len(wanted)
        slowest = max(
            (self.network.link(a, wanted[0]) for a, *_ in owners if a != wanted[0]),
            key=lambda link: link.seconds(num_bytes),
            default=self.network.link(wanted[0], wanted[1]),
        )
        foreign = len(owners) - 1
        at_once = slowest.seconds(foreign * num_bytes)
        piece = num_bytes / count
        in_pieces = slowest.seconds(foreign * piece) + slowest.seconds((count - 1) * piece)
        return at_once <= in_pieces


def cut(bounds: Bounds, count: int) -> tuple[Bounds, ...]:
    """Cut a part along its longest dimension.

    Args:
        bounds: the part.
        count: how many pieces; fewer come where the dimension is shorter.

    Returns:
        The pieces; their sizes differ by one at most.

    Example:
        >>> cut(((0, 5), (0, 2)), 2)
        (((0, 2), (0, 2)), ((2, 5), (0, 2)))
    """
    sizes = extent(bounds)
    if not sizes:
        return (bounds,)
    axis = sizes.index(max(sizes))
    count = min(count, sizes[axis])
    start = bounds[axis][0]
    return tuple(
        (*bounds[:axis], (start + first, start + end), *bounds[axis + 1 :])
        for first, end in itertools.pairwise(even_ends(sizes[axis], count))
    )


def _merged(phase: Sequence[Combination]) -> Iterator[Combination]:
    """Combinations of one part and the same senders, drawn together."""
    takers: dict[tuple[Bounds, tuple[int, ...]], DeviceNumbers] = {}
    for part in phase:
        takers.setdefault((part.bounds, part.senders), []).extend(part.receivers)
    for (bounds, senders), receivers in takers.items():
        yield Combination(bounds, senders, tuple(receivers))
