"""What a synthesised program does, as rows that people read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.pipeline.program.costs import is_heavy
from hetjax.planner.costs.member_rates import member_rates
from hetjax.planner.costs.modules_cost import stage_programs_of, starting_seconds
from hetjax.planner.hap.chain_search import ChainSearch
from hetjax.planner.hap.forced import DATA_PARALLEL
from hetjax.planner.hap.hap_planner import chain_of_problem
from hetjax.planner.hap.synthesis import synthesise_at
from hetjax.planner.module_programs.module_chain import Module
from hetjax.planner.module_programs.program import ModuleProgram, layouts_text
from hetjax.planner.module_programs.rates import Rates
from hetjax.planner.module_programs.ways import WHOLE
from hetjax.planner.plan.plan import Plan
from hetjax.planner.problem.problem import PlanningProblem


@dataclass(frozen=True)
class LayoutRow:
    """How a tensor of a module lies, or how a product is computed.

    Args:
        module: the module, for people.
        what: the tensor or the product.
        shape: its shape.
        layout: how it lies among members.
        ratios: what part each member has of what is divided; empty where nothing is.
    """

    module: str
    what: str
    shape: str
    layout: str
    ratios: tuple[float, ...]


@dataclass(frozen=True)
class MoveRow:
    """A move of a module's program.

    Args:
        module: the module, for people.
        what: what is moved.
        shape: its shape.
        layout: how it lies before, and after.
        form: what kind of move it is.
        num_bytes: bytes of the whole value.
        seconds: what it takes.
        times: how often a step does it.
        by_even_parts: whether it brings something to even parts on its way.
    """

    module: str
    what: str
    shape: str
    layout: str
    form: str
    num_bytes: float
    seconds: float
    times: int
    by_even_parts: bool = False


@dataclass(frozen=True)
class ProgramReport:
    """A synthesised program for people.

    Args:
        layouts: how tensors lie and products are computed, by module.
        moves: what is moved, by module.
        data_parallel: seconds of a step of data parallelism of its members, by what shares it has;
            none where the plan has other stages, too.
        without_rule: primitives that every member computes whole, for want of a rule.
    """

    layouts: tuple[LayoutRow, ...]
    moves: tuple[MoveRow, ...]
    data_parallel: Mapping[str, float]
    without_rule: tuple[str, ...]


def explain(plan: Plan, problem: PlanningProblem) -> ProgramReport:
    """Say what the synthesised stage of a plan does.

    Args:
        plan: a plan of which one stage has modules.
        problem: the problem that it solves.

    Returns:
        The report; what programs take is predicted.
    """
    stage = next(stage for stage in plan.stages if stage.shares.modules)
    read, rates = stage_programs_of(plan, stage, problem), member_rates(problem, stage.members)
    groups: dict[int, list[Module]] = {}
    for module, program in zip(read.chain.modules, read.programs, strict=True):
        groups.setdefault(id(program), []).append(module)
    programs = {id(program): program for program in read.programs}
    layouts: list[LayoutRow] = []
    moves: list[MoveRow] = []
    for key, modules in groups.items():
        program, name = programs[key], _name(modules)
        shares = read.ratios[modules[0].kind]
        layouts += _layout_rows(name, program, modules[0], shares, problem)
        moves += _move_rows(name, program, modules, shares, problem, rates)
    beside = _data_parallel(problem, rates) if len(plan.stages) == 1 else {}
    missing = {
        step.name
        for kind, trace in enumerate(read.chain.kinds)
        for step, each in zip(
            trace.traced.flat.steps, read.dimensions.signatures[kind], strict=True
        )
        if each is None and step.inputs
    }
    return ProgramReport(tuple(layouts), tuple(moves), beside, tuple(sorted(missing)))


def _data_parallel(problem: PlanningProblem, rates: Rates) -> dict[str, float]:
    """Seconds of the best data parallelism with even and with proportional shares."""
    chain = chain_of_problem(problem)
    search = ChainSearch(chain, problem.optimizer_bytes, problem.num_microbatches, DATA_PARALLEL)
    even = np.full(rates.count, 1 / rates.count)
    started = starting_seconds(problem.num_microbatches)
    return {
        name: started + synthesise_at(search, rates, ratios).seconds
        for name, ratios in (
            ("even shares", even),
            ("shares in proportion to speed", rates.proportional),
        )
    }


def _name(modules: Sequence[Module]) -> str:
    first, last = modules[0], modules[-1]
    times = f" x {len(modules)}" if len(modules) > 1 else ""
    return f"{first.start}-{last.stop - 1}{times}"


def _layout_rows(
    name: str,
    program: ModuleProgram,
    module: Module,
    shares: np.ndarray,
    problem: PlanningProblem,
) -> Iterator[LayoutRow]:
    """The module's parameters, and then its products."""
    traced, avals = program.trace.traced, program.trace.traced.flat.avals
    for place, part in enumerate(module.parameters):
        value, stored = traced.parameters[place], program.stored[place]
        shape = avals[value].shape
        if len(shape) < 2:
            continue
        layout = layouts_text([stored.layout])
        if stored.layout == WHOLE:
            how = "by all" if stored.update == WHOLE else f"in parts of dim {stored.update}"
            layout = f"whole, updated {how}"
        divided = max(stored)
        ratios = _ratios(program, value, divided, shares)
        path = problem.program.parameter_names[part.leaf]
        yield LayoutRow(name, path, _shape(shape), layout, ratios)
    for equation, step in enumerate(traced.flat.steps):
        if not is_heavy(step):
            continue
        way = program.ways[equation]
        divided = way.load.divided
        ratios = tuple(shares[divided].tolist()) if divided >= 0 else ()
        backward = "" if equation in program.trace.forward else ", backward"
        layout = f"{layouts_text(way.operands)} to {layouts_text(way.results)}"
        shape = _shape(avals[step.outputs[0]].shape)
        yield LayoutRow(name, f"{step.name} {equation}{backward}", shape, layout, ratios)


def _ratios(
    program: ModuleProgram, value: int, layout: int, shares: np.ndarray
) -> tuple[float, ...]:
    if layout < 0:
        return ()
    number = program.dimensions.class_of(program.kind, value, layout)
    return tuple(shares[number].tolist())


def _move_rows(
    name: str,
    program: ModuleProgram,
    modules: Sequence[Module],
    shares: np.ndarray,
    problem: PlanningProblem,
    rates: Rates,
) -> Iterator[MoveRow]:
    names = _value_names(program)
    charged = program.charged_moves
    taken = rates.move_seconds(charged, shares).tolist()
    by_even = rates.go_by_even_parts(charged, shares).tolist()
    for each, seconds, goes in zip(program.moves, taken, by_even, strict=True):
        move = each.move
        count = len(modules) * (1 if move.once else problem.num_microbatches)
        shape = program.trace.traced.flat.avals[each.value].shape
        yield MoveRow(
            name,
            names.get(each.value, f"value {each.value}"),
            _shape(shape),
            f"{layouts_text([each.before])} to {layouts_text([each.after])}",
            move.form,
            move.num_bytes,
            seconds,
            count,
            goes,
        )


def _value_names(program: ModuleProgram) -> Mapping[int, str]:
    traced = program.trace.traced
    names = dict.fromkeys(traced.parameters, "parameter")
    names |= dict.fromkeys(traced.batch, "batch")
    names |= dict.fromkeys(traced.received, "received")
    names |= dict.fromkeys(traced.cotangents, "cotangent")
    for equation, step in enumerate(traced.flat.steps):
        names |= dict.fromkeys(step.outputs, f"{step.name} {equation}")
    names |= {value: "gradient" for value in traced.gradients if isinstance(value, int)}
    return names


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
