"""What the members of a stage hold that share the context, program by program.

A member runs a task as several programs, between moves. While one runs, there is what it takes and
makes, what XLA needs beside that, and all that earlier programs have made for later ones. What is
kept of a microbatch goes as soon as nothing reads it any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from hetjax.pipeline.program.step_program import StepProgram
from hetjax.pipeline.program.temporaries import Temporaries
from hetjax.pipeline.program.traced_program import Operand, Step, num_bytes
from hetjax.pipeline.stages.backward import StagePrograms
from hetjax.planner.costs.union_cost import UnionExecution
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.context_items import ComputedRun, Item
from hetjax.planner.work.context_walk import ContextTrace, Shares
from hetjax.planner.work.execution import parameter_bytes
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.tensor_walk import TensorTrace


@dataclass(frozen=True, eq=False)
class ContextTask:
    """A task of a stage whose members share the context.

    Args:
        program: what it computes, of all members together.
        items: what members compute and move, in turn.
        direction: of which pass it is.
    """

    program: StepProgram
    items: tuple[Item, ...]
    direction: int


@dataclass(frozen=True, eq=False)
class ContextPrograms:
    """What the members of a stage do for a microbatch.

    Args:
        programs: the stage's programs, with moves in them.
        trace: what members have of the values in them.
        tasks: by name.
        inside: of each member that divides values over a tensor axis, what its devices have.
    """

    programs: StagePrograms
    trace: ContextTrace
    tasks: Mapping[str, ContextTask]
    inside: tuple[TensorTrace | None, ...]


def held_bytes(
    problem: PlanningProblem, run: Runs, union: UnionExecution, found: ContextPrograms
) -> list[dict[str, int]]:
    """What a device of each member holds.

    Args:
        problem: the planning problem.
        run: the stage's work on one device.
        union: how the members run.
        found: what they do.

    Returns:
        For each member fields of a `hetjax.planner.plan.prediction.MemberPrediction`.
    """
    programs = found.programs
    sizes = _Sizes(found, [execution.kind.is_processor for execution in union.members])
    _, batch, received, residuals, *_ = programs.backward.arguments
    inputs, again = (*batch, *received), np.zeros(found.trace.count)
    kept = sizes.of((*inputs, *residuals))
    if programs.recompute is not None:
        _, *read = programs.recompute.arguments
        kept, again = sizes.of((*inputs, *(v for each in read for v in each))), sizes.of(residuals)
    deferred = sizes.of(programs.split.input_gradient.outputs[1])
    waiting = sizes.of(programs.forward.outputs[0]) + sizes.of(received)
    # Of one microbatch there are no sums before they are made.
    sums = found.tasks["B"].program.summands if problem.num_microbatches == 1 else None
    awaited = frozenset(sums or ())
    peaks = {
        name: sizes.peak(task, awaited)
        for name, task in found.tasks.items()
        if name in ("F", "R", "B")
    }
    most = np.maximum.reduce(
        [each - kept - (again if name != "F" else 0.0) for name, each in peaks.items()]
    )
    rows = []
    for m, execution in enumerate(union.members):
        on_device = problem.optimizer_bytes if execution.host_link is None else 0.0
        figures = {
            "state_bytes": parameter_bytes(problem.program, on_device, run, execution).held,
            "working_bytes": max(0.0, most[m]) + waiting[m],
            "activation_bytes": kept[m],
            "recomputed_bytes": again[m],
            "deferred_bytes": deferred[m],
        }
        rows.append({name: int(figure) for name, figure in figures.items()})
    return rows


class _Sizes:
    """What members hold of values, and of tasks.

    Args:
        found: what they do.
        on_cpu: for each member whether its programs are compiled for CPUs; see `Temporaries`.
    """

    def __init__(self, found: ContextPrograms, on_cpu: Sequence[bool]):
        self._on_cpu = tuple(on_cpu)
        self._trace, self._avals = found.trace, found.programs.forward.avals
        self._tensor = found.inside
        self._same = dict(self._unmoved())
        self._known: dict[int, Shares] = {}

    def size(self, value: int) -> Shares:
        """Bytes of a value on each member, on one device of it."""
        if value not in self._known:
            size = num_bytes(self._avals[value])
            parts = [1.0 if each is None else each.of_value(value) for each in self._tensor]
            self._known[value] = self._trace.held_bytes(value, size) * np.array(parts)
        return self._known[value]

    def _unmoved(self) -> Iterator[tuple[int, int]]:
        """By the number that a reshard gives a value the one before, where every device has it.

        Where members have a tensor axis, the plan says so of many values.
        """
        tensors, known = [each for each in self._tensor if each is not None], dict[int, int]()
        for move in self._trace.moves.values() if tensors else ():
            before, after = move.value, move.moved
            one, other = (self._trace.held_bytes(value, 1) for value in (before, after))
            is_moved = move.messages or (one != other).any()
            if not is_moved and all(t.of_value(before) == t.of_value(after) for t in tensors):
                known[after] = known.get(before, before)
                yield after, known[after]

    def _first(self, values: Iterable[Operand]) -> set[int]:
        """Values by the first numbers that they had."""
        return {self._same.get(value, value) for value in values if isinstance(value, int)}

    def of(self, values: Iterable[Operand]) -> Shares:
        """Bytes of several values."""
        return sum(map(self.size, sorted(self._first(values))), np.zeros(self._trace.count))

    def peak(self, task: ContextTask, awaited: Set[Operand]) -> Shares:
        """The most that a task holds, with all that it is given but parameters and sums.

        Args:
            task: the task.
            awaited: sums that are not there before they are made. Until then they are taken off,
                since a member's state has room for all.
        """
        program, awaited = task.program, self._first(awaited)
        missing = self.of(awaited)
        _, *arguments = program.arguments
        alive = self._first(value for argument in arguments for value in argument)
        returned = self._first(value for part in program.outputs for value in part)
        sums = self._first(program.summands or ())
        held, most = self.of(alive), np.full(self._trace.count, -np.inf)
        uses = list(_uses(task.items))
        used = [tuple(map(self._first, each)) for each in uses]
        last = {value: place for place, (read, made) in enumerate(used) for value in (*read, *made)}
        for place, (item, (read, made)) in enumerate(zip(task.items, used, strict=True)):
            made = made - alive
            kept = {v for v in made if v in returned or (last[v] > place and v not in sums)}
            added = self.of(kept)
            missing = missing - self.of(v for v in made if v in awaited)
            most = np.maximum(most, held + added - missing)
            if isinstance(item, ComputedRun):
                # Its steps know values by the numbers that these have there.
                reads, makes = uses[place]
                outputs = [v for v in makes if self._same.get(v, v) in kept | (made & sums)]
                inside = self._inside(item, reads, outputs)
                most = np.maximum(most, held + added + inside - missing)
            held = held + added
            alive |= kept
            gone = {v for v in (*read, *made) if last[v] == place and v in alive} - returned
            held = held - self.of(gone)
            alive -= gone
        return most

    def _inside(self, item: ComputedRun, read: Sequence[int], outputs: Sequence[int]) -> Shares:
        """What a program holds beside what goes in and comes out."""
        program = StepProgram(tuple(item.steps), (tuple(read),), (tuple(outputs),), self._avals)
        orders = {way: Temporaries(program, on_cpu=way) for way in {*self._on_cpu}}

        def most(member: int) -> int:
            def inside(step: Step) -> int | None:
                blocks, tensor = self._trace.blocks.get(step), self._tensor[member]
                if blocks is None:
                    return None
                share = 1.0 if tensor is None else tensor.of_step(step).products
                return int(blocks[member] * share)

            temporaries = orders[self._on_cpu[member]]
            return temporaries.most_bytes(lambda value: int(self.size(value)[member]), inside)

        return np.array([float(most(member)) for member in range(self._trace.count)])


def _uses(items: Sequence[Item]) -> Iterator[tuple[list[int], list[int]]]:
    """The values that each item reads which another one made, and those that it makes."""
    for item in items:
        if isinstance(item, ComputedRun):
            made = [value for step in item.steps for value in step.outputs]
            own = set(made)
            reads = dict.fromkeys(value for step in item.steps for value in step.values())
            yield [value for value in reads if value not in own], made
        else:
            yield [move.value for move in item.moves], [move.moved for move in item.moves]
