"""The training loop: steps, evaluations and checkpoints in their order, for commands and notebooks.

with hetjax.Trainer(plan, loss, parameters, optimizer, batch, source=data) as trainer:
    for done in hetjax.loop.train(trainer, TrainSettings(steps=100)):
        print(done.metrics.step, done.metrics.loss)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetjax.configuration.settings import TrainSettings
from hetjax.errors import InputError, NonfiniteError, SaveError

if TYPE_CHECKING:
    from hetjax.planner.plan.plan import Plan
    from hetjax.runtime import StepMetrics, Trainer
    from hetjax.runtime.checkpoints.nonfinite import Nonfinite


@dataclass(frozen=True)
class StepDone:
    """One step of the loop.

    Args:
        metrics: what the step gave.
        evaluation_loss: the mean held-out loss after it, where it was evaluated.
        timed: whether the time of every operation was taken, which slows the step a little.
        saved: whether a checkpoint of it was begun.
        beside: the schedule that it ran by, where that is not the plan's.
        failed_save: why the checkpoint that was last to be written was not; told once. Training
            goes on, and the next one is tried.
    """

    metrics: StepMetrics
    evaluation_loss: float | None = None
    timed: bool = False
    saved: bool = False
    beside: str | None = None
    failed_save: SaveError | None = None


def train(
    trainer: Trainer,
    settings: TrainSettings,
    *,
    checkpoints: bool = False,
    stop: Callable[[], bool] = lambda: False,
    tune: str | None = None,
) -> Iterator[StepDone]:
    """Train from where the trainer is to the last step, a step each time it is asked for the next.

    The third step, one in the middle and the last one are timed, so that there is a timeline of
    every run; five of those after the third run by `settings.beside`, where that is given. Where
    `checkpoints` are wanted, the last step's is on the disk when the loop ends, also when it is
    stopped, and when it raises but for a step that was cut off.

    A step whose loss or gradient norm is not finite is not applied. A checkpoint that is due there
    waits for the next step that is, since nothing has changed: copies of one state would take the
    places of earlier ones.

    Args:
        trainer: what trains; its source gives the batches.
        settings: how many steps, and when to evaluate and to save.
        checkpoints: whether to save; the trainer has a workdir then.
        stop: asked before every step whether to stop there.
        tune: a schedule's name; the first steps measure what tasks and transfers take, and the
            trainer goes on with this schedule, made of that. None keeps the plan's schedule, and so
            does a plan of several pipelines.

    Yields:
        Every step that is done.

    Raises:
        InputError: before the first step: the trainer has no workdir for checkpoints, holds out
            nothing to evaluate on, or has a plan without the prediction that another schedule is
            made of.
        NonfiniteError: `settings.max_nonfinite` steps in a row were not applied.
        SaveError: the last checkpoint could not be written.
    """
    if trainer.steps_done < settings.steps:
        _check_able(trainer, settings, tune, checkpoints=checkpoints)
    timed = timed_steps(trainer.steps_done, settings.steps)
    saved = applied = trainer.steps_done
    save_is_due, in_a_row = False, 0
    failed: SaveError | None = None
    tuning = iter(()) if tune is None or keeps_schedules(trainer.plan) else _tuning(trainer, tune)
    others, first = _beside(trainer, settings), trainer.steps_done + 1 + _STEPS_BEFORE_OTHERS
    try:
        while trainer.steps_done < settings.steps and not stop():
            step = trainer.steps_done + 1
            metrics, other = next(tuning, None), None
            is_timed = metrics is not None or step in timed
            if metrics is None and step >= first:
                metrics, is_timed = next(others, (None, is_timed))
                other = settings.beside if metrics is not None else None
            metrics = metrics or trainer.train_step(timed=is_timed)
            is_last = step == settings.steps
            applied = step if metrics.nonfinite is None else applied
            loss = None
            if _is_due(step, settings.evaluate_every, is_last=is_last):
                loss = trainer.evaluate(settings.evaluation_batches)
            save_is_due = save_is_due or _is_due(step, settings.checkpoint_every)
            if checkpoints and save_is_due and metrics.nonfinite is None:
                trainer.save()
                saved, save_is_due = step, False
            failed, told = (trainer.failed_save, failed) if checkpoints else (None, None)
            news = failed if failed is not told else None
            yield StepDone(metrics, loss, is_timed, saved == step, other, news)
            in_a_row = 0 if metrics.nonfinite is None else in_a_row + 1
            if metrics.nonfinite is not None and in_a_row == settings.max_nonfinite:
                raise NonfiniteError(_goes_nowhere(step, metrics.nonfinite, in_a_row))
    except Exception as error:
        if checkpoints and saved < applied:
            _save_after(trainer, error)
        raise
    if checkpoints and saved != trainer.steps_done:
        trainer.save()
    if checkpoints:
        trainer.finish_saving()


def _save_after(trainer: Trainer, error: Exception) -> None:
    """Save what was trained before an error, which a save that fails does not hide."""
    try:
        trainer.save(wait=True)
    except SaveError as another:
        error.add_note(str(another))
    except Exception:
        pass  # The state is between two steps, or gone with its workers: the error says why.


def _check_able(
    trainer: Trainer, settings: TrainSettings, tune: str | None, *, checkpoints: bool
) -> None:
    """Check that the trainer can do what comes later, so that no step is done in vain."""
    if checkpoints and not trainer.has_workdir:
        raise InputError(
            "checkpoints is True, and the trainer has no workdir to save them in; give the trainer "
            "one, or leave checkpoints out"
        )
    if settings.evaluate_every is not None and not trainer.num_held_out:
        raise InputError(
            f"train.evaluate_every is {settings.evaluate_every}, and there are no held-out batches "
            f"to evaluate on; set it to None, or hold some out"
        )
    others = tune is not None or settings.beside is not None
    if others and not keeps_schedules(trainer.plan):
        _ = trainer.plan.predicted


def keeps_schedules(plan: Plan) -> str | None:
    """Why no other schedule than its own is made for a plan; None where it is."""
    if len(plan.pipelines) > 1:
        return "a plan of several pipelines keeps its schedules"
    if plan.has_unions:
        return "a plan with a stage of several members keeps its schedules"
    if plan.pipeline.schedule.groups:
        return "a plan whose stages share devices keeps its schedule"
    return None


def _goes_nowhere(step: int, last: Nonfinite, in_a_row: int) -> str:
    return (
        f"{in_a_row} steps in a row up to step {step} were not finite and not applied, as many as "
        f"train.max_nonfinite allows; the last: {last}. Try a lower learning rate, clip gradients, "
        f"or look at the data; what is saved is the last finite state"
    )


def _tuning(trainer: Trainer, name: str) -> Iterator[StepMetrics]:
    """The first steps of a run that makes its schedule of measured times.

    The schedule is made twice: of times by 1F1B, and of those by the schedule that came of it, in
    which transfers and computation get in each other's way as they will.
    """
    from hetjax.planner import choose_schedule
    from hetjax.runtime.measuring import measuring

    plan, times = trainer.plan, None
    for _ in range(2):
        times = yield from measuring(trainer, rounds=1, known=times)
        trainer.use_plan(choose_schedule(plan, name, times))


_STEPS_BEFORE_OTHERS = 3
_OTHER_STEPS = 5
"""Steps by another schedule: the first warms up, the last is timed."""


def _beside(trainer: Trainer, settings: TrainSettings) -> Iterator[tuple[StepMetrics, bool]]:
    """Steps by the schedule that is to stand beside the plan's; whether each was timed."""
    from hetjax.planner import choose_schedule

    if settings.beside is None or keeps_schedules(trainer.plan):
        return
    other = choose_schedule(trainer.plan, settings.beside)
    for place in range(_OTHER_STEPS):
        plan, timed = trainer.plan, place == _OTHER_STEPS - 1
        trainer.use_plan(other)
        metrics = trainer.train_step(timed=timed)
        trainer.use_plan(plan)
        yield metrics, timed


def timed_steps(steps_done: int, steps: int) -> frozenset[int]:
    """Which steps to take the times of: one soon after the start, one halfway, and the last.

    Args:
        steps_done: where the loop begins.
        steps: where it ends.

    Returns:
        Numbers of steps, from 1.

    Example:
        >>> sorted(timed_steps(0, 100)), sorted(timed_steps(99, 100))
        ([3, 52, 100], [100])
    """
    first = min(steps_done + 3, steps)
    return frozenset({first, (first + steps + 1) // 2, steps})


def usual_step_time(steps: Sequence[StepDone]) -> float:
    """The usual duration of a step: the median without the first, which warms up, and timed ones.

    Args:
        steps: the steps of one loop, one or more. Those by another schedule than the plan's do not
            count.

    Returns:
        Seconds; of all steps where no other is left.

    Example:
        >>> from types import SimpleNamespace
        >>> seconds = [9.0, 1.0, 5.0, 3.0]
        >>> steps = [StepDone(SimpleNamespace(seconds=s), timed=s == 5.0) for s in seconds]
        >>> usual_step_time(steps)
        2.0
    """
    own = [done for done in steps if done.beside is None]
    return statistics.median(_usual_seconds(own) or [done.metrics.seconds for done in own])


def other_step_time(steps: Sequence[StepDone]) -> float | None:
    """The usual duration of a step by the schedule that stands beside the plan's.

    Args:
        steps: the steps of one loop.

    Returns:
        Seconds, the first such step and timed ones left out; None where there are no others.

    Example:
        >>> from types import SimpleNamespace
        >>> metrics = [SimpleNamespace(seconds=s) for s in (9.0, 2.0, 4.0)]
        >>> other_step_time([StepDone(each, beside="1f1b") for each in metrics])
        3.0
    """
    usual = _usual_seconds([done for done in steps if done.beside is not None])
    return statistics.median(usual) if usual else None


def _usual_seconds(steps: Sequence[StepDone]) -> list[float]:
    """The seconds of steps by one schedule, without the first and those that were timed."""
    return [done.metrics.seconds for done in steps[1:] if not done.timed]


def _is_due(step: int, every: int | None, *, is_last: bool = False) -> bool:
    return every is not None and (step % every == 0 or is_last)
