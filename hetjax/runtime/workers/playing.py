"""Playing a cluster: real computation, held back to the moments that a plan predicts.

Every stage has a clock of its own, or with others on its devices, which says when it is free; a
program or a transfer moves clocks forward by what the plan predicts of it, and workers wait until
the time is there. Where the machine ends a task late, the next wait is shorter.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from hetjax.errors import InputError, is_number, shown
from hetjax.planner.costs.exchange_cost import exchange_bandwidth
from hetjax.planner.plan.plan import Plan
from hetjax.runtime.instructions.instruction import Route, RouteKind, Tag
from hetjax.runtime.moves.peers import Peer
from hetjax.runtime.moves.transport import Arrival, InProcessTransport, WorkerTransport

ROOM = 1.5
"""How much more time a played task gets than all stages need to compute at once."""

_HANDLING_SECONDS = 0.5e-3
"""What a worker does between two programs, at about: transfers, batches, buffers."""

_LATE = 0.15
"""By which share of its time a task may end late, before it counts as late."""


@dataclass(frozen=True)
class Play:
    """That a cluster is to be played, and how slowly.

    A plan is played that has a prediction, and no stage of several members.

    Args:
        scale: seconds of this machine for one second of the cluster; None for the least that leaves
            this machine time to compute.

    Raises:
        InputError: the scale is not a positive number.

    Example:
        >>> Play(scale=2.5).scale
        2.5
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is None:
            return
        if not (is_number(self.scale) and self.scale > 0 and math.isfinite(self.scale)):
            raise InputError(
                f"play: scale is {shown(self.scale)}; it must be more than 0 and finite, or None"
            )


class Lane(NamedTuple):
    """What carries one transfer after the other: a direction of a link, or of a stage's card.

    Stages that share devices are called by the first of them.
    """

    name: str
    source: int
    target: int


@dataclass(frozen=True)
class PlayedTimes:
    """What programs and transfers take on a cluster, as a plan predicts it; all in seconds.

    Args:
        tasks: for each stage its tasks' programs, by name.
        updates: for each stage all its other programs of a step, together.
        routes: activations and their gradients, of one microbatch.
        links: for each pair of stages latency and seconds a byte of what else they exchange.
        leads: for each stage the first one on its devices, mostly itself.
    """

    tasks: Sequence[Mapping[str, float]]
    updates: Sequence[float]
    routes: Mapping[Route, float]
    links: Mapping[tuple[int, int], tuple[float, float]]
    leads: Mapping[int, int]

    @classmethod
    def of(cls, plan: Plan) -> PlayedTimes:
        """Those of a plan.

        Raises:
            InputError: the plan has no prediction, or a stage of several members.
        """
        if plan.has_unions:
            raise InputError(
                "play: the plan has a stage of several members, which no played cluster holds "
                "back; train by it without play"
            )
        stages = plan.predicted.stages
        routes = {}
        for s, stage in enumerate(stages):
            routes[Route(RouteKind.VALUE, s, s + 1)] = stage.communication_seconds
            routes[Route(RouteKind.COTANGENT, s, s - 1)] = stage.return_seconds
        links = {}
        for a, one in enumerate(plan.stages):
            for b, other in enumerate(plan.stages):
                if a != b:
                    link = plan.cluster.link_between(one.submesh, other.submesh)
                    rate = exchange_bandwidth(plan.cluster, one.submesh, other.submesh)
                    links[a, b] = link.latency, 1 / rate
        tasks = [
            {
                "forward": stage.forward_seconds,
                "recompute": stage.recompute_seconds,
                "backward": stage.backward_seconds,
                "input_gradient": stage.input_gradient_seconds,
                "weight_gradient": stage.weight_gradient_seconds,
            }
            for stage in stages
        ]
        updates = [stage.update_seconds for stage in stages]
        return cls(tasks, updates, routes, links, plan.leads)

    def transfer(self, tag: Tag, num_bytes: int) -> tuple[float, tuple[Lane, ...]]:
        """Seconds of a transfer, and the lanes that it keeps busy.

        Args:
            tag: the transfer.
            num_bytes: its size, of whole arrays.
        """
        kind, source, target = tag.route
        ends = self.leads[source], self.leads[target]
        lane = Lane("link", *ends)
        if tag.route in self.routes:
            return self.routes[tag.route], (lane,)
        latency, seconds_a_byte = self.links[source, target]
        if kind not in (RouteKind.GRADIENT, RouteKind.PARAMETER):
            return latency, (lane,)
        # Each device of a submesh exchanges its part; a stage's partners wait for one another.
        cards = Lane("out", ends[0], ends[0]), Lane("in", ends[1], ends[1])
        return latency + num_bytes * seconds_a_byte, cards


class Clock(Protocol):
    """Tells and awaits moments, in seconds from any zero."""

    def now(self) -> float:
        """The moment."""
        ...

    def wait_until(self, moment: float) -> None:
        """Return when a moment is there, or has been."""
        ...


class WallClock:
    """The clock on the wall, which sleeps while it waits."""

    def now(self) -> float:
        """The moment, by `time.monotonic`."""
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        """Sleep until a moment is there."""
        while (left := moment - time.monotonic()) > 0:
            time.sleep(left)


class Pace(Protocol):
    """What programs run under."""

    def running(self, stage: int, program: str) -> AbstractContextManager[None]:
        """What a program of a stage runs in; its results are there at the end of the block."""
        ...


@dataclass
class Rehearsal:
    """Steps in which one program runs at a time, to see what each takes on this machine.

    Args:
        seconds: for each stage the seconds of every run of its programs, by name.
    """

    seconds: dict[tuple[int, str], list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def running(self, stage: int, program: str) -> Iterator[None]:
        """Time a program that has the machine to itself."""
        with self._lock:
            began = time.perf_counter()
            yield
            seconds = time.perf_counter() - began
            self.seconds.setdefault((stage, program), []).append(seconds)

    def usual(self) -> dict[tuple[int, str], float]:
        """The usual seconds of each stage's programs, with what comes between two of them."""
        return {key: median(each) + _HANDLING_SECONDS for key, each in self.seconds.items()}


@dataclass(frozen=True)
class Pacing:
    """What is played: times, and how this machine's programs share those of an update.

    Args:
        times: of the cluster.
        here: what each stage's programs take on this machine, by stage and name.
    """

    times: PlayedTimes
    here: Mapping[tuple[int, str], float]

    def seconds(self, stage: int, program: str) -> float:
        """What a program takes on the cluster."""
        tasks = self.times.tasks[stage]
        if program in tasks:
            return tasks[program]
        total = sum(self._others(stage))
        share = self.here.get((stage, program), 0.0) / total if total else 0.0
        return share * self.times.updates[stage]

    def _others(self, stage: int) -> Iterator[float]:
        for (other, name), seconds in self.here.items():
            if other == stage and name not in self.times.tasks[stage]:
                yield seconds

    @property
    def least_scale(self) -> float:
        """Seconds of this machine for one of the cluster, such that it has time to compute."""
        largest: dict[int, float] = defaultdict(float)
        for (stage, program), seconds in self.here.items():
            played = self.seconds(stage, program)
            if played > 0:
                devices = self.times.leads[stage]
                largest[devices] = max(largest[devices], seconds / played)
        return float(f"{ROOM * sum(largest.values()):.1e}")


class Player:
    """Paces the stages of a process, a step at a time.

    Args:
        pacing: what programs and transfers take on the cluster.
        scale: seconds of this machine for one second of the cluster.
        clock: tells and awaits moments.
    """

    def __init__(self, pacing: Pacing, scale: float, clock: Clock | None = None):
        self.pacing, self.scale = pacing, scale
        self._clock: Clock = clock or WallClock()
        self._lock = threading.Lock()
        self.tasks = self.late_tasks = 0
        self.begin()

    def begin(self) -> None:
        """Begin a step: all stages are free, and nothing is under way."""
        # Moments are told in seconds of `time.time`, which may jump, and awaited by another clock.
        began = self._clock.now()
        self._told = time.time() - began
        self._free = defaultdict[int, float](lambda: began)
        self._lanes: dict[Lane, float] = {}
        self._spans: dict[Tag, tuple[float, float]] = {}
        self._sent: dict[Tag, float] = {}

    @contextmanager
    def running(self, stage: int, program: str) -> Iterator[None]:
        """Hold a program's end back to the moment at which it would be on the cluster."""
        seconds = self.scale * self.pacing.seconds(stage, program)
        devices = self.pacing.times.leads[stage]
        end = self._free[devices] + seconds
        yield
        late = self._clock.now() - end > _LATE * seconds
        with self._lock:
            self.tasks += 1
            self.late_tasks += late
        self._clock.wait_until(end)
        self._free[devices] = end

    def send(self, tag: Tag, num_bytes: int) -> None:
        """Put a transfer on its way."""
        seconds, lanes = self.pacing.times.transfer(tag, num_bytes)
        with self._lock:
            free = (self._lanes.get(lane, 0.0) for lane in lanes)
            start = max(self._free[self.pacing.times.leads[tag.route.source]], *free)
            end = start + self.scale * seconds
            self._lanes.update(dict.fromkeys(lanes, end))
            self._sent[tag] = self._clock.now()
            self._spans[tag] = start, end

    def is_there(self, tag: Tag) -> bool:
        """Whether a transfer that was sent has arrived."""
        return tag in self._spans and self._spans[tag][1] <= self._clock.now()

    def receive(self, tag: Tag) -> None:
        """Wait for the arrival of a transfer that was sent."""
        _, end = self._spans[tag]
        self._clock.wait_until(end)
        devices = self.pacing.times.leads[tag.route.target]
        self._free[devices] = max(self._free[devices], end)

    def span(self, tag: Tag) -> tuple[float, float]:
        """When a transfer entered its link and when it was there, in seconds of `time.time`."""
        start, end = self._spans[tag]
        return self._told + start, self._told + max(end, self._sent[tag])


class PlayedTransport(InProcessTransport):
    """A transport in one process whose transfers take what they take on the cluster.

    Without a player it is like any other in one process.
    """

    player: Player | None = None

    def set_deadline(self, seconds: float) -> None:
        """Wait this long for a transfer that does not come."""
        self._deadline = seconds

    def of(self, peer: Peer, mesh: Mesh) -> WorkerTransport:
        """The transport of one worker."""
        super().of(peer, mesh)
        return _PlayedWorkerTransport(self, peer)


class _PlayedWorkerTransport(WorkerTransport):
    def __init__(self, shared: PlayedTransport, peer: Peer):
        super().__init__(shared, peer)
        self._played = shared

    def send(self, step: int, tag: Tag, arrays: Sequence[jax.Array]) -> None:
        """Put the arrays on their way, without waiting."""
        if self._played.player is not None:
            self._played.player.send(tag, sum(array.nbytes for array in arrays))
        super().send(step, tag, arrays)

    def ready(self, step: int, tag: Tag) -> bool:
        """Whether the transfer has arrived, or will never."""
        if not super().ready(step, tag):
            return False
        player = self._played.player
        return player is None or self._played.failure is not None or player.is_there(tag)

    def receive(self, step: int, tag: Tag) -> list[jax.Array]:
        """Wait until the sending stage has sent, and the transfer has arrived."""
        arrays = super().receive(step, tag)
        if self._played.player is not None:
            self._played.player.receive(tag)
        return arrays

    def arrival(self, step: int, tag: Tag) -> Arrival:
        """When the transfer arrived."""
        arrival, player = super().arrival(step, tag), self._played.player
        return arrival if player is None else arrival._replace(at=player.span(tag)[1])
