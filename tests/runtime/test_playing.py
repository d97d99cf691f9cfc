"""Playing a cluster: clocks, the scale, and steps that are held back."""

import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from ray_jobs import (
    MICROBATCHES,
    SHARES,
    make_plan,
    make_plan_of_two_passes,
    make_trainer,
    union_plan,
)

from hetjax import InputError, Trainer
from hetjax.commands.measured import TimedStep, prediction_rows
from hetjax.commands.playing import check_duration, lateness, playing, scale_words
from hetjax.configuration.settings import make_configuration
from hetjax.pipeline import simulate_schedule
from hetjax.pipeline.schedules.interleaved import interleaved
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.pipeline.schedules.warm_up import eager_1f1b, gpipe, one_f_one_b
from hetjax.pipeline.timeline.timeline import stage_track
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.prediction import Prediction, StagePrediction, times_of
from hetjax.runtime import LocalOptions, Play
from hetjax.runtime.instructions.instruction import Route, RouteKind, Tag
from hetjax.runtime.local.played import PlayedExecutor
from hetjax.runtime.workers.playing import Pacing, PlayedTimes, Player, WallClock


def predicted(forward: float, backward: float, send: float, back: float) -> StagePrediction:
    return StagePrediction(
        forward, backward, 0.0, 0.0, 0.0, 0.25, send, back, 1, 1, 1, 0, 1, 1, 10**6, 0.1
    )


STAGES = (predicted(1.0, 2.0, 1.5, 0.0), predicted(0.5, 2.5, 0.0, 1.25))
"""In seconds, of which a test waits for few."""


def played_plan(
    scale: float = 1.0, plan: Plan | None = None, predicted: tuple[StagePrediction, ...] = STAGES
) -> Plan:
    def scaled(stage: StagePrediction) -> StagePrediction:
        changed = {k: v * scale for k, v in vars(stage).items() if k.endswith("seconds")}
        return replace(stage, **changed)

    plan, stages = plan or make_plan(), tuple(map(scaled, predicted))
    makespan = simulate_schedule(plan.pipeline.schedule, times_of(stages)).makespan
    return replace(plan, prediction=Prediction(makespan, makespan, stages))


class Instant:
    """A clock that never goes, and notes what it is asked to wait for."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def now(self) -> float:
        return 0.0

    def wait_until(self, moment: float) -> None:
        self.moments.append(moment)


class Noted(Player):
    """A player that notes when each stage's programs end."""

    def __init__(self, *arguments: Any):
        self.ends: dict[int, list[float]] = defaultdict(list)
        super().__init__(*arguments)

    def running(self, stage: int, program: str) -> Any:
        within = super().running(stage, program)
        player = self

        class Block:
            def __enter__(self) -> None:
                within.__enter__()

            def __exit__(self, *error: Any) -> None:
                within.__exit__(*error)
                if program in ("forward", "backward"):
                    lead = player.pacing.times.leads[stage]
                    player.ends[stage].append(player._free[lead])

        return Block()


def executor_of(trainer: Trainer) -> PlayedExecutor:
    assert isinstance(trainer._executor, PlayedExecutor)
    return trainer._executor


@pytest.fixture(scope="module")
def trainer() -> Any:
    with make_trainer(LocalOptions(play=Play(scale=1e-3)), played_plan()) as trainer:
        trainer.rehearse()
        yield trainer


@pytest.mark.parametrize("schedule", [one_f_one_b(2, 3), eager_1f1b(2, 3), gpipe(2, 3)])
def test_clocks_go_as_the_timeline_model_does(trainer: Trainer, schedule: Schedule) -> None:
    check_clocks(trainer, schedule, STAGES)


def test_clocks_of_shared_devices_go_as_the_timeline_model_does() -> None:
    """Their stages' tasks follow each other, and what goes the same way for two of them does."""
    stages = (
        *(replace(STAGES[0], forward_seconds=1.0 + s, return_seconds=0.5 * s) for s in range(3)),
        replace(STAGES[1], return_seconds=2.5),
    )
    played = played_plan(1.0, make_plan_of_two_passes(), stages)
    with make_trainer(LocalOptions(play=Play(scale=1e-3)), played) as trainer:
        trainer.rehearse()
        for ahead in (1, 2):
            check_clocks(trainer, interleaved(2, 2, MICROBATCHES, ahead), stages)


def check_clocks(trainer: Trainer, schedule: Schedule, stages: tuple[StagePrediction, ...]) -> None:
    executor = executor_of(trainer)
    before = executor.player
    assert before is not None
    noted = Noted(before.pacing, 2.0, Instant())
    executor.player = noted
    trainer.use_schedule(schedule)
    trainer.train_step()
    executor.player = before
    timeline = simulate_schedule(schedule, times_of(stages))
    for stage in range(len(stages)):
        expected = [event for event in timeline.on(stage_track(stage)) if event.kind in "FB"]
        assert noted.ends[stage] == pytest.approx([2.0 * event.end for event in expected])


def test_played_steps_compute_the_same_and_leave_no_trace_of_the_rehearsal() -> None:
    plan = played_plan(2e-3)
    playing = LocalOptions(play=Play())
    with make_trainer("local", plan) as plain, make_trainer(playing, plan) as played:
        player = played.rehearse()
        assert player is not None
        assert plain.rehearse() is None
        for _ in range(3):
            one, other = plain.train_step(), played.train_step(timed=True)
            assert (one.loss, one.gradient_norm) == (other.loss, other.gradient_norm)
            # It is waited for what was predicted, so that this holds on any machine.
            assert plan.prediction is not None
            assert other.seconds >= plan.prediction.step_time
        assert plain.evaluate() == played.evaluate()
        jax.tree.map(np.testing.assert_array_equal, plain.parameters(), played.parameters())
        rows = prediction_rows(plan, [TimedStep(played.timeline())], step_time=1.0)
        sends = {row.name: row for row in rows}
        assert sends["activations 0 to 1"].measured == pytest.approx(3e-3, rel=0.5)


def test_evaluation_is_not_held_back(trainer: Trainer) -> None:
    executor = executor_of(trainer)
    before = executor.player
    clock = Instant()
    assert before is not None
    executor.player = Player(before.pacing, 1e6, clock)
    trainer.evaluate()
    executor.player = before
    assert clock.moments == []


def test_the_scale_leaves_every_stage_its_share() -> None:
    times = PlayedTimes.of(played_plan())
    here = {
        (0, "forward"): 0.5,
        (0, "backward"): 0.2,
        (1, "backward"): 0.5,
        (1, "update_0"): 0.01,
        (1, "update_1"): 0.03,
    }
    pacing = Pacing(times, here)
    assert pacing.seconds(1, "update_1") == pytest.approx(0.75 * 0.25)
    assert pacing.seconds(0, "forward") == 1.0
    assert pacing.least_scale == pytest.approx(1.5 * (0.5 / 1.0 + 0.5 / 2.5), rel=0.05)


def test_transfers_wait_for_their_lane_and_nothing_else() -> None:
    clock = Instant()
    player = Player(Pacing(PlayedTimes.of(played_plan()), {}), 2.0, clock)
    tags = [Tag(Route(RouteKind.VALUE, 0, 1), m) for m in range(2)]
    for tag in tags:
        player.send(tag, 100)
    spans = [player._spans[tag] for tag in tags]
    assert spans == [(0.0, 3.0), (3.0, 6.0)]
    assert not player.is_there(tags[0])
    back = Tag(Route(RouteKind.COTANGENT, 1, 0), 0)
    player.send(back, 100)
    assert player._spans[back] == (0.0, 2.5)
    player.receive(tags[1])
    assert clock.moments == [6.0]


def test_what_stages_share_leaves_and_enters_one_after_another() -> None:
    times = PlayedTimes.of(played_plan())
    seconds, lanes = times.transfer(Tag(Route(RouteKind.GRADIENT, 0, 1)), 10**6)
    latency, a_byte = times.links[0, 1]
    assert seconds == latency + 10**6 * a_byte
    assert [lane.name for lane in lanes] == ["out", "in"]
    assert times.transfer(Tag(Route(RouteKind.MESSAGE, 0, 1)), 4)[0] == latency


def test_a_deadline_is_one_of_the_cluster() -> None:
    options = LocalOptions(play=Play(50.0), deadline=7.0)
    with make_trainer(options, played_plan(1e-4)) as trainer:
        trainer.rehearse()
        assert executor_of(trainer)._played_transport._deadline == 350.0


def test_what_cannot_be_played_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no prediction; make one"):
        make_trainer(LocalOptions(play=Play()), make_plan())
    with pytest.raises(InputError, match="play: the plan has a stage of several members"):
        make_trainer(LocalOptions(play=Play()), union_plan(SHARES["batch"]))
    with pytest.raises(InputError, match=r"scale is 0\.0; it must be more than 0"):
        Play(0.0)
    with pytest.raises(InputError, match=r"play_scale is 2\.0 and cluster\.play is False"):
        make_configuration({"cluster": {"play_scale": 2.0}})
    configuration = make_configuration({"cluster": {"play": True}, "train": {"steps": 1000}})
    plan = played_plan()
    assert playing(configuration, plan) == Play()
    assert plan.prediction is not None
    large = tuple(replace(stage, memory_bytes=10**18) for stage in plan.prediction.stages)
    too_large = replace(plan, prediction=replace(plan.prediction, stages=large))
    with pytest.raises(InputError, match=r"cluster\.play is True, and the plan's devices hold"):
        playing(configuration, too_large)
    step = plan.prediction.step_time
    with pytest.raises(InputError, match=f"set train.steps = {int(3600 / step / 2)}, take"):
        check_duration(configuration, plan, 2.0, 1000)
    check_duration(configuration, plan, 2.0, 10)
    given = make_configuration(
        {"cluster": {"play": True, "play_scale": 2.0}, "train": {"steps": 1000}}
    )
    check_duration(given, plan, 2.0, 1000)


def test_scales_and_lateness_are_said() -> None:
    assert [scale_words(scale) for scale in (1.0, 40.0, 0.1)] == ["at 1:1", "at 1:40", "at 10:1"]
    assert lateness(5, 100, 2.0) is None
    assert "cluster.play_scale = 4" in str(lateness(50, 100, 2.0))


def test_a_task_that_ends_late_is_followed_by_a_shorter_wait() -> None:
    class ByHand(Instant):
        time = 0.0

        def now(self) -> float:
            return self.time

    clock = ByHand()
    player = Player(Pacing(PlayedTimes.of(played_plan()), {}), 1.0, clock)
    for moment in (1.5, 1.9):
        with player.running(0, "forward"):
            clock.time = moment
    assert player.late_tasks == 1
    assert clock.moments == [1.0, 2.0]


def test_the_wall_clock_sleeps_and_is_never_early() -> None:
    clock = WallClock()
    moment, used = clock.now() + 0.05, time.thread_time()
    clock.wait_until(moment)
    assert clock.now() >= moment
    assert time.thread_time() - used < 0.025
