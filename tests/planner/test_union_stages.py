"""Stages of several members: what is refused, what a person sees, and who cannot have them yet."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import optax
import pytest

from hetjax import planner
from hetjax.errors import InputError
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import (
    Member,
    PipelinePlan,
    Plan,
    Prediction,
    Share,
    Shares,
    StagePlan,
    StagePrediction,
    validate,
    validate_for,
)
from hetjax.planner.plan.annotate import activation_annotations
from hetjax.planner.predictions.plan_sharding import shard_stages
from hetjax.report.plan_pictures import stage_picture
from hetjax.report.plan_table import plan_table

LINK = Link(1e9, 1e-5)
FAST, SLOW = (
    DeviceKind(name, {"float32": flops}, 10**10, 1e11, source="made up")
    for name, flops in (("fast card", 3e12), ("slow card", 1e12))
)
CLUSTER = Cluster(
    "unlike",
    (
        Subcluster("fast", FAST, 1, 2, LINK, LINK, price_per_device_hour=2.0),
        Subcluster("slow", SLOW, 1, 2, LINK, LINK, price_per_device_hour=1.0),
    ),
    (("fast", "slow", LINK),),
)
MEMBERS = (
    Member(SubMesh("fast", 0, (1, 2)), (2, 1)),
    Member(SubMesh("slow", 0, (1, 1)), (1, 1)),
)
SHARES = Shares(batch=(6, 2), parameters={"w": Share(1, (4, 2))}, values={3: Share(0, (8, 0))})


def loss(weights: Mapping[str, Any], x: Any) -> Any:
    return jnp.mean((x @ weights["w"]) ** 2) * weights["scale"]


def program_of(examples: int = 8) -> Program:
    return trace(loss, {"scale": jnp.ones(()), "w": jnp.ones((4, 6))}, jnp.ones((examples, 4)))


def plan_of(stage: StagePlan, microbatch_size: int = 8) -> Plan:
    program = program_of()
    pipeline = PipelinePlan((stage,), 2, microbatch_size, one_f_one_b(1, 2))
    return Plan(program.fingerprint, (0, program.num_positions), CLUSTER, (pipeline,))


def union_of(**changed: Any) -> StagePlan:
    return StagePlan(**{"layers": (0, 1), "members": MEMBERS, "shares": SHARES, **changed})


def test_a_stage_knows_the_devices_of_its_members():
    stage = union_of()
    assert stage.num_devices == 3
    assert stage.submeshes == (SubMesh("fast", 0, (1, 2)), SubMesh("slow", 0, (1, 1)))
    assert stage.device_ids(CLUSTER) == (0, 1, 2)
    turned = replace(stage, members=MEMBERS[::-1])
    assert turned.device_ids(CLUSTER) == (2, 0, 1)
    for name in ("submesh", "mesh_shape"):
        with pytest.raises(InputError, match=r"the stage of layers 0-0 has 2 members, .* of one"):
            getattr(stage, name)


def test_a_union_is_valid_and_its_file_says_what_it_has():
    plan = plan_of(union_of())
    validate(plan)
    validate_for(plan, program_of())
    written = json.loads(json.dumps(plan.to_json_dict()))
    stage = written["pipelines"][0]["stages"][0]
    assert list(stage) == ["layers", "members", "sharding", "parameters", "recompute", "shares"]
    assert stage["shares"] == {
        "batch": [6, 2],
        "parameters": {"w": {"dimension": 1, "sizes": [4, 2]}},
        "values": {"3": {"dimension": 0, "sizes": [8, 0]}},
    }
    assert Plan.from_json_dict(written) == plan
    unshared = plan_of(union_of(shares=Shares()))
    validate(unshared)
    assert "shares" not in unshared.to_json_dict()["pipelines"][0]["stages"][0]


def whole(sizes: tuple[int, ...], dimension: int = 1) -> Shares:
    return Shares(parameters={"w": Share(dimension, sizes)})


STAGE = r"plan: pipelines\[0\].stages\[0\]"
BAD_STAGES = [
    ({"members": ()}, rf"{STAGE}.members is empty; a stage has one or more"),
    (
        {"members": (MEMBERS[0], MEMBERS[0])},
        r"members\[1\].submesh fast\[0:2\] 1x2 has device 0, which .*members\[0\] has too",
    ),
    (
        {"members": (MEMBERS[0], Member(SubMesh("fast", 1, (1, 1)), (1, 1)))},
        r"stages\[0\].members\[1\].submesh .* has device 1, which .*stages\[0\].members\[0\] has",
    ),
    (
        {"members": (MEMBERS[0], Member(SubMesh("slow", 1, (1, 2)), (1, 2)))},
        rf"{STAGE}.members\[1\].submesh: .*device 2 is not there",
    ),
    (
        {"members": (MEMBERS[0], Member(SubMesh("slow", 0, (1, 2)), (1, 1)))},
        rf"{STAGE}.members\[1\].mesh_shape is \[1, 1\]; its product .* 2",
    ),
    (
        {"members": MEMBERS[:1]},
        rf"{STAGE}.shares is given, and the stage has one member; allowed where it has several",
    ),
    (
        {"shares": Shares(batch=(8,))},
        rf"{STAGE}.shares.batch is \[8\]; it must have one entry for each of the stage's 2 members",
    ),
    (
        {"shares": Shares(batch=(10, -2))},
        rf"{STAGE}.shares.batch\[1\]: -2 is not allowed: .* greater than or equal to 0",
    ),
    (
        {"shares": Shares(batch=(6, 1))},
        rf"{STAGE}.shares.batch is \[6, 1\], 7 together; it must add up to microbatch_size, 8",
    ),
    (
        {"shares": Shares(batch=(5, 3))},
        rf"{STAGE}.shares.batch\[0\] is 5, which the data axis of members\[0\].mesh_shape \[2, 1\]",
    ),
    (
        {"shares": whole((6,))},
        rf"{STAGE}.shares.parameters\['w'\].sizes is \[6\]; it must have one entry for each",
    ),
    (
        {"shares": whole((7, -1))},
        rf"{STAGE}.shares.parameters.w.sizes\[1\]: -1 is not allowed: .* or equal to 0",
    ),
    (
        {"shares": whole((0, 0))},
        rf"{STAGE}.shares.parameters\['w'\].sizes is \[0, 0\]; some member must have some of it",
    ),
    (
        {"shares": whole((4, 2), -1)},
        rf"{STAGE}.shares.parameters.w.dimension: -1 is not allowed: .* or equal to 0",
    ),
    (
        {"shares": Shares(values={3: Share(0, (8, 0, 0))})},
        rf"{STAGE}.shares.values\[3\].sizes is \[8, 0, 0\]; it must have one entry for each",
    ),
]


@pytest.mark.parametrize(("changed", "message"), BAD_STAGES)
def test_what_makes_no_sense_in_a_union(changed: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        validate(plan_of(union_of(**changed)))


def test_a_member_of_one_stage_is_none_of_another():
    first = union_of(shares=Shares())
    second = StagePlan.on((0, 1), SubMesh("slow", 0, (1, 2)), (2, 1))
    plan = plan_of(first)
    pipeline = PipelinePlan((second,), 2, 8, one_f_one_b(1, 2))
    message = (
        r"pipelines\[1\].stages\[0\].members\[0\].submesh slow\[0:2\] 1x2 has device 2, which "
        r"pipelines\[0\].stages\[0\].members\[1\] has too"
    )
    with pytest.raises(InputError, match=message):
        validate(replace(plan, pipelines=(*plan.pipelines, pipeline)))


def test_each_member_computes_all_of_a_batch_that_is_not_shared():
    members = (MEMBERS[1], MEMBERS[0])
    message = (
        r"pipelines\[0\].microbatch_size is 7, which the data axis of "
        r"stages\[0\].members\[1\].mesh_shape \[2, 1\] does not divide"
    )
    with pytest.raises(InputError, match=message):
        validate(plan_of(union_of(members=members, shares=Shares()), microbatch_size=7))
    validate(plan_of(union_of(members=members, shares=Shares(batch=(1, 6))), microbatch_size=7))


TENSOR = (Member(SubMesh("fast", 0, (1, 2)), (1, 2)), MEMBERS[1])
BAD_SHARES = [
    (
        {"shares": Shares(parameters={"v": Share(0, (1, 1))})},
        rf"unknown {STAGE}.shares.parameters: parameter 'v'. Allowed: scale, w",
    ),
    (
        {"shares": whole((4, 2), 2)},
        rf"{STAGE}.shares.parameters\['w'\].dimension is 2; the parameter's shape \(4, 6\) has "
        r"dimensions 0 to 1",
    ),
    (
        {"shares": Shares(parameters={"scale": Share(0, (1, 0))})},
        r"parameters\['scale'\].dimension is 0; the parameter's shape \(\) has no dimension",
    ),
    (
        {"shares": whole((4, 1))},
        rf"{STAGE}.shares.parameters\['w'\].sizes is \[4, 1\], 5 together; it must add up to 6, "
        r"dimension 1 of the parameter's shape \(4, 6\)",
    ),
    (
        {"shares": whole((3, 3)), "members": TENSOR, "parameters": {"w": (None, "tensor")}},
        rf"{STAGE}.shares.parameters\['w'\].sizes\[0\] is 3: the stage's parameters\['w'\], "
        r"\[None, 'tensor'\], does not divide the shape \(4, 3\) evenly on members\[0\].mesh_shape "
        r"\[1, 2\]",
    ),
    (
        {"shares": Shares(values={99: Share(0, (6, 2))})},
        rf"{STAGE}.shares.values has 99, which is no value that layers 0 to 0 make",
    ),
    (
        {"shares": Shares(values={0: Share(0, (6, 2))})},
        rf"{STAGE}.shares.values has 0, which is no value",
    ),
    (
        {"shares": Shares(values={3: Share(2, (6, 2))})},
        rf"{STAGE}.shares.values\[3\].dimension is 2; the value's shape \(8, 6\) has dimensions "
        r"0 to 1",
    ),
    (
        {"shares": Shares(values={3: Share(0, (6, 3))})},
        rf"{STAGE}.shares.values\[3\].sizes is \[6, 3\], 9 together; it must add up to 8, "
        r"dimension 0 of the value's shape \(8, 6\)",
    ),
    (
        {"shares": Shares(values={3: Share(0, (3, 5))}), "values": {3: ("data",)}},
        rf"{STAGE}.shares.values\[3\].sizes\[0\] is 3: the stage's values\[3\], \['data'\], does "
        r"not divide the shape \(3, 6\) evenly on members\[0\].mesh_shape \[2, 1\]",
    ),
]


@pytest.mark.parametrize(("changed", "message"), BAD_SHARES)
def test_shares_that_do_not_fit_the_model(changed: dict[str, Any], message: str):
    plan = plan_of(union_of(**changed))
    validate(plan)
    with pytest.raises(InputError, match=message):
        validate_for(plan, program_of())


def test_a_stage_has_no_shares_of_a_parameter_that_it_does_not_use():
    def two_products(weights: Mapping[str, Any], x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ weights["first"]) @ weights["second"])

    weights = {"first": jnp.ones((4, 6)), "second": jnp.ones((6, 4))}
    program = trace(two_products, weights, jnp.ones((8, 4)))
    shares = Shares(batch=(6, 2), parameters={"first": Share(1, (4, 2))})
    other = StagePlan((1, 2), (Member(SubMesh("slow", 1, (1, 1)), (1, 1)),))
    pipeline = PipelinePlan((union_of(shares=shares), other), 2, 8, one_f_one_b(2, 2))
    plan = Plan(program.fingerprint, (0, 2, program.num_positions), CLUSTER, (pipeline,))
    validate_for(plan, program)
    wrong = union_of(shares=Shares(parameters={"second": Share(0, (4, 2))}))
    plan = replace(plan, pipelines=(replace(pipeline, stages=(wrong, other)),))
    message = (
        rf"{STAGE}.shares.parameters has 'second', which layers 0 to 0 do not use; allowed: first"
    )
    with pytest.raises(InputError, match=message):
        validate_for(plan, program)


def test_values_are_not_judged_by_a_program_of_other_microbatches():
    plan = plan_of(union_of(shares=Shares(values={3: Share(0, (6, 2))})))
    validate_for(plan, program_of(8))
    validate_for(plan, program_of(16))
    plan = plan_of(union_of(shares=Shares(values={3: Share(0, (6, 1))})))
    validate_for(plan, program_of(16))
    with pytest.raises(InputError, match="7 together; it must add up to 8"):
        validate_for(plan, program_of(8))


def predicted(plan: Plan) -> Plan:
    """The plan as a person might write it, with figures."""
    stage = StagePrediction(
        0.1, 0.2, 0.0, 0.1, 0.1, 0.1, 0.0, 0.0, 1, 1, 1, 0, 0, 10**9, 10**10, 0.1
    )  # fmt: skip
    return replace(plan, prediction=Prediction(1.0, 0.5, (stage,)))


def test_each_member_has_a_line():
    plan = plan_of(union_of(sharding="state_sharded", recompute=True))
    assert str(plan).splitlines() == [
        "Plan on cluster unlike: 1 stage on 3 of 4 devices, 16 examples a step, made by hand",
        "  2 microbatches of 8 examples, schedule 1f1b",
        "    stage 0: layer 0 on 2 members, state sharded, recompute",
        "      fast[0:2] 1x2 (fast card), data 2, 6 of 8 examples, 67% of 1 parameter",
        "      slow[0:1] 1x1 (slow card), one device, 2 of 8 examples, 33% of 1 parameter",
        "  without a prediction",
    ]
    told = Shares(parameters={"a": Share(0, (3, 1)), "b": Share(0, (1, 1))})
    _, _, stage, first, second, _ = str(predicted(plan_of(union_of(shares=told)))).splitlines()
    assert stage == "    stage 0: layer 0 on 2 members, 1 GB of 10 GB"
    assert first.endswith("data 2, all of 8 examples, 50% to 75% of 2 parameters")
    assert second.endswith("one device, all of 8 examples, 25% to 50% of 2 parameters")


def test_tables_and_pictures_name_each_member():
    stage = union_of(recompute=True)
    assert stage.sharding_text == "data 2 + one device, 6 + 2 examples, recompute"
    plan = predicted(plan_of(stage))
    columns = [[*column.cells] for column in plan_table(plan).columns]
    assert str(columns[2][0]) == "fast[0:2] 1x2 + slow[0:1] 1x1"
    assert str(columns[3][0]) == stage.sharding_text
    lanes = re.findall(r"<b title=.*?>(.*?)</b>", stage_picture(plan, [1.0], []))
    assert lanes == ["0 fast[0:2] 1x2", "0 slow[0:1] 1x1"]


def test_what_follows_from_figures_counts_each_member():
    plan = predicted(plan_of(union_of()))
    assert planner.simulate(plan).makespan > 0
    assert planner.limits(plan).stage == 0
    # Of 3 + 3 + 1 + 1 TFLOP/s one is left idle.
    assert planner.load_balance(plan, "float32") == pytest.approx(7 / 8)
    assert planner.step_cost(plan, 3600.0) == pytest.approx(2 * 2.0 + 2 * 1.0)
    alone = plan_of(StagePlan.on((0, 1), SubMesh("fast", 0, (1, 2)), (2, 1)))
    assert planner.differences(alone, plan) == (
        "one stage shared by fast and slow; 1 device more of slow; in the order fast, slow"
    )
    assert planner.differences(plan, alone) == "no stage shared by unlike devices; without slow"
    even = plan_of(union_of(shares=Shares(batch=(4, 4))))
    assert planner.differences(plan, even) == "stage 0 sharded otherwise"


def test_what_knows_one_member_only_says_so():
    plan = plan_of(union_of())
    problem = planner.make_problem(
        loss,
        {"scale": jnp.ones(()), "w": jnp.ones((4, 6))},
        jnp.ones((16, 4)),
        cluster=CLUSTER,
        optimizer=optax.sgd(0.1),
        num_microbatches=2,
    )
    message = r"^plan: pipelines\[0\].stages\[0\] has 2 members, and its shares are not those of"
    with pytest.raises(InputError, match=message):
        planner.predict(plan, problem)
    assert shard_stages(predicted(plan), problem) == predicted(plan)
    with pytest.raises(InputError, match=r"has 2 members, fast.*; this works on stages of one"):
        activation_annotations(plan)
