"""Stages of several members: any shares give the loss and the gradients of one device."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import jax
import numpy as np
import optax
import pytest
from cases import Case, examples
from execution import gathered_parameters, job_of, one_device_steps, running, train
from hypothesis import given
from hypothesis import strategies as st
from one_device import TOLERANCE, check_gradients, float64, tolerance_of
from random_unions import ONE_STAGE, THREE_WORKERS, random_union_case
from ray_jobs import (
    BATCH,
    OPTIMIZER,
    RUNTIMES,
    SHARES,
    SIZE,
    Tokens,
    loss,
    make_plan_of_two_pipelines,
    make_trainer,
    parameters,
    union_plan,
)
from small_models import make_batch

from hetjax import Trainer
from hetjax.mesh import SubMesh
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedules.warm_up import gpipe, one_f_one_b
from hetjax.planner import Member, Share, Shares, StagePlan
from hetjax.runtime.workers.job import Job, build, transfers

NUMBERS = st.integers(0, 2**32 - 1)


def one_device_losses(steps: int) -> list[float]:
    """Of the job's first steps, by plain JAX."""

    def mean(parameters, batch):
        total, count = loss(parameters, batch)
        return total / count

    held = parameters()
    gradient = jax.jit(jax.value_and_grad(mean))
    found = []
    with jax.numpy_dtype_promotion("standard"):
        state = OPTIMIZER.init(held)
        for step in range(steps):
            value, gradients = gradient(held, Tokens().batch(step, BATCH))
            updates, state = OPTIMIZER.update(gradients, state, held)
            held = optax.apply_updates(held, updates)
            found.append(float(value))
    return found


@pytest.mark.parametrize("shares", SHARES)
def test_one_stage_over_two_devices_and_one_trains(shares: str):
    with make_trainer("local", union_plan(SHARES[shares])) as trainer:
        found = [trainer.train_step().loss for _ in range(5)]
    np.testing.assert_allclose(found, one_device_losses(5), rtol=TOLERANCE)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("shares", SHARES)
def test_on_ray_it_computes_what_one_process_does(shares: str):
    plan = union_plan(SHARES[shares])
    found = {}
    for runtime in ("local", "ray"):
        with make_trainer(runtime, plan) as trainer:
            found[runtime] = [trainer.train_step().loss for _ in range(4)]
    assert found["ray"] == found["local"]


@examples(usual=3)
@given(number=NUMBERS)
def test_loss_and_gradients_of_unions_equal_those_of_one_device(number: int):
    check_gradients(random_union_case(Random(number)), evaluates=True)


@examples(usual=1)
@given(number=NUMBERS)
def test_in_float64_they_do_to_twelve_digits(number: int):
    with float64():
        check_gradients(random_union_case(Random(number), double=True), evaluates=True)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@examples(usual=2, full=20)
@given(number=NUMBERS)
def test_random_unions_compute_on_ray_what_they_do_in_one_process(number: int):
    case = random_union_case(Random(number), THREE_WORKERS)
    # Adam makes a whole step of a gradient that is nothing but rounding, unless epsilon is larger.
    optimizer = optax.adamw(1e-3, eps=1e-5)
    batches = [make_batch(case.plan.batch_size, seed) for seed in range(3)]
    found = {}
    for name, runtime in RUNTIMES.items():
        with Trainer(
            plan=case.plan,
            loss_function=case.model.loss,
            parameters=case.model.init,
            optimizer=optimizer,
            batch=batches[0],
            runtime=runtime,
        ) as trainer:
            losses = [trainer.train_step(batch).loss for batch in batches]
            found[name] = losses, jax.tree.map(np.asarray, trainer.parameters())
    assert found["ray"][0] == found["local"][0]
    jax.tree.map(np.testing.assert_array_equal, found["ray"][1], found["local"][1])
    with jax.numpy_dtype_promotion("standard"):
        expected = [loss for loss, _ in one_device_steps(case.model, optimizer, batches)]
    np.testing.assert_allclose(found["ray"][0], expected, rtol=tolerance_of(case.model))


def test_members_hold_the_same_bits_of_what_they_share():
    """Each updates its share of what all have, and gives it to the others."""
    case = random_union_case(Random(0), ONE_STAGE)
    optimizer = optax.adamw(1e-3, eps=1e-5)
    batches = [make_batch(case.plan.batch_size, seed) for seed in range(3)]
    with running(job_of(case, optimizer)) as executor:
        found = train(executor, batches)
        gathered_parameters(executor)
    with jax.numpy_dtype_promotion("standard"):
        expected = one_device_steps(case.model, optimizer, batches)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)


def test_members_of_a_data_parallel_stage_exchange_only_at_its_end():
    """A microbatch moves the loss alone; gradients are summed once a step."""
    plan = union_plan(SHARES["batch"])
    batch = jax.eval_shape(lambda: Tokens().batch(0, BATCH))
    placement = build(Job(loss, parameters(), batch, OPTIMIZER, plan))
    moved = {tag for tag in transfers(placement) if tag.route.kind == "move"}
    in_microbatches = {tag.move.partition("/")[0] for tag in moved if tag.microbatch >= 0}
    assert in_microbatches <= {"forward", "evaluate"}


def test_members_have_rows_of_their_own_and_moves_are_seen():
    plan = union_plan(SHARES["both"])
    with make_trainer("local", plan) as trainer:
        trainer.train_step()
        trainer.train_step(timed=True)
        timeline, (use,) = trainer.timeline(), trainer.link_uses()
        tags = transfers(trainer._placement)
    assert timeline.tracks == ("stage 0", "stage 0, member 1", "link 0->0")
    for track in timeline.stage_tracks:
        assert {event.kind for event in timeline.on(track)} >= {"F", "B", "update"}
    # A timed step has them all but those of evaluation, and of other schedules' tasks.
    unseen = ("evaluate", "recompute", "input_gradient", "weight_gradient")
    moves = [tag for tag in tags if tag.route.kind == "move" and not tag.move.startswith(unseen)]
    drawn = timeline.on("link 0->0")
    assert sorted(event.name for event in drawn) == sorted(tag.move for tag in moves)
    of_microbatches = {tag.microbatch for tag in moves if tag.microbatch >= 0}
    assert {event.microbatch for event in drawn} == {*of_microbatches, None}
    assert (use.source, use.target, use.carriers) == (0, 0, ("in process",))
    assert use.transfers == len(moves)
    assert use.num_bytes == sum(event.num_bytes for event in drawn) > 0
    assert use.wait_seconds > 0


def test_what_members_hold_is_told_of_every_step_and_anew_of_another_schedule():
    """It is counted in a schedule's first step."""
    with make_trainer("local", union_plan(SHARES["both"])) as trainer:
        reports = []
        for _ in range(2):
            trainer.train_step()
            reports += trainer.reports
        count = trainer.plan.pipeline.num_microbatches
        trainer.use_schedule(gpipe(1, count))
        trainer.train_step()
        reports += trainer.reports
    live = [report.live_microbatches for report in reports]
    assert live == [1, 1, count]
    first, second, every = (report.live_bytes for report in reports)
    assert every > first == second > 0


def _with_one_microbatch(case: Case) -> Case:
    (pipeline,) = case.plan.pipelines
    schedule = one_f_one_b(len(pipeline.stages), 1)
    pipeline = replace(pipeline, num_microbatches=1, schedule=schedule)
    return replace(case, plan=replace(case.plan, pipelines=(pipeline,)))


def test_one_microbatch_has_no_sums_to_keep():
    check_gradients(_with_one_microbatch(random_union_case(Random(3), ONE_STAGE)))


def _on_two_devices(stage: StagePlan, shares: Shares) -> StagePlan:
    """A stage with a member on each of its two devices."""
    submesh = stage.submesh
    singles = (SubMesh(submesh.subcluster, submesh.start + i, (1, 1)) for i in range(2))
    return replace(stage, members=tuple(Member(each, (1, 1)) for each in singles), shares=shares)


def test_rows_of_a_part_are_those_that_its_members_have():
    """Stages of unlike pipelines update rows of what they hold for each other."""
    plan = replace(make_plan_of_two_pipelines(), shard_optimizer_state=True)
    parameters = {"embedding": Share(0, (5, 8)), "blocks/in[0]": Share(0, (3, 5))}
    others = {"blocks/in[3]": Share(0, (3, 5))}
    one, two = plan.pipelines
    whole = _on_two_devices(one.stages[0], Shares(batch=(3, 1), parameters=parameters | others))
    half = _on_two_devices(two.stages[0], Shares(parameters=parameters))
    one, two = replace(one, stages=(whole,)), replace(two, stages=(half, two.stages[1]))
    with make_trainer("local", replace(plan, pipelines=(one, two))) as trainer:
        found = [trainer.train_step().loss for _ in range(5)]
    np.testing.assert_allclose(found, one_device_losses(5), rtol=TOLERANCE)


def test_a_value_lies_as_its_share_says():
    """Megatron's form, told of a value: what lies between two products is divided by columns."""
    program = trace(loss, parameters(), jax.eval_shape(lambda: Tokens().batch(0, SIZE)))
    features = next(step.outputs[0] for step in program.steps if step.name == "gather")
    width = program.avals[features].shape[-1]
    share = Share(2, (width - 3, 3))
    plan = union_plan(Shares(values={features: share}))
    with make_trainer("local", plan) as trainer:
        found = [trainer.train_step().loss for _ in range(3)]
    np.testing.assert_allclose(found, one_device_losses(3), rtol=TOLERANCE)
