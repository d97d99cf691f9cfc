"""What the tasks of a stage take whose members share the context: computing, and a timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from hetjax.pipeline.program.work_classes import is_product
from hetjax.planner.costs.context_memory import ContextPrograms
from hetjax.planner.costs.context_timeline import MemberNetwork, Played, play
from hetjax.planner.costs.measured_times import measured_times
from hetjax.planner.costs.member_rates import PassSpeed, pass_speeds
from hetjax.planner.costs.union_cost import UnionExecution
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.context_items import ComputedRun, Item
from hetjax.planner.work.context_walk import Amounts, Shares
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.tensor_walk import TensorTrace
from hetjax.sharding.context.context_split import ContextSplit

FORWARD, BACKWARD = 0, 1
"""The two passes, whose times were measured apart."""

Part = Callable[[Shares], float]
"""What is taken of something that members have: a member's own, or all of it."""


class MemberSpeeds:
    """What the members of a stage take for what they compute.

    Args:
        problem: the planning problem, with its profile.
        union: how the members run.
        split: which tokens each has.
        found: what they do.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        union: UnionExecution,
        split: ContextSplit,
        found: ContextPrograms,
    ):
        self.union, self.found = union, found
        speeds = pass_speeds(problem)
        self._speeds = [speeds(each.subcluster, each.shape) for each in union.members]
        self._tokens = np.array(split.tokens) / split.length

    def seconds(self, items: Sequence[Item], member: int, direction: int) -> list[float]:
        """What a member takes for each item of a task; 0 for moves.

        Args:
            items: the items.
            member: the member's place.
            direction: of which pass they are.
        """

        def mine(figures: Shares) -> float:
            return float(figures[member])

        return self._seconds(items, member, mine, float(self._tokens[member]), direction)

    def alone_seconds(
        self, items: Sequence[Item], alone: Amounts, member: int, direction: int
    ) -> float:
        """What a member would take for the stage, were it not shared.

        What members compute adds up to something else: tiles of attention at the ends of their
        parts are no whole ones, and tokens are brought where they are needed.

        Args:
            items: what all members compute of the stage, as for `seconds`.
            alone: what one device computes of it, ``[]``.
            member: the member's place.
            direction: of which pass they are.
        """
        speed = self._speeds[member]
        seconds = _seconds_of(speed, alone, float, direction)
        if self.found.inside[member] is None:
            return seconds

        def all_of(figures: Shares) -> float:
            return float(figures.sum())

        computed = (item for item in items if isinstance(item, ComputedRun))
        undivided = sum(_seconds_of(speed, each.amounts, all_of, direction) for each in computed)
        divided = sum(self._seconds(items, member, all_of, 1.0, direction))
        return seconds * divided / undivided if undivided else 0.0

    def _seconds(
        self, items: Sequence[Item], member: int, part: Part, tokens: float, direction: int
    ) -> list[float]:
        speed, inside = self._speeds[member], self.found.inside[member]
        if inside is None:
            return [
                _seconds_of(speed, item.amounts, part, direction)
                if isinstance(item, ComputedRun)
                else 0.0
                for item in items
            ]
        places = (n for n, item in enumerate(items) if isinstance(item, ComputedRun))
        found, last = [0.0] * len(items), next(places, 0)
        for place, item in enumerate(items):
            if isinstance(item, ComputedRun):
                amounts, last = self._divided(item, inside), place
                values = (value for step in item.steps for value in step.outputs)
                found[place] += _seconds_of(speed, amounts, part, direction)
            else:
                # What its devices must bring together to send it, they do before.
                values = (move.moved for move in item.moves)
            found[last] += self._told_seconds(member, inside, values, tokens)
        return found

    def _divided(self, item: ComputedRun, inside: TensorTrace) -> Amounts:
        """What one device of a member computes."""
        trace = self.found.trace
        nothing = np.zeros(trace.count)
        total = Amounts(nothing, nothing, {})
        for step in item.steps:
            if step in trace.moves:
                continue
            whole, share = trace.amounts(step), inside.of_step(step)
            classes = {
                name: figures * (share.products if is_product(name) else share.traffic)
                for name, figures in whole.classes.items()
            }
            total += Amounts(whole.flops * share.products, whole.traffic * share.traffic, classes)
        return total

    def _told_seconds(
        self, member: int, inside: TensorTrace, values: Iterable[int], tokens: float
    ) -> float:
        """What a member's devices take to tell each other what makes some values whole."""
        link, ring = self.union.members[member].link, inside.devices - 1
        sizes = [size for value in values if (size := inside.exchanged.get(value))]
        waiting = 2 * ring * link.latency * len(sizes)
        return waiting + 2 * ring / inside.devices * tokens * sum(sizes) / link.bandwidth


class TaskCosts:
    """What tasks take the members of a stage.

    Args:
        problem: the planning problem, with its profile.
        run: the stage's work on one device.
        speeds: what the members take for what they compute.
        network: what carries their moves.
        alone: finds what one device computes of the stage, forward and backward.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        run: Runs,
        speeds: MemberSpeeds,
        network: MemberNetwork,
        alone: Callable[[], tuple[Amounts, Amounts]],
    ):
        self.union, self.found = speeds.union, speeds.found
        self._network, self._speeds, self._alone = network, speeds, alone
        self._factors = np.array([self._measured(problem, run, each) for each in ("F", "B")])

    def played(self, name: str) -> Played:
        """The timeline of a task."""
        task = self.found.tasks[name]
        factors = self._factors[task.direction]
        members = range(len(self.union.members))
        seconds = np.array([self._speeds.seconds(task.items, m, task.direction) for m in members])
        rows = [
            factors * row if isinstance(item, ComputedRun) else None
            for item, row in zip(task.items, seconds.T, strict=True)
        ]
        return play(task.items, rows, self._network)

    def _measured(self, problem: PlanningProblem, run: Runs, name: str) -> Shares:
        """By what members take longer than their rates say, where all of the stage was measured."""
        task, found = self.found.tasks[name], []
        for m, member in enumerate(self.union.members):
            times = measured_times(problem, run, replace(member, examples=1.0))
            if times is None:
                found.append(1.0)
                continue
            whole = times.forward if task.direction == FORWARD else times.backward
            amounts = self._alone()[task.direction]
            expected = self._speeds.alone_seconds(task.items, amounts, m, task.direction)
            measured = float(run.in_form(whole.of(run.layers)))
            # Of layers that are frozen there is no backward pass.
            found.append(measured / expected if expected else 1.0)
        return np.array(found)


def _seconds_of(speed: PassSpeed, of: Amounts, part: Part, way: int) -> float:
    """What a member takes for a part of something."""
    work = tuple((name, part(figures)) for name, figures in of.classes.items())
    return speed.seconds(part(of.flops), part(of.traffic), work, way)
