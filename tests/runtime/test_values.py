"""Plans that say how the values inside a stage lie compute what one device computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import CLUSTER, Case, trace_model
from execution import (
    gathered_state,
    job_of,
    keep_gradients,
    one_device_gradients,
    running,
    summed_late,
    train,
)
from small_models import Model, make_batch

from hetjax.errors import InputError
from hetjax.mesh import DeviceKind, Link, SubMesh
from hetjax.pipeline.schedule_search.named_schedules import make_schedule
from hetjax.pipeline.stages.cutting import cut
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner.intra_op import StageDevices, Training, shard_stage
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, Spec, StagePlan
from hetjax.runtime.workers.job import build

MODELS = {
    block: Model((block, "dense"), tied=True, counted=True, half_parameters=False)
    for block in ("attention", "weight_product")
}
# So fast a link that everything is divided which can be.
DEVICES = StageDevices(
    DeviceKind("slow", {"float32": 1e6}, 10**9, 1e6, "made up"), 4, Link(1e15, 0), 1e9
)


def case_of(
    mesh_shape: tuple[int, int],
    schedule: str = "1f1b",
    *,
    recompute: bool = False,
    model: Model = MODELS["attention"],
) -> Case:
    """Two stages on four devices each, divided as the integer program would have it."""
    program = trace_model(model, 4)
    layers = (0, program.num_positions // 2, program.num_positions)
    training = Training(4, 2, 1, "float32", 0.0)
    stages = []
    for i, (stage, name) in enumerate(zip(cut(program, layers), ("first", "second"), strict=True)):
        found = shard_stage(program, stage, DEVICES, training, mesh_shapes=[mesh_shape])
        assert found is not None
        submesh = SubMesh(name, 0, (1, 4))
        stages.append(
            StagePlan.on(
                (i, i + 1),
                submesh,
                mesh_shape,
                found.sharding,
                found.parameters,
                recompute,
                found.values,
            )
        )
    times = StepTimes([1.0] * 2, [2.0] * 2, [0.1], [0.1], (), [1.0] * 2, [1.0] * 2)
    order = make_schedule(schedule, 2, 2, times)
    pipeline = PipelinePlan(tuple(stages), 2, 4, order)
    return Case(model, program, Plan(program.fingerprint, layers, CLUSTER, (pipeline,)))


@pytest.mark.parametrize(
    ("name", "mesh_shape", "schedule", "recompute"),
    [
        ("attention", (1, 4), "1f1b", False),
        ("attention", (2, 2), "h_1f1b_split", False),
        ("weight_product", (2, 2), "1f1b", True),
    ],
)
def test_losses_and_gradients_are_those_of_one_device(name, mesh_shape, schedule, recompute):
    model, batch = MODELS[name], make_batch(8)
    case = case_of(mesh_shape, schedule, recompute=recompute, model=model)
    told = [spec for stage in case.plan.stages for spec in stage.values.values()]
    assert any("tensor" in spec for spec in told)
    assert Plan.from_json_dict(case.plan.to_json_dict()) == case.plan
    loss, norm, expected = one_device_gradients(model, batch)
    with running(job_of(case, keep_gradients())) as executor:
        assert not any(summed_late(executor))
        [reported] = train(executor, [batch])
        np.testing.assert_allclose(reported, (loss, norm), rtol=1e-5)
        for ours, theirs in zip(gathered_state(executor), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.max(np.abs(theirs)))


def with_values(case: Case, values: dict[int, Spec]) -> Case:
    pipeline = case.plan.pipeline
    first, second = pipeline.stages
    stages = (replace(first, values=values), second)
    plan = replace(case.plan, pipelines=(replace(pipeline, stages=stages),))
    return replace(case, plan=plan)


def test_values_that_cannot_lie_so_are_named():
    case = case_of((1, 4))
    theirs = next(iter(case.plan.stages[1].values))
    own, spec = next(iter(case.plan.stages[0].values.items()))
    wrong: list[tuple[dict[int, Spec], str]] = [
        ({10**6: ()}, r"values has 1000000, which is no value that layers 0 to 0 make"),
        ({theirs: ()}, r"no value that layers 0 to 0 make"),
        ({own: ("tensor",) * (len(spec) + 1)}, r"an axis may divide one dimension"),
        ({own: ("rows",)}, r"stages\[0\].values\[\d+\] 'rows'"),
        ({own: (None,) * (len(spec) + 1)}, r"of more dimensions than the value's shape"),
    ]
    for values, said in wrong:
        with pytest.raises(InputError, match=said):
            build(job_of(with_values(case, values), keep_gradients()))
    lengths = [
        (value, place)
        for value in case.plan.stages[0].values
        for place, size in enumerate(case.program.avals[value].shape)
        if size == 5
    ]
    value, place = lengths[0]
    spec = (*[None] * place, "tensor")
    message = r"pipelines\[0\].stages\[0\].values.* does not divide its shape"
    with pytest.raises(InputError, match=message):
        build(job_of(with_values(case, {value: spec}), keep_gradients()))
