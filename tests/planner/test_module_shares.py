"""Modules of a stage in a plan: what is refused, and how they stand in a file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax import Trainer
from hetjax.errors import InputError
from hetjax.mesh import KINDS, Cluster, Link, Subcluster, SubMesh
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import (
    Member,
    ModuleShares,
    OperandShare,
    PipelinePlan,
    Plan,
    Share,
    Shares,
    StagePlan,
    make_problem,
    predict,
    validate,
    validate_for,
)

LINK = Link(1e9, 1e-5)
CLUSTER = Cluster(
    "two",
    tuple(Subcluster(name, KINDS["T4"], 1, 1, LINK, LINK) for name in ("first", "second")),
    (("first", "second", LINK),),
)
MEMBERS = tuple(Member(SubMesh(name, 0, (1, 1)), (1, 1)) for name in ("first", "second"))


def loss(weights: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ weights["one"]) @ weights["two"])


WEIGHTS = {name: np.ones((4, 4), np.float32) / 4 for name in ("one", "two")}
BATCH = np.ones((6, 4), np.float32)
PROGRAM = trace(loss, WEIGHTS, BATCH)
END = PROGRAM.num_positions
COLUMNS = Share(1, (3, 1))


def plan_of(shares: Shares, **changes: Any) -> Plan:
    stage = replace(StagePlan((0, 1), MEMBERS, shares=shares), **changes)
    pipeline = PipelinePlan((stage,), 1, 6, one_f_one_b(1, 1))
    return Plan(PROGRAM.fingerprint, (0, END), CLUSTER, (pipeline,))


def modules(*operands: OperandShare, runs: tuple[tuple[int, int], ...] = ((0, END),)) -> Shares:
    return Shares(modules=(ModuleShares(runs, operands),))


def check(plan: Plan) -> None:
    validate(plan)
    validate_for(plan, PROGRAM, 6)


@pytest.mark.parametrize(
    ("shares", "changes", "message"),
    [
        (modules(runs=((3, 3),)), {}, "has the run [3, 3]"),
        (modules(runs=((0, 2), (3, END))), {}, "the runs [0, 2] and [3, "),
        (modules(runs=((0, 2),)), {}, "from 0 to 2; the stage's layers are from 0 to"),
        (modules(OperandShare(1, 0, Share(0, (6,)))), {}, "one entry for each of the stage's 2"),
        (modules(OperandShare(1, 0), OperandShare(1, 0)), {}, "lies in one way"),
        (modules(OperandShare(-1, 0)), {}, "equation: -1 is not allowed"),
        (replace(modules(), values={2: COLUMNS}), {}, "values is given beside modules"),
        (modules(), {"recompute": True}, "and the stage recomputes"),
        (
            replace(modules(), parameters={"one": COLUMNS}, updates={"one": None}),
            {},
            "updates has 'one', which is in parameters, too",
        ),
        (
            modules(OperandShare(0, 0, None, Share(0, (4, 2)))),
            {},
            "operands[0].through.sizes is [4, 2]; allowed: even parts",
        ),
        (
            modules(OperandShare(0, 0, COLUMNS, Share(0, (3, 3)))),
            {},
            "through.dimension is 0, and that of share is 1",
        ),
        (replace(modules(), updates={"three": None}), {}, "three"),
        (replace(modules(), updates={"one": Share(0, (3, 2))}), {}, "5 together"),
    ],
)
def test_what_makes_no_sense_is_refused(shares: Shares, changes: dict[str, Any], message: str):
    plan = plan_of(shares, **changes)
    with pytest.raises(InputError, match=re.escape(message)):
        check(plan)


@pytest.mark.parametrize(
    ("operand", "message"),
    [
        (OperandShare(99, 0), "operand 0 of equation 99; it has"),
        (OperandShare(0, 7), "operand 7 of equation 0; it has"),
        (OperandShare(0, 1, Share(0, (3, 2))), "5"),
        (OperandShare(0, 1, None, Share(0, (3, 2))), "5"),
        (OperandShare(0, 1, None, Share(5, (2, 2))), "5"),
    ],
)
def test_operands_that_are_not_there_are_refused_before_anything_is_made(
    operand: OperandShare, message: str
):
    with pytest.raises(InputError, match=message):
        Trainer(plan_of(modules(operand)), loss, WEIGHTS, optax.sgd(0.1), BATCH)


@pytest.mark.parametrize(
    ("operand", "message"),
    [
        (OperandShare(99, 0), "has operand 0 of equation 99"),
        (OperandShare(0, 7), "has operand 7 of equation 0"),
        (OperandShare(0, 1, Share(7, (2, 2))), "operand 1.share.dimension is 7"),
        (OperandShare(0, 1, Share(0, (3, 2))), "operand 1.share.sizes is [3, 2], 5 together"),
        (OperandShare(0, 1, None, Share(7, (2, 2))), "operand 1.through.dimension is 7"),
        (OperandShare(0, 1, None, Share(0, (3, 2))), "operand 1.through.sizes is [3, 2], 5"),
        (OperandShare(0, 1, None, Share(0, (2, 2))), "the operand comes as whole; allowed where"),
    ],
)
def test_operands_that_are_not_there_are_not_predicted(operand: OperandShare, message: str):
    problem = make_problem(
        loss, WEIGHTS, BATCH, cluster=CLUSTER, optimizer=optax.sgd(0.1), num_microbatches=1
    )
    with pytest.raises(InputError, match=re.escape(message)):
        predict(plan_of(modules(operand)), problem)


def test_a_plan_with_modules_is_the_same_after_a_file(tmp_path: Path):
    shares = replace(
        modules(OperandShare(0, 0, None, Share(0, (3, 3))), OperandShare(2, 1, COLUMNS)),
        parameters={"one": COLUMNS},
        updates={"two": None},
    )
    plan = plan_of(shares)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_plan_that_says_too_little_is_mended():
    """Rows of a weight, and nothing said of what they are multiplied with."""
    shares = replace(modules(), parameters={"one": Share(0, (3, 1)), "two": COLUMNS})
    with Trainer(plan_of(shares), loss, WEIGHTS, optax.sgd(0.1), BATCH) as trainer:
        found = trainer.train_step(BATCH).loss
    np.testing.assert_allclose(found, float(loss(WEIGHTS, BATCH)), rtol=1e-6)
