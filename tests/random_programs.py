"""Random programs of unions: what is best where all that computing and moving costs is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from cases import Case, random_boundaries, random_model, random_schedule, trace_model
from random_unions import ONE_STAGE, UNLIKE, random_members

from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.schedules.warm_up import gpipe
from hetjax.planner.hap.chain_search import ChainSearch
from hetjax.planner.hap.ratios import rounded_shares
from hetjax.planner.hap.synthesis import Synthesis
from hetjax.planner.hap.writing import shares_of
from hetjax.planner.module_programs.charges import Loads, Moves
from hetjax.planner.module_programs.module_chain import ModuleChain, chain_of, narrow_edges
from hetjax.planner.module_programs.rates import DirectNetwork, MemberSpeed, Rates
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Member, PipelinePlan, StagePlan
from hetjax.planner.problem.problem import model_figures
from hetjax.planner.work.stage_traces import StageTraces


@dataclass(frozen=True, eq=False)
class DrawnRates(Rates):
    """Rates that are drawn for each load and each move, whatever its size."""

    rng: np.random.Generator = field(default_factory=np.random.default_rng)

    def load_seconds(self, loads: Loads, shares: np.ndarray) -> np.ndarray:
        return self.rng.random((len(loads), self.count))

    def move_seconds(self, moves: Moves, shares: np.ndarray) -> np.ndarray:
        return 0.5 * self.rng.random(len(moves))

    def go_by_even_parts(self, moves: Moves, shares: np.ndarray) -> np.ndarray:
        may = np.array([each.by_even_parts is None for each in moves.sorts], bool)
        return may[moves.places] & (self.rng.random(len(moves)) < 0.5) & (self.count > 2)


def random_program_case(rng: Random, *, double: bool = False) -> Case:
    """A random model with a random program of one stage over two to four members."""
    model = replace(random_model(rng), double=double)
    (members,) = random_members(rng, replace(ONE_STAGE, members=rng.choice([2, 2, 3, 4])), 1)
    flat = tuple(Member(each.submesh, (each.submesh.num_devices, 1)) for each in members)
    if len(flat) == 1:
        return random_program_case(rng, double=double)
    size = 12 * rng.choice([1, 2])
    program = trace_model(model, size)
    chain = chain_of_program(program, size)
    count = rng.choice([1, 1, 2, 3])
    stage = replace(random_stage(rng, chain, flat), layers=(0, 1))
    schedule = gpipe(1, count)
    pipeline = PipelinePlan((stage,), count, size, schedule)
    layers = (0, program.num_positions)
    return Case(model, program, Plan(program.fingerprint, layers, UNLIKE, (pipeline,)))


def random_pipeline_case(rng: Random) -> Case:
    """A random model in a pipeline of two or three stages, the last one with a random program."""
    model = random_model(rng)
    cuts = random_boundaries(rng, trace_model(model, 1), 3)
    if len(cuts) < 3:
        return random_pipeline_case(rng)
    most = replace(ONE_STAGE, members=len(cuts) + 1)
    *first, last = random_members(rng, most, len(cuts) - 1)
    if len(last) < 2 or any(len(each) > 1 for each in first):
        return random_pipeline_case(rng)
    size = 12 * rng.choice([1, 2])
    program = trace_model(model, size)
    flat = tuple(Member(each.submesh, (each.submesh.num_devices, 1)) for each in last)
    chain = chain_of_program(program, size, cuts[-2])
    stages = [
        StagePlan((place, place + 1), (Member(each.submesh, (1, each.submesh.num_devices)),))
        for place, (each,) in enumerate(first)
    ]
    held = (len(first), len(first) + 1)
    stages.append(replace(random_stage(rng, chain, flat), layers=held))
    schedule = random_schedule(rng, stages, rng.choice([1, 2, 3]))
    pipeline = PipelinePlan(tuple(stages), schedule.num_microbatches, size, schedule)
    return Case(model, program, Plan(program.fingerprint, cuts, UNLIKE, (pipeline,)))


def chain_of_program(program: Program, size: int, start: int = 0) -> ModuleChain:
    """The modules of a program from a position on, by its structure."""
    sections = model_figures(program, StageTraces(program), size, None)["sections"]
    starts = [each.section.start for each in sections if each.section.start > start]
    return chain_of(program, narrow_edges(program, [start, *starts, program.num_positions]))


def random_stage(rng: Random, chain: ModuleChain, members: Sequence[Member]) -> StagePlan:
    """A stage whose members compute a random program."""
    search = ChainSearch(chain, 8.0)
    draws = np.random.default_rng(rng.getrandbits(32))
    speeds = tuple(MemberSpeed(1.0, 1.0, 1.0) for _ in members)
    rates = DrawnRates(speeds, DirectNetwork((1.0,) * len(members), 0.0), rng=draws)
    weights = np.full(len(members), 1 / len(members))
    shares = random_ratios(rng, search, members)
    program = search.best(rates, shares, weights)
    ratios = np.zeros((len(shares), len(members)))
    found = Synthesis(program, ratios, shares, 0)
    told = shares_of(chain, search.dimensions, found, members, rates)
    return StagePlan((0, 1), tuple(members), shares=told)


def random_ratios(
    rng: Random, search: ChainSearch, members: Sequence[Member]
) -> tuple[np.ndarray, ...]:
    """Random ratios, mostly the same in all kinds of modules; some members may have nothing."""
    multiples = [member.mesh_shape[0] for member in members]

    def drawn() -> np.ndarray:
        parts = np.array([rng.random() ** 2 for _ in members])
        if rng.random() < 0.2:
            parts[rng.randrange(len(members))] = 0.0
        parts = parts / parts.sum()
        return rounded_shares(parts, search.dimensions, multiples)

    first = drawn()
    alike = rng.random() < 0.6
    return tuple(first if alike else drawn() for _ in search.networks)
