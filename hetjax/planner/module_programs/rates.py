"""What computing and moving takes on the members of a stage, for given parts of dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.module_programs.ways import WayLoad
from hetjax.planner.work.rates import expected_rate

Shares = NDArray[np.float64]
"""For each class of dimensions what part of it each member has: `[classes, members]`."""

GATHER, SCATTER, SUM, EXCHANGE, REGROUP = "gather", "scatter", "sum", "exchange", "regroup"
"""The forms of moves: of parts to all; of summands to parts, or to all; from parts along one
dimension to parts along another; from parts to other parts along the same."""


class MoveOf(NamedTuple):
    """A move of a value.

    Args:
        form: what is moved to what.
        num_bytes: of the value, whole.
        source: the class of the dimension that is divided before; -1 for none.
        target: the same of afterwards.
        once: whether it is moved once a step, and not for each microbatch.
        by_even_parts: whether it is brought to even parts in between, as a gather of uneven parts
            may be, or a sum to them; None: if that is faster.
    """

    form: str
    num_bytes: float
    source: int = -1
    target: int = -1
    once: bool = False
    by_even_parts: bool | None = False


class MoveNetwork(Protocol):
    """What carries moves among members."""

    @property
    def byte_seconds(self) -> Shares:
        """For each member, what sending or receiving a byte takes, `[members]`."""
        ...

    def seconds(self, move: MoveOf, source: Shares, target: Shares) -> float:
        """What a move takes.

        Args:
            move: the move.
            source: what part each member has before, `[members]`; even for what is not divided.
            target: the same of afterwards.
        """
        ...


@dataclass(frozen=True)
class DirectNetwork:
    """Members that give each other exactly what each needs, each over a link of its own.

    Args:
        bandwidths: of each member's link, in bytes/s, either way at once.
        latency: seconds of a move beside its bytes. The moves of an update go together, in one
            message to each: they have none of their own.
        loads: seconds of computing that each byte costs members at its two ends, where they see to
            moves themselves; none where they do not. They do so while the link carries the bytes.
    """

    bandwidths: tuple[float, ...]
    latency: float
    loads: tuple[float, ...] = ()

    @property
    def byte_seconds(self) -> Shares:
        """For each member, what sending or receiving a byte takes, `[members]`."""
        return np.maximum(1 / np.array(self.bandwidths), self._loads)

    @property
    def _loads(self) -> Shares:
        return np.array(self.loads or (0.0,) * len(self.bandwidths))

    def seconds(self, move: MoveOf, source: Shares, target: Shares) -> float:
        """What a move takes: the slowest member's, which sends and receives at once."""
        if not move.by_even_parts:
            start = 0.0 if move.once else self.latency
            return start + self._carried(move.form, move.num_bytes, source, target)
        even = np.full(len(source), 1 / len(source))
        ends = (source, even) if move.form == GATHER else (even, target)
        regrouped = self._carried(REGROUP, move.num_bytes, *ends)
        return 2 * self.latency + regrouped + self._carried(move.form, move.num_bytes, even, even)

    def _carried(self, form: str, num_bytes: float, source: Shares, target: Shares) -> float:
        given, taken = _parts_moved(form, source, target)
        carried = np.maximum(given, taken) / np.array(self.bandwidths)
        return num_bytes * float(np.maximum(carried, (given + taken) * self._loads).max())


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
    """

    flops: float
    traffic: float
    updated: float
    devices: int = 1
    inner_bandwidth: float = math.inf
    memory: float = math.inf
    classes: ClassRates | None = None


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

    def load_seconds(self, loads: list[WayLoad], shares: Shares) -> NDArray[np.float64]:
        """What loads take on each member, `[loads, members]`.

        Args:
            loads: the loads.
            shares: of every class.
        """
        if not loads:
            return np.zeros((0, self.count))
        table = np.array([_figures(each) for each in loads])
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
            flops, traffic, updated = table[:, 2:5].T + table[:, 6:9].T * part[:, m]
            computing = flops / member.flops + traffic / member.traffic
            if member.classes is not None:
                whole = np.array([member.classes.seconds(load.work) for load in loads])
                shared = _share_of(table, part[:, m])
                computing = whole * shared / member.devices + _LITTLE * computing
            seconds[:, m] = alone * computing + updated * (1 / member.updated + inner)
            if self.pressure:
                seconds[:, m] += self.pressure[m] * self._held(table, part[:, m], member)
        return seconds

    def held_bytes(self, loads: list[WayLoad], shares: Shares) -> NDArray[np.float64]:
        """What each device of each member holds of loads, `[members]`.

        Args:
            loads: the loads.
            shares: of every class.
        """
        if not loads:
            return np.zeros(self.count)
        table = np.array([_figures(each) for each in loads])
        part = np.where(table[:, :1] < 0, 1.0, shares[table[:, 0].astype(int)])
        return np.array(
            [self._held(table, part[:, m], each).sum() for m, each in enumerate(self.members)]
        )

    def _held(self, table: Shares, part: Shares, member: MemberSpeed) -> Shares:
        """What a device of a member holds of each load."""
        devices = np.where(table[:, 1] > 0, float(member.devices), 1.0)
        return (table[:, 5] + table[:, 9] * part) / devices

    def move_seconds(self, moves: list[MoveOf], shares: Shares) -> NDArray[np.float64]:
        """What moves take, `[moves]`.

        Args:
            moves: the moves.
            shares: of every class.
        """
        known: dict[object, tuple[float, float]] = {}

        def seconds(move: MoveOf) -> float:
            if move.by_even_parts is not None or self.count < 3:
                return self._move_seconds(move, shares, known)
            both = (move._replace(by_even_parts=each) for each in (False, True))
            return min(self._move_seconds(each, shares, known) for each in both)

        return np.array([seconds(each) for each in moves])

    def goes_by_even_parts(self, move: MoveOf, shares: Shares) -> bool:
        """Whether a move brings something to even parts in between.

        Args:
            move: the move.
            shares: of every class.
        """
        if move.by_even_parts is not None or self.count < 3:
            # Of two, each gives all it has either way.
            return bool(move.by_even_parts)
        straight, by_even = (move._replace(by_even_parts=each) for each in (False, True))
        times = self.move_seconds([straight, by_even], shares)
        return bool(times[1] < times[0])

    def _move_seconds(
        self, move: MoveOf, shares: Shares, known: dict[object, tuple[float, float]]
    ) -> float:
        """What a move takes, which is linear in its bytes."""
        key = move.form, move.source, move.target, move.once, move.by_even_parts
        if key not in known:
            even = np.full(self.count, 1 / self.count)
            source, target = (
                shares[each] if each >= 0 else even for each in (move.source, move.target)
            )
            start = self.network.seconds(move._replace(num_bytes=0.0), source, target)
            byte = self.network.seconds(move._replace(num_bytes=1e9), source, target)
            known[key] = start, (byte - start) / 1e9
        start, byte = known[key]
        return start + byte * move.num_bytes


def _share_of(table: Shares, part: Shares) -> Shares:
    """What share of their whole work loads are: of FLOPs, and of bytes where there are none."""
    of_flops = table[:, 2] + table[:, 6] > 0
    alone = np.where(of_flops, table[:, 2], table[:, 3])
    shared = np.where(of_flops, table[:, 6], table[:, 7])
    return (alone + shared * part) / np.maximum(alone + shared, 1e-30)


def _figures(load: WayLoad) -> tuple[float, ...]:
    """A load as a row of numbers: class, whether by examples, four figures alone and shared."""
    return (
        load.divided,
        load.by_examples,
        load.flops,
        load.traffic,
        load.updated,
        load.held,
        load.shared_flops,
        load.shared_traffic,
        load.shared_updated,
        load.shared_held,
    )
