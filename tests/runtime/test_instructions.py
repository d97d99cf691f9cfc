"""Instruction lists: sound on their own, and free of deadlock when all stages run theirs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import optax
import pytest
from cases import Case, cases, examples
from execution import job_of
from hypothesis import given

from hetjax.pipeline.build import PipelinePrograms
from hetjax.pipeline.schedules.schedule import Schedule, Task
from hetjax.runtime.instructions.buffers import (
    ACTIVATIONS,
    STEP_METRICS,
    Buffer,
    Buffers,
    Gradient,
    LossCount,
    LossSeed,
    LossSum,
    OptimizerState,
    Parameter,
)
from hetjax.runtime.instructions.instruction import (
    Expect,
    Free,
    Instruction,
    Load,
    Receive,
    Run,
    Send,
    Tag,
)
from hetjax.runtime.instructions.instruction_list import (
    evaluation_instructions,
    stage_programs,
    training_instructions,
)
from hetjax.runtime.instructions.placement import reduction_groups
from hetjax.runtime.workers.job import build

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def reads(instruction: Instruction) -> Buffers:
    match instruction:
        case Run(inputs=inputs):
            return tuple(buffer for argument in inputs for buffer in argument)
        case Send(buffers=buffers):
            return buffers
    return ()


def makes(instruction: Instruction) -> Buffers:
    match instruction:
        case Run(outputs=outputs):
            return outputs
        case Load(buffers=buffers) | Receive(buffers=buffers):
            return buffers
    return ()


@dataclass
class SimulatedWorker:
    """Runs a list on names alone.

    Args:
        instructions: the list.
        held: the buffers that exist.
        live: the most microbatches whose activations existed at once.
        place: the next instruction.
    """

    instructions: Sequence[Instruction]
    held: set[Buffer]
    live: int = 0
    place: int = field(default=0)

    def advance(self, sent: dict[Tag, int]) -> bool:
        """Run until a receive blocks; whether anything ran."""
        start = self.place
        while self.place < len(self.instructions):
            instruction = self.instructions[self.place]
            if isinstance(instruction, Receive) and instruction.tag not in sent:
                break
            self.execute(instruction, sent)
            self.place += 1
        return self.place > start

    def execute(self, instruction: Instruction, sent: dict[Tag, int]) -> None:
        missing = set(reads(instruction)) - self.held
        assert not missing, f"{instruction} reads {missing}"
        if isinstance(instruction, Free):
            assert set(instruction.buffers) <= self.held
            self.held -= set(instruction.buffers)
        if isinstance(instruction, Send):
            assert instruction.tag not in sent, f"{instruction.tag} is sent twice"
            sent[instruction.tag] = len(instruction.buffers)
        if isinstance(instruction, Receive):
            assert sent.pop(instruction.tag) == len(instruction.buffers)
        self.held |= set(makes(instruction))
        microbatches = {
            buffer.microbatch for buffer in self.held if isinstance(buffer, ACTIVATIONS)
        }
        self.live = max(self.live, len(microbatches))


def simulate(workers: Sequence[SimulatedWorker]) -> None:
    """Run all lists with blocking receives and sends that never block, to their ends."""
    sent: dict[Tag, int] = {}
    moved = True
    while moved:
        moved = sum(worker.advance(sent) for worker in workers) > 0
    for stage, worker in enumerate(workers):
        assert worker.place == len(worker.instructions), (
            f"stage {stage} waits for ever at {worker.instructions[worker.place]}"
        )
    assert not sent, "some transfers are never received"


def initial_buffers(pipelines: PipelinePrograms, schedule: Schedule, stage: int) -> set[Buffer]:
    places = range(len(pipelines.stages[stage].parameters))
    found: set[Buffer] = {Parameter(place) for place in places}
    found |= {OptimizerState(place) for place in range(len(pipelines.updates[stage].state))}
    if schedule.num_microbatches > 1:
        found |= {Gradient(place) for place in places}
    return found | ({LossSeed()} if pipelines.is_last(stage) else set())


def check_list(instructions: Sequence[Instruction]) -> None:
    """Buffers are freed right after their last use; receives are asked for before.

    The last use of an array may also be the last one before another gets its name.
    """
    last: dict[Buffer, int] = {}
    freed: set[Buffer] = set()
    asked: set[Tag] = set()
    for place, instruction in enumerate(instructions):
        assert not freed & set(reads(instruction))
        freed -= set(makes(instruction))
        last.update(dict.fromkeys((*reads(instruction), *makes(instruction)), place))
        if isinstance(instruction, Free):
            assert not freed & set(instruction.buffers)
            freed.update(instruction.buffers)
            assert {last[buffer] for buffer in instruction.buffers} == {place - 1}
        if isinstance(instruction, Expect):
            assert instruction.tag not in asked
            asked.add(instruction.tag)
        if isinstance(instruction, Receive):
            assert instruction.tag in asked
            asked.remove(instruction.tag)
    assert not asked


def check_routes(stage: int, instructions: Sequence[Instruction]) -> None:
    for instruction in instructions:
        match instruction:
            case Send(tag=tag):
                assert tag.route.source == stage != tag.route.target
            case Receive(tag=tag) | Expect(tag=tag):
                assert tag.route.target == stage != tag.route.source


@examples(usual=15)
@given(case=cases(max_pipelines=3))
def test_training_lists(case: Case):
    placement = build(job_of(case, OPTIMIZER))
    pipelines, workers = placement.pipelines, []
    for stage in range(pipelines.num_stages):
        schedule = placement.pipeline_plan(stage).schedule
        reductions = reduction_groups(placement, stage)
        instructions = training_instructions(pipelines, schedule, stage, reductions=reductions)
        check_list(instructions)
        check_routes(stage, instructions)
        workers.append(SimulatedWorker(instructions, initial_buffers(pipelines, schedule, stage)))
    before = [set(worker.held) for worker in workers]
    simulate(workers)
    for stage, worker in enumerate(workers):
        assert worker.held == before[stage] | {*STEP_METRICS}
        schedule = placement.pipeline_plan(stage).schedule
        assert worker.live <= schedule.live_bound(placement.place(stage))


@examples(usual=8)
@given(case=cases(max_pipelines=3))
def test_evaluation_lists(case: Case):
    placement = build(job_of(case, OPTIMIZER))
    pipelines, workers = placement.pipelines, []
    for stage in range(pipelines.num_stages):
        schedule = placement.pipeline_plan(stage).schedule
        instructions = evaluation_instructions(pipelines, schedule, stage)
        check_list(instructions)
        check_routes(stage, instructions)
        workers.append(SimulatedWorker(instructions, initial_buffers(pipelines, schedule, stage)))
    before = [set(worker.held) for worker in workers]
    simulate(workers)
    for stage, worker in enumerate(workers):
        count = placement.pipeline_plan(stage).num_microbatches
        losses = {kind(m) for kind in (LossSum, LossCount) for m in range(count)}
        assert worker.held == before[stage] | (losses if pipelines.is_last(stage) else set())
        assert worker.live <= 1


def order(*stages: str) -> Schedule:
    return Schedule("explicit", tuple(tuple(map(Task.parse, stage.split())) for stage in stages))


@pytest.mark.parametrize(
    ("tasks", "recomputes", "programs"),
    [
        ("F0 B0", False, ("forward", "backward")),
        ("F0 B0 W0", False, ("forward", "input_gradient", "weight_gradient")),
        (
            "F0 F1 B0 B1 W1",
            True,
            ("forward", "recompute", "backward", "input_gradient", "weight_gradient"),
        ),
    ],
)
def test_a_stage_compiles_what_its_tasks_need(
    tasks: str, recomputes: bool, programs: tuple[str, ...]
):
    assert stage_programs(order(tasks), 0, recomputes) == programs
