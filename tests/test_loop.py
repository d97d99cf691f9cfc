import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray_jobs import make_plan

from hetjax import InputError, NonfiniteError, SaveError
from hetjax.configuration import TrainSettings
from hetjax.loop import StepDone, other_step_time, timed_steps, train, usual_step_time
from hetjax.runtime import StepMetrics, Trainer
from hetjax.runtime.checkpoints.nonfinite import Nonfinite


def metrics(step: int, seconds: float = 1.0) -> StepMetrics:
    return StepMetrics(step, loss=1.0, gradient_norm=1.0, seconds=seconds)


@dataclass
class Recorder:
    """Stands for a trainer, and writes down what it is asked."""

    steps_done: int = 0
    calls: list[str] = field(default_factory=list)
    failures: dict[int, SaveError] = field(default_factory=dict)
    has_workdir: bool = True
    num_held_out: int = 2
    plan: Any = None

    def train_step(self, *, timed: bool = False) -> StepMetrics:
        self.steps_done += 1
        self.calls.append(f"{'timed ' if timed else ''}step {self.steps_done}")
        return metrics(self.steps_done)

    def evaluate(self, max_batches: int | None) -> float:
        self.calls.append(f"evaluate {max_batches}")
        return 2.0

    def save(self, *, wait: bool = False) -> None:
        self.calls.append(f"save {self.steps_done}{' and wait' if wait else ''}")

    @property
    def failed_save(self) -> SaveError | None:
        return self.failures.get(self.steps_done)

    def finish_saving(self) -> None:
        self.calls.append("finish saving")


def _plan(name: str) -> SimpleNamespace:
    alone = SimpleNamespace(schedule=SimpleNamespace(groups=()))
    alike = {"pipelines": (alone,), "pipeline": alone, "has_unions": False, "predicted": None}
    return SimpleNamespace(name=name, **alike)


def run(trainer: Recorder, settings: TrainSettings, **arguments: Any) -> list[StepDone]:
    return list(train(cast("Trainer", trainer), settings, **arguments))


def test_steps_evaluations_and_checkpoints_come_in_order() -> None:
    trainer = Recorder()
    settings = TrainSettings(steps=5, evaluate_every=2, evaluation_batches=3, checkpoint_every=2)
    steps = run(trainer, settings, checkpoints=True)
    assert trainer.calls == [
        "step 1",
        "step 2",
        "evaluate 3",
        "save 2",
        "timed step 3",
        "timed step 4",
        "evaluate 3",
        "save 4",
        "timed step 5",
        "evaluate 3",
        "save 5",
        "finish saving",
    ]
    assert [done.evaluation_loss for done in steps] == [None, 2.0, None, 2.0, 2.0]
    assert [done.metrics.step for done in steps if done.saved] == [2, 4]


def test_nothing_is_saved_without_checkpoints_or_twice() -> None:
    trainer = Recorder()
    run(trainer, TrainSettings(steps=4, checkpoint_every=2))
    assert not [call for call in trainer.calls if "save" in call]
    trainer = Recorder()
    settings = TrainSettings(steps=4, checkpoint_every=2)
    run(trainer, settings, checkpoints=True)
    assert [call for call in trainer.calls if "save" in call] == ["save 2", "save 4"]


def test_a_stop_is_followed_by_a_checkpoint() -> None:
    trainer, settings = Recorder(steps_done=4), TrainSettings(steps=100)
    steps = run(trainer, settings, checkpoints=True, stop=lambda: trainer.steps_done == 6)
    assert [done.metrics.step for done in steps] == [5, 6]
    assert trainer.calls[-1] == "finish saving"


def test_a_run_that_is_done_does_nothing() -> None:
    trainer = Recorder(steps_done=5)
    assert not run(trainer, TrainSettings(steps=5), checkpoints=True)
    assert trainer.calls == ["finish saving"]


@pytest.mark.parametrize(
    ("lacking", "settings", "message"),
    [
        ({"has_workdir": False}, {}, "checkpoints is True, and the trainer has no workdir"),
        (
            {"num_held_out": 0},
            {"evaluate_every": 4},
            "evaluate_every is 4, and there are no held-out batches",
        ),
        ({"plan": make_plan()}, {"beside": "1f1b"}, "no prediction; make one"),
    ],
)
def test_what_comes_later_and_cannot_be_done_is_told_before_the_first_step(
    lacking: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    trainer = Recorder(**lacking)
    with pytest.raises(InputError, match=message):
        run(
            trainer,
            TrainSettings(**{"steps": 6, "evaluate_every": None, **settings}),
            checkpoints=True,
        )
    assert not trainer.calls
    run(trainer, TrainSettings(steps=6, evaluate_every=None), checkpoints=trainer.has_workdir)


@given(st.integers(0, 50), st.integers(1, 50))
def test_timed_steps_are_steps_of_the_run(begin: int, more: int) -> None:
    timed = timed_steps(begin, begin + more)
    assert begin + more in timed
    assert all(begin < step <= begin + more for step in timed)


def test_the_usual_step_time_has_no_first_and_no_timed_step() -> None:
    steps = [
        StepDone(metrics(1, seconds=50.0)),
        StepDone(metrics(2, seconds=1.0)),
        StepDone(metrics(3, seconds=20.0), timed=True),
    ]
    assert usual_step_time(steps) == 1.0
    assert usual_step_time(steps[:1]) == 50.0


def test_steps_by_another_schedule_are_told_apart_and_leave_the_plan() -> None:
    @dataclass
    class Planned(Recorder):
        def __post_init__(self) -> None:
            self.plan = _plan("own")

        def use_plan(self, plan: Any) -> None:
            self.calls.append(plan.name)
            self.plan = plan

    trainer = Planned()
    with pytest.MonkeyPatch.context() as patch:
        other = _plan("other")
        patch.setattr("hetjax.planner.choose_schedule", lambda plan, name: other)
        steps = run(trainer, TrainSettings(steps=12, beside="1f1b"))
    assert [done.metrics.step for done in steps if done.beside == "1f1b"] == [4, 5, 6, 7, 8]
    assert trainer.plan.name == "own"
    at = trainer.calls.index("timed step 8")
    assert trainer.calls[at - 1 : at + 2] == ["other", "timed step 8", "own"]
    assert other_step_time(steps) == 1.0


class Diverging(Recorder):
    """Some of whose steps are not finite."""

    bad: frozenset[int] = frozenset()

    def train_step(self, *, timed: bool = False) -> StepMetrics:
        done = super().train_step(timed=timed)
        why = Nonfinite(math.nan, math.nan) if done.step in self.bad else None
        return replace(done, nonfinite=why)


def test_a_checkpoint_that_is_due_waits_for_a_step_that_is_applied() -> None:
    trainer = Diverging()
    trainer.bad = frozenset({2, 3, 6})
    settings = TrainSettings(steps=7, checkpoint_every=2, max_nonfinite=3)
    run(trainer, settings, checkpoints=True)
    saves = [call for call in trainer.calls if "save" in call]
    assert saves == ["save 4", "save 7"]


def test_too_many_steps_in_a_row_end_the_loop_and_save_no_state_twice() -> None:
    trainer = Diverging()
    trainer.bad = frozenset({2, 4, 5, 6})
    settings = TrainSettings(steps=100, checkpoint_every=1, max_nonfinite=3)
    with pytest.raises(NonfiniteError, match=r"3 steps in a row up to step 6"):
        run(trainer, settings, checkpoints=True)
    assert [call for call in trainer.calls if "save" in call] == ["save 1", "save 3"]


def test_too_many_steps_in_a_row_cost_no_state() -> None:
    trainer = Diverging()
    trainer.bad = frozenset({4, 5, 6})
    settings = TrainSettings(steps=100, max_nonfinite=3)
    with pytest.raises(NonfiniteError, match="what is saved is the last finite state"):
        run(trainer, settings, checkpoints=True)
    assert [call for call in trainer.calls if "save" in call] == ["save 6 and wait"]
    trainer = Diverging()
    trainer.bad = frozenset({1, 2, 3})
    with pytest.raises(NonfiniteError):
        run(trainer, settings, checkpoints=True)
    assert not [call for call in trainer.calls if "save" in call]  # nothing was trained


class Unlucky(Recorder):
    """Whose held-out batches cannot be read, and whose disk may be full."""

    full: bool = False

    def evaluate(self, max_batches: int | None) -> float:
        raise OSError("the held-out batches are gone")

    def save(self, *, wait: bool = False) -> None:
        super().save(wait=wait)
        if self.full:
            raise SaveError(self.steps_done, "No space left on device")


@pytest.mark.parametrize("full", [False, True])
def test_an_error_between_steps_costs_no_state_and_is_not_hidden(full: bool) -> None:
    trainer = Unlucky()
    trainer.full = full
    with pytest.raises(OSError, match="the held-out batches are gone") as raised:
        run(trainer, TrainSettings(steps=9, evaluate_every=2), checkpoints=True)
    assert trainer.calls == ["step 1", "step 2", "save 2 and wait"]
    notes = ["checkpoint 2 was not saved: No space left on device"] if full else []
    assert getattr(raised.value, "__notes__", []) == notes
