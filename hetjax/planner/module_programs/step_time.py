"""What a step of a chain's programs takes: members wait for each other at moves."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.planner.module_programs.charges import REGROUP, Loads, MoveOf, Moves
from hetjax.planner.module_programs.module_chain import ModuleChain
from hetjax.planner.module_programs.program import ModuleProgram, shared_update
from hetjax.planner.module_programs.rates import Rates
from hetjax.planner.module_programs.ways import WayLoad
from hetjax.planner.module_programs.working_memory import working_bytes
from hetjax.planner.work.arrays import FloatArray

Ratios = Sequence[FloatArray]
"""For each kind of module, what part of every class of dimensions each member has."""


@dataclass(frozen=True, eq=False)
class Span:
    """What members compute between two moves.

    Args:
        seconds: of each member, `[members]`.
        move: seconds of the moves after it; None after the last.
    """

    seconds: FloatArray
    move: float | None


class StepTime(NamedTuple):
    """What the parts of a step take.

    Args:
        forward: the forward pass of one microbatch.
        backward: its backward pass.
        update: the update, with the sums of gradients before it.
        waited: for each member the part of the computing in which the others wait for it.
        computing: for each member what it computes itself of forward and backward pass,
            `[2, members]`.
    """

    forward: float
    backward: float
    update: float
    waited: FloatArray
    computing: FloatArray

    def step(self, num_microbatches: int) -> float:
        """Seconds of a step.

        Args:
            num_microbatches: microbatches in it.
        """
        return num_microbatches * (self.forward + self.backward) + self.update


class WaitingClock:
    """Adds up what members take, who wait for each other at moves.

    Args:
        count: how many members.

    Attributes:
        waited: for how long the others have waited for each member.
        computing: what each has computed.

    Source: HAP, section 3.2 (figure 6).
    """

    def __init__(self, count: int):
        self._open, self._seconds = np.zeros(count), 0.0
        self.waited, self.computing = np.zeros(count), np.zeros(count)

    def run(self, spans: Sequence[Span], times: int = 1) -> None:
        """All members run what stands between moves.

        Args:
            spans: what they run.
            times: how often, one after the other.
        """
        before = self._seconds, self._open, self.waited, self.computing
        for _ in range(min(times, 2)):
            before = self._seconds, self._open, self.waited.copy(), self.computing.copy()
            for span in spans:
                self._open = self._open + span.seconds
                if span.move is not None:
                    self.move(span.move)
        if times > 2:
            # From the second time on, each adds the same.
            self._seconds += (times - 2) * (self._seconds - before[0])
            self._open = self._open + (times - 2) * (self._open - before[1])
            self.waited += (times - 2) * (self.waited - before[2])
            self.computing += (times - 2) * (self.computing - before[3])

    def move(self, seconds: float) -> None:
        """All wait for each other, and move something."""
        self._close()
        self._seconds += seconds

    def done(self) -> float:
        """When the slowest is done."""
        self._close()
        return self._seconds

    def _close(self) -> None:
        place = int(np.argmax(self._open))
        self._seconds += float(self._open[place])
        self.waited[place] += float(self._open[place])
        self.computing += self._open
        self._open = np.zeros_like(self._open)


def step_time(
    chain: ModuleChain,
    programs: Sequence[ModuleProgram],
    rates: Rates,
    ratios: Ratios,
    state_bytes: float,
) -> StepTime:
    """What a step takes.

    Args:
        chain: the modules.
        programs: what members do of each.
        rates: what computing and moving takes.
        ratios: the ratios of each kind of module.
        state_bytes: bytes of optimizer state for each element of a parameter.

    Source: HAP, section 3.2.
    """
    known: dict[int, tuple[list[Span], list[Span], list[Span]]] = {}
    for module, program in zip(chain.modules, programs, strict=True):
        if id(program) not in known:
            known[id(program)] = spans_of(program, rates, ratios[module.kind], state_bytes)
    clocks = [WaitingClock(rates.count) for _ in range(3)]
    runs = list(alike_runs(programs))
    for place, times in runs:
        _regroup(chain, programs, place, clocks[0], rates, ratios, forward=True)
        clocks[0].run(known[id(programs[place])][0], times)
    for place, times in reversed(runs):
        clocks[1].run(known[id(programs[place])][1], times)
        _regroup(chain, programs, place, clocks[1], rates, ratios, forward=False)
    for place, times in runs:
        clocks[2].run(known[id(programs[place])][2], times)
    forward, backward, update = (clock.done() for clock in clocks)
    waited = clocks[0].waited + clocks[1].waited + clocks[2].waited
    return StepTime(
        forward,
        backward,
        update + _shared_seconds(chain, programs, rates, ratios, state_bytes),
        waited / max(1e-30, float(waited.sum())),
        np.stack([clocks[0].computing, clocks[1].computing]),
    )


def alike_runs(programs: Sequence[ModuleProgram]) -> Iterator[tuple[int, int]]:
    """Modules in a row that have one program: nothing is regrouped among them.

    Args:
        programs: of each module its program.

    Yields:
        The place of the first one, and how many there are.
    """
    place = 0
    for _, run in itertools.groupby(programs, id):
        times = len(list(run))
        yield place, times
        place += times


def spans_of(
    program: ModuleProgram, rates: Rates, shares: FloatArray, state_bytes: float
) -> tuple[list[Span], list[Span], list[Span]]:
    """What members compute between moves: forward, backward, and in the update.

    Args:
        program: what members do of a module.
        rates: what computing and moving takes.
        shares: what part of every class of dimensions each member has.
        state_bytes: bytes of optimizer state for each element of a parameter.
    """
    steps = program.trace.traced.flat.steps
    loads = rates.load_seconds(program.loads, shares)
    waiting: dict[int, float] = {}
    moved = rates.move_seconds(program.charged_moves, shares)
    returned, given = set(program.trace.returned.values()), 0.0
    for each, seconds in zip(program.moves, moved.tolist(), strict=True):
        if each.equation == len(steps) and each.value in returned:
            given += seconds
            continue
        waiting[each.equation] = waiting.get(each.equation, 0.0) + seconds
    found: tuple[list[Span], list[Span], list[Span]] = ([], [], [])
    opened = [np.zeros(rates.count) for _ in range(3)]

    def cut(which: int, seconds: float) -> None:
        found[which].append(Span(opened[which], seconds))
        opened[which] = np.zeros(rates.count)

    for equation in range(len(steps)):
        which = 0 if equation in program.trace.forward else 1
        if equation in waiting:
            cut(which, waiting[equation])
        opened[which] = opened[which] + loads[equation]
    if given:
        cut(1, given)
    if len(steps) in waiting:
        cut(2, waiting[len(steps)])
    updates = rates.load_seconds(Loads(program.update_loads(state_bytes)), shares)
    opened[2] = opened[2] + updates.sum(axis=0)
    inputs = program.input_loads(program.held_inputs)
    opened[0] = opened[0] + rates.load_seconds(inputs, shares).sum(axis=0)
    for which in range(3):
        found[which].append(Span(opened[which], None))
    return found


class HeldBytes(NamedTuple):
    """What a device of each member holds, in bytes, `[members]`.

    Args:
        state: parameters, gradients and optimizer state.
        residuals: what one microbatch keeps for its backward pass.
        working: the most that a pass of one module holds beside these.
    """

    state: FloatArray
    residuals: FloatArray
    working: FloatArray


def held_bytes(
    chain: ModuleChain,
    programs: Sequence[ModuleProgram],
    rates: Rates,
    ratios: Ratios,
    state_bytes: float,
) -> HeldBytes:
    """What devices hold.

    Args:
        chain: the modules.
        programs: what members do of each.
        rates: the members.
        ratios: the ratios of each kind of module.
        state_bytes: bytes of optimizer state for each element of a parameter.
    """
    state, residuals, working = (np.zeros(rates.count) for _ in HeldBytes._fields)
    known: dict[int, tuple[FloatArray, FloatArray]] = {}
    for place, times in alike_runs(programs):
        program = programs[place]
        shares = ratios[program.kind]
        if id(program) not in known:
            held = rates.held_bytes(Loads(program.update_loads(state_bytes)), shares)
            known[id(program)] = held, rates.held_bytes(program.loads, shares)
            working = np.maximum(working, working_bytes(program, rates, shares))
        mine = known[id(program)]
        state, residuals = state + times * mine[0], residuals + times * mine[1]
        for inputs, count in Counter(chain.new_inputs[place : place + times]).items():
            loads = program.input_loads(inputs)
            residuals = residuals + count * rates.held_bytes(loads, shares)
    for kind, loads, _ in shared_updates(chain, programs, state_bytes):
        state = state + rates.held_bytes(Loads(loads), ratios[kind])
    return HeldBytes(state, residuals, working)


def regroup_seconds(
    program: ModuleProgram, rates: Rates, ours: FloatArray, theirs: FloatArray, *, forward: bool
) -> float:
    """What it takes that a module divides values in other ratios than the one before it.

    Args:
        program: the module's program.
        rates: what moving takes.
        ours: what part of every class of dimensions each member has in it.
        theirs: the same of the module before.
        forward: of the values received; else of the cotangents given back.
    """
    traced = program.trace.traced
    values = traced.received if forward else program.trace.returned.values()
    total = 0.0
    for value in values:
        layout = program.made(value)
        if not isinstance(value, int) or layout < 0:
            continue
        number = program.dimensions.class_of(program.kind, value, layout)
        total += regrouped(rates, program.trace.num_bytes[value], ours, theirs, number)
    return total


def regrouped(
    rates: Rates, size: float, ours: FloatArray, theirs: FloatArray, number: int
) -> float:
    """What it takes to bring a value from some ratios of a class of dimensions to others."""
    if np.array_equal(ours[number], theirs[number]):
        return 0.0
    move = MoveOf(REGROUP, float(size), number, number)
    return rates.network.seconds(move, theirs[number], ours[number])


def _regroup(
    chain: ModuleChain,
    programs: Sequence[ModuleProgram],
    place: int,
    clock: WaitingClock,
    rates: Rates,
    ratios: Ratios,
    *,
    forward: bool,
) -> None:
    if not place:
        return
    theirs, ours = (ratios[chain.modules[each].kind] for each in (place - 1, place))
    if ours is theirs:
        return
    seconds = regroup_seconds(programs[place], rates, ours, theirs, forward=forward)
    if seconds:
        clock.move(seconds)


def _shared_seconds(
    chain: ModuleChain,
    programs: Sequence[ModuleProgram],
    rates: Rates,
    ratios: Ratios,
    state_bytes: float,
) -> float:
    """What the update of parameters takes that several modules have."""
    total = 0.0
    for kind, loads, moves in shared_updates(chain, programs, state_bytes):
        total += float(rates.load_seconds(Loads(loads), ratios[kind]).max(axis=1).sum())
        total += float(rates.move_seconds(Moves(moves), ratios[kind]).sum())
    return total


def shared_updates(
    chain: ModuleChain, programs: Sequence[ModuleProgram], state_bytes: float
) -> Iterator[tuple[int, list[WayLoad], list[MoveOf]]]:
    """The updates of parameters that several modules have, each once.

    Args:
        chain: the modules.
        programs: what members do of each.
        state_bytes: bytes of optimizer state for each element of a parameter.

    Yields:
        The kind of a module that has one, and loads and moves of its update.
    """
    done: set[ParameterPart] = set()
    for module, program in zip(chain.modules, programs, strict=True):
        for place in sorted(program.shared):
            if module.parameters[place] not in done:
                done.add(module.parameters[place])
                yield (module.kind, *shared_update(program, place, state_bytes))
