"""One space: Harp's pipelines whose last stage is a synthesised program, and HAP's own plans."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import optax
import pytest
from bench_hap import Traced
from hap_models import bert, vgg19
from random_programs import chain_of_program

from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh, kind
from hetjax.planner import (
    DynamicProgram,
    HapPlanner,
    PlanningProblem,
    PlanOptions,
    make_problem,
    predict,
)
from hetjax.planner.hap.chain_search import ChainSearch
from hetjax.planner.hap.hap_planner import members_of
from hetjax.planner.hap.synthesis import synthesise_at
from hetjax.planner.hap.writing import shares_of
from hetjax.planner.module_programs.rates import DirectNetwork, MemberSpeed, Rates
from hetjax.planner.module_programs.reading import read_programs
from hetjax.planner.plan.stage_plan import Member

INSIDE = Link(5e9, 2e-5)
ONE_SPACE = PlanOptions(max_pipelines=1, synthesised_stages=True)


def three_hosts() -> Cluster:
    """A host behind a slow link, and two that a fast one joins."""
    names, speeds = ("a", "b", "c"), (6e10, 3e10, 3e10)
    subclusters = tuple(
        Subcluster(
            name, DeviceKind(f"of {name}", {"float32": speed}, 12 * 10**9, 1e10, "made up"), 1, 1,
            INSIDE, INSIDE,
        )
        for name, speed in zip(names, speeds, strict=True)
    )  # fmt: skip
    fast, slow = Link(1.25e8, 3e-4), Link(1.25e7, 3e-4)
    return Cluster("three", subclusters, (("a", "b", slow), ("a", "c", slow), ("b", "c", fast)))


def vgg_problem(options: PlanOptions = ONE_SPACE) -> PlanningProblem:
    model = vgg19(64, 32, 2048, 4)
    return make_problem(
        model.loss,
        model.parameters,
        model.batch,
        cluster=three_hosts(),
        optimizer=optax.adam(1e-3),
        num_microbatches=8,
        options=options,
    )


def test_a_pipeline_that_ends_in_a_program_beats_both_planners_alone():
    problem = vgg_problem()
    found = DynamicProgram().find(problem)
    harp = DynamicProgram().find(
        replace(problem, options=replace(ONE_SPACE, synthesised_stages=False))
    )
    hap = predict(HapPlanner().plan(problem), problem).prediction
    assert found is not None
    assert harp is not None
    assert hap is not None
    assert found.step_time < 0.95 * min(harp.step_time, hap.step_time)
    *first, last = found.plan.stages
    assert first
    assert last.shares.modules
    assert all(not stage.shares.modules for stage in first)
    assert found.runners_up[0].plan == harp.plan
    # What was found is what is predicted of it.
    again = predict(found.plan, problem).prediction
    assert again is not None
    assert again.step_time == pytest.approx(found.step_time)


def test_a_head_that_no_good_pipeline_divides_is_shared_by_its_vocabulary():
    """It is most of the work, and the fastest host's alone in all pipelines by examples."""
    links = Link(6e7, 3e-4), Link(1.2e7, 3e-4)
    model = bert(64, layers=1, tokens=32, width=192, hidden=768, heads=3, vocabulary=24576)
    problem = make_problem(
        model.loss,
        model.parameters,
        model.batch,
        cluster=replace(
            three_hosts(),
            links=(("a", "b", links[0]), ("a", "c", links[1]), ("b", "c", links[1])),
        ),
        optimizer=optax.adam(1e-3),
        num_microbatches=8,
        options=ONE_SPACE,
    )
    plan = DynamicProgram().plan(problem)
    hosts = [[member.submesh.subcluster for member in stage.members] for stage in plan.stages]
    assert hosts == [["c"], ["a", "b"]]
    assert plan.stages[1].shares.parameters["head"].dimension == 1
    # The slow link has several microbatches on their way.
    assert plan.pipeline.schedule.warm_up_counts[0] > 2


def test_it_is_only_looked_for_where_it_is_asked_for():
    found = DynamicProgram().find(vgg_problem(PlanOptions(max_pipelines=1)))
    assert found is not None
    assert not any(stage.shares.modules for stage in found.plan.stages)


def test_a_limit_of_stages_holds_for_it():
    problem = vgg_problem(replace(ONE_SPACE, max_stages=1))
    found = DynamicProgram().find(problem)
    assert found is not None
    assert len(found.plan.stages) == 1


def test_what_is_written_of_a_later_stage_is_read_again():
    """Its examples lie as they come from the stage before: all whole, or all divided."""
    program = Traced(vgg19(12, 32, 64, 16)).program
    members = tuple(Member(SubMesh(name, 0, (1, 1)), (1, 1)) for name in ("first", "second"))
    kinds = set()
    for seed in range(6):
        rng = Random(seed)
        start = rng.randrange(1, program.num_positions - 1)
        chain = chain_of_program(program, 12, start)
        speeds = tuple(MemberSpeed(10 ** rng.uniform(8, 11), 1e9, 1e9) for _ in members)
        rates = Rates(speeds, DirectNetwork((10 ** rng.uniform(6, 10),) * 2, 1e-5))
        search = ChainSearch(chain, 8.0)
        found = synthesise_at(search, rates, np.array([2 / 3, 1 / 3]))
        shares = shares_of(chain, search.dimensions, found, members, rates)
        kinds.add(bool(shares.batch))
        read = read_programs(chain, shares, 2, "shares")
        for ours, theirs in zip(read.programs, found.program.modules, strict=True):
            assert ours.ways == theirs.ways
            assert ours.stored == theirs.stored
            assert ours.gives_back == theirs.gives_back
    assert kinds == {True, False}


def test_devices_of_several_nodes_are_several_members():
    link = Link(1e9, 0.0)
    parts = (Subcluster(name, kind("T4"), 2, 4, link, link) for name in ("fast", "slow"))
    rack = Cluster("rack", tuple(parts), (("fast", "slow", link),))
    members = members_of(rack, [SubMesh("fast", 0, (2, 4)), SubMesh("slow", 2, (1, 2))], 8)
    assert [str(each.submesh) for each in members] == [
        "fast[0:4] 1x4", "fast[4:8] 1x4", "slow[2:4] 1x2",
    ]  # fmt: skip
    assert [each.mesh_shape for each in members] == [(4, 1), (4, 1), (2, 1)]


def test_a_host_behind_a_slow_link_is_left_out_where_all_are_faster_without_it():
    """It would have to be given whatever every member has whole."""
    model = vgg19(64, 32, 2048, 4)
    slow = Link(1e5, 1e-3)
    fast, cluster = Link(1.25e8, 3e-4), three_hosts()
    links = (("a", "b", slow), ("a", "c", slow), ("b", "c", fast))
    plan = HapPlanner().plan(
        make_problem(
            model.loss,
            model.parameters,
            model.batch,
            cluster=replace(cluster, links=links),
            optimizer=optax.adam(1e-3),
            num_microbatches=1,
        )
    )
    (stage,) = plan.stages
    assert [each.submesh.subcluster for each in stage.members] == ["b", "c"]
