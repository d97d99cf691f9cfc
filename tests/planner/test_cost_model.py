"""The cost model: its terms, one by one, and that a run of layers costs what its layers do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.stages.holders import with_updates
from hetjax.planner import PlanOptions, predict
from hetjax.planner.costs.cost_model import Estimate, estimate
from hetjax.planner.costs.pass_cost import sums_of_examples
from hetjax.planner.costs.sharing_cost import SharedParameters
from hetjax.planner.costs.update_cost import update_groups
from hetjax.planner.harp.table_making import execution_options
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.planner.problem.problem import PlanningProblem, make_problem
from hetjax.planner.work.alike_runs import alike_layers
from hetjax.planner.work.execution import Execution, offloaded_bytes
from hetjax.planner.work.layer_runs import all_runs, one_run
from hetjax.planner.work.rates import TASK_SECONDS, ring_seconds, transfer_seconds
from hetjax.planner.work.repeating_layers import Repetition

KIND = DeviceKind("test", {"float32": 1e12}, 10**9, 1e11, source="made up")
LINK = Link(1e9, 1e-5)
CLUSTER = Cluster("test", (Subcluster("only", KIND, 1, 4, LINK, LINK),))


def tied_problem(optimizer: optax.GradientTransformation) -> PlanningProblem:
    """Six layers; the first and the last use the same parameter."""

    def loss(weights, x):
        for weight in (*weights, weights[0]):
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    return make_problem(
        loss,
        [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 5,
        jax.ShapeDtypeStruct((32, 64), jnp.float32),
        cluster=CLUSTER,
        optimizer=optimizer,
        num_microbatches=4,
        options=PlanOptions(num_layers=6),
    )


PROBLEM = tied_problem(optax.adam(1e-3))
ONE_DEVICE = Execution(KIND, LINK, (1, 1))


def whole_model(execution: Execution) -> Estimate:
    runs = all_runs(PROBLEM.program, PROBLEM.works)
    every = estimate(PROBLEM, runs, execution)
    return Estimate(**{name: value[0, -1] for name, value in vars(every).items()})


def test_a_run_computes_what_its_layers_compute():
    every = estimate(PROBLEM, all_runs(PROBLEM.program, PROBLEM.works), ONE_DEVICE)
    task = TASK_SECONDS
    for field in ("forward_seconds", "backward_seconds"):
        seconds = getattr(every, field)
        one_by_one = sum(seconds[i, i + 1] - task for i in range(6))
        assert seconds[0, 6] == pytest.approx(one_by_one + task)


def test_members_of_unlike_kinds_hold_what_each_kind_does():
    """Also where what one of them holds is known already: processors copy in an update."""
    runs = all_runs(PROBLEM.program, PROBLEM.works)
    kinds = (replace(KIND, platform=platform) for platform in ("gpu", "cpu"))
    members = (Execution(kind, LINK, (1, 1), members=2) for kind in kinds)
    of_card, of_processor = (estimate(PROBLEM, runs, each).update_bytes for each in members)
    assert not np.any(of_card)
    assert of_processor[0, -1] > 0


def test_one_run_alone_is_the_entry_of_all_runs():
    every = estimate(PROBLEM, all_runs(PROBLEM.program, PROBLEM.works), ONE_DEVICE)
    sent = PROBLEM.works[3].received_bytes
    alone = estimate(PROBLEM, one_run(PROBLEM.program, PROBLEM.works[2], sent), ONE_DEVICE)
    for name, value in vars(alone).items():
        assert value == pytest.approx(getattr(every, name)[2, 3]), name


def test_devices_that_see_to_transfers_lose_the_time_that_these_take():
    load, message = 2e-9, 3e-3
    (only,) = CLUSTER.subclusters
    burdened = Cluster("test", (replace(only, transfer_load=load, message_load=message),))
    problem = replace(PROBLEM, cluster=burdened)
    execution = replace(ONE_DEVICE, subcluster=only.name)
    runs = all_runs(PROBLEM.program, PROBLEM.works)
    free, busy = (estimate(each, runs, execution) for each in (PROBLEM, problem))
    crossing = PROBLEM.works[2].received_bytes + PROBLEM.works[4].received_bytes
    for field in ("forward_seconds", "backward_seconds"):
        more = getattr(busy, field) - getattr(free, field)
        assert more[2, 4] == pytest.approx(load * crossing + 2 * message)
        assert more[0, 4] == pytest.approx(load * PROBLEM.works[4].received_bytes + message)
        assert more[0, 6] == 0, "the whole model neither sends nor receives"


def test_a_shared_parameter_is_held_once_a_stage():
    state = estimate(PROBLEM, all_runs(PROBLEM.program, PROBLEM.works), ONE_DEVICE).state_bytes
    # Parameter, gradient and Adam's two moments, each of 4 bytes.
    layer = 16 * 64 * 64
    assert state[0, 1] == state[5, 6] == layer
    assert state[0, 6] == 5 * layer
    assert state[4, 6] == 2 * layer


def test_products_of_an_update_are_work_that_no_axis_divides():
    muon = optax.contrib.muon(1e-3)
    plain, found = (tied_problem(optimizer) for optimizer in (optax.sgd(0.1, momentum=0.9), muon))
    for execution in (ONE_DEVICE, replace(ONE_DEVICE, mesh_shape=(2, 1))):
        adding, multiplying = (
            estimate(each, each.runs, execution).update_seconds for each in (plain, found)
        )
        # Five turns of three products each, of which two are square.
        flops = 5 * 3 * 2 * 64**3
        expected = 3 * flops / execution.kind.product_flops(found.dtype)
        assert multiplying[2, 5] - adding[2, 5] == pytest.approx(expected, rel=1e-4)
    rates = {execution.subcluster: execution.kind.memory_bandwidth / 2}
    measured = replace(found, profile=replace(found.profile, updates=rates))
    assert estimate(measured, measured.runs, execution).update_seconds[2, 5] < 2 * adding[2, 5]


def mixed(labels: list[str]) -> optax.GradientTransformation:
    """An optimizer that keeps no state of some parameters, and moments of others."""
    return optax.multi_transform({"plain": optax.sgd(1e-3), "moments": optax.adam(1e-3)}, labels)


def test_each_parameter_has_the_state_that_its_own_optimizer_keeps():
    labels = ["plain", "plain", "moments", "moments", "moments"]
    problem = tied_problem(mixed(labels))
    runs, elements = problem.runs, 64 * 64
    every = estimate(problem, runs, ONE_DEVICE)
    assert every.state_bytes[0, 2] == 2 * 8 * elements
    assert every.state_bytes[2, 5] == 3 * 16 * elements
    updating = every.update_seconds - TASK_SECONDS
    assert updating[2, 5] == pytest.approx(3 * updating[0, 2])
    sharded = replace(ONE_DEVICE, mesh_shape=(4, 1), sharding="state_sharded", updates=0.5)
    assert offloaded_bytes(problem.program, problem.optimizer_bytes, runs, sharded)[0][2, 5] == (
        3 * 8 * elements / 4 / 2
    )
    assert len(set(alike_layers(problem.program, problem.works)[1:5])) == 2
    groups = update_groups(problem, runs.of((1, 5)), replace(ONE_DEVICE, host_link=LINK))
    # What has no state goes with what comes after it.
    assert [group.fetch for group in groups] == [LINK.seconds(8 * elements)] * 3


@pytest.mark.parametrize("tied", ["plain", "moments"])
def test_what_another_stage_updates_is_as_much_as_its_own_optimizer_keeps(tied: str):
    problem = tied_problem(mixed([tied, *["plain", "moments"] * 2]))
    part = problem.works[0].parts[0]
    shapes = [problem.program.avals[each].shape for each in problem.program.parameters]
    held = [[part], [part]]
    shared = SharedParameters(problem.program, held, with_updates(held, shapes, divided=True))
    state = 64 * 64 * {"plain": 0, "moments": 8}[tied]
    saved = [shared.saved_bytes(s, problem.optimizer_bytes, ONE_DEVICE) for s in range(2)]
    assert saved == [state / 2] * 2
    half = replace(ONE_DEVICE, updates=0.5)
    assert shared.undivided_bytes(0, problem.optimizer_bytes, half) == state / 2


def test_a_data_axis_divides_work_and_activations_and_reduces_gradients():
    one, four = whole_model(ONE_DEVICE), whole_model(replace(ONE_DEVICE, mesh_shape=(4, 1)))
    task = TASK_SECONDS
    assert four.forward_seconds - task == pytest.approx((one.forward_seconds - task) / 4)
    reduction = 2 * ring_seconds(LINK, np.array(5 * 4 * 64 * 64), 4)
    assert four.backward_seconds - task == pytest.approx((one.backward_seconds - task) / 4)
    assert four.update_seconds - one.update_seconds == pytest.approx(reduction)
    assert four.activation_bytes == one.activation_bytes / 4
    assert four.state_bytes == one.state_bytes


@pytest.mark.parametrize("sharding", ["data", "state_sharded", "fully_sharded"])
def test_all_rings_of_a_data_axis_share_what_is_between_nodes(sharding: str):
    in_a_node = replace(ONE_DEVICE, mesh_shape=(4, 2), shape=(1, 8), sharding=sharding)
    near, far = (whole_model(replace(in_a_node, shape=shape)) for shape in ((1, 8), (2, 4)))
    # Each of two rings waits as long as before, and carries its half of the parameters beside the
    # other one.
    more = 3 * (5 * 4 * 64 * 64 / 2 / 4) / LINK.bandwidth
    assert far.exchange_seconds - near.exchange_seconds == pytest.approx(
        0.0 if sharding == "fully_sharded" else 2 * more
    )
    for field, times in (("forward_seconds", 1), ("backward_seconds", 2)):
        assert getattr(far, field) - getattr(near, field) == pytest.approx(
            times * more if sharding == "fully_sharded" else 0.0
        )


def test_sums_over_examples_share_what_is_between_nodes():
    run = replace(all_runs(PROBLEM.program, PROBLEM.works).of((0, 6)), forward_moved=np.array(1e6))
    near, far = (
        sums_of_examples(run, replace(ONE_DEVICE, mesh_shape=(2, 4), shape=shape))[0]
        for shape in ((1, 8), (4, 2))
    )
    assert far == pytest.approx(2 * near), "a node has two of the four rings"


def test_full_sharding_divides_the_state_and_gathers_parameters():
    plain = whole_model(replace(ONE_DEVICE, mesh_shape=(4, 1)))
    sharded = whole_model(replace(ONE_DEVICE, mesh_shape=(4, 1), sharding="fully_sharded"))
    assert sharded.state_bytes == plain.state_bytes / 4
    assert sharded.forward_seconds > plain.forward_seconds
    assert sharded.working_bytes == plain.working_bytes + 5 * 4 * 64 * 64


@pytest.mark.parametrize("repeats", ["stage", "layers"])
def test_what_is_made_again_of_divided_parameters_gathers_them_again(repeats: Repetition):
    layers = tuple((layer, layer + 1) for layer in range(6)) if repeats == "layers" else ()
    submesh = SubMesh("only", 0, (1, 4))

    def backward_seconds(**changes: Any) -> tuple[float, float]:
        """What a stage of all layers takes in whole backward passes, and in halves of these."""
        stage = replace(StagePlan.on((0, 6), submesh, (4, 1)), **changes)
        pipeline = PipelinePlan((stage,), 4, 8, one_f_one_b(1, 4))
        plan = Plan(PROBLEM.program.fingerprint, PROBLEM.layers, CLUSTER, (pipeline,))
        (found,) = predict(plan, PROBLEM).predicted.stages
        halves = found.input_gradient_seconds + found.weight_gradient_seconds
        again = found.recompute_seconds
        return again + found.backward_seconds, again + halves

    again = {"recompute": repeats == "stage", "recompute_layers": layers}
    whole = ring_seconds(LINK, 5 * 4 * 64 * 64, 4)
    more = []
    for sharding in ("data", "fully_sharded"):
        kept, made = (backward_seconds(sharding=sharding, **each) for each in ({}, again))
        more.append(np.subtract(made, kept))
    assert more[1] - more[0] == pytest.approx([whole, whole])


def test_sharded_state_is_divided_and_costs_no_more_to_update():
    plain = whole_model(replace(ONE_DEVICE, mesh_shape=(4, 1)))
    sharded = whole_model(replace(ONE_DEVICE, mesh_shape=(4, 1), sharding="state_sharded"))
    elements = 5 * 64 * 64
    assert sharded.state_bytes == elements * (4 + 4 + 8 / 4 + 4 / 4 / 8)
    assert sharded.forward_seconds == plain.forward_seconds
    assert sharded.backward_seconds == plain.backward_seconds
    assert sharded.update_seconds < plain.update_seconds


def test_a_tensor_axis_divides_the_state_and_not_the_activations():
    one, four = whole_model(ONE_DEVICE), whole_model(replace(ONE_DEVICE, mesh_shape=(1, 4)))
    assert four.state_bytes == one.state_bytes / 4
    assert four.activation_bytes == one.activation_bytes


def test_a_specification_in_the_plan_overrides_the_rule():
    name = PROBLEM.program.parameter_names[0]
    execution = replace(ONE_DEVICE, mesh_shape=(4, 1), parameters={name: ("data", None)})
    assert whole_model(execution).state_bytes == 16 * 64 * 64 * (4 + 1 / 4)


def test_recomputation_keeps_inputs_only():
    runs = all_runs(PROBLEM.program, PROBLEM.works).repeating_forward()
    again = estimate(PROBLEM, runs, replace(ONE_DEVICE, repeats="stage"))
    kept = estimate(PROBLEM, all_runs(PROBLEM.program, PROBLEM.works), ONE_DEVICE)
    assert again.activation_bytes[1, 6] == PROBLEM.works[1].received_bytes
    assert again.backward_seconds[1, 6] == pytest.approx(
        kept.backward_seconds[1, 6] + kept.forward_seconds[1, 6] - TASK_SECONDS
    )
    assert again.working_bytes[1, 6] == kept.working_bytes[1, 6] + kept.activation_bytes[1, 6]


def test_live_limits_are_where_memory_ends():
    whole = whole_model(ONE_DEVICE)
    for live in range(4):
        limit = float(whole.memory_bytes(live))
        assert whole.live_limit(limit, most=8) == live
        assert whole.live_limit(limit - 1, most=8) == max(live - 1, 0)
    assert whole.live_limit(1e12, most=8) == 8


def test_nothing_kept_means_no_limit():
    free = replace(whole_model(ONE_DEVICE), activation_bytes=np.array(0.0))
    assert free.live_limit(1e9, most=8) == 8
    assert free.live_limit(0.0, most=8) == 0


def test_rings_and_transfers():
    assert ring_seconds(LINK, np.array(4e6), 4) == pytest.approx(3 * (1e-5 + 1e-3))
    assert ring_seconds(LINK, np.array(4e6), 1) == 0
    assert transfer_seconds(LINK, 1e6) == pytest.approx(1e-5 + 1e-3)
    assert transfer_seconds(LINK, 0) == 0


def test_a_list_of_runs_takes_what_the_square_has():
    square = all_runs(PROBLEM.program, PROBLEM.works)
    for runs in (square, square.repeating_forward()):
        listed = runs.by_length()
        assert listed.listed is not None
        firsts, ends = listed.listed
        size = PROBLEM.num_layers + 1
        assert [*zip(firsts, ends, strict=True)] == [
            (0, 0),
            *((i, i + n) for n in range(1, size) for i in range(size - n)),
        ]
        for option in execution_options(PROBLEM, CLUSTER.subclusters[0], (1, 4)):
            if option.recompute != (runs is not square):
                continue
            one_by_one, at_once = (estimate(PROBLEM, each, option) for each in (listed, runs))
            for name, values in vars(one_by_one).items():
                assert (values == vars(at_once)[name][firsts, ends]).all(), name


def test_a_list_goes_back_to_where_its_runs_are():
    listed = all_runs(PROBLEM.program, PROBLEM.works).by_length()
    assert listed.listed is not None
    length = listed.listed[1] - listed.listed[0]
    square = listed.on_square(np.array([length, -length]))
    layers = np.arange(PROBLEM.num_layers + 1)
    expected = np.maximum(layers[None, :] - layers[:, None], 0)
    assert (square == [expected, -expected]).all()


def test_what_is_found_once_is_not_found_again():
    runs = all_runs(PROBLEM.program, PROBLEM.works)
    assert runs.once("answer", lambda: 42) == 42
    assert runs.repeating_forward().once("answer", lambda: 0) == 42
    assert runs.by_length().once("answer", lambda: 7) == 7
