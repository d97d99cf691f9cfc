"""What computing and moving takes on the members of a stage, for given parts of dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.module_programs.charges import GATHER, REGROUP, SUM, Loads, MoveOf, Moves
from hetjax.planner.work.rates import expected_rate
from hetjax.sharding.deduction.local_additions import LARGE_BYTES

Shares = NDArray[np.float64]
"""For each class of dimensions what part of it each member has: `[classes, members]`."""


class MoveNetwork(Protocol):
    """What carries moves among members."""

    @property
    def byte_seconds(self) -> Shares:
        """For each member, what sending or receiving a byte takes, `[members]`."""
        ...

    def seconds(self, move: MoveOf, source: Shares, target: Shares) -> float:
        """What a move takes.

        Args:
            move: the move; a network that has no way by even parts takes no notice of those.
            source: what part each member has before, `[members]`; even for what is not divided.
            target: the same of afterwards.
        """
        ...


@dataclass(frozen=True)
class DirectNetwork:
    """Members that give each other exactly what each needs, each over a link of its own.

    Args:
        bandwidths: of each member's link, in bytes/s, either way at once.
        latency: seconds of a move beside its bytes.
        loads: seconds of computing that each byte costs members at its two ends, where they see to
            moves themselves; none where they do not. A message is put together before the link
            carries it, and taken apart afterwards.
    """

    bandwidths: tuple[float, ...]
    latency: float
    loads: tuple[float, ...] = ()

    @property
    def byte_seconds(self) -> Shares:
        """For each member, what sending or receiving a byte takes, `[members]`."""
        return 1 / np.array(self.bandwidths) + self._loads

    @property
    def _loads(self) -> Shares:
        return np.array(self.loads or (0.0,) * len(self.bandwidths))

    def seconds(self, move: MoveOf, source: Shares, target: Shares) -> float:
        """What a move takes: the slowest member's, which sends and receives at once."""
        if not move.by_even_parts:
            return self.latency + self._carried(move.form, move.num_bytes, source, target)
        even = np.full(len(source), 1 / len(source))
        ends = (source, even) if move.form == GATHER else (even, target)
        regrouped = self._carried(REGROUP, move.num_bytes, *ends)
        return 2 * self.latency + regrouped + self._carried(move.form, move.num_bytes, even, even)

    def _carried(self, form: str, num_bytes: float, source: Shares, target: Shares) -> float:
        given, taken = _parts_moved(form, source, target)
        carried = np.maximum(given, taken) / np.array(self.bandwidths)
        return num_bytes * float((carried + (given + taken) * self._loads).max())


def _parts_moved(form: str, source: Shares, target: Shares) -> tuple[Shares, Shares]:
    """What parts of a value each member gives to others, and takes from them."""
    count = len(source)
    match form:
        case "gather":
            return (count - 1) * source, 1 - source
        case "scatter":
            return 1 - target, (count - 1) * target
        case "sum":
            each = np.full(count, 2 * (count - 1) / count if count > 2 else float(count - 1))
            return each, each
        case "exchange":
            return source * (1 - target), target * (1 - source)
        case _:
            kept = _overlap(source, target)
            return source - kept, target - kept


def _overlap(source: Shares, target: Shares) -> Shares:
    """What part of a dimension each member has both before and after."""
    ends, new_ends = np.cumsum(source), np.cumsum(target)
    start = np.maximum(ends - source, new_ends - target)
    return np.maximum(0.0, np.minimum(ends, new_ends) - start)


@dataclass(frozen=True, eq=False)
class ClassRates:
    """What a device takes for classes of work, as it was measured.

    Args:
        rates: seconds of a FLOP or a byte, by class.
        flops: FLOP/s of products of classes that nothing is known of.
        bandwidth: bytes/s of its memory, for the others.
    """

    rates: Mapping[str, float]
    flops: float
    bandwidth: float
    _known: dict[object, float] = field(default_factory=dict, init=False, repr=False)

    def seconds(self, work: tuple[tuple[str, float], ...]) -> float:
        """What work takes.

        Args:
            work: FLOPs and bytes by class.
        """
        found = self._known.get(work)
        if found is None:
            found = sum(amount * self._rate(name) for name, amount in work)
            self._known[work] = found
        return found

    def _rate(self, name: str) -> float:
        known = self.rates.get(name)
        return expected_rate(name, self.flops, self.bandwidth) if known is None else known


_TOGETHER = 1 - 1e-4
"""What moves of an update count for: of a gradient's sum in the backward pass and one in the update
that take as long, the update's is taken. Those go together; the other one has all wait for it."""

_LITTLE = 1e-6
"""What counts of a load's bytes where its seconds are known: of ways that are as fast, that which
reads less is taken."""


@dataclass(frozen=True)
class MemberSpeed:
    """What a member computes.

    Args:
        flops: FLOP/s of matrix products, of all its devices.
        traffic: bytes/s of what is read and written, were nothing fused.
        updated: bytes/s of parameters, gradients and state that an update gets through.
        devices: how many it has.
        inner_bandwidth: bytes/s of the link among them.
        memory: bytes that each may hold.
        classes: what one of its devices takes for classes of work; None where none was measured.
        on_cpu: whether its programs are compiled for CPUs.
    """

    flops: float
    traffic: float
    updated: float
    devices: int = 1
    inner_bandwidth: float = math.inf
    memory: float = math.inf
    classes: ClassRates | None = None
    on_cpu: bool = False


@dataclass(frozen=True, eq=False)
class Rates:
    """What computing and moving takes on the members of a stage.

    Args:
        members: what each computes.
        network: what carries moves.
        pressure: seconds that a byte which a member holds counts for; none for nothing.
    """

    members: tuple[MemberSpeed, ...]
    network: MoveNetwork
    pressure: tuple[float, ...] = ()

    @property
    def count(self) -> int:
        """How many members there are."""
        return len(self.members)

    @property
    def proportional(self) -> Shares:
        """Ratios in proportion to how fast members compute products."""
        speeds = np.array([member.flops for member in self.members])
        return speeds / speeds.sum()

    def load_seconds(self, loads: Loads, shares: Shares) -> NDArray[np.float64]:
        """What loads take on each member, `[loads, members]`.

        Args:
            loads: the loads.
            shares: of every class.
        """
        if not len(loads):
            return np.zeros((0, self.count))
        table = loads.figures
        part = np.where(table[:, :1] < 0, 1.0, shares[table[:, 0].astype(int)])
        seconds = np.zeros((len(loads), self.count))
        known: dict[object, int] = {}
        for m, member in enumerate(self.members):
            # Members that are alike have mostly the same parts.
            key = member, part[:, m].tobytes(), self.pressure[m] if self.pressure else 0.0
            if known.setdefault(key, m) != m:
                seconds[:, m] = seconds[:, known[key]]
                continue
            alone = np.where(table[:, 1] > 0, 1.0, float(member.devices))
            inner = 2 * (member.devices - 1) / member.devices / member.inner_bandwidth
            figures = table[:, 2:6].T + table[:, 7:11].T * part[:, m]
            flops, traffic, updated, summed = figures
            computing = flops / member.flops + traffic / member.traffic
            if member.classes is not None:
                whole = np.array([member.classes.seconds(load.work) for load in loads.all])
                shared = _share_of(table, part[:, m])
                computing = whole * shared / member.devices + _LITTLE * computing
            seconds[:, m] = alone * computing + updated / member.updated + summed * inner
            if self.pressure:
                seconds[:, m] += self.pressure[m] * self._held(table, part[:, m], member)
        return seconds

    def held_bytes(self, loads: Loads, shares: Shares) -> NDArray[np.float64]:
        """What each device of each member holds of loads, `[members]`.

        Args:
            loads: the loads.
            shares: of every class.
        """
        return self.held_of_each(loads, shares).sum(axis=0)

    def held_of_each(self, loads: Loads, shares: Shares) -> Shares:
        """What each device of each member holds of each load, `[loads, members]`.

        Args:
            loads: the loads.
            shares: of every class.
        """
        if not len(loads):
            return np.zeros((0, self.count))
        table = loads.figures
        part = np.where(table[:, :1] < 0, 1.0, shares[table[:, 0].astype(int)])
        held = [self._held(table, part[:, m], each) for m, each in enumerate(self.members)]
        return np.stack(held, axis=1)

    def _held(self, table: Shares, part: Shares, member: MemberSpeed) -> Shares:
        """What a device of a member holds of each load."""
        devices = np.where(table[:, 1] > 0, float(member.devices), 1.0)
        return (table[:, 6] + table[:, 11] * part) / devices

    def move_seconds(self, moves: Moves, shares: Shares) -> NDArray[np.float64]:
        """What moves take, `[moves]`.

        Args:
            moves: the moves.
            shares: of every class.
        """
        if not len(moves):
            return np.zeros(0)
        seconds = np.minimum(*self._both_ways(moves, shares))
        once = np.array([each.once for each in moves.sorts])[moves.places]
        return np.where(once, _TOGETHER * seconds, seconds)

    def go_by_even_parts(self, moves: Moves, shares: Shares) -> NDArray[np.bool_]:
        """Whether moves bring something to even parts in between, `[moves]`.

        Args:
            moves: the moves.
            shares: of every class.
        """
        if not len(moves):
            return np.zeros(0, bool)
        told = np.array([each.by_even_parts is True for each in moves.sorts])
        straight, by_even = self._both_ways(moves, shares)
        return told[moves.places] | (by_even < straight)

    def _both_ways(self, moves: Moves, shares: Shares) -> tuple[Shares, Shares]:
        """What moves take that go as they are told, those that are told nothing either way."""
        straight = self._seconds(moves, moves.sorts, shares)
        if self.count < 3 or not moves.may_go_by_even_parts:
            # Of two, each gives all it has either way.
            return straight, straight
        by_even = [
            each._replace(by_even_parts=each.by_even_parts is not False) for each in moves.sorts
        ]
        return straight, self._seconds(moves, by_even, shares)

    def _seconds(
        self, moves: Moves, sorts: Sequence[MoveOf], shares: Shares
    ) -> NDArray[np.float64]:
        """What moves take, each of one of some sorts."""
        even = np.full(self.count, 1 / self.count)
        # Most classes of dimensions have one of few rows of shares.
        rows = [each.tobytes() for each in shares]
        known: dict[object, tuple[float, float]] = {}
        lines = np.empty((len(sorts), 2))
        for place, move in enumerate(sorts):
            source, target = move.source, move.target
            key = (
                move.form,
                rows[source] if source >= 0 else None,
                rows[target] if target >= 0 else None,
                move.by_even_parts,
            )
            if key not in known:
                ends = (shares[each] if each >= 0 else even for each in (source, target))
                known[key] = self._line(move, *ends)
            lines[place] = known[key]
        start, byte = lines[moves.places].T
        is_sum = np.array([move.form == SUM for move in sorts])[moves.places]
        if self.count > 2 and is_sum.any():
            # Small sums go in one phase, of which each sends what it has to all the others.
            large = is_sum & (moves.num_bytes >= LARGE_BYTES)
            start = start * np.where(large, 2, 1)
            byte = byte * np.where(is_sum & ~large, self.count / 2, 1)
        return start + byte * moves.num_bytes

    def _line(self, move: MoveOf, source: Shares, target: Shares) -> tuple[float, float]:
        """What a sort of move takes whatever its bytes, and for each of them."""
        start = self.network.seconds(move._replace(num_bytes=0.0), source, target)
        byte = self.network.seconds(move._replace(num_bytes=1e9), source, target)
        return start, (byte - start) / 1e9


def _share_of(table: Shares, part: Shares) -> Shares:
    """What share of their whole work loads are: of FLOPs, and of bytes where there are none."""
    of_flops = table[:, 2] + table[:, 7] > 0
    alone = np.where(of_flops, table[:, 2], table[:, 3])
    shared = np.where(of_flops, table[:, 7], table[:, 8])
    return (alone + shared * part) / np.maximum(alone + shared, 1e-30)
