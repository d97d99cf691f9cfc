"""Pulls are asked for before what they pull is there, so that no computation waits for one."""

from random import Random

import optax
import pytest
from cases import CLUSTER, Case, trace_model
from execution import job_of
from small_models import Model

from hetjax.mesh import SubMesh
from hetjax.pipeline.build import PipelinePrograms
from hetjax.pipeline.schedule_search.named_schedules import make_schedule
from hetjax.pipeline.schedule_search.schedule_search import search_schedule
from hetjax.pipeline.schedules.schedule import SCHEDULES, Schedule
from hetjax.pipeline.timeline.simulate import simulate_schedule
from hetjax.pipeline.timeline.timeline import Event, stage_track
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.runtime.instructions.instruction import Expect, Receive, RouteKind, Run, Tag
from hetjax.runtime.instructions.instruction_list import training_instructions
from hetjax.runtime.workers.job import build

STAGES, MICROBATCHES = 4, 12
TASKS = {RouteKind.VALUE: "F", RouteKind.COTANGENT: "B"}
PROGRAMS = {"forward": "F", "backward": "B", "input_gradient": "B", "weight_gradient": "W"}


@pytest.fixture(scope="module")
def pipeline() -> PipelinePrograms:
    model = Model(("dense", "dense"))
    program = trace_model(model, 1)
    layers = tuple(i * program.num_positions // STAGES for i in range(STAGES + 1))
    stages = tuple(
        StagePlan.on((stage, stage + 1), SubMesh("first", stage, (1, 1)), (1, 1))
        for stage in range(STAGES)
    )
    schedule = make_schedule("gpipe", STAGES, MICROBATCHES, draw_times(Random(0)))
    plan = PipelinePlan(stages, MICROBATCHES, 1, schedule)
    case = Case(model, program, Plan(program.fingerprint, layers, CLUSTER, (plan,)))
    return build(job_of(case, optax.sgd(0.1))).pipelines


def draw_times(rng: Random) -> StepTimes:
    """Stages of unlike speed, and links that take up to what the slowest stage takes."""
    halves = [rng.uniform(0.5, 1.0) for _ in range(STAGES)]
    links = [rng.uniform(0.1, 2.0) for _ in range(STAGES - 1)]
    whole = [2 * half for half in halves]
    return StepTimes(halves, whole, links, links, (), halves, halves)


def asked(
    pipeline: PipelinePrograms, schedule: Schedule, stage: int, events: dict[tuple[str, str], Event]
) -> dict[Tag, float]:
    """When a stage asks for each transfer of a microbatch.

    What stands after a receive is done when the task that received it starts.
    """
    found, waiting, begun = {}, [], False
    for instruction in training_instructions(pipeline, schedule, stage):
        if isinstance(instruction, Receive):
            begun = True
        if isinstance(instruction, Expect) and instruction.tag.route.kind in TASKS:
            waiting.append(instruction.tag)
            if not begun:
                found[waiting.pop()] = 0.0
        if isinstance(instruction, Run) and instruction.microbatch >= 0:
            begun, name = True, f"{PROGRAMS[instruction.program]}{instruction.microbatch}"
            start = events[stage_track(stage), name].start
            found.update(dict.fromkeys(waiting, start))
            waiting.clear()
    assert not waiting
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_pull_is_asked_for_before_its_data_is_there(
    pipeline: PipelinePrograms, name: str, seed: int
):
    times = draw_times(Random(seed))
    if name == "search":
        schedule = search_schedule(times, MICROBATCHES, [STAGES + seed] * STAGES, trials=20)
    else:
        schedule = make_schedule(name, STAGES, MICROBATCHES, times)
    # What was misjudged when the schedule was made must not matter.
    for told in (times, draw_times(Random(seed + 100))):
        events = {(e.track, e.name): e for e in simulate_schedule(schedule, told).events}
        for stage in range(STAGES):
            for tag, at in asked(pipeline, schedule, stage, events).items():
                task = f"{TASKS[tag.route.kind]}{tag.microbatch}"
                made = events[stage_track(tag.route.source), task].end
                assert at <= made + 1e-9, f"{tag} is asked for {at - made} s late"
