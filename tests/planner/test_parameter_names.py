"""A plan may say of a stacked leaf what holds for all of its rows, or speak of one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from cases import CLUSTER, Case, trace_model
from execution import job_of, keep_gradients
from small_models import DEPTH, Model

from hetjax.errors import InputError
from hetjax.mesh import SubMesh
from hetjax.pipeline.schedules.warm_up import gpipe
from hetjax.planner import Member, PipelinePlan, Plan
from hetjax.planner.plan.module_shares import Share
from hetjax.planner.plan.plan import validate_for
from hetjax.planner.plan.stage_plan import Shares, StagePlan
from hetjax.runtime.instructions.buffers import OptimizerState, Parameter
from hetjax.runtime.workers.job import lay_out
from hetjax.sharding.annotation.annotation import HSharding

MODEL = Model(("scan",), tied=False)
PROGRAM = trace_model(MODEL, 4)
LEAF = "blocks/0/in"
ROWS = [f"{LEAF}[{row}]" for row in range(DEPTH)]
SHARE, OTHER = Share(1, (10, 6)), Share(0, (3, 5))
MEMBERS = tuple(Member(SubMesh(name, 0, (1, 1)), (1, 1)) for name in ("first", "second"))


def plan_of(**changes: Any) -> Plan:
    """A stage of two devices of one host, or of the given members."""
    submesh = SubMesh("first", 0, (1, 2))
    stage = StagePlan(**{"layers": (0, 1), "members": (Member(submesh, (1, 2)),), **changes})
    pipeline = PipelinePlan((stage,), 1, 4, gpipe(1, 1))
    return Plan(PROGRAM.fingerprint, (0, PROGRAM.num_positions), CLUSTER, (pipeline,))


def laid_out(plan: Plan) -> Mapping[str, HSharding]:
    """How parameters and gradients, which are the optimizer's state, lie."""
    placement = lay_out(job_of(Case(MODEL, PROGRAM, plan), keep_gradients()))
    names = PROGRAM.parameter_names
    held = {}
    for kind in (Parameter, OptimizerState):
        found = placement.leaves(0, kind).annotations
        held |= {f"{kind.__name__} {name}": each for name, each in zip(names, found, strict=True)}
    return held


def test_what_is_said_of_a_leaf_is_said_of_each_row():
    of_leaf = laid_out(plan_of(parameters={LEAF: (None, "tensor")}))
    assert of_leaf == laid_out(plan_of(parameters=dict.fromkeys(ROWS, (None, "tensor"))))
    assert len({of_leaf[f"Parameter {row}"] for row in ROWS}) == 1
    one = laid_out(plan_of(parameters={LEAF: (None, "tensor"), ROWS[2]: ()}))
    assert {key.split()[1] for key in one if one[key] != of_leaf[key]} == {ROWS[2]}


@pytest.mark.parametrize("field", ["parameters", "updates"])
def test_members_share_each_row_as_is_said_of_the_leaf(field: str):
    def shared(told: Mapping[str, Share]) -> Mapping[str, HSharding]:
        shares: Any = {"batch": (2, 2), field: told}
        return laid_out(plan_of(members=MEMBERS, shares=Shares(**shares)))

    of_leaf = shared({LEAF: SHARE})
    assert of_leaf == shared(dict.fromkeys(ROWS, SHARE))
    assert of_leaf != shared({})
    one = shared({LEAF: SHARE, ROWS[1]: OTHER})
    assert {key.split()[1] for key in one if one[key] != of_leaf[key]} == {ROWS[1]}


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({f"{LEAF}[{DEPTH}]": ()}, rf"'{LEAF}\[{DEPTH}\]'"),
        (
            {LEAF: (None, None, "tensor")},
            r"of more dimensions than the parameter's shape \(8, 16\)",
        ),
    ],
)
def test_other_rows_and_the_dimension_of_the_rows_are_refused(told: Any, message: str):
    with pytest.raises(InputError, match=message):
        validate_for(plan_of(parameters=told), PROGRAM)
