"""Programs and ratios: the cheapest that there are, and never dearer than those of one kind."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bench_hap import STATE, Traced, published_rates, random_model
from cases import examples
from hap_models import HapModel, bert, vgg19, vit
from hypothesis import given
from hypothesis import strategies as st

from hetjax import planner
from hetjax.errors import InputError
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh, kind
from hetjax.pipeline.program.traced_program import num_bytes
from hetjax.pipeline.stages.cutting import cut
from hetjax.pipeline.stages.traced_modules import modules_of, trace_modules
from hetjax.pipeline.stages.traced_stage import halve
from hetjax.planner import HapPlanner, Member, PlanOptions, make_problem, predict
from hetjax.planner.costs.member_rates import member_rates
from hetjax.planner.hap import chain_search
from hetjax.planner.hap.chain_search import ChainSearch
from hetjax.planner.hap.forced import (
    COLUMNS,
    DATA_PARALLEL,
    GATHERED_FACTORS,
    REPLICATED,
    ROWS,
    STATE_SHARDED,
    Forced,
)
from hetjax.planner.hap.hap_planner import chain_of_problem, cluster_members
from hetjax.planner.hap.ratios import whole_units
from hetjax.planner.hap.synthesis import fits, ratio_problem, synthesise, synthesise_at
from hetjax.planner.hap.tables import as_graph
from hetjax.planner.hap.writing import shares_of
from hetjax.planner.intra_op.integer_program import solve
from hetjax.planner.module_programs.charges import Loads, MoveOf, Moves
from hetjax.planner.module_programs.rates import ClassRates, DirectNetwork, MemberSpeed, Rates
from hetjax.planner.module_programs.reading import read_programs
from hetjax.planner.module_programs.step_time import Span, WaitingClock, step_time
from hetjax.planner.module_programs.ways import WayLoad
from hetjax.planner.work.run_structure import inputs_of
from hetjax.sharding.deduction.local_additions import LARGE_BYTES

NUMBERS = st.integers(0, 2**32 - 1)
TWO = published_rates(1, 1)
SMALL = [
    vgg19(8, 32, 64),
    vit(8, 1, 24, 48, 2),
    bert(8, 1, 0, 16, 24, 48, 2, 64),
    bert(4, 2, 4, 16, 24, 48, 2, 64),
]


def random_rates(rng: Random) -> Rates:
    """Two to four unlike members behind unlike links."""
    count = rng.randint(2, 4)
    members = tuple(
        MemberSpeed(10 ** rng.uniform(9, 12), 10 ** rng.uniform(9, 12), 10 ** rng.uniform(8, 11))
        for _ in range(count)
    )
    bandwidths = tuple(10 ** rng.uniform(6, 10) for _ in range(count))
    return Rates(members, DirectNetwork(bandwidths, 10 ** rng.uniform(-6, -3)))


def weights_of(rng: Random, rates: Rates) -> np.ndarray:
    weights = np.array([rng.random() for _ in range(rates.count)])
    return weights / weights.sum()


@examples(6, 50)
@given(NUMBERS)
def test_a_program_costs_what_the_integer_program_finds(number: int):
    rng = Random(number)
    rates, search = random_rates(rng), ChainSearch(Traced(random_model(rng), True).chain, STATE)
    shares = np.tile(rates.proportional, (len(search.dimensions.units), 1))
    weights = weights_of(rng, rates)
    found = search.best(rates, [shares], weights)
    (network,) = search.networks
    tables = network.tables(*search.costs(0, rates, shares, weights))
    solution = solve(as_graph(network.sizes, network.scopes, tables, {}))
    assert solution is not None
    np.testing.assert_allclose(found.bound, solution.seconds, rtol=1e-6)


@pytest.mark.parametrize("model", SMALL, ids=lambda model: model.name)
def test_a_bound_is_under_every_program(model: HapModel):
    """Whatever the weights: also under programs that were found with others."""
    rng, search = Random(0), ChainSearch(Traced(model).chain, STATE)
    for _ in range(4):
        rates = random_rates(rng)
        shares = np.tile(weights_of(rng, rates), (len(search.dimensions.units), 1))
        ratios = [shares] * len(search.networks)
        found = [search.best(rates, ratios, weights_of(rng, rates)) for _ in range(3)]
        least = min(each.seconds for each in found)
        assert all(each.bound <= least * (1 + 1e-9) for each in found)


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_modules_put_together_cost_what_the_whole_program_does(layers: int):
    rates = published_rates(1, 2)
    bounds = []
    for is_whole in (False, True):
        chain = Traced(vit(64, layers, 96, 384, 4), is_whole).chain
        search = ChainSearch(chain, STATE)
        shares = np.tile(rates.proportional, (len(search.dimensions.units), 1))
        weights = np.array([0.2, 0.3, 0.5])
        bounds.append(search.best(rates, [shares] * len(search.networks), weights).bound)
    np.testing.assert_allclose(*bounds, rtol=1e-9)


@pytest.mark.parametrize("model", SMALL, ids=lambda model: model.name)
@pytest.mark.parametrize("speed", [1e9, 1e12])
def test_it_is_never_dearer_than_programs_of_one_kind(model: HapModel, speed: float):
    members = (MemberSpeed(speed, speed, speed), MemberSpeed(speed / 3, speed, speed))
    rates = Rates(members, DirectNetwork((1e8, 1e8), 1e-5))
    search = ChainSearch(Traced(model).chain, STATE)
    ours = synthesise(search, rates)
    kinds = [DATA_PARALLEL, REPLICATED, STATE_SHARDED, GATHERED_FACTORS, COLUMNS, ROWS]
    for forced in kinds:
        for ratios in (np.array([0.5, 0.5]), rates.proportional):
            other = synthesise_at(search.among(forced), rates, ratios)
            assert ours.seconds <= other.seconds * (1 + 1e-6), forced.name


def test_a_module_of_too_many_choices_is_refused_by_its_positions(monkeypatch):
    monkeypatch.setattr(chain_search, "MOST_ENTRIES", 1)
    with pytest.raises(InputError, match=r"positions 0 to \d+ .* choose 'harp'"):
        ChainSearch(Traced(SMALL[0], True).chain, STATE)


def test_a_slow_link_makes_a_program_that_moves_less():
    search = ChainSearch(Traced(vgg19(32, 32, 256)).chain, STATE)
    speeds = (MemberSpeed(1e11, 1e12, 1e11), MemberSpeed(5e10, 1e12, 1e11))
    moved = []
    for bandwidth in (1e12, 1e9, 1e7):
        found = synthesise(search, Rates(speeds, DirectNetwork((bandwidth,) * 2, 1e-6)))
        moves = [each.move for module in found.program.modules for each in module.moves]
        moved.append(sum(move.num_bytes for move in moves if move is not None))
    assert moved[0] > moved[1] > moved[2]


@given(st.integers(1, 200), st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_whole_units_add_up_and_are_near(total: int, weights: list[int]):
    parts = (np.array(weights) + 1e-3) / (np.array(weights) + 1e-3).sum()
    found = whole_units(total, parts, [1] * len(weights))
    assert sum(found) == total
    assert min(found) >= 0
    assert np.abs(np.array(found) - parts * total).max() <= 1


@given(st.lists(st.floats(0, 1), min_size=2, max_size=4), st.lists(st.floats(0, 1), min_size=2))
def test_moves_take_what_the_busiest_link_does(first: list[float], second: list[float]):
    """By counting who sends what to whom."""
    count = min(len(first), len(second))
    source, target = (
        (np.array(parts[:count]) + 1e-3) / (np.array(parts[:count]) + 1e-3).sum()
        for parts in (first, second)
    )
    network = DirectNetwork((1.0,) * count, 0.0)
    given_away = {
        "gather": [(count - 1) * part for part in source],
        "scatter": [1 - part for part in target],
        "exchange": [a * (1 - b) for a, b in zip(source, target, strict=True)],
    }
    taken = {
        "gather": [1 - part for part in source],
        "scatter": [(count - 1) * part for part in target],
        "exchange": [b * (1 - a) for a, b in zip(source, target, strict=True)],
    }
    for form, each in given_away.items():
        seconds = network.seconds(MoveOf(form, 1.0), source, target)
        np.testing.assert_allclose(seconds, max(*each, *taken[form]))


@pytest.mark.parametrize("form", ["gather", "scatter"])
def test_uneven_parts_go_by_even_ones_where_that_is_faster(form: str):
    """Counted by hand: one of four members has 0.7 of it, the others 0.1 each."""
    shares = np.array([[0.7, 0.1, 0.1, 0.1]])
    move = MoveOf(form, 1e6, 0, 0, by_even_parts=None)
    members = (MemberSpeed(1.0, 1.0, 1.0),) * 4
    for latency, is_better in ((0.1, True), (0.85, True), (0.95, False), (5.0, False)):
        rates = Rates(members, DirectNetwork((1e6,) * 4, latency))
        straight, by_even = 3 * 0.7 + latency, (0.7 - 0.25) + 0.75 + 2 * latency
        np.testing.assert_allclose(
            rates.move_seconds(Moves([move]), shares), [min(straight, by_even)]
        )
        assert rates.go_by_even_parts(Moves([move]), shares).tolist() == [is_better]
    even = np.full((1, 4), 0.25)
    rates = Rates(members, DirectNetwork((1e6,) * 4, 1e-9))
    assert rates.go_by_even_parts(Moves([move]), even).tolist() == [False]


@pytest.mark.parametrize("members", [2, 3, 5])
def test_small_sums_are_sent_to_all_others_and_large_ones_by_parts(members: int):
    """As `hetjax.sharding.deduction.local_additions` has them go: in one phase, or in two."""
    rates = Rates((MemberSpeed(1.0, 1.0, 1.0),) * members, DirectNetwork((1e6,) * members, 1e-3))
    small, large = LARGE_BYTES - 1, LARGE_BYTES
    found = rates.move_seconds(
        Moves([MoveOf("sum", small), MoveOf("sum", large)]), np.full((1, members), 1 / members)
    )
    sent = 2 * (members - 1) / members * large if members > 2 else large
    phases = 2 if members > 2 else 1
    expected = [1e-3 + (members - 1) * small / 1e6, phases * 1e-3 + sent / 1e6]
    np.testing.assert_allclose(found, expected)


def test_moves_of_a_plan_go_by_even_parts_where_it_says_so():
    """Three boxes of which one is much faster; what is written is read again, and costs as much."""
    members = tuple(MemberSpeed(flops, 1e12, 1e11) for flops in (4e11, 1e11, 1e11))
    rates = Rates(members, DirectNetwork((2e7,) * 3, 1e-6))
    chain = Traced(vgg19(24, 32, 256, 8)).chain
    search = ChainSearch(chain, STATE)
    found = synthesise_at(search.among(COLUMNS), rates, rates.proportional)
    places = tuple(Member(SubMesh(f"box{m}", 0, (1, 1)), (1, 1)) for m in range(3))
    shares = shares_of(chain, search.dimensions, found, places, rates)
    operands = [each for module in shares.modules for each in module.operands]
    assert any(each.through for each in operands)
    for each in operands:
        assert each.through is None or np.ptp(each.through.sizes) <= 1
    kept = replace(
        shares,
        modules=tuple(
            replace(each, operands=tuple(replace(o, through=None) for o in each.operands))
            for each in shares.modules
        ),
    )
    taken = []
    for told in (shares, kept):
        read = read_programs(chain, told, 3, "shares")
        taken.append(step_time(chain, read.programs, rates, read.ratios, STATE).step(1))
    np.testing.assert_allclose(taken[0], found.seconds, rtol=1e-6)
    assert taken[1] > 1.01 * taken[0]


@given(st.randoms(use_true_random=False), st.integers(1, 6))
def test_alike_modules_in_a_row_take_what_they_do_one_by_one(rng: Random, times: int):
    def drawn() -> np.ndarray:
        return np.array([rng.random() for _ in range(3)])

    moves = [rng.choice([None, rng.random()]) for _ in range(rng.randint(0, 3))]
    spans = [Span(drawn(), move) for move in [*moves, None]]
    others = [Span(drawn(), 0.5), Span(drawn(), None)]
    found = []
    for clock, runs in ((WaitingClock(3), [times]), (WaitingClock(3), [1] * times)):
        clock.run(others)
        for each in runs:
            clock.run(spans, each)
        clock.run(others)
        found.append([clock.done(), *clock.waited, *clock.computing])
    np.testing.assert_allclose(*found)


@pytest.mark.parametrize("layers", [1, 3, 6])
def test_ratios_are_sought_for_all_modules_of_a_row(layers: int):
    """The spans of a chain, counted module by module, are those that are counted at once."""
    rates, search = published_rates(1, 2), ChainSearch(Traced(vit(64, layers, 96, 384, 4)).chain, 8)
    program = synthesise_at(search, rates, rates.proportional).program
    alone = replace(program, modules=tuple(map(copy, program.modules)))
    shares = [np.tile(rates.proportional, (len(search.dimensions.units), 1))] * len(search.networks)
    one, other = (ratio_problem(search, each, rates, shares) for each in (program, alone))
    assert one.spans == other.spans
    assert dict(one.moved) == pytest.approx(dict(other.moved))


LINK = Link(1e9, 1e-5)


def cluster(memory: int = 10**10, devices: int = 1) -> Cluster:
    kinds = [
        DeviceKind(name, {"float32": flops}, memory, 1e11, source="made up")
        for name, flops in (("quick", 3e12), ("slow", 1e12))
    ]
    parts = tuple(
        Subcluster(kind.name, kind, 1, devices, LINK, LINK, price_per_device_hour=1.0)
        for kind in kinds
    )
    return Cluster("unlike", parts, (("quick", "slow", LINK),))


def problem_of(model: HapModel, on: Cluster, microbatches: int = 1) -> planner.PlanningProblem:
    return make_problem(
        model.loss,
        model.parameters,
        model.batch,
        cluster=on,
        optimizer=optax.adam(1e-3),
        num_microbatches=microbatches,
        options=PlanOptions(),
    )


@pytest.mark.parametrize("model", SMALL, ids=lambda model: model.name)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_plan_is_predicted_to_take_what_it_was_found_to(model: HapModel, microbatches: int):
    problem = problem_of(model, cluster(devices=2), microbatches)
    made = HapPlanner().synthesise(problem)
    prediction = predict(made.plan, problem).prediction
    assert prediction is not None
    np.testing.assert_allclose(prediction.step_time, made.seconds)


def lies_anyhow(*_: Any) -> Any:
    """In place of how values of one device lie."""


def rows(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, np.float32)


@pytest.mark.parametrize("width", [64, 4])
def test_what_members_hold_is_what_the_stage_keeps_that_runs(width: int):
    """Also what crosses edges of modules: of blocks that are narrow inside, nearly all of it."""

    def loss(parameters, batch):
        x = batch["x"] @ parameters["first"]
        for up, down in parameters["blocks"]:
            x = x + jnp.tanh(x @ up) @ down
        return jnp.mean((x @ parameters["head"]) ** 2)

    blocks = [(rows(32, width), rows(width, 32))] * 6
    parameters = {"first": rows(32, 32), "blocks": blocks, "head": rows(32, 32)}
    problem = make_problem(
        loss,
        parameters,
        {"x": rows(128, 32)},
        cluster=cluster(),
        optimizer=optax.sgd(1e-3),
        num_microbatches=1,
    )
    program, chain = problem.program, chain_of_problem(problem)
    assert len(chain.modules) > 3
    (stage,) = cut(program, [0, program.num_positions])
    (inputs,) = inputs_of(program, [stage])
    edges = [*(module.start for module in chain.modules), program.num_positions]
    runs = modules_of(program, edges)
    traced = trace_modules(stage, runs, *inputs, (0,), [{} for _ in runs], lies_anyhow)
    kept = halve(traced, is_last=True).residuals
    plan = HapPlanner(DATA_PARALLEL, (0.5, 0.5)).plan(problem)
    prediction = predict(plan, problem).prediction
    assert prediction is not None
    held = sum(member.activation_bytes for member in prediction.stages[0].members)
    assert held == sum(num_bytes(traced.flat.avals[value]) for value in kept)


def test_what_does_not_fit_whole_is_divided():
    """Each member has memory for less than the whole state."""
    model = vit(8, 2, 96, 384, 4)
    whole = HapPlanner().synthesise(problem_of(model, cluster()))
    fitting = predict(whole.plan, problem_of(model, cluster())).prediction
    assert fitting is not None
    needed = max(member.memory_bytes for member in fitting.stages[0].members)
    small = cluster(int(0.8 * needed / 0.9))
    made = HapPlanner().synthesise(problem_of(model, small))
    prediction = predict(made.plan, problem_of(model, small)).prediction
    assert prediction is not None
    assert all(stage.fits for stage in prediction.stages)
    assert made.found.seconds >= whole.found.seconds


@pytest.mark.parametrize("part", [0.8, 0.65])
def test_what_fits_is_no_slower_than_in_fixed_ratios_that_fit(part: float):
    """One of two members has memory for a part of what the fastest program needs."""
    up, down, square = (
        jax.ShapeDtypeStruct(shape, np.float32)
        for shape in ((1024, 4096), (4096, 1024), (1024, 1024))
    )
    parameters = [square, *[(up, down)] * 4, square]

    def loss(parameters, x):
        first, *blocks, head = parameters
        x = x @ first
        for up, down in blocks:
            x = x + jnp.tanh(x @ up) @ down
        return jnp.mean((x @ head) ** 2)

    link = Link(100e9, 1e-5)

    def problem_with(*memories: float) -> planner.PlanningProblem:
        kinds = [
            replace(kind(name), name=name.lower(), memory_bytes=int(memory))
            for name, memory in zip(("V100", "P100"), memories, strict=True)
        ]
        parts = tuple(Subcluster(each.name, each, 1, 1, link, link) for each in kinds)
        on = Cluster("two", parts, ((parts[0].name, parts[1].name, link),))
        batch = jax.ShapeDtypeStruct((512, 1024), np.float32)
        return make_problem(
            loss,
            parameters,
            batch,
            cluster=on,
            optimizer=optax.adam(1e-3),
            num_microbatches=1,
        )

    roomy = problem_with(16e9, 16e9)
    told = predict(HapPlanner().plan(roomy), roomy).prediction
    assert told is not None
    needed = max(member.memory_bytes for member in told.stages[0].members)
    tight = problem_with(part * needed / 0.9, 16e9)
    rates = member_rates(tight, cluster_members(tight.cluster, tight.microbatch_size))
    search = ChainSearch(chain_of_problem(tight), tight.optimizer_bytes)
    found = synthesise(search, rates)
    assert fits(search, rates, found)
    every = [synthesise_at(search, rates, np.array([a, 1 - a])) for a in np.linspace(0, 1, 21)]
    fixed = [each.seconds for each in every if fits(search, rates, each)]
    assert len(fixed) > 5
    assert found.seconds <= min(fixed)


def test_what_fits_in_no_way_is_refused_with_the_bytes():
    model = vit(8, 1, 96, 384, 4)
    with pytest.raises(InputError, match=r"members\[\d\] needs .*B on each device, and has .*B;"):
        HapPlanner().plan(problem_of(model, cluster(100_000)))


def test_one_device_is_refused():
    lonely = replace(cluster(), subclusters=cluster().subclusters[:1], links=())
    with pytest.raises(InputError, match="one member that can be used, a node or a device of"):
        HapPlanner().plan(problem_of(SMALL[1], lonely))


@pytest.mark.parametrize("forced", [STATE_SHARDED, REPLICATED])
@pytest.mark.parametrize("state_bytes", [0.0, 8.0])
def test_devices_of_a_node_sum_gradients_and_no_optimizer_state(forced: Forced, state_bytes: float):
    """By nodes whose devices are joined by a slow link, beside those with a fast one."""
    model, taken = vit(8, 1, 24, 48, 2), []
    links = Link(1e9, 1e-6), Link(1e12, 1e-6)
    for inner in links:
        parts = [replace(e, intra_node=inner) for e in cluster(devices=4).subclusters]
        near = replace(cluster(devices=4), subclusters=tuple(parts))
        problem = replace(problem_of(model, near), optimizer_bytes=state_bytes)
        predicted = predict(HapPlanner(forced, (0.5, 0.5)).plan(problem), problem).prediction
        assert predicted is not None
        taken.append(predicted.stages[0].update_seconds)
    size = sum(4 * leaf.size for leaf in jax.tree.leaves(model.parameters))
    slow, fast = (2 * 3 / 4 * size / link.bandwidth for link in links)
    assert taken[0] - taken[1] == pytest.approx(slow - fast)


def test_members_that_see_to_moves_themselves_pay_for_each_byte():
    even = np.array([0.5, 0.5])
    move = MoveOf("gather", 1e6)
    free, paying = DirectNetwork((1e8, 1e8), 1e-4), DirectNetwork((1e8, 1e8), 1e-4, (1e-8, 2e-8))
    assert paying.seconds(move, even, even) - free.seconds(move, even, even) == pytest.approx(0.02)
    np.testing.assert_allclose(paying.byte_seconds, [2e-8, 3e-8])


def test_computing_takes_what_its_classes_were_measured_to_take():
    """A member at whose products of few rows a FLOP takes ten times as long."""
    slow = ClassRates({"product 32": 1e-9}, 1e11, 1e10)
    load = WayLoad(0.0, 1e9, 0.0, 0.0, 0, True, work=(("product 32", 1e9),))
    known = MemberSpeed(1e11, 1e11, 1e10, classes=slow)
    unknown = MemberSpeed(1e11, 1e11, 1e10)
    rates = Rates((known, unknown), DirectNetwork((1e9, 1e9), 0.0))
    found = rates.load_seconds(Loads([load]), np.array([[0.25, 0.75]]))
    np.testing.assert_allclose(found, [[0.25, 0.0075]], rtol=1e-4)
    unheard = WayLoad(1e9, 0.0, 0.0, 0.0, -1, True, work=(("kernel gradient 64", 1e9),))
    found = rates.load_seconds(Loads([unheard]), np.array([[0.25, 0.75]]))
    np.testing.assert_allclose(found, [[0.01, 0.01]], rtol=1e-4)
