"""Exchanges: who gives what to whom, so that devices come to hold other parts than before.

An array is cut into the finest slices, on which no part begins or ends. A slice that is not summed
goes from one of its owners to each device that wants it; one that is summed is first put together
piece by piece, on one device a piece.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetjax.errors import InputError
from hetjax.sharding.annotation.bounds import (
    Bounds,
    contains,
    cut,
    finest_slices,
    volume,
)
from hetjax.sharding.annotation.subgroup import Shard, Summand
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.senders import BestLink, Senders
from hetjax.sharding.resolution.steps import Combination, Phase
from hetjax.sharding.resolution.summing import Choose, at_once, paired, summed

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
    one_phase: bool = False,
    preference: Mapping[int, int] | None = None,
) -> tuple[Phase, ...]:
    """Plan how devices come to hold other parts, and sums in place of summands.

    Args:
        shape: the array's shape.
        before: what devices hold.
        after: what devices shall hold: summands, where there are some, or their sum.
        network: the links.
        senders: who sends what several hold.
        itemsize: bytes of an element.
        relay: whether devices of one node may take a piece each of what all of them want, and pass
            it on, where that is faster and the senders' policy allows it.
        one_phase: whether all goes in one phase. Then nothing is passed on, and whoever wants a sum
            adds it up by itself: all of them the same summands in the same order, so that what they
            get is the same to the bit.
        preference: for each device a number; of several owners those with the lowest are taken, so
            that all parts are of one copy. None: any owner.

    Returns:
        What is combined, phase by phase.

    Raises:
        InputError: devices shall hold summands of what there is only the value of.

    Source: Hetu v2, section 4.3; H2, section 5 (a byte crosses a slow link once).
    """
    planner = _ExchangePlanner(network, senders, itemsize, relay=relay, one_phase=one_phase)
    for part in _slices(tuple(shape), tuple(before), tuple(after)):
        planner.add(part if preference is None else _preferred(part, preference))
    return tuple(tuple(_merged(phase)) for phase in planner.phases if phase)


def _by_group(
    side: Mapping[Summand | None, DeviceNumbers],
) -> dict[int, dict[int, DeviceNumbers]]:
    """Who has or wants each summand, group by group."""
    found: dict[int, dict[int, DeviceNumbers]] = {}
    for summand, devices in side.items():
        if summand is not None:
            found.setdefault(summand.group, {})[summand.place] = devices
    return found


@functools.lru_cache(maxsize=128)
def _slices(
    shape: tuple[int, ...], before: tuple[Shard, ...], after: tuple[Shard, ...]
) -> tuple[_FinestSlice, ...]:
    """The finest slices that somebody wants; alike for the parameters of blocks that are alike."""
    sides = [_by_part(before), _by_part(after)]
    parts = {bounds for side in sides for bounds, _ in side}
    found = []
    for bounds in finest_slices(parts, shape):
        owners, wanted = (_holding(side, bounds) for side in sides)
        if wanted:
            found.append(_FinestSlice(bounds, owners, wanted))
    return tuple(found)


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
    def __init__(
        self, network: Network, senders: Senders, itemsize: int, *, relay: bool, one_phase: bool
    ):
        self.network, self.senders, self.itemsize = network, senders, itemsize
        self.relay = relay and senders.relays and not one_phase
        self.one_phase = one_phase
        self.phases: list[list[Combination]] = []

    def put(self, phase: int, bounds: Bounds, givers: Sequence[int], takers: Sequence[int]) -> None:
        while len(self.phases) <= phase:
            self.phases.append([])
        self.phases[phase].append(Combination(bounds, tuple(givers), tuple(takers)))

    def add(self, part: _FinestSlice) -> None:
        if not part.owners:
            raise InputError(f"source: no device holds {part.bounds}")
        whole = part.wanted.get(None)
        if whole and None in part.owners:
            self.deliver(0, part.bounds, part.owners[None], whole)
        elif whole:
            self.add_up(part, whole, alone=len(part.wanted) == 1)
        groups = _by_group(part.wanted)
        for group, wanted in groups.items():
            self.keep_partial(part, group, wanted)

    def keep_partial(
        self, part: _FinestSlice, group: int, wanted: Mapping[int, DeviceNumbers]
    ) -> None:
        """Bring summands to those who want them; of fewer summands each is a sum of some."""
        groups = _by_group(part.owners)
        if not groups:
            raise InputError(
                f"destination: it has partial sums of {part.bounds}, of which the source has the "
                "value; only computation makes summands"
            )
        receivers = {device for devices in wanted.values() for device in devices}

        def common(number: int) -> int:
            return sum(len(receivers & set(devices)) for devices in groups[number].values())

        held = groups[max(groups, key=lambda number: (common(number), number == group, -number))]
        for target, places in paired(held, wanted).items():
            devices = wanted[target]
            if len(places) == 1:
                self.deliver(0, part.bounds, held[places[0]], devices)
            elif places:
                owners = [held[place] for place in places]
                self.reduce(part.bounds, owners, devices, alone=False)
            else:
                self.put(0, part.bounds, [], devices)

    def add_up(self, part: _FinestSlice, wanted: DeviceNumbers, *, alone: bool) -> None:
        """Each device adds up the group of which it has a summand, any other one the first.

        Sums of unlike groups are the same but for rounding: in one phase all add up the first one.
        """
        groups = _by_group(part.owners)
        mine: dict[int, int] = {}
        if not self.one_phase:
            mine = {d: group for group, held in groups.items() for o in held.values() for d in o}
        takers: dict[int, DeviceNumbers] = {}
        for device in wanted:
            takers.setdefault(mine.get(device, min(groups)), []).append(device)
        for group, devices in takers.items():
            summands = groups[group]
            owners = [summands[place] for place in sorted(summands)]
            self.reduce(part.bounds, owners, devices, alone=alone)

    def deliver(
        self, phase: int, bounds: Bounds, owners: DeviceNumbers, wanted: DeviceNumbers
    ) -> None:
        """Bring a part from its owners to those who want it."""
        for device in wanted:
            if device in owners:
                self.put(phase, bounds, [device], [device])
        missing = self.network.by_node(device for device in wanted if device not in owners)
        for node, receivers in missing.items():
            is_near = any(self.network.node(owner) == node for owner in owners)
            if is_near or not self._relays(bounds, owners, receivers):
                for receiver in receivers:
                    self._send(phase, bounds, owners, receiver)
                continue
            pieces = cut(bounds, len(receivers))
            for receiver, piece in zip(receivers, pieces, strict=False):
                others = [device for device in receivers if device != receiver]
                for share in self._send(phase, piece, owners, receiver):
                    self.put(phase + 1, share, [receiver], others)

    def reduce(
        self,
        bounds: Bounds,
        owners: Sequence[DeviceNumbers],
        wanted: DeviceNumbers,
        *,
        alone: bool,
    ) -> None:
        """Bring a part's sum to those who want it; alone: no device has to do with another sum."""
        if self.one_phase:
            for part in at_once(bounds, owners, wanted, self.network, self._choose)[0]:
                self.put(0, part.bounds, part.senders, part.receivers)
            return

        def trial() -> Choose:
            # A form that is not taken must leave no load behind.
            senders = BestLink(self.network)
            return lambda owners, receiver, part: senders.choose(
                owners, receiver, volume(part) * self.itemsize
            )

        phases = summed(
            bounds,
            owners,
            wanted,
            network=self.network,
            itemsize=self.itemsize,
            choose=self._choose,
            trial=trial,
            others_may_add=alone,
        )
        for place, phase in enumerate(phases):
            for part in phase:
                self.put(place, part.bounds, part.senders, part.receivers)

    def _send(
        self, phase: int, bounds: Bounds, owners: DeviceNumbers, receiver: int
    ) -> list[Bounds]:
        """Bring a part to a device; the pieces in which it comes: several owners send one each."""
        shares = self.senders.shares(owners, receiver, bounds, self.itemsize)
        for owner, piece in shares:
            self.put(phase, piece, [owner], [receiver])
        return [piece for _, piece in shares]

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


def _merged(phase: Sequence[Combination]) -> Iterator[Combination]:
    """Combinations of one part and the same senders, drawn together."""
    takers: dict[tuple[Bounds, tuple[int, ...]], DeviceNumbers] = {}
    for part in phase:
        takers.setdefault((part.bounds, part.senders), []).extend(part.receivers)
    for (bounds, senders), receivers in takers.items():
        yield Combination(bounds, senders, tuple(receivers))
