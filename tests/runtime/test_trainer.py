"""The trainer on the local runtime."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import optax
import pytest
from execution import gathered_state
from ray_jobs import (
    BATCH,
    MICROBATCHES,
    OPTIMIZER,
    Tokens,
    loss,
    make_plan,
    make_trainer,
    parameters,
)

import hetjax
from hetjax import CheckpointError, InputError, Trainer
from hetjax.configuration import TrainSettings
from hetjax.loop import train
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import choose_schedule, make_problem, predict
from hetjax.planner.plan.plan import Plan
from hetjax.runtime import CheckpointOptions, LocalOptions, RayOptions
from hetjax.runtime.local.local_executor import LocalExecutor

PLAN = make_plan()


def make(runtime: str | LocalOptions = "local", **changes: Any) -> Trainer:
    return make_trainer(runtime, PLAN, **changes)


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    """A trainer that has a source and no workdir."""
    with make() as trainer:
        yield trainer


@pytest.fixture(scope="module")
def sourceless() -> Iterator[Trainer]:
    """A trainer that is given its batches."""
    with make(source=None) as trainer:
        yield trainer


def state(trainer: Trainer) -> list[np.ndarray]:
    assert isinstance(trainer._executor, LocalExecutor)
    return gathered_state(trainer._executor)


def assert_equal(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def mean_loss(weights: Any, batch: Any) -> float:
    total, count = loss(weights, batch)
    return float(total / count)


def test_a_step_gives_its_number_loss_and_norm(trainer: Trainer):
    done = trainer.steps_done
    for step in range(done, done + 3):
        expected = mean_loss(trainer.parameters(), Tokens().batch(step, BATCH))
        metrics = trainer.train_step()
        assert metrics.step == trainer.steps_done == step + 1
        assert metrics.loss == pytest.approx(expected, rel=1e-5)
        assert metrics.gradient_norm > 0
        assert metrics.seconds > 0
        assert len(trainer.reports) == 2


def test_evaluation_is_the_mean_over_held_out_batches_and_changes_nothing(trainer: Trainer):
    before, done = trainer.parameters(), trainer.steps_done
    expected = [mean_loss(before, batch) for batch in Tokens().held_out_batches(BATCH)]
    assert trainer.evaluate() == pytest.approx(np.mean(expected), rel=1e-5)
    assert trainer.evaluate(max_batches=1) == pytest.approx(expected[0], rel=1e-5)
    assert_equal(trainer.parameters(), before)
    assert trainer.steps_done == done


def test_evaluation_without_batches_is_refused(trainer: Trainer, sourceless: Trainer):
    with pytest.raises(InputError, match="no held-out batches"):
        sourceless.evaluate()
    with pytest.raises(InputError, match="max_batches is 0; it must be a whole number, 1 or more"):
        trainer.evaluate(max_batches=0)


def test_checkpoints_want_a_folder(trainer: Trainer):
    with pytest.raises(InputError, match="no workdir to save"):
        trainer.save()
    with pytest.raises(InputError, match="no workdir to resume"):
        trainer.resume()


def test_a_step_wants_a_batch_of_the_planned_shape(sourceless: Trainer):
    done = sourceless.steps_done
    with pytest.raises(InputError, match="was given no batch"):
        sourceless.train_step()
    with pytest.raises(InputError, match="'tokens' has shape"):
        sourceless.train_step(Tokens().batch(0, BATCH + 1))
    assert sourceless.steps_done == done
    assert sourceless.train_step(Tokens().batch(0, BATCH)).step == done + 1


def test_a_timeline_wants_a_timed_step(sourceless: Trainer):
    with pytest.raises(InputError, match="no step was timed"):
        sourceless.timeline()


def test_a_timed_step_shows_every_stage_and_link(trainer: Trainer):
    trainer.train_step(timed=True)
    trainer.train_step()
    timeline = trainer.timeline()
    assert timeline.tracks == ("stage 0", "link 0->1", "link 1->0", "stage 1")
    for track in timeline.tracks:
        events = [event for event in timeline.events if event.track == track]
        marks = {event.microbatch for event in events if event.kind != "update"}
        assert marks == set(range(MICROBATCHES))
    assert min(event.start for event in timeline.events) == 0
    assert all(event.end >= event.start for event in timeline.events)


def test_a_resumed_run_continues_bitwise(tmp_path: Path):
    with make(workdir=tmp_path, parameters=parameters()) as trainer:
        with pytest.raises(CheckpointError, match="there is no checkpoint to resume from"):
            trainer.resume()
        assert trainer.resume(or_start=True)[-1].endswith("starting at step 0")
        assert_equal(trainer.parameters(), parameters())
        trainer.train_step()
        trainer.train_step()
        trainer.save()
        expected = [trainer.train_step().loss for _ in range(3)]
        final = trainer.parameters(), state(trainer)
    batches = [Tokens().batch(step, BATCH) for step in range(2, 5)]
    with make(workdir=tmp_path, source=None) as trainer:
        messages = trainer.resume()
        assert messages[-1].startswith("resumed from step 2 (")
        assert trainer.steps_done == 2
        assert [trainer.train_step(batch).loss for batch in batches] == expected
        assert_equal(trainer.parameters(), final[0])
        assert_equal(state(trainer), final[1])
    with (
        make(workdir=tmp_path, optimizer=optax.sgd(0.1)) as trainer,
        pytest.raises(CheckpointError, match="optimizer leaf"),
    ):
        trainer.resume()


def test_the_keep_policy_reaches_the_checkpoints(tmp_path: Path):
    with make(
        workdir=tmp_path, checkpoints=CheckpointOptions(keep_last=1, keep_every=2)
    ) as trainer:
        for _ in range(5):
            trainer.train_step()
            trainer.save()
    found = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert found == [2, 4, 5]


def interrupted(trainer: Trainer) -> None:
    with trainer:
        trainer.train_step()
        trainer.save()
        raise KeyboardInterrupt


def test_an_error_closes_the_trainer_and_finishes_its_checkpoint(tmp_path: Path):
    trainer = make(workdir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        interrupted(trainer)
    trainer.close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000001"]
    with pytest.raises(InputError, match="the trainer is closed"):
        trainer.train_step()


def test_a_closed_trainer_says_so(tmp_path: Path):
    trainer = make(workdir=tmp_path)
    trainer.train_step()
    trainer.close()
    trainer.close()
    uses = (
        trainer.train_step,
        trainer.evaluate,
        trainer.save,
        trainer.resume,
        trainer.parameters,
        trainer.measure,
        lambda: trainer.switch(PLAN),
        lambda: trainer.use_plan(PLAN),
    )
    for use in uses:
        with pytest.raises(InputError, match="the trainer is closed; make another one"):
            use()


def test_the_name_of_a_schedule_is_none(trainer: Trainer):
    with pytest.raises(InputError, match="schedule is 'gpipe'; give a hetjax Schedule"):
        trainer.use_schedule(cast("Any", "gpipe"))


def test_the_name_of_a_runtime_is_not_its_options():
    name: Any = "ray"
    with pytest.raises(InputError, match=r"runtime is 'ray'; give hetjax\.LocalOptions\(\)"):
        Trainer(PLAN, loss, parameters, OPTIMIZER, Tokens().batch(0, BATCH), runtime=name)


def test_the_options_of_a_runtime_reach_its_job():
    with make(LocalOptions(deadline=7.0)) as trainer:
        assert trainer._job.deadline == 7.0
    with make() as trainer:
        assert trainer._job.deadline == LocalOptions().deadline == RayOptions().deadline


def test_a_plan_for_another_batch_or_model_is_refused():
    with pytest.raises(InputError, match=rf"computes {BATCH} examples a step"):
        make(batch=Tokens().batch(0, 2 * BATCH))
    other = Plan("another", PLAN.layers, PLAN.cluster, PLAN.pipelines)
    with pytest.raises(InputError, match="made for another model"):
        make_trainer("local", other)


def test_another_schedule_trains_on_as_if_nothing_had_changed():
    batch = Tokens().batch(0, BATCH)
    with make() as steady, make() as changing:
        plan = predict_for(changing)
        for name in ("gpipe", "h_1f1b_split", "zb_h1", "search"):
            changing.use_schedule(choose_schedule(plan, name).pipeline.schedule)
            for _ in range(2):
                found, expected = changing.train_step(batch), steady.train_step(batch)
                assert found.loss == pytest.approx(expected.loss, rel=1e-6)
                assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5)


def predict_for(trainer: Trainer) -> Plan:
    """The trainer's plan with a prediction."""
    shapes = jax.eval_shape(parameters)
    batch = Tokens().batch(0, BATCH)
    problem = make_problem(
        loss,
        shapes,
        batch,
        cluster=trainer.plan.cluster,
        optimizer=optax.adamw(1e-3),
        num_microbatches=MICROBATCHES,
    )
    return predict(trainer.plan, problem)


def test_measuring_gives_times_of_whole_and_split_passes_and_trains(trainer: Trainer):
    done, plan = trainer.steps_done, trainer.plan
    times = trainer.measure(rounds=1)
    assert trainer.steps_done == done + 4
    assert trainer.plan == plan
    assert trainer.measure(rounds=2, known=times).can_split
    assert trainer.steps_done == done + 7
    assert trainer.plan == plan
    assert times.num_stages == len(plan.pipeline.stages)
    assert times.can_split
    assert min(*times.forward, *times.backward, *times.update) > 0


def test_what_is_no_flag_no_times_and_no_folder_is_refused(trainer: Trainer):
    done = trainer.steps_done
    with pytest.raises(InputError, match="timed is 'yes'; it must be True or False"):
        trainer.train_step(timed=cast(Any, "yes"))
    with pytest.raises(
        InputError, match=r"known is 3; give what measure\(\) has returned, or None"
    ):
        trainer.measure(known=cast(Any, 3))
    assert trainer.steps_done == done
    with pytest.raises(InputError, match="workdir is 5; give the path of a folder, or None"):
        make(workdir=5)


def test_a_run_makes_its_schedule_of_what_its_first_steps_measure(trainer: Trainer):
    plan = predict_for(trainer)
    trainer.use_plan(plan)
    steps = list(train(trainer, TrainSettings(steps=trainer.steps_done + 8), tune="search"))
    assert [done.timed for done in steps] == [True] * 6 + [False, True]
    assert trainer.plan.pipeline.schedule.name == "search"
    assert trainer.plan.prediction != plan.prediction


def test_a_run_that_ends_before_all_is_measured_has_its_plan(trainer: Trainer):
    plan = predict_for(trainer)
    trainer.use_plan(plan)
    list(train(trainer, TrainSettings(steps=trainer.steps_done + 2), tune="search"))
    assert trainer.plan == plan


def test_a_trainer_takes_a_plan_with_another_schedule_alone(trainer: Trainer):
    plan = predict_for(trainer)
    other = choose_schedule(plan, "zb_h1")
    trainer.use_plan(other)
    assert trainer.plan == other
    trainer.use_plan(plan)
    with pytest.raises(InputError, match="more than its schedule"):
        trainer.use_plan(replace(other, model="another"))


def test_a_schedule_that_does_not_fit_the_plan_is_refused(trainer: Trainer):
    with pytest.raises(InputError, match="microbatches"):
        trainer.use_schedule(one_f_one_b(len(PLAN.pipeline.stages), MICROBATCHES + 1))


def test_a_plan_may_be_the_path_of_its_file(tmp_path: Path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    with make_trainer("local", cast(Any, str(path))) as trainer:
        assert trainer.plan == PLAN
    with pytest.raises(InputError, match=r"nowhere.json"):
        Trainer(tmp_path / "nowhere.json", loss, parameters, OPTIMIZER, BATCH)
    wrong: Any = 3
    with pytest.raises(
        InputError, match="plan is 3; it must be a Plan, or the path of a plan file"
    ):
        Trainer(wrong, loss, parameters, OPTIMIZER, BATCH)
    with pytest.raises(InputError, match="plan is None; it must be a Plan"):
        hetjax.simulate(cast(Any, None))
