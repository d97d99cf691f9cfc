"""What workers see of a step, and what their reports tell together of the links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from hetjax.pipeline.timeline.timeline import Event, Timeline, link_track
from hetjax.runtime.instructions.instruction import RouteKind, Tag
from hetjax.runtime.moves.carriers import CarrierName
from hetjax.runtime.moves.transport import Arrival

Told = TypeVar("Told")

_ACTIVATIONS = {RouteKind.VALUE: "F", RouteKind.COTANGENT: "B"}
"""The kinds of transfers that tasks wait for, and the kinds of these tasks."""

_DRAWN = (*_ACTIVATIONS, RouteKind.MOVE)
"""The kinds of transfers that timelines show."""

_SHARED = (RouteKind.GRADIENT, RouteKind.PARAMETER)
"""The kinds of transfers of what several stages hold."""


@dataclass
class StepReport:
    """What a worker saw in one step.

    Args:
        loss: the mean loss; None except in the last stage of the first pipeline.
        gradient_norm: the global norm of the mean gradient; None except there.
        nonfinite_leaves: the parameter leaves whose gradient was not finite; none except there.
        aux: what the loss gives beside itself, summed over the microbatches of a pipeline: the
            count, and each figure times the count; empty except in its last stage.
        seconds: the step's duration.
        live_microbatches: of how many microbatches it held activations at once, at most.
        live_bytes: the size of these, on all devices of the stage.
        sends: when it sent each transfer, in seconds of `time.time`.
        arrivals: when each transfer that it received was there, and how many bytes it pulled.
        waits: how many seconds it waited for each transfer.
        events: when each operation began and ended, where the step was timed; seconds of
            `time.time`.
    """

    loss: float | None = None
    gradient_norm: float | None = None
    nonfinite_leaves: tuple[int, ...] = ()
    aux: tuple[float, ...] = ()
    seconds: float = 0.0
    live_microbatches: int = 0
    live_bytes: int = 0
    sends: dict[Tag, float] = field(default_factory=dict)
    arrivals: dict[Tag, Arrival] = field(default_factory=dict)
    waits: dict[Tag, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    @property
    def wait_seconds(self) -> float:
        """Seconds in which it waited for transfers."""
        return sum(self.waits.values())


def summed(losses: Sequence[Sequence[float] | None]) -> tuple[float, ...]:
    """Sums over a batch (the loss, the count, figures), of what each stage knows of them.

    Example:
        >>> summed([None, (6.0, 3.0), (2.0, 1.0)])
        (8.0, 4.0)
    """
    known = [loss for loss in losses if loss is not None]
    return tuple(map(sum, zip(*known, strict=True)))


@dataclass(frozen=True)
class LinkUse:
    """What one direction of the link between two stages did in a step, by one carrier.

    Args:
        source: the stage that sends.
        target: the stage that receives; the same one for what its members exchange.
        num_bytes: the bytes that crossed.
        transfers: in how many transfers.
        wait_seconds: how long the receiving stage waited for them.
        busy_seconds: how long something was under way.
        step_seconds: the step's duration.
        carriers: what took them: ``"in process"``, ``"wire"``, ``"host"``, or several, where not
            all workers of the stages have the same; none where every member had all it needed.
    """

    source: int
    target: int
    num_bytes: int
    transfers: int
    wait_seconds: float
    busy_seconds: float
    step_seconds: float
    carriers: tuple[CarrierName, ...] = (CarrierName.IN_PROCESS,)

    @property
    def busy(self) -> float:
        """The share of the step, from 0 to 1, in which something was under way."""
        return self.busy_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def rate(self) -> float:
        """Bytes/s while something was under way; 0 where nothing was."""
        return self.num_bytes / self.busy_seconds if self.busy_seconds else 0.0


def member_report(reports: Sequence[StepReport]) -> StepReport:
    """The report of a member of a stage, from those of its hosts.

    Args:
        reports: one a host.

    Returns:
        The first host's, with the transfers of all: they begin when the first host sends and are
        there when the last one has its part; their bytes are those of all hosts.

    Example:
        >>> from hetjax.runtime.instructions.instruction import Route
        >>> tag = Tag(Route(RouteKind.VALUE, 0, 1), microbatch=3)
        >>> hosts = [StepReport(arrivals={tag: Arrival(at, 64)}) for at in (5.0, 7.0)]
        >>> member_report(hosts).arrivals[tag]
        Arrival(at=7.0, num_bytes=128, carriers=(<CarrierName.IN_PROCESS: 'in process'>,))
    """
    sends = _by_tag([report.sends for report in reports])
    arrivals = _by_tag([report.arrivals for report in reports])
    waits = _by_tag([report.waits for report in reports])
    return replace(
        reports[0],
        sends={tag: min(each) for tag, each in sends.items()},
        arrivals={
            tag: Arrival(
                max(a.at for a in each),
                sum(a.num_bytes for a in each),
                tuple(sorted({name for a in each for name in a.carriers})),
            )
            for tag, each in arrivals.items()
        },
        waits={tag: max(each) for tag, each in waits.items()},
    )


def _by_tag(told: Sequence[Mapping[Tag, Told]]) -> dict[Tag, list[Told]]:
    found: dict[Tag, list[Told]] = {}
    for each in told:
        for tag, what in each.items():
            found.setdefault(tag, []).append(what)
    return found


def stage_report(reports: Sequence[StepReport]) -> StepReport:
    """The report of a stage, from those of its members.

    Args:
        reports: one a member.

    Returns:
        The first member's, with the transfers of all as `member_report` has them, the events of
        all, and what is live on all of them. What members give each other is under way when the
        last of them has sent: before that some wait for its computation.

    Example:
        >>> stage_report([StepReport(seconds=1.0, live_bytes=8), StepReport(seconds=1.5)]).seconds
        1.5
    """
    if len(reports) == 1:
        return reports[0]
    together = member_report(reports)
    sends = _by_tag([report.sends for report in reports])
    moves = {tag: max(each) for tag, each in sends.items() if tag.route.kind == RouteKind.MOVE}
    return replace(
        together,
        sends=together.sends | moves,
        seconds=max(report.seconds for report in reports),
        live_microbatches=max(report.live_microbatches for report in reports),
        live_bytes=sum(report.live_bytes for report in reports),
        events=[event for report in reports for event in report.events],
    )


def link_events(reports: Sequence[StepReport]) -> list[Event]:
    """The transfers of activations and of their gradients, and the moves among members.

    Args:
        reports: the reports of all stages, of one timed step.

    Returns:
        One event for each transfer, put together from what both of its ends saw.
    """
    return [each.event for each in _transfers(reports) if each.tag.route.kind in _DRAWN]


def link_uses(reports: Sequence[StepReport]) -> list[LinkUse]:
    """What the links between stages, and those among the members of a stage, did in a step.

    Args:
        reports: the reports of all stages, of one timed step: in others a worker sends what is not
            computed yet, and its clock may differ from that of the receiver.

    Returns:
        One entry for each direction that was used, and each carrier there, with transfers of every
        kind.
    """
    waits = {tag: seconds for report in reports for tag, seconds in report.waits.items()}
    links: dict[tuple[int, int, tuple[CarrierName, ...]], list[_SeenTransfer]] = {}
    for each in _transfers(reports):
        route = each.tag.route
        links.setdefault((route.source, route.target, each.carriers), []).append(each)
    return [
        LinkUse(
            source,
            target,
            num_bytes=sum(each.event.num_bytes for each in transfers),
            transfers=len(transfers),
            wait_seconds=sum(waits[each.tag] for each in transfers),
            busy_seconds=Timeline(tuple(each.event for each in transfers)).busy(
                link_track(source, target)
            ),
            step_seconds=max(report.seconds for report in reports),
            carriers=carriers,
        )
        for (source, target, carriers), transfers in sorted(links.items())
    ]


def exchange_seconds(reports: Sequence[StepReport]) -> float:
    """How long stages exchanged gradients and parameters that several of them hold.

    Args:
        reports: the reports of all stages, of one timed step.

    Returns:
        Seconds: of the stage that exchanged longest, in the direction that took longer; 0 where
        nothing is shared.
    """
    events: dict[tuple[int, str, str], list[Event]] = {}
    for tag, event, _ in _transfers(reports):
        kind, source, target = tag.route
        if kind in _SHARED:
            events.setdefault((source, kind, "out"), []).append(event)
            events.setdefault((target, kind, "in"), []).append(event)
    busy = {
        key: Timeline(tuple(replace(event, track="card") for event in each)).busy("card")
        for key, each in events.items()
    }
    stages = {stage for stage, _, _ in busy}
    return max(
        (
            sum(max(busy.get((s, kind, way), 0.0) for way in ("in", "out")) for kind in _SHARED)
            for s in stages
        ),
        default=0.0,
    )


class _SeenTransfer(NamedTuple):
    """A transfer of a step: when it was under way, and what took it."""

    tag: Tag
    event: Event
    carriers: tuple[CarrierName, ...]


def _transfers(reports: Sequence[StepReport]) -> Iterator[_SeenTransfer]:
    """Every transfer of which both ends tell."""
    arrivals = {tag: at for report in reports for tag, at in report.arrivals.items()}
    for report in reports:
        for tag, sent in report.sends.items():
            if tag in arrivals:
                yield _SeenTransfer(tag, _event(tag, sent, arrivals[tag]), arrivals[tag].carriers)


def _event(tag: Tag, sent: float, arrival: Arrival) -> Event:
    """A transfer on its link; it is called as the task is that waits for it, or as its move."""
    kind, source, target = tag.route
    number = max(tag.microbatch, tag.phase)
    name = tag.move or f"{_ACTIVATIONS.get(kind, kind)}{number}"
    return Event(
        link_track(source, target),
        name,
        "move" if kind == RouteKind.MOVE else "send",
        number if number >= 0 else None,
        sent,
        max(sent, arrival.at),
        arrival.num_bytes,
    )
