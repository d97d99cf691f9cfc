"""Every process of a run on Ray traces the job by itself, and must trace the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ray_jobs import (
    BATCH,
    OPTIMIZER,
    SIZE,
    Tokens,
    loss,
    make_plan,
    make_plan_of_two_pipelines,
    make_trainer,
    parameters,
)

from hetjax import InputError
from hetjax.pipeline.program.tracing import trace
from hetjax.runtime.ray.ray_worker import HostWorker, computation_settings
from hetjax.runtime.workers.job import Job, build, traced_losses
from hetjax.runtime.workers.same_traces import (
    JobRecord,
    check_losses,
    check_optimizer,
    check_parameters,
    check_trees,
    job_record,
    parameters_record,
)


def job_of(**changes: Any) -> Job:
    batch = jax.eval_shape(lambda: Tokens().batch(0, BATCH))
    return replace(Job(loss, parameters, batch, OPTIMIZER, make_plan()), **changes)


def record_of(job: Job) -> JobRecord:
    return job_record(job, build(job))


def scaled_loss(scale: float) -> Any:
    def scaled(parameters: Any, batch: Any) -> Any:
        total, count = loss(parameters, batch)
        return total * scale, count

    return scaled


def test_a_worker_that_traces_another_loss_is_refused():
    plan = make_plan(function=scaled_loss(3.0))
    record = record_of(job_of(loss_function=scaled_loss(3.0), plan=plan))
    own = traced_losses(job_of(loss_function=scaled_loss(1.0), plan=plan))
    message = rf"the driver and stage 1 .* the loss differs first in 'mul' at {__file__}:.*3.0 and"
    with pytest.raises(InputError, match=message):
        check_losses(record, own, "stage 1")
    check_losses(record, traced_losses(job_of(loss_function=scaled_loss(3.0), plan=plan)), "any")


@pytest.mark.parametrize(
    ("optimizer", "what"),
    [
        (optax.adam(2e-3), "update of the optimizer"),
        (
            optax.inject_hyperparams(optax.adam)(2e-3),
            "initial state of the optimizer",
        ),
    ],
)
def test_a_worker_that_traces_another_optimizer_is_refused(optimizer: Any, what: str):
    like = optax.adam(1e-3) if "update" in what else optax.inject_hyperparams(optax.adam)(1e-3)
    record = record_of(job_of(optimizer=like))
    with pytest.raises(InputError, match=f"the {what} differs first in"):
        check_optimizer(record, build(job_of(optimizer=optimizer)), "stage 1")


@dataclass
class Alone:
    """What a worker makes of a class that the driver has made a pytree."""

    value: Any


@jax.tree_util.register_dataclass
@dataclass
class Known:
    """A class that is a pytree."""

    value: Any


def loss_of_known(parameters: Any, batch: Any) -> Any:
    return loss(parameters.value, batch)


def job_of_known(given: Any) -> Job:
    shapes = jax.eval_shape(lambda: Tokens().batch(0, SIZE))
    model = trace(loss_of_known, Known(parameters()), shapes).fingerprint
    plan = replace(make_plan(), model=model)
    return job_of(loss_function=loss_of_known, parameters=given, plan=plan)


@pytest.mark.parametrize(
    ("of_driver", "of_worker"),
    [
        (lambda: Known(parameters()), lambda: Alone(parameters())),
        (Known(parameters()), Alone(parameters())),
        (Known(parameters()), Known({})),
    ],
)
def test_a_pytree_that_a_worker_does_not_know_is_refused(of_driver: Any, of_worker: Any):
    job = job_of_known(of_driver)
    record = record_of(job)
    check_trees(record, job, "stage 1")
    message = rf"parameters: stage 1 does not take .* put Known of {__name__}, .* into a module"
    with pytest.raises(InputError, match=message):
        check_trees(record, replace(job, parameters=of_worker), "stage 1")


def test_pytrees_of_batches_and_states_are_compared():
    def optimizer_in(node: Any) -> Any:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            updates, inner = OPTIMIZER.update(updates, state.value, params)
            return updates, node(inner)

        made: Any = optax.GradientTransformation
        return made(lambda params: node(OPTIMIZER.init(params)), update)

    def loss_of_batch(parameters: Any, batch: Any) -> Any:
        return loss(parameters, batch.value)

    job = job_of(optimizer=optimizer_in(Known))
    job = replace(job, batch=Known(job.batch), loss_function=loss_of_batch)
    record = record_of(job)
    check_trees(record, job, "stage 1")
    for what, changes in (
        ("batch", {"batch": Alone(job.batch.value)}),
        ("state of the optimizer", {"optimizer": optimizer_in(Alone)}),
    ):
        with pytest.raises(InputError, match=f"{what}: stage 1 does not take"):
            check_trees(record, replace(job, **changes), "stage 1")


def drawn_from(seeds: Iterator[int]) -> Any:
    """Of which only the embedding is drawn from a seed that changes."""

    def make() -> Any:
        rng = np.random.default_rng(next(seeds))
        embedding = 0.3 * jnp.asarray(rng.normal(size=(13, 8)).astype(np.float32))
        return {**parameters(), "embedding": embedding}

    return make


def test_what_several_workers_hold_is_drawn_alike():
    """The embedding is tied, and both pipelines have all blocks."""
    for plan in (make_plan(), make_plan_of_two_pipelines()):
        job = job_of(plan=plan)
        placement = build(job)
        seeds = iter(range(1, 9))
        one, other = (
            parameters_record(replace(job, parameters=drawn_from(seeds))) for _ in range(2)
        )
        peers = [(stage, 0) for stage in range(len(plan.stages))]
        check_parameters(job, placement, dict.fromkeys(peers, one))
        drawn = replace(job, parameters=drawn_from(iter([0])))
        records = {peer: one if peer == (0, 0) else other for peer in peers}
        with pytest.raises(InputError, match=r"'embedding' otherwise in stage 1.* than in stage 0"):
            check_parameters(drawn, placement, records)


def test_workers_draw_keys_as_the_driver_does():
    before = jax.config.values["jax_random_seed_offset"]
    try:
        jax.config.update("jax_random_seed_offset", 7)
        settings = computation_settings()
        jax.config.update("jax_random_seed_offset", before)
        HostWorker((0, 0), "stage 0").prepare(settings, None)
        assert jax.random.key_data(jax.random.key(0))[-1] == 7
    finally:
        jax.config.update("jax_random_seed_offset", before)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_workers_compare_what_they_trace():
    driver = os.getpid()

    def other(parameters: Any, batch: Any) -> Any:
        return scaled_loss(3.0 if os.getpid() == driver else 2.0)(parameters, batch)

    with pytest.raises(InputError, match=r"the driver and stage \d, host 0 .* 3.0 and 2.0"):
        make_trainer("ray", make_plan(function=other), loss_function=other)

    def drawn() -> Any:
        return drawn_from(iter([os.getpid()]))()

    with (
        make_trainer("ray", parameters=drawn) as trainer,
        pytest.raises(InputError, match=r"the function makes 'embedding' otherwise in stage 1"),
    ):
        trainer.train_step()
