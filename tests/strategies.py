"""Random schedules, plans and whole cases, shared by the property tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from hypothesis import Phase, settings
from hypothesis import strategies as st
from small_models import Model, make_batch, models

from hetjax.mesh import KINDS, Cluster, Link, Subcluster, SubMesh
from hetjax.pipeline.program import Program, trace
from hetjax.pipeline.schedule import SCHEDULES, Schedule, make_schedule
from hetjax.planner.plan import PipelinePlan, Plan, StagePlan
from hetjax.sharding.rules import RULES

_LINK = Link(bandwidth=1e9, latency=1e-5)
CLUSTER = Cluster(
    "two by four",
    tuple(Subcluster(name, KINDS["T4"], 1, 4, _LINK, _LINK) for name in ("first", "second")),
    (("first", "second", _LINK),),
)
"""Two subclusters of four devices: the eight host devices of the tests."""

_seconds = st.floats(0.01, 10.0)


def examples(usual: int, full: int = 200) -> settings:
    """How many cases an expensive property test draws, by hypothesis profile.

    A case that fails is small as it is, and is shown without minutes of shrinking.
    """
    return settings(
        max_examples=full if settings.get_current_profile_name() == "full" else usual,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )


@dataclass(frozen=True, repr=False, eq=False)
class Case:
    """A model, the plan to run it with, and its program.

    Args:
        model: the model.
        program: the model's loss, traced at the size of a microbatch.
        plan: the plan.
    """

    model: Model
    program: Program
    plan: Plan

    def __repr__(self) -> str:
        pipeline = self.plan.pipeline
        stages = "; ".join(
            f"{stage.submesh} {stage.mesh_shape} {stage.sharding}" + " recompute" * stage.recompute
            for stage in pipeline.stages
        )
        counts = f"{pipeline.num_microbatches} x {pipeline.microbatch_size}"
        schedule = f"{pipeline.schedule.name} {pipeline.schedule.warm_up_counts}"
        return f"Case({self.model}, layers {self.plan.layers}, {stages}, {counts}, {schedule})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@st.composite
def schedules(draw: st.DrawFn, num_stages: int, num_microbatches: int) -> Schedule:
    """Any of the named schedules, with random costs."""
    return make_schedule(
        draw(st.sampled_from(SCHEDULES)),
        num_stages,
        num_microbatches,
        compute=draw(st.lists(_seconds, min_size=num_stages, max_size=num_stages)),
        communication=draw(st.lists(_seconds, min_size=num_stages - 1, max_size=num_stages - 1)),
    )


@st.composite
def boundaries(draw: st.DrawFn, num_positions: int, max_stages: int = 5) -> tuple[int, ...]:
    """The positions where one to five stages begin, and the end."""
    num_cuts = draw(st.integers(0, min(max_stages, num_positions) - 1))
    inside = st.integers(1, num_positions - 1)
    cuts = draw(st.sets(inside, min_size=num_cuts, max_size=num_cuts)) if num_cuts else set()
    return (0, *sorted(cuts), num_positions)


@st.composite
def submeshes(draw: st.DrawFn, num_stages: int) -> tuple[SubMesh, ...]:
    """Disjoint submeshes of one, two or four devices."""
    sizes: list[int] = []
    for stages_left in range(num_stages, 0, -1):
        room = CLUSTER.num_devices - sum(sizes) - (stages_left - 1)
        sizes.append(draw(st.sampled_from([size for size in (1, 2, 4) if size <= room])))
    starts: dict[int, int] = {}
    first_free = 0
    # Sizes are powers of two: in falling order they never straddle the two subclusters.
    for stage in sorted(range(num_stages), key=lambda stage: -sizes[stage]):
        starts[stage], first_free = first_free, first_free + sizes[stage]
    return tuple(
        SubMesh(("first", "second")[starts[s] // 4], starts[s] % 4, (1, sizes[s]))
        for s in range(num_stages)
    )


@st.composite
def stage_plans(draw: st.DrawFn, num_stages: int) -> tuple[StagePlan, ...]:
    """Stages of one layer each, on random submeshes, with random mesh shapes and rules."""
    stages = []
    for index, submesh in enumerate(draw(submeshes(num_stages))):
        size = submesh.num_devices
        data = draw(st.sampled_from([d for d in (1, 2, 4) if size % d == 0]))
        stages.append(
            StagePlan(
                layers=(index, index + 1),
                submesh=submesh,
                mesh_shape=(data, size // data),
                sharding=draw(st.sampled_from(sorted(RULES))),
                recompute=draw(st.booleans()),
            )
        )
    return tuple(stages)


@st.composite
def cases(draw: st.DrawFn, max_stages: int = 5, max_microbatches: int = 6) -> Case:
    """A random model with a random plan."""
    model = draw(models())
    # The number of positions does not depend on the size of the microbatch.
    num_positions = trace_model(model, 1).num_positions
    layers = draw(boundaries(num_positions, max_stages))
    stages = draw(stage_plans(len(layers) - 1))
    most = max(stage.mesh_shape[0] for stage in stages)
    size = most * draw(st.integers(1, max(1, 4 // most)))
    count = draw(st.integers(1, max_microbatches))
    schedule = draw(schedules(len(stages), count))
    program = trace_model(model, size)
    pipeline = PipelinePlan(stages, count, size, schedule)
    return Case(model, program, Plan(program.fingerprint, layers, CLUSTER, (pipeline,)))


def trace_model(model: Model, examples: int) -> Program:
    """A model's loss, traced for a number of examples."""
    return trace(model.loss, jax.eval_shape(model.init), make_batch(examples))
