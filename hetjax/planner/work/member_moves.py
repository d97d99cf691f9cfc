"""What members of a data-parallel stage must tell each other inside a microbatch, by its trace.

It is what cannot be taken as it lies; see `hetjax.planner.work.example_shares`. Gradients of
parameters are sums over the examples that nothing is made of, and stay summands until the end of
the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from hetjax import _compat
from hetjax.pipeline.program.traced_program import Constant, Operand, operand_value
from hetjax.pipeline.stages.traced_stage import TracedStage
from hetjax.planner.work.example_shares import ExampleWalk, WalkedValue, examples_of
from hetjax.sharding.annotation.annotation import PARTIAL


@dataclass(frozen=True)
class MemberMoves:
    """Exchanges among members that one pass over a microbatch waits for.

    Args:
        count: how many.
        bytes: of what they exchange, together, whole.
    """

    count: int = 0
    bytes: float = 0.0

    def __add__(self, other: MemberMoves) -> MemberMoves:
        return MemberMoves(self.count + other.count, self.bytes + other.bytes)


def member_moves(
    traced: TracedStage, microbatch_size: int
) -> tuple[MemberMoves, MemberMoves, MemberMoves]:
    """What members exchange in a stage's passes, were its examples divided among them.

    Args:
        traced: the stage's trace.
        microbatch_size: examples in a microbatch.

    Returns:
        Of the forward pass, of the backward pass without recomputation, and what they exchange of
        what the stage gives to others: the loss.
    """
    flat = traced.flat
    values = {number: WalkedValue(flat.avals[number]) for number in flat.inputs}
    for number in (*traced.batch, *traced.received, *traced.cotangents):
        shape = flat.avals[number].shape
        if shape and shape[0] == microbatch_size:
            values[number] = examples_of(flat.avals[number], microbatch_size)

    def value(operand: Operand) -> WalkedValue:
        if isinstance(operand, Constant):
            return WalkedValue(jax.typeof(operand.value))
        assert isinstance(operand, int), "a trace has no slices"
        return values[operand]

    passes, is_backward = [MemberMoves(), MemberMoves()], False

    def exchanged(equation: _compat.JaxprEqn, size: float, times: int) -> None:
        passes[is_backward] += MemberMoves(times, times * float(size))

    walk = ExampleWalk(exchanged)
    reached = set(traced.cotangents)
    for step in flat.steps:
        is_backward = not reached.isdisjoint(step.values())
        if is_backward:
            reached.update(step.outputs)
        assert step.equation is not None, "a trace has equations"
        results = walk.follow(step.equation, [value(each) for each in step.inputs])
        values.update(zip(step.outputs, results, strict=True))
    given = MemberMoves()
    for operands in (traced.sent, traced.returned):
        # What is given at once goes at once, as the loss and what it is divided by.
        numbers = dict.fromkeys(n for n in map(operand_value, operands) if n is not None)
        last = [values[n] for n in numbers if values[n].top.hdim == PARTIAL]
        if last:
            given += MemberMoves(1, float(sum(each.summand_bytes for each in last)))
    return passes[0], passes[1], given
