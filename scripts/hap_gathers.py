"""One gather of uneven parts by each method, as plans: what `bench_hap.py methods` trains by.

The examples of a batch are divided among members; every member needs all of them, for its own
columns of a product, which costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.mesh import Cluster, SubMesh
from hetjax.pipeline.program.traced_program import Program
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
)
from hetjax.planner.module_programs.module_chain import chain_of
from hetjax.sharding.annotation.bounds import even_sizes

Method = Literal["padded", "straight", "by even parts"]

METHODS: tuple[Method, ...] = ("straight", "padded", "by even parts")

_WIDTH, _COLUMNS = 256, 16


def loss(weight: Any, batch: Any) -> Any:
    """Mean of the squares of a product."""
    return jnp.mean((batch @ weight) ** 2)


def gather_plan(
    cluster: Cluster, num_bytes: int, largest: float, method: Method
) -> tuple[Plan, np.ndarray, np.ndarray]:
    """A plan of one gather.

    Args:
        cluster: its subclusters are the members.
        num_bytes: what all parts have together.
        largest: how much of it the first member has; the others have the rest in even parts.
        method: how it is gathered: padded to even parts as large as the largest, each part as it
            is, or brought to even parts before.

    Returns:
        The plan, the weight and the batch.
    """
    members = tuple(Member(SubMesh(each.name, 0, (1, 1)), (1, 1)) for each in cluster.subclusters)
    count, rows = len(members), num_bytes // (4 * _WIDTH)
    first = round(largest * rows)
    sizes = (first, *even_sizes(rows - first, count - 1))
    if method == "padded":
        rows, sizes = count * max(sizes), (max(sizes),) * count
    batch = np.random.default_rng(0).normal(size=(rows, _WIDTH)).astype(np.float32)
    weight = np.ones((_WIDTH, _COLUMNS), np.float32) / _WIDTH
    program = trace(loss, weight, jax.ShapeDtypeStruct(batch.shape, batch.dtype))
    shares = Shares(
        batch=sizes,
        parameters={program.parameter_names[0]: Share(1, even_sizes(_COLUMNS, count))},
        modules=(
            ModuleShares(
                ((0, program.num_positions),),
                tuple(_gathered(program, Share(0, even_sizes(rows, count)), method)),
            ),
        ),
    )
    stage = StagePlan((0, 1), members, shares=shares)
    pipeline = PipelinePlan((stage,), 1, rows, one_f_one_b(1, 1))
    plan = Plan(program.fingerprint, (0, program.num_positions), cluster, (pipeline,))
    return plan, weight, batch


def _gathered(program: Program, even: Share, method: Method) -> Iterator[OperandShare]:
    """Every use of the batch, which is whole there."""
    (module,) = chain_of(program, [0, program.num_positions]).kinds
    (value,) = module.traced.batch
    through = even if method == "by even parts" else None
    for equation, step in enumerate(module.traced.flat.steps):
        for place, operand in enumerate(step.inputs):
            if isinstance(operand, int) and operand == value:
                yield OperandShare(equation, place, None, through)
