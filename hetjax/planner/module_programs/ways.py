"""Ways to compute the equations of a module among members: the layouts of operands and results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from hetjax.pipeline.program.costs import step_cost
from hetjax.pipeline.program.traced_program import Operand, Step
from hetjax.pipeline.program.work_classes import step_work
from hetjax.planner.module_programs.dimensions import Dimensions
from hetjax.planner.module_programs.module_chain import ModuleTrace
from hetjax.sharding.deduction.signature import Labels, Signature

WHOLE = -1
"""The layout of a value that each member has whole. One of 0 or more is a divided dimension."""

SUMMANDS = -2
"""The layout of a value of which each member has a summand."""

FREE = -3
"""In place of the layout of an operand that is known everywhere."""


@dataclass(frozen=True)
class WayLoad:
    """What a way makes each member compute.

    Args:
        flops: of matrix products, whatever share a member has.
        shared_flops: of those, for all members together, what is divided among them.
        traffic: bytes read and written, whatever share a member has.
        shared_traffic: bytes that are divided among them.
        divided: the class of the dimension that is divided; -1 for none.
        by_examples: whether a member divides it by examples over its devices.
        updated: bytes of parameters, gradients and state that each member updates.
        shared_updated: those that are divided among them.
        summed: bytes of gradients that the devices of each member sum among themselves.
        shared_summed: those that are divided among members.
        held: bytes that each member holds of it, whatever share it has.
        shared_held: bytes that are divided among them.
        work: FLOPs and bytes by class of all of the equation, for members that know their rates.
    """

    flops: float = 0.0
    shared_flops: float = 0.0
    traffic: float = 0.0
    shared_traffic: float = 0.0
    divided: int = -1
    by_examples: bool = False
    updated: float = 0.0
    shared_updated: float = 0.0
    summed: float = 0.0
    shared_summed: float = 0.0
    held: float = 0.0
    shared_held: float = 0.0
    work: tuple[tuple[str, float], ...] = ()

    @property
    def is_of_update(self) -> bool:
        """Whether it is computed once a step."""
        return self.updated + self.shared_updated + self.summed + self.shared_summed > 0


@dataclass(frozen=True)
class ComputingWay:
    """A way to compute an equation.

    Args:
        operands: the layout of each operand.
        results: the layout of each result.
        load: what each member computes.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]
    load: WayLoad


def ways_of(trace: ModuleTrace, kind: int, dimensions: Dimensions) -> list[list[ComputingWay]]:
    """The ways to compute each equation of a module.

    Args:
        trace: the module's trace.
        kind: its number.
        dimensions: the classes of dimensions.

    Returns:
        For each equation its ways; the first computes all of it on every member.

    Source: HAP, section 4.2 (figure 9).
    """
    return [
        list(_ways(trace, kind, step, signature, dimensions))
        for step, signature in zip(
            trace.traced.flat.steps, dimensions.signatures[kind], strict=True
        )
    ]


def _ways(
    trace: ModuleTrace, kind: int, step: Step, signature: Signature | None, dimensions: Dimensions
) -> Iterator[ComputingWay]:
    operands = [operand if isinstance(operand, int) else None for operand in step.inputs]
    sizes = [0 if value is None else trace.num_bytes[value] for value in operands]
    made = [trace.num_bytes[value] for value in step.outputs]
    cost = step_cost(step)
    classes = dimensions.classes[kind]
    values = [*(v for v in operands if v is not None), *step.outputs]
    by_examples = any(dimensions.examples in classes[value] for value in values)
    # A constant may be large: what is read of it is not in the sizes of values.
    traffic = max(cost.bytes, float(sum(sizes) + sum(made)))
    whole = tuple(FREE if value is None else WHOLE for value in operands)
    kept = [
        size if value in trace.residuals else 0
        for value, size in zip(step.outputs, made, strict=True)
    ]
    held = float(sum(kept))
    work = tuple(step_work(step).items())
    whole_load = WayLoad(
        cost.matmul_flops, 0.0, traffic, 0.0, -1, by_examples, held=held, work=work
    )
    yield ComputingWay(whole, (WHOLE,) * len(step.outputs), whole_load)
    if signature is None:
        return
    for label in _names(signature):
        found = _divided(label, operands, step.outputs, signature)
        if found is None:
            continue
        layouts, results = found
        pairs = [*zip(operands, layouts, strict=True), *zip(step.outputs, results, strict=True)]
        divided = {
            classes[value][layout] for value, layout in pairs if value is not None and layout >= 0
        }
        if len(divided) != 1 or dimensions.units[next(iter(divided))] < 2:
            continue
        shared = float(
            sum(n for n, at in zip(sizes, layouts, strict=True) if at >= 0)
            + sum(n for n, at in zip(made, results, strict=True) if at >= 0)
        )
        part = float(sum(n for n, at in zip(kept, results, strict=True) if at >= 0))
        load = WayLoad(
            0.0,
            cost.matmul_flops,
            traffic - shared,
            shared,
            divided.pop(),
            by_examples,
            held=held - part,
            shared_held=part,
            work=work,
        )
        yield ComputingWay(layouts, results, load)
    # Each member would compute a whole product of its summand: it is added up before.
    for together in signature.linear if cost.matmul_flops == 0 else ():
        if not _is_summable(trace, step, operands, together):
            continue
        layouts = tuple(
            FREE if value is None else (SUMMANDS if place in together else WHOLE)
            for place, value in enumerate(operands)
        )
        # A byte more, so that no values are made summands for nothing.
        load = replace(whole_load, traffic=traffic + 1)
        yield ComputingWay(layouts, (SUMMANDS,) * len(step.outputs), load)


def _names(signature: Signature) -> list[int]:
    """The labels of a signature, in the order in which they first stand."""
    every = (*signature.operands, *signature.results)
    return list(dict.fromkeys(label.name for labels in every for label in labels if label))


def _divided(
    name: int, operands: Sequence[int | None], outputs: Sequence[int], signature: Signature
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """How operands and results lie where a label is divided; None where it cannot be."""
    layouts = []
    for value, labels in zip(operands, signature.operands, strict=True):
        place = _place(name, labels)
        layouts.append(FREE if value is None else (WHOLE if place is None else place))
    if all(layout < 0 for layout in layouts):
        return None
    results = []
    for labels in signature.results:
        place = _place(name, labels)
        if place is None and name not in signature.summed:
            return None
        results.append(SUMMANDS if place is None else place)
    return tuple(layouts), tuple(results)


def _place(name: int, labels: Labels) -> int | None:
    found = (place for place, label in enumerate(labels) if label and label.name == name)
    return next(found, None)


def _is_summable(
    trace: ModuleTrace, step: Step, operands: Sequence[int | None], together: frozenset[int]
) -> bool:
    """Whether the operands of a set can be summands: one that is known everywhere cannot alone."""
    avals = trace.traced.flat.avals
    values = [operands[place] for place in together if operands[place] is not None]
    made = [avals[value].dtype for value in step.outputs]
    return bool(values) and all(jnp.issubdtype(dtype, jnp.inexact) for dtype in made)


def layouts_of(
    operand: Operand, kind: int, trace: ModuleTrace, dimensions: Dimensions
) -> tuple[int, ...]:
    """The layouts that a value may have.

    Args:
        operand: the value.
        kind: the number of the module's trace.
        trace: the module's trace.
        dimensions: the classes of dimensions.
    """
    if not isinstance(operand, int):
        return (WHOLE,)
    aval = trace.traced.flat.avals[operand]
    classes = dimensions.classes[kind][operand]
    divided = [d for d, each in enumerate(classes) if dimensions.units[each] > 1]
    summands = [SUMMANDS] if jnp.issubdtype(aval.dtype, jnp.inexact) else []
    return (WHOLE, *divided, *summands)
