"""The table of annotations: it has all that transfers and states need, and says what is there."""

import optax
from cases import Case, cases, examples
from execution import job_of, running
from hypothesis import given

from hetjax.runtime.instructions.annotation_table import AnnotatedLeaves
from hetjax.runtime.instructions.buffers import (
    BatchLeaf,
    Buffer,
    Gradient,
    OptimizerState,
    Parameter,
    ReceivedValue,
    ReducedGradient,
    SentValue,
)
from hetjax.runtime.instructions.instruction import Receive, Send
from hetjax.runtime.instructions.instruction_list import training_instructions
from hetjax.runtime.instructions.placement import Placement, reduction_groups
from hetjax.runtime.workers.job import build, lay_out

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def described(leaves: AnnotatedLeaves) -> list[tuple[tuple[int, ...], str]]:
    return [(shape.shape, str(shape.dtype)) for shape in leaves.shapes]


def check_lists(placement: Placement, stage: int) -> None:
    """Every array that is sent or received is annotated, and alike at both of its ends."""
    schedule = placement.pipeline_plan(stage).schedule
    for instruction in training_instructions(placement.pipelines, schedule, stage):
        if isinstance(instruction, Send | Receive):
            tag = instruction.tag
            sent, received = placement.ends(tag)
            assert len(sent.annotations) == len(instruction.buffers)
            assert described(sent) == described(received)


@examples(usual=15)
@given(case=cases(max_pipelines=3))
def test_both_ends_of_every_transfer_have_its_arrays(case: Case):
    placement = build(job_of(case, OPTIMIZER))
    for stage, plan in enumerate(placement.plan.stages):
        check_lists(placement, stage)
        devices = set(placement.plan.cluster.device_ids(plan.submesh))
        for leaves in placement.table[stage].values():
            assert len(leaves.names) == len(set(leaves.names)) == len(leaves.shapes)
            assert all(set(annotation.devices) == devices for annotation in leaves.annotations)
        sums = placement.leaves(stage, Gradient).annotations
        assert bool(placement.leaves(stage, ReducedGradient).names) == any(
            annotation.is_partial for annotation in sums
        )
        places = [place for group in reduction_groups(placement, stage) for place in group]
        assert places in ([], list(range(len(sums))))


@examples(usual=8)
@given(case=cases(max_pipelines=2))
def test_workers_hold_what_the_table_says(case: Case):
    with running(job_of(case, OPTIMIZER)) as executor:
        for worker in executor.workers:
            state, stage = worker.state(), worker.stage
            for kind, arrays in ((Parameter, state.parameters), (OptimizerState, state.optimizer)):
                leaves = worker.placement.leaves(stage, kind)
                assert [(a.shape, str(a.dtype)) for a in arrays] == described(leaves)
                assert [a.sharding for a in arrays] == leaves.on(worker.mesh)


@examples(usual=8)
@given(case=cases(max_pipelines=2))
def test_a_plan_that_is_only_laid_out_annotates_its_state(case: Case):
    """The same as with programs, which other kinds of buffers need."""
    job = job_of(case, OPTIMIZER)
    built, laid_out = build(job), lay_out(job)
    for stage in range(built.pipelines.num_stages):
        for kind in laid_out.table[stage]:
            assert laid_out.leaves(stage, kind) == built.leaves(stage, kind)
        of_programs: set[type[Buffer]] = {BatchLeaf, ReceivedValue, SentValue}
        assert not of_programs & set(laid_out.table[stage])
        assert not laid_out.leaves(stage, BatchLeaf).names


def test_leaves_are_chosen_by_name():
    chosen = AnnotatedLeaves(("a", "b", "c"), (1, 2, 3), (4, 5, 6)).chosen(["c", "a"])  # pyright: ignore[reportArgumentType]
    assert (chosen.names, chosen.shapes, chosen.annotations) == (("c", "a"), (3, 1), (6, 4))
