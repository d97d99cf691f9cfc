"""From a loss function and a cluster to a plan, by the planner that is asked for."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optax
from jaxtyping import PyTree

from hetjax.collecting import seldom_collected
from hetjax.errors import InputError, shown
from hetjax.mesh.cluster import Cluster
from hetjax.pipeline.program.traced_program import Program
from hetjax.planner.annotated.annotated_plan import plan_of_annotations
from hetjax.planner.harp.dynamic_program import DynamicProgram
from hetjax.planner.harp.microbatches import choose_among, divisors, notes_of
from hetjax.planner.hexiseq.hexiseq_planner import HexiSeqPlanner
from hetjax.planner.plan.obeyed_reshards import check_reshards
from hetjax.planner.plan.plan import Plan
from hetjax.planner.predictions.complete import complete
from hetjax.planner.problem.options import DEFAULTS, PlanOptions
from hetjax.planner.problem.problem import (
    Planner,
    PlanningProblem,
    as_cluster,
    make_problem,
    num_examples,
    trace_microbatch,
)
from hetjax.planner.problem.problems import Problems


@seldom_collected()
def plan(
    loss_function: Callable[..., Any],
    parameters: PyTree,
    batch: PyTree,
    *,
    cluster: Cluster | str | os.PathLike[str],
    optimizer: optax.GradientTransformation,
    num_microbatches: int | None = None,
    has_aux: bool = False,
    options: PlanOptions = DEFAULTS,
    planner: Planner | None = None,
    annotations: tuple[PyTree, PyTree] | None = None,
) -> Plan:
    """Plan one training step on a cluster: by a search, or by annotations.

    Args:
        loss_function: ``loss_function(parameters, batch)``, a plain JAX function that returns the
            mean loss, or the pair of the summed loss and what to divide it by.
        parameters: pytree of arrays or shapes, or a function without arguments that makes it.
        batch: the batch of a whole step, pytree of arrays or shapes; first axes are the examples.
        cluster: the devices and their links, or the path of a cluster file.
        optimizer: the Optax transformation, whose state takes memory.
        num_microbatches: into how many microbatches the batch is divided; None for the number with
            the best plan, or for the fewest that fit where another number is another loss, as with
            batch normalisation (the plan's notes say so then).
        has_aux: whether the loss function returns a pair of that and a pytree of scalars, as in
            `jax.value_and_grad`.
        options: what the plan may be, such as ``PlanOptions(max_pipelines=1)``, and what it makes
            least.
        planner: what makes the plan; `DynamicProgram` unless given. With `HexiSeqPlanner` devices
            share the loss's sequences.
        annotations: a pair of pytrees of `HSharding`, of the parameters and of the batch, as
            `jax.jit` takes ``in_shardings``; together with every `hetjax.reshard` in the loss they
            say what the plan is, and nothing is searched for. The batch is that of a whole step;
            inside the loss, values have the examples of a microbatch.

    Returns:
        A plan with its prediction; the plan of annotations has none.

    Raises:
        InputError: a value is not allowed, the batch does not divide, a price is missing, the
            model fits nowhere, annotations say what a plan cannot hold, the loss has a
            `hetjax.reshard` that the plan found without them does not obey, or no number of
            microbatches is given beside them or another planner.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from hetjax.mesh import Cluster, Link, Subcluster, kind
        >>> near, far = Link(25e9, 10e-6), Link(1.25e9, 50e-6)
        >>> fast = Subcluster("fast", kind("RTX4090"), 1, 2, near, near)
        >>> slow = Subcluster("slow", kind("RTX3080"), 1, 2, near, near)
        >>> home = Cluster("home", (fast, slow), (("fast", "slow", far),))
        >>> def loss(weights, x):
        ...     for weight in weights:
        ...         x = jnp.tanh(x @ weight)
        ...     return jnp.mean(x**2)
        >>> weights = [jax.ShapeDtypeStruct((8192, 8192), jnp.float32)] * 12
        >>> batch = jax.ShapeDtypeStruct((256, 8192), jnp.float32)
        >>> made = plan(
        ...     loss, weights, batch, cluster=home, optimizer=optax.adam(1e-3), num_microbatches=8
        ... )
        >>> for stage in made.pipeline.stages:
        ...     print(stage.layers, stage.submesh)
        (0, 5) slow[0:2] 1x2
        (5, 12) fast[0:2] 1x2

        The first six weights on the fast cards by columns, the others on a slow one:

        >>> from jax.sharding import PartitionSpec
        >>> from hetjax.sharding import HSharding, Subgroup
        >>> columns = Subgroup((0, 1), (("tensor", 2),), PartitionSpec(None, "tensor"))
        >>> one = Subgroup((2,), (), PartitionSpec())
        >>> lies = [HSharding((columns,))] * 6 + [HSharding((one,))] * 6
        >>> made = plan(
        ...     loss, weights, batch, cluster=home, optimizer=optax.adam(1e-3), num_microbatches=8,
        ...     annotations=(lies, None),
        ... )
        >>> for stage in made.pipeline.stages:
        ...     print(stage.submesh, stage.sharding_text)
        fast[0:2] 1x2 tensor 2
        slow[0:1] 1x1 one device
    """
    _check_planner(planner)
    if num_microbatches is None and (annotations is not None or planner is not None):
        given = "annotations" if annotations is not None else "planner"
        raise InputError(
            f"num_microbatches is None, which has hetjax's own planner choose it; give a number "
            f"beside {given}"
        )
    if annotations is not None:
        assert num_microbatches is not None, "a number is given beside annotations"
        if planner is not None:
            raise InputError("planner: given beside annotations, which say what the plan is")
        return plan_of_annotations(
            loss_function,
            parameters,
            batch,
            annotations,
            cluster=as_cluster(cluster),
            num_microbatches=num_microbatches,
            has_aux=has_aux,
            options=options,
        )
    divides_sequences = isinstance(planner, HexiSeqPlanner)
    ask = functools.partial(
        make_problem,
        loss_function,
        parameters,
        batch,
        cluster=cluster,
        optimizer=optimizer,
        has_aux=has_aux,
        options=options,
        divides_sequences=divides_sequences,
    )

    def trace(count: int) -> Program:
        how = {"has_aux": has_aux, "divides_sequences": divides_sequences}
        return trace_microbatch(loss_function, parameters, batch, count, **how)[0]

    if num_microbatches is None:
        return _with_chosen_number(ask, trace, num_examples(batch))
    problem = ask(num_microbatches=num_microbatches)
    made = solve(problem, planner)
    check_reshards(made, problem.program)
    return replace(made, notes=(*made.notes, *notes_of(problem, trace)))


def _with_chosen_number(
    ask: Callable[..., PlanningProblem],
    trace: Callable[[int], Program],
    batch_size: int,
) -> Plan:
    """The plan with the number of microbatches that the planner chooses."""
    counts = divisors(batch_size)
    problems = Problems(
        lambda count: ask(num_microbatches=count),
        trace,
        batch_size,
        counts,
    )
    choice = choose_among(problems, batch_size, DynamicProgram(), counts)
    check_reshards(choice.found.plan, choice.problem.program)
    return complete(choice.found.plan, choice.problem, *choice.beside)


def solve(problem: PlanningProblem, planner: Planner | None = None) -> Plan:
    """Solve a planning problem.

    Args:
        problem: the problem.
        planner: what chooses stages and submeshes; `DynamicProgram` unless given.

    Returns:
        A plan with its prediction, where the cost model knows it, and with the schedule that the
        problem names.

    Raises:
        InputError: the model fits nowhere, or the planner is none.
    """
    _check_planner(planner)
    made = (planner or DynamicProgram()).plan(problem)
    return complete(made, problem) if made.is_predictable else made


def _check_planner(planner: object) -> None:
    is_made = not isinstance(planner, type) and callable(getattr(planner, "plan", None))
    if planner is not None and not is_made:
        raise InputError(
            f"planner is {shown(planner)}; it must be a planner, such as DynamicProgram(), or None"
        )
