"""The same training on each kind: its losses beside the reference's, and where it first overflows.

Each kind trains by itself, on its own parameters: here errors travel, as they would in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from hetjax.alignment.comparison import Told, first_nonfinite
from hetjax.alignment.devices import Injection, KindDevice
from hetjax.alignment.evaluation import Place, evaluate_whole
from hetjax.alignment.operators import PRODUCTS, Operator, OperatorProgram
from hetjax.pipeline.program.loss import host_array, path_names
from hetjax.pipeline.update.whole_update import optimizer_updates

CRITERION = 0.015
"""The mean relative error of losses under which a kind is aligned. Source: H2, section 3.1.2."""


@dataclass(frozen=True)
class Overflow:
    """The first step of a training in which something was not finite.

    Args:
        step: which, from 1.
        operator: the operator that first makes it of finite operands; None where that is no
            operator by itself.
        place: the iteration of its loops in which it does.
        what: what was seen not to be finite: the loss, or a gradient or parameter by its path.
    """

    step: int
    operator: Operator | None
    place: Place
    what: str


@dataclass(frozen=True)
class KindTraining:
    """A training on one kind.

    Args:
        kind: the kind's name.
        losses: of each step, up to the one before the loss, a gradient or a parameter is not
            finite, where training ends.
        overflow: the first step in which something is not finite; None where there is none.
    """

    kind: str
    losses: tuple[float, ...]
    overflow: Overflow | None = None


def train_kind(
    program: OperatorProgram,
    kind: KindDevice,
    optimizer: optax.GradientTransformation,
    parameters: PyTree,
    batch_of: Callable[[int], PyTree],
    steps: int,
    *,
    injection: Injection | None = None,
    told: Told = lambda count, total, what: None,
) -> KindTraining:
    """Train on a kind.

    Args:
        program: the forward and backward pass, traced with such parameters and batches.
        kind: the kind.
        optimizer: any Optax transformation; one that takes the ``value`` of the loss gets it.
        parameters: the first parameters.
        batch_of: from the number of steps done to the next step's batch.
        steps: how many steps.
        injection: an error that the kind makes.
        told: is told of each step.

    Returns:
        The losses, and the first overflow.
    """
    leaves, tree = jax.tree.flatten(parameters)
    extended = optax.with_extra_args_support(optimizer)

    def of_step(number: Any) -> KindDevice:
        if injection is None:
            return kind
        return replace(
            kind,
            replacements={**kind.replacements, injection.operator: injection.replacement(number)},
        )

    @jax.jit
    def step(values: list[Any], state: Any, batch: list[Any], number: Any) -> Any:
        here = of_step(number)

        def visit(operator: Operator, operands: list[Any], place: Place) -> list[Any]:
            return here.give(operator, operands)

        (loss, *gradients), swallowed = evaluate_whole(
            program.block, [*values, *batch], visit, _nonfinite_within
        )
        held = jax.tree.unflatten(tree, values)
        given = jax.tree.unflatten(tree, gradients)
        updates, state = optimizer_updates(extended, given, state, held, loss)
        new = jax.tree.leaves(optax.apply_updates(held, updates))
        finite = [jnp.isfinite(each).all() for each in (loss, *gradients, *new)]
        return loss, jnp.stack([*finite, ~swallowed]), new, state

    values = [kind.put(np.asarray(leaf)) for leaf in leaves]
    with jax.default_device(kind.device):
        state = jax.jit(optimizer.init)(jax.tree.unflatten(tree, values))
    losses: list[float] = []
    overflow: Overflow | None = None
    for done in range(steps):
        batch = [kind.put(host_array(leaf)) for leaf in jax.tree.leaves(batch_of(done))]
        number = np.int32(done + 1)
        loss, checks, new, state = step(values, state, batch, number)
        finite = np.asarray(checks)
        if overflow is None and not finite.all():
            where = first_nonfinite(program, [*values, *batch], of_step(number))
            operator, place = where or (None, ())
            what = _what(finite, path_names(parameters))
            overflow = Overflow(done + 1, operator, place, what)
        if not finite[:-1].all():
            break
        losses.append(float(loss))
        values = new
        told(done + 1, steps, f"loss {losses[-1]:.4f} on {kind.kind.name}")
    return KindTraining(kind.kind.name, tuple(losses), overflow)


def _nonfinite_within(operator: Operator, operands: list[Any], results: list[Any]) -> Any:
    """Whether a product overflows, or an exponential gets no number.

    What comes of it need not show: XLA's exponential on CPUs makes a number of none, and the
    softmax around it a usual one.
    """
    if operator.name in PRODUCTS:
        return ~jnp.isfinite(results[0]).all()
    if operator.name in _SWALLOWING:
        return jnp.isnan(operands[0]).any()
    return None


_SWALLOWING = ("exp", "exp2", "tanh", "logistic")


def _what(finite: np.ndarray, names: Sequence[str]) -> str:
    first = int(np.argmin(finite))
    if first == 0:
        return "the loss"
    if first == len(finite) - 1:
        return "a value on the way, which leaves no trace in the loss"
    sort = "gradient" if first <= len(names) else "new value"
    return f"the {sort} of {names[(first - 1) % len(names)]}"
