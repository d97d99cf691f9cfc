"""Frozen parameters: the rest trains as on one device, and nothing is done for what is frozen."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np
import optax
import pytest
from cases import Case, examples, random_case
from execution import (
    gathered_parameters,
    gathered_state,
    job_of,
    keep_gradients,
    one_device_gradients,
    one_device_steps,
    running,
    train,
)
from hypothesis import given
from hypothesis import strategies as st
from one_device import TOLERANCE, largest_error, tolerance_of
from random_unions import Most, random_union_case
from ray_jobs import make_trainer, parameters
from small_models import Model, make_batch

from hetjax import CheckpointError, Trainer
from hetjax.pipeline.program.loss import path_names
from hetjax.runtime.checkpoints.checkpoint_files import CheckpointFolder
from hetjax.runtime.checkpoints.saving import CHECKPOINTS_FOLDER, check_resumable
from hetjax.runtime.checkpoints.traced_model import TracedModel
from hetjax.runtime.instructions.buffers import Gradient
from hetjax.runtime.instructions.instruction import Receive, RouteKind, Run, Send
from hetjax.runtime.workers.job import build

SMALL = Most(stages=2, microbatches=2, pipelines=1, members=3)
"""Of unions, which take long to compile."""

BLOCKS = {"embedding": "trained", "blocks": {"in": "frozen", "out": "frozen"}}
EMBEDDING = {"embedding": "frozen", "blocks": {"in": "trained", "out": "trained"}}


def freezing(
    model: Model, trained: optax.GradientTransformation, frozen: Sequence[bool]
) -> optax.GradientTransformation:
    """An optimizer of a model's parameters that leaves some leaves of them as they are."""
    tree = jax.tree.structure(model.init())
    labels = jax.tree.unflatten(tree, ["frozen" if each else "trained" for each in frozen])
    return optax.multi_transform({"trained": trained, "frozen": optax.set_to_zero()}, labels)


def random_frozen(rng: Random, case: Case) -> list[bool]:
    """Which leaves of the parameters are frozen: not all."""
    count = len(case.program.leaves.rows)
    frozen = [rng.random() < 0.6 for _ in range(count)]
    frozen[rng.randrange(count)] = False
    return frozen


def check_gradients(case: Case, frozen: Sequence[bool]) -> None:
    """Check the loss, and the gradients of what is trained, of a step after another one."""
    batch, before = make_batch(case.plan.batch_size), make_batch(case.plan.batch_size, 1)
    expected, _, gradients = one_device_gradients(case.model, batch)
    tolerance = tolerance_of(case.model)
    with running(job_of(case, freezing(case.model, keep_gradients(), frozen))) as executor:
        *_, (reported, _) = train(executor, [before, batch])
        found = gathered_state(executor, rounded=True)
        program = executor.workers[0].pipelines.program
    leaves = [leaf for leaf, is_frozen in enumerate(frozen) if is_frozen]
    assert program.frozen.without_update == program.leaves.split_places(leaves)
    np.testing.assert_allclose(reported, expected, rtol=tolerance)
    trained = [g for g, is_frozen in zip(gradients, frozen, strict=True) if not is_frozen]
    assert len(found) == len(trained)
    for ours, theirs in zip(found, trained, strict=True):
        assert largest_error(ours, theirs) <= tolerance


@examples(usual=2)
@given(number=st.integers(0, 2**32 - 1))
def test_gradients_of_the_rest_equal_those_of_one_device(number: int):
    rng = Random(number)
    case = random_case(rng, 5, 6, rng.choice((1, 1, 3)))
    check_gradients(case, random_frozen(rng, case))


@examples(usual=1, full=60)
@given(number=st.integers(0, 2**32 - 1))
def test_they_do_where_stages_have_several_members(number: int):
    rng = Random(number)
    case = random_union_case(rng, SMALL)
    check_gradients(case, random_frozen(rng, case))


@examples(usual=1, full=30)
@given(number=st.integers(0, 2**32 - 1))
def test_steps_equal_those_of_one_device_and_what_is_frozen_stays(number: int):
    rng = Random(number)
    case = random_case(rng, 4, 4, rng.choice((1, 2)))
    frozen = random_frozen(rng, case)
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3, eps=1e-5))
    optimizer = freezing(case.model, clipped, frozen)
    batches = [make_batch(case.plan.batch_size, seed) for seed in range(4)]
    with jax.numpy_dtype_promotion("standard"):
        expected = one_device_steps(case.model, optimizer, batches)
    with running(job_of(case, optimizer)) as executor:
        found = train(executor, batches)
        after = gathered_parameters(executor)
    tolerance = max(tolerance_of(case.model), TOLERANCE)
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected], rtol=tolerance)
    before = map(np.asarray, jax.tree.leaves(case.model.init()))
    for first, last, stays in zip(before, after, frozen, strict=True):
        assert not stays or np.array_equal(first, last)


def trainer_of(runtime: str, labels: Any, workdir: Path | None = None) -> Trainer:
    optimizer = optax.multi_transform(
        {"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labels
    )
    return make_trainer(runtime, optimizer=optimizer, workdir=workdir)


def test_below_what_is_trained_there_is_neither_backward_pass_nor_exchange():
    rng = Random(3)
    case = next(
        case
        for case in iter(lambda: random_case(rng, 4, 4), None)
        if len(case.plan.stages) > 1 and not case.model.tied
    )
    frozen = [name != "head" for name in path_names(case.model.init())]
    pipelines = build(job_of(case, freezing(case.model, optax.adam(1e-3), frozen))).pipelines
    *lower, last = range(pipelines.num_stages)
    assert [pipelines.programs[stage].has_backward for stage in lower] == [False] * len(lower)
    assert not any(pipelines.programs[stage].residuals for stage in lower)
    assert pipelines.programs[last].has_backward
    assert pipelines.programs[last].cotangents_out == ()
    assert [len(update.parts) for update in pipelines.updates] == [0] * len(lower) + [1]
    with running(job_of(case, freezing(case.model, optax.adam(1e-3), frozen))) as executor:
        for worker in executor.workers:
            moved = [
                each.tag.route.kind for each in worker.training if isinstance(each, Send | Receive)
            ]
            assert not {RouteKind.COTANGENT, RouteKind.GRADIENT} & set(moved)
            runs = {each.program for each in worker.training if isinstance(each, Run)}
            backward = {"backward", "input_gradient", "recompute", "zero_gradients"}
            assert worker.stage == last or not runs & backward
            assert worker.stage == last or not runs & set(worker.compiled.programs) & backward
            sums = [name for name in worker.buffers if isinstance(name, Gradient)]
            assert worker.stage == last or not sums


def test_what_is_frozen_is_saved_and_other_frozen_ones_are_refused(tmp_path: Path):
    with trainer_of("local", BLOCKS, tmp_path) as trainer:
        trainer.train_step()
        trainer.save(wait=True)
        saved = trainer.parameters()
    with trainer_of("local", BLOCKS, tmp_path) as trainer:
        assert trainer.resume()
        jax.tree.map(np.testing.assert_array_equal, trainer.parameters(), saved)
        np.testing.assert_array_equal(saved["blocks"]["in"], parameters()["blocks"]["in"])
        assert np.any(saved["embedding"] != parameters()["embedding"])
        trainer.train_step()
    with (
        trainer_of("local", EMBEDDING, tmp_path) as trainer,
        pytest.raises(CheckpointError, match="or where other parameters were frozen"),
    ):
        trainer.resume()
    other = jax.eval_shape(optax.sgd(0.1).init, saved)
    newest = CheckpointFolder(tmp_path / CHECKPOINTS_FOLDER).newest_manifest()
    assert newest is not None
    with pytest.raises(CheckpointError, match="or where other parameters were frozen"):
        check_resumable(
            tmp_path, TracedModel(1, lambda _: newest.model), None, other, allow_changed_data=True
        )


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_on_ray_it_is_as_in_one_process():
    with trainer_of("local", BLOCKS) as trainer:
        expected = [trainer.train_step().loss for _ in range(3)]
        after = trainer.parameters()
    with trainer_of("ray", BLOCKS) as trainer:
        found = [trainer.train_step().loss for _ in range(3)]
        frozen = trainer.parameters()["blocks"]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, frozen, after["blocks"])
