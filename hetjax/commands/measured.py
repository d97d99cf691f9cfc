"""Predicted beside measured: the rows of a run's tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median

from hetjax.pipeline.timeline.measured_times import seconds_on_link
from hetjax.pipeline.timeline.timeline import Event, Timeline, link_track
from hetjax.planner import Plan, StagePlan
from hetjax.report import CarrierRow, LinkRow, PredictionRow
from hetjax.runtime import CarrierCurves, LinkUse, StepReport
from hetjax.runtime.moves.carriers import taken_sizes


@dataclass(frozen=True)
class TimedStep:
    """What was seen of a step whose operations were timed.

    Args:
        timeline: when each ran.
        exchange_seconds: how long stages exchanged what several of them hold.
    """

    timeline: Timeline
    exchange_seconds: float = 0.0


def prediction_rows(
    plan: Plan, steps: Sequence[TimedStep], step_time: float
) -> list[PredictionRow]:
    """Predicted beside measured.

    Args:
        plan: a plan; where it has no prediction, 0 is given for what was predicted.
        steps: timed steps; of each figure the median over them counts.
        step_time: the usual step's seconds, measured without taking times inside it.

    Returns:
        The step time, then each stage's tasks and transfers, of one microbatch, and the exchange
        between pipelines; what was not seen is left out.
    """
    if plan.prediction is None:
        return [PredictionRow("step time", 0.0, step_time)]
    rows = [PredictionRow("step time", plan.prediction.step_time, step_time)]
    for s, stage in enumerate(plan.prediction.stages):
        figures = (
            (f"stage {s} forward", stage.forward_seconds),
            (f"stage {s} backward", stage.backward_seconds + stage.recompute_seconds),
            (f"stage {s} update", stage.update_seconds),
            (f"activations {s} to {s + 1}", stage.communication_seconds),
            (f"gradients {s} to {s - 1}", stage.return_seconds),
        )
        seen = [tuple(_stage_seconds(step.timeline, s)) for step in steps]
        measured = [median(column) for column in zip(*seen, strict=True)] or [0.0] * len(figures)
        rows += [PredictionRow(*row, each) for row, each in zip(figures, measured, strict=True)]
    exchanges = [step.exchange_seconds for step in steps]
    if plan.prediction.sharing_seconds > 0 and exchanges:
        name, predicted = "exchange between stages", plan.prediction.sharing_seconds
        rows.append(PredictionRow(name, predicted, median(exchanges)))
    return [row for row in rows if row.measured > 0]


def _stage_seconds(timeline: Timeline, stage: int) -> Iterator[float]:
    """A stage's forward and backward pass, its update, and a transfer to either neighbour.

    Of several members what the slowest computes: the others wait for it.
    """
    members = [timeline.on(track) for track in timeline.member_tracks(stage)]
    yield max((_pass_seconds(events, "F") for events in members), default=0.0)
    yield max((_pass_seconds(events, "B", "R", "W") for events in members), default=0.0)
    # The update runs in several programs.
    yield max((_seconds(events, "update") for events in members), default=0.0)
    for neighbour in (stage + 1, stage - 1):
        transfers = list(seconds_on_link(timeline.on(link_track(stage, neighbour))))
        yield mean(transfers) if transfers else 0.0


def _pass_seconds(events: Sequence[Event], kind: str, *besides: str) -> float:
    """The mean duration of a pass, in all its segments, with what the schedule runs of it apart."""
    microbatches = {event.microbatch for event in events if event.kind == kind}
    return _seconds(events, kind, *besides) / max(len(microbatches), 1)


def _seconds(events: Sequence[Event], *kinds: str) -> float:
    return sum(event.duration for event in events if event.kind in kinds)


def link_rows(plan: Plan, uses: Sequence[LinkUse]) -> list[LinkRow]:
    """What the links between stages and among members did in a step.

    Args:
        plan: the plan.
        uses: what was seen of each direction.

    Returns:
        One row for each direction, and each carrier there.
    """
    stages = plan.stages
    return [
        LinkRow(
            name=_link_name(use),
            carrier=" and ".join(use.carriers),
            num_bytes=use.num_bytes,
            transfers=use.transfers,
            rate=use.rate,
            bandwidth=_bandwidth(plan, stages[use.source], stages[use.target]),
            busy=use.busy,
            wait_seconds=use.wait_seconds,
        )
        for use in uses
    ]


def _link_name(use: LinkUse) -> str:
    if use.source == use.target:
        return f"within stage {use.source}"
    return f"stage {use.source} to {use.target}"


def carrier_rows(curves: CarrierCurves) -> list[CarrierRow]:
    """What was measured of carriers, and which messages each takes.

    Args:
        curves: what was measured.

    Returns:
        One row for each carrier of each link.
    """
    several = {end.address for link in curves.links for end in link.between}
    rows = []
    for link in curves.links:
        ends = [str(end) if len(several) > 1 else end.subcluster for end in link.between]
        name = " and ".join(dict.fromkeys(ends))
        taken = taken_sizes(link.carriers)
        ends_of = (*(start for _, start in taken[1:]), None)
        spans = [
            (carrier, (start, end)) for (carrier, start), end in zip(taken, ends_of, strict=True)
        ]
        rows += [
            CarrierRow(
                name,
                carrier,
                dict(zip(each.sizes, each.seconds, strict=True)),
                [span for of, span in spans if of == carrier],
            )
            for carrier, each in link.carriers.items()
        ]
    return rows


def _bandwidth(plan: Plan, source: StagePlan, target: StagePlan) -> float:
    """That of the slowest link between members of two stages, or among the members of one."""
    pairs = itertools.product(source.submeshes, target.submeshes)
    links = (plan.cluster.link_between(a, b) for a, b in pairs if source is not target or a != b)
    return min(link.bandwidth for link in links)


def live_microbatches(plan: Plan, reports: Sequence[StepReport]) -> str:
    """How many microbatches every stage held at once, beside the schedule's bound.

    Args:
        plan: the plan.
        reports: what the stages' workers saw in a step.

    Returns:
        One line of text.
    """
    bounds = (
        pipeline.schedule.live_bound(s)
        for pipeline in plan.pipelines
        for s in range(len(pipeline.stages))
    )
    held = (
        f"stage {s}: {report.live_microbatches} (bound {bound})"
        for s, (report, bound) in enumerate(zip(reports, bounds, strict=True))
    )
    return "live microbatches: " + ", ".join(held)
