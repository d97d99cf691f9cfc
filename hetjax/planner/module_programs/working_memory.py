"""What devices hold while they compute a module, beside parameters, state and what is kept."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hetjax.pipeline.program.temporaries import HeldLine
from hetjax.planner.module_programs.charges import Loads
from hetjax.planner.module_programs.program import ModuleProgram, input_load
from hetjax.planner.module_programs.rates import Rates
from hetjax.planner.module_programs.ways import WayLoad
from hetjax.planner.work.arrays import FloatArray


def working_bytes(program: ModuleProgram, rates: Rates, shares: FloatArray) -> FloatArray:
    """The most that a pass of a module holds beside its state and what is kept, `[members]`.

    That is what it makes on its way and what is brought together for it, divided as its equations
    divide it, and what the module gives to others and gets from them.

    Args:
        program: what members do of the module.
        rates: the members.
        shares: what part of every class of dimensions each member has.
    """
    sizes = _sizes(program, rates, shares)
    on_cpu = np.array([member.on_cpu for member in rates.members])
    found = np.zeros(rates.count)
    for each, held in zip(program.trace.passes_held, _beside(program, rates, shares), strict=True):
        given = sizes[sorted(each.crossing)].sum(axis=0)
        most = np.zeros(rates.count)
        for way, lines in ((False, each.lines), (True, each.lines_on_cpu)):
            if (on_cpu == way).any():
                made = np.where(on_cpu == way, _most(program, rates, shares, sizes, lines), 0.0)
                most = np.maximum(most, made)
        found = np.maximum(found, given + held + most)
    return found


def _sizes(program: ModuleProgram, rates: Rates, shares: FloatArray) -> FloatArray:
    """What a device holds of each value, as it is made or as it is moved: `[values, members]`."""
    pairs = [*program.layouts.items(), *((each.value, each.after) for each in program.moves)]
    where = program.trace, program.kind, program.dimensions
    held = rates.held_of_each(Loads(input_load(*where, *pair) for pair in pairs), shares)
    sizes = np.zeros((len(program.trace.num_bytes), rates.count))
    np.maximum.at(sizes, [value for value, _ in pairs], held)
    return sizes


def _beside(program: ModuleProgram, rates: Rates, shares: FloatArray) -> Iterator[FloatArray]:
    """What a device has, forward and backward, of parameters and kept values brought together."""
    trace = program.trace
    apart = {*trace.traced.parameters, *trace.residuals, *trace.kept_inputs}
    where = trace, program.kind, program.dimensions
    count = len(trace.traced.flat.steps)
    for is_forward in (True, False):
        moves = [
            each
            for each in program.moves
            if each.value in apart
            and each.equation < count
            and (each.equation in trace.forward) == is_forward
        ]
        loads = Loads(input_load(*where, each.value, each.after) for each in moves)
        yield rates.held_bytes(loads, shares)


def _most(
    program: ModuleProgram,
    rates: Rates,
    shares: FloatArray,
    sizes: FloatArray,
    lines: tuple[HeldLine, ...],
) -> FloatArray:
    """The most that the lines of a pass hold."""
    if not lines:
        return np.zeros(rates.count)
    alive = np.zeros((len(lines), len(sizes)))
    for place, line in enumerate(lines):
        alive[place, sorted(line.values)] = 1.0
    inside = rates.held_of_each(Loads(_inside_load(program, line) for line in lines), shares)
    return (alive @ sizes + inside).max(axis=0)


def _inside_load(program: ModuleProgram, line: HeldLine) -> WayLoad:
    """What an equation holds inside, divided as it is."""
    load = program.ways[program.equation_of(line.step)].load
    is_divided = load.divided >= 0
    return WayLoad(
        divided=load.divided,
        by_examples=load.by_examples,
        held=0.0 if is_divided else line.inside,
        shared_held=line.inside if is_divided else 0.0,
    )
