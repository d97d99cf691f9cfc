"""Times that no schedule beats, and Harp's closed form for H-1F1B's."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hetjax.errors import InputError
from hetjax.pipeline.schedules.live_limits import check_live_limits
from hetjax.pipeline.timeline.times import StepTimes


def lower_bound(
    num_microbatches: int,
    times: StepTimes,
    live_limits: Sequence[int] | None = None,
    sharing: Sequence[Sequence[int]] = (),
) -> float:
    """A time that no schedule beats, under a cap of live microbatches or however much it holds.

    Proof. Take one stage, or one direction of a link. It executes its operations one at a time. To
    each of them belongs a *head* r, a time before which it cannot start, and a *tail* q, a time
    that must still pass after it has ended. For any set of these operations the makespan is at
    least ``min r + sum of durations + min q``: none of the set starts before the least head, they
    take their sum, and after the last one the least tail follows. The bound is the maximum of
    that over all sets, all stages and all links. (The maximum over the sets of one machine is the
    makespan of its preemptive schedule, the longest tail first: Carlier 1982.)

    Heads. Number the operations of one kind by their order on the stage. Microbatches are alike,
    so the k-th F, from 0, does not start before

    - the k-th transfer has arrived; on a link, the k-th starts after the (k - 1)-th has ended, and
      after the k-th F before it has;
    - the (k - 1)-th F has ended;
    - with a cap of N, the (k - N)-th microbatch is complete: of the k that started before, at most
      N - 1 are still live. A stage holds a microbatch at least from its F to the end of the way
      there and back, so that caps limit the pace of the whole pipeline.

    The k-th B does not start before the k-th gradient has arrived (on the last stage, the k-th F
    has ended), R included on stages that recompute; nor before the stage has done k + 1 F and R
    and k B since its first task. The k-th W follows the k-th B, and k + 1 F, R, B and k W. All
    these are sums and maxima of bounds that are proved before, so they are bounds.

    Tails are the heads of the same step read backwards in time: the last W comes first, B runs
    from the first stage to the last, and F comes back.

    A whole backward pass counts as an input gradient that is sent when the pass ends, and the
    rest of its time as a weight gradient. Where halves are known, the two take the least that
    either form takes; so the bound holds for schedules that split, that do not, and mixed ones.

    Args:
        num_microbatches: M, at least 1.
        times: what the tasks take.
        live_limits: how many microbatches may be live on every stage; None for any number.
        sharing: groups of stages that share devices. They are one machine, which has all of their
            tasks and updates to do from when the first F of one of them can start.

    Returns:
        Seconds, at most the makespan of every such schedule under `simulate_schedule`.

    Raises:
        InputError: `num_microbatches` is below 1, or a cap is, or there is not one a stage.

    Source: Carlier, The one-machine sequencing problem, 1982, for the bound of one machine.

    Example:
        >>> times = StepTimes([1.0, 1.0], [2.0, 2.0], [0.5], [0.5])
        >>> lower_bound(2, times), lower_bound(2, times, live_limits=[1, 1])
        (10.0, 14.0)
    """
    if num_microbatches < 1:
        raise InputError(f"num_microbatches is {num_microbatches}; it must be 1 or more")
    stages = range(times.num_stages)
    limits = check_live_limits(live_limits, times.num_stages, num_microbatches)
    durations = [_durations(times, stage) for stage in stages]
    heads = [_PathTimes(before=0.0, there=d.f, turn=d.r, back=d.b, after=d.w) for d in durations]
    tails = [
        _PathTimes(before=d.w, there=d.b, turn=d.r, back=d.f, after=0.0, start=d.update)
        for d in durations
    ]
    _travel(heads, times.sends, times.returns, limits, num_microbatches)
    _travel(tails, times.returns, times.sends, limits, num_microbatches)
    bounds = [_stage_bound(*each) for each in zip(durations, heads, tails, strict=True)]
    for a, (there, back) in enumerate(zip(times.sends, times.returns, strict=True)):
        bounds.append(_one_machine(_jobs(there, heads[a].sent_there, tails[a + 1].sent_back)))
        bounds.append(_one_machine(_jobs(back, heads[a + 1].sent_back, tails[a].sent_there)))
    for group in sharing:
        begin = min(heads[stage].starts_there[0] for stage in group)
        of_group = [durations[stage] for stage in group]
        work = sum(d.f + d.r + d.b + d.w for d in of_group)
        bounds.append(begin + num_microbatches * work + sum(d.update for d in of_group))
    return max(bounds)


def harp_latency(
    compute: Sequence[float], communication: Sequence[float], num_microbatches: int
) -> float:
    """Harp's closed form for the step time under H-1F1B, where every c_i is at most t_max.

    ``sum_i (t_i + 2 c_i) + (M - 1) t_max``: one microbatch's way through the pipeline and back,
    then one more microbatch every t_max. Where stages are equal and so are links, the
    discrete-event model gives the same; where links differ it can give up to S t_max more, lost
    once while the pipeline fills.

    Args:
        compute: t_i, forward plus backward of one microbatch, in seconds; S long.
        communication: c_i, one transfer between stage i and i + 1, in seconds; S - 1 long.
        num_microbatches: M, written B in the paper.

    Returns:
        Seconds.

    Source: Harp equation 12.

    Example:
        >>> harp_latency([3.0, 3.0], [0.5], num_microbatches=2)
        10.0
    """
    return sum(compute) + 2 * sum(communication) + (num_microbatches - 1) * max(compute)


@dataclass(frozen=True)
class _Durations:
    """The least that the operations of one microbatch take on a stage, and the stage's update."""

    f: float
    r: float
    b: float
    w: float
    update: float


def _durations(times: StepTimes, stage: int) -> _Durations:
    whole, b, w = times.backward[stage], times.backward[stage], 0.0
    if times.can_split:
        halves = times.input_gradient[stage] + times.weight_gradient[stage]
        b = min(whole, times.input_gradient[stage])
        w = max(0.0, min(whole, halves) - b)
    update = times.update[stage] if len(times.update) else 0.0
    return _Durations(times.forward[stage], times.recompute_seconds(stage), b, w, update)


class _PathTimes:
    """A stage as the microbatches pass it on their way there and back, and when they can.

    Read forwards in time the way there is F, the way back B, and W comes after; backwards in time
    W comes before, the way there is B and the way back F. All lists are by microbatch.
    """

    def __init__(
        self,
        before: float,
        there: float,
        turn: float,
        back: float,
        after: float,
        start: float = 0.0,
    ):
        self.before, self.there, self.turn = before, there, turn
        # When the stage can start its very first operation; the first that goes there tells.
        self.first = 0.0
        self.back, self.after, self.start = back, after, start
        self.starts_before: list[float] = []
        self.starts_there: list[float] = []
        self.starts_back: list[float] = []
        self.starts_after: list[float] = []
        self.sent_there: list[float] = []
        self.sent_back: list[float] = []

    def go(self, k: int, arrival: float, limit: int) -> float:
        """When the k-th microbatch can be through on its way there."""
        before, there = self.start, arrival
        if k:
            before = max(before, self.starts_before[-1] + self.before)
            there = max(there, self.starts_there[-1] + self.there)
        if k >= limit:
            before = max(before, self.starts_after[k - limit] + self.after)
        self.starts_before.append(before)
        there = max(there, before + self.before)
        if not k:
            # Only now is it known when the stage starts at all.
            self.first = before if self.before else there
        there = max(there, self.first + (k + 1) * self.before + k * self.there)
        self.starts_there.append(there)
        return there + self.there

    def come_back(self, k: int, arrival: float) -> float:
        """When the k-th microbatch can be through on its way back."""
        on_the_way = self.before + self.there + self.turn
        start = max(
            arrival,
            self.starts_there[k] + self.there + self.turn,
            self.first + (k + 1) * on_the_way + k * self.back,
        )
        if k:
            start = max(start, self.starts_back[-1] + self.back)
        self.starts_back.append(start)
        end = start + self.back
        after = max(end, self.first + (k + 1) * (on_the_way + self.back) + k * self.after)
        if k:
            after = max(after, self.starts_after[-1] + self.after)
        self.starts_after.append(after)
        return end


def _travel(
    ways: Sequence[_PathTimes],
    there: Sequence[float],
    back: Sequence[float],
    limits: Sequence[int],
    num_microbatches: int,
) -> None:
    """Sends all microbatches along the stages and back, each as early as it could be."""
    last = len(ways) - 1
    for k in range(num_microbatches):
        time = 0.0
        for stage, way in enumerate(ways):
            time = way.go(k, time, limits[stage])
            if stage < last:
                time = _send(way.sent_there, time, there[stage])
        for stage in range(last, -1, -1):
            way = ways[stage]
            time = way.come_back(k, time)
            if stage:
                time = _send(way.sent_back, time, back[stage - 1])


def _send(sent: list[float], ready: float, seconds: float) -> float:
    """When the next transfer of a link can have arrived; notes when it can start."""
    sent.append(max(ready, sent[-1] + seconds) if sent else ready)
    return sent[-1] + seconds


MachineJob = tuple[float, float, float]
"""An operation of one machine: its head, its duration, its tail."""


def _stage_bound(durations: _Durations, heads: _PathTimes, tails: _PathTimes) -> float:
    recompute_heads = [start + durations.f for start in heads.starts_there]
    recompute_tails = [start + durations.b for start in tails.starts_there]
    jobs = [
        *_jobs(durations.f, heads.starts_there, tails.starts_back),
        *_jobs(durations.b, heads.starts_back, tails.starts_there),
    ]
    if durations.r:
        jobs += _jobs(durations.r, recompute_heads, recompute_tails)
    if durations.w:
        jobs += _jobs(durations.w, heads.starts_after, tails.starts_before)
    return _one_machine(jobs)


def _jobs(seconds: float, heads: Sequence[float], tails: Sequence[float]) -> list[MachineJob]:
    """The operations of one kind: the first has the tail that is the last one's from the end."""
    return [(head, seconds, tail) for head, tail in zip(heads, reversed(tails), strict=True)]


def _one_machine(jobs: Sequence[MachineJob]) -> float:
    """The makespan with tails of the best preemptive schedule: always the longest tail first."""
    waiting = sorted(jobs, reverse=True)
    ready: list[tuple[float, float]] = []
    now = makespan = 0.0
    while waiting or ready:
        if not ready:
            now = max(now, waiting[-1][0])
        while waiting and waiting[-1][0] <= now:
            _, seconds, tail = waiting.pop()
            heapq.heappush(ready, (-tail, seconds))
        tail, seconds = heapq.heappop(ready)
        until = waiting[-1][0] if waiting else float("inf")
        if now + seconds <= until:
            now += seconds
            makespan = max(makespan, now - tail)
        else:
            heapq.heappush(ready, (tail, seconds - (until - now)))
            now = until
    return makespan
