"""Dividing a backward pass: what the gradient to send back needs, and the rest.

The first part gives the cotangents that the stage before waits for; the second part gives the
parameters' gradients, from what the first one has made, whenever there is time for it. Gradients
without a matrix product (of biases, of norms) stay in the first part, whose kernels have them at
hand: to put them off would save no time, and could round them differently. Where a
``scan`` holds work of both sorts it becomes two scans, and the first hands the second what each
iteration made; a checkpointed region is opened, for the same reason.

Source: zero-bubble pipelines (Qi et al., 2024), section 2: B and W.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from hetjax import _compat
from hetjax.pipeline.program.costs import is_expensive, is_heavy, steps_cost
from hetjax.pipeline.program.traced_program import (
    Constant,
    FlatJaxpr,
    Operand,
    Step,
    evaluate_steps,
    flatten_jaxpr,
    needed_steps,
    operand_value,
)
from hetjax.pipeline.program.values import Values, renumbered
from hetjax.pipeline.stages.residuals import choose_residuals
from hetjax.sharding.deduction.region import REGION


@dataclass(frozen=True, eq=False)
class SplitSteps:
    """A list of steps in two parts.

    Args:
        first: the steps that the first results need.
        second: the steps that only the others need.
        crossing: the values of the first part that the second one is given: made there, or an
            input that it need not have of its own.
        moved: which of the second results the first part gives, by place.
    """

    first: tuple[Step, ...]
    second: tuple[Step, ...]
    crossing: tuple[int, ...]
    moved: tuple[int, ...]


def divide(
    steps: Sequence[Step],
    first_outputs: Sequence[Operand],
    second_outputs: Sequence[Operand],
    *,
    values: Values,
    free: Collection[int],
    kept: Collection[int],
    cotangents: Collection[int],
) -> SplitSteps:
    """Divide steps by which results need them.

    A second result that takes no matrix product more is moved to the first part. No expensive step
    is in both parts, and none that the cotangents reach: computed again in
    another program it could round differently. Cheap steps of the forward pass may be in both,
    where that saves memory between the two.

    Args:
        steps: the steps, in order.
        first_outputs: the results of the first part.
        second_outputs: the results of the second part.
        values: the shapes of the values; it grows where scans are divided.
        free: inputs that are at hand in the second part whatever it reads.
        kept: inputs that cost memory if the second part reads them.
        cotangents: those of the inputs that are cotangents.

    Returns:
        The division. Of the kept inputs those that the second part reads are among the crossing
        values.
    """
    steps = _open_checkpoints(steps, values)
    reached = _reached(steps, cotangents)
    moved = _light(steps, first_outputs, second_outputs)
    needed = values_read((*first_outputs, *(second_outputs[i] for i in moved)))
    second_outputs = [output for i, output in enumerate(second_outputs) if i not in moved]
    first: list[Step] = []
    second: list[Step] = []
    for step in reversed(steps):
        if not needed.intersection(step.outputs):
            second.append(step)
            continue
        now, later = _divide_scan(step, needed, reached, values)
        second.extend(later)
        first.append(now)
        needed.update(now.values())
    first.reverse()
    second.reverse()

    made = {output for step in first for output in step.outputs}
    second = list(needed_steps(second, second_outputs, tuple(made)))
    reads = {value for step in second for value in step.values()}
    reads |= values_read(second_outputs)
    own = {output for step in second for output in step.outputs}
    sources = [Step("kept", (), (value,), _never, None) for value in sorted(kept)]
    chosen = choose_residuals(
        [*sources, *first],
        free,
        reads - own - set(free),
        values.size,
        lambda step: (
            step.name == "kept" or is_expensive(step) or not reached.isdisjoint(step.outputs)
        ),
    )
    again = needed_steps(first, [*(reads - own)], tuple(chosen))
    return SplitSteps(tuple(first), (*again, *second), tuple(sorted(chosen)), moved)


def values_read(operands: Sequence[Operand]) -> set[int]:
    """The values that operands read."""
    return {value for value in map(operand_value, operands) if value is not None}


def _light(
    steps: Sequence[Step], first_outputs: Sequence[Operand], outputs: Sequence[Operand]
) -> tuple[int, ...]:
    """Which outputs take no matrix product beyond those of the first outputs, by place."""
    first = needed_steps(steps, first_outputs)
    made = {output for step in first for output in step.outputs}
    needed = values_read(first_outputs).union(*(step.values() for step in first))
    # What a scan of the first part makes for others alone may have taken any work.
    heavy = {v for s in first if s.name == "scan" for v in s.outputs} - needed
    for step in steps:
        if made.isdisjoint(step.outputs) and (
            is_heavy(step) or not heavy.isdisjoint(step.values())
        ):
            heavy.update(step.outputs)
    return tuple(
        place for place, output in enumerate(outputs) if heavy.isdisjoint(values_read([output]))
    )


def _reached(steps: Sequence[Step], cotangents: Collection[int]) -> set[int]:
    """What the cotangents reach."""
    reached = set(cotangents)
    for step in steps:
        if reached.intersection(step.values()):
            reached.update(step.outputs)
    return reached


def _never(*_: Any) -> list[Any]:
    raise AssertionError("this stands for an input, and is not computed")


def _open_checkpoints(steps: Sequence[Step], values: Values) -> list[Step]:
    """Steps with the content of checkpointed regions in the place of these.

    What such a region computes again it computes once, in the first part that needs it.
    """
    opened: list[Step] = []
    for step in steps:
        inner = None if step.equation is None else _compat.checkpointed_jaxpr(step.equation)
        if inner is not None:
            renamed = renumbered(flatten_jaxpr(inner), step.inputs, values)
            opened.extend(_open_checkpoints(renamed.steps, values))
            opened.extend(copies(renamed.outputs, step.outputs))
        elif step.name == REGION:
            opened.extend(copies(step.inputs, step.outputs))
        else:
            opened.append(step)
    return opened


def copies(sources: Sequence[Operand], outputs: Sequence[int]) -> Iterator[Step]:
    """Steps that give values another number."""
    for source, output in zip(sources, outputs, strict=True):
        yield Step("copy", (source,), (output,), lambda x: [x], None)


def _divide_scan(
    step: Step, needed: Collection[int], reached: Collection[int], values: Values
) -> tuple[Step, list[Step]]:
    """A scan's part for the needed results, and, where it leaves heavy work, the part for others.

    The body is divided as any steps are. A carry stays in the first scan if the needed results
    depend on it; what else the second scan reads of an iteration, the first one stacks.
    """
    wanted = tuple(i for i, output in enumerate(step.outputs) if output in needed)
    if step.name != "scan" or step.equation is None or len(wanted) == len(step.outputs):
        return step, []
    params = step.equation.params
    num_consts, num_carry = _compat.scan_sizes(params)
    body = flatten_jaxpr(params["jaxpr"])
    inner = Values(body.avals)
    # A region reads all that any of its results needs.
    body = replace(body, steps=tuple(_open_checkpoints(body.steps, inner)))
    carry_in = body.inputs[num_consts : num_consts + num_carry]
    wanted_set = _with_carries(body, set(wanted), carry_in)
    outputs = [body.outputs[i] for i in wanted_set]
    light = {i for i in _light(body.steps, outputs, body.outputs) if body.outputs[i] not in outputs}
    wanted_set = _with_carries(body, wanted_set | light, carry_in)
    rest = [i for i in range(len(step.outputs)) if i not in wanted_set]
    rows_in = body.inputs[num_consts + num_carry :]
    stays = [i for i in range(num_carry) if i in wanted_set]
    moves = [i for i in rest if i < num_carry]
    division = divide(
        body.steps,
        [body.outputs[i] for i in sorted(wanted_set)],
        [body.outputs[i] for i in rest],
        values=inner,
        free=[*body.inputs[:num_consts], *rows_in, *(carry_in[i] for i in moves)],
        kept=[carry_in[i] for i in stays],
        cotangents=_reached_inputs(body, step, reached, carry_in),
    )
    if steps_cost(division.second).matmul_flops == 0:
        return step, []
    stacks = [
        values.new((params["length"], *inner.avals[v].shape), inner.avals[v].dtype)
        for v in division.crossing
    ]
    consts = dict(zip(body.inputs[:num_consts], step.inputs[:num_consts], strict=True))
    carries = dict(zip(carry_in, step.inputs[num_consts : num_consts + num_carry], strict=True))
    rows = dict(zip(rows_in, step.inputs[num_consts + num_carry :], strict=True))
    now = _scan_step(
        params,
        division.first,
        consts,
        {carry_in[i]: carries[carry_in[i]] for i in stays},
        rows,
        [body.outputs[i] for i in stays],
        [body.outputs[i] for i in sorted(wanted_set) if i >= num_carry] + [*division.crossing],
        [step.outputs[i] for i in sorted(wanted_set)] + stacks,
        values,
    )
    later = _scan_step(
        params,
        division.second,
        consts,
        {carry_in[i]: carries[carry_in[i]] for i in moves},
        {**rows, **dict(zip(division.crossing, stacks, strict=True))},
        [body.outputs[i] for i in moves],
        [body.outputs[i] for i in rest if i >= num_carry],
        [step.outputs[i] for i in rest],
        values,
    )
    return now, [later]


def _with_carries(body: FlatJaxpr, wanted: set[int], carry_in: Sequence[int]) -> set[int]:
    """Wanted results of a scan with the carries that they depend on, over all iterations."""
    while True:
        outputs = [body.outputs[i] for i in wanted]
        reads = {value for step in needed_steps(body.steps, outputs) for value in step.values()}
        reads |= values_read(outputs)
        more = {i for i, value in enumerate(carry_in) if value in reads} - wanted
        if not more:
            return wanted
        wanted = wanted | more


def _reached_inputs(
    body: FlatJaxpr, step: Step, reached: Collection[int], carry_in: Sequence[int]
) -> set[int]:
    """The inputs of a scan's body that cotangents reach, in some iteration."""
    inputs = {
        value
        for value, operand in zip(body.inputs, step.inputs, strict=True)
        if operand_value(operand) in reached
    }
    while True:
        found = _reached(body.steps, inputs)
        outputs = zip(carry_in, body.outputs, strict=False)
        more = {value for value, output in outputs if output in found} - inputs
        if not more:
            return inputs
        inputs |= more


def _scan_step(
    params: dict[str, Any],
    steps: Sequence[Step],
    consts: dict[int, Operand],
    carries: dict[int, Operand],
    rows: dict[int, Operand],
    carry_outputs: Sequence[Operand],
    row_outputs: Sequence[Operand],
    outputs: Sequence[int],
    values: Values,
) -> Step:
    """A scan over some of a body's steps.

    Args:
        params: those of the scan that it is a part of.
        steps: the body's steps.
        consts: from the body's values to the operands that all iterations read; likewise
        carries: for what the first iteration begins with, and
        rows: for what each iteration takes a row of. What the steps do not read is left out.
        carry_outputs: what an iteration hands on, in the order of `carries`.
        row_outputs: what it stacks.
        outputs: the numbers of the results: carries, then stacks.
        values: the shapes of the values outside.
    """
    reads = {value for step in steps for value in step.values()}
    reads |= values_read((*carry_outputs, *row_outputs))
    consts = {value: operand for value, operand in consts.items() if value in reads}
    rows = {value: operand for value, operand in rows.items() if value in reads}

    def evaluate(*operands: Any) -> list[Any]:
        fixed = dict(zip(consts, operands[: len(consts)], strict=True))

        def iteration(carry: Any, taken: Any) -> tuple[Any, Any]:
            environment = {
                **fixed,
                **dict(zip(carries, carry, strict=True)),
                **dict(zip(rows, taken, strict=True)),
            }
            results = evaluate_steps(steps, environment, [*carry_outputs, *row_outputs])
            return tuple(results[: len(carries)]), tuple(results[len(carries) :])

        final, stacked = jax.lax.scan(
            iteration,
            tuple(operands[len(consts) : len(consts) + len(carries)]),
            tuple(operands[len(consts) + len(carries) :]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*final, *stacked]

    inputs = (*consts.values(), *carries.values(), *rows.values())
    equation = _scan_equation(evaluate, [_aval(operand, values) for operand in inputs])
    return Step("scan", inputs, tuple(outputs), evaluate, equation)


def _aval(operand: Operand, values: Values) -> Any:
    if isinstance(operand, Constant):
        return operand.value
    assert isinstance(operand, int), "a backward pass reads whole values"
    return values.avals[operand]


def _scan_equation(evaluate: Callable[..., Any], avals: Sequence[Any]) -> _compat.JaxprEqn:
    """The equation that a scan traces to, of which its cost is read."""
    closed = jax.make_jaxpr(evaluate)(*avals)
    return next(e for e in closed.jaxpr.eqns if e.primitive.name == "scan")
