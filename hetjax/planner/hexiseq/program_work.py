"""The work of a traced program whose context is shared: counted from its equations.

All that does not attend is averaged over the attentions, as if each had an equal layer around it,
but for the last product that tokens go through: that one stands for the logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hetjax.pipeline.program.costs import step_cost
from hetjax.pipeline.program.loss import accumulator_dtype
from hetjax.pipeline.program.sequence import token_dimensions
from hetjax.pipeline.program.token_dimensions import TokenDimensions
from hetjax.pipeline.program.traced_program import Program, Step, num_bytes
from hetjax.planner.hexiseq.context_work import ContextWork
from hetjax.planner.hexiseq.program_attentions import (
    AttentionShape,
    program_attentions,
)
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.repeating_layers import LayerRun
from hetjax.sharding.annotation.rules import REDUCTION_GROUPS
from hetjax.sharding.cross_entropy.primitive import CROSS_ENTROPY


def context_work(problem: PlanningProblem) -> ContextWork:
    """What the program of a problem computes, moves and holds where members share its context.

    Args:
        problem: the problem; its program was traced with `divides_sequences`.

    Returns:
        The work of a step, of layers that are not made again.

    Raises:
        InputError: the program has no attention, two of them have unlike heads, or something goes
            along the sequence; the message names it and its line.
    """
    program = problem.program
    tokens = token_dimensions(program)
    attentions = program_attentions(program)
    first, layers = attentions[0], len(attentions)
    count = first.batch * first.length
    flops = _flops(program, tokens, attentions)
    width = _width(problem, attentions, count)
    state = _state(problem)
    of_layers = state.elements_of(_leaves_of_layers(problem)) // layers
    return ContextWork(
        length=first.length,
        query_heads=first.query_heads,
        key_value_heads=first.key_value_heads,
        head_size=round(_mean((each.head_size + each.value_size) / 2 for each in attentions)),
        width=width,
        layers=layers,
        token_flops=flops.others / count / layers,
        layer_parameters=of_layers,
        other_parameters=state.elements - layers * of_layers,
        vocabulary=round(flops.logits / (2 * width * count)),
        working_bytes=_working_bytes(problem, attentions, flops.logits_position) / count / layers,
        sequences=first.batch * problem.num_microbatches,
        batch=first.batch,
        item_bytes=first.item_bytes,
        is_causal=2 * sum(each.is_causal for each in attentions) >= layers,
        is_recomputed=False,
        divides_state=False,
        state_bytes=state.whole / state.elements,
        updated_bytes=state.updated / state.elements,
        weight_bytes=state.sent / state.elements,
        logit_tokens=count if flops.chunk is None else min(count, first.batch * flops.chunk),
    )


def attending_layers(problem: PlanningProblem) -> tuple[LayerRun, ...]:
    """The runs of layers that attend, which may be made again right before their backward pass.

    Args:
        problem: the problem.

    Returns:
        The modules that the model repeats and that attend; none where it repeats nothing.
    """
    places = [each.position for each in program_attentions(problem.program)]
    ends = problem.layers
    return tuple(
        (start, stop)
        for start, stop in problem.repeatable_layers
        if any(ends[start] <= place < ends[stop] for place in places)
    )


class _Flops(NamedTuple):
    """FLOPs of products that do not attend, of a microbatch's forward pass.

    Args:
        others: all but those of the logits.
        logits: those of the last product with tokens.
        logits_position: where it stands; the program's end where there is none.
        chunk: of how many tokens of a sequence there are logits at once; None for all.
    """

    others: float
    logits: float
    logits_position: int
    chunk: int | None


def _flops(
    program: Program, tokens: TokenDimensions, attentions: Sequence[AttentionShape]
) -> _Flops:
    attending = {each.position for each in attentions}
    others = logits = 0.0
    place, chunk = program.num_positions, None
    for position, step in enumerate(program.steps):
        flops = 0.0 if position in attending else step_cost(step).matmul_flops
        has_tokens = any(value in tokens.values for value in step.outputs)
        if flops and has_tokens and position > attentions[-1].position:
            others, logits, place = others + logits, flops, position
            chunk = _chunk_of(step)
        else:
            others += flops
    return _Flops(others, logits, place, chunk)


def _chunk_of(step: Step) -> int | None:
    """Of how many tokens of a sequence a product makes something at once; None for all."""
    if step.equation is None or step.equation.primitive is not CROSS_ENTROPY:
        return None
    return step.equation.params["chunk"]


def _width(problem: PlanningProblem, attentions: Sequence[AttentionShape], count: int) -> int:
    """Numbers of a token between layers: what those receive that attend."""
    received = [
        problem.works[start].received_bytes
        for start, _ in attending_layers(problem)
        if problem.works[start].received_bytes
    ]
    if received:
        return max(1, round(_mean(received) / count / attentions[0].item_bytes))
    return round(_mean(each.query_heads * each.value_size for each in attentions))


def _working_bytes(
    problem: PlanningProblem, attentions: Sequence[AttentionShape], logits: int
) -> float:
    """Bytes that layers keep of a microbatch, but for what attention has by heads, and logits."""
    before = [
        work.residual_bytes - work.kept_twice
        for end, work in zip(problem.layers[1:], problem.works, strict=True)
        if end <= logits
    ]
    return max(0.0, float(sum(before) - sum(each.kept_bytes for each in attentions)))


def _leaves_of_layers(problem: PlanningProblem) -> set[int]:
    """The parameters that layers have which attend."""
    return {
        part.leaf
        for start, stop in attending_layers(problem)
        for work in problem.works[start:stop]
        for part in work.parts
    }


class _State(NamedTuple):
    """What a step holds of the parameters, in bytes of all of them.

    Args:
        sizes: numbers of each parameter leaf.
        whole: what every device has: parameters, sums of gradients, and what is exchanged of those.
        updated: the optimizer's state, of which each device has that of what it updates.
        sent: the mean of what gradients and new parameters take when they are sent.
    """

    sizes: tuple[int, ...]
    whole: float
    updated: float
    sent: float

    @property
    def elements(self) -> int:
        """Numbers of all parameters."""
        return sum(self.sizes)

    def elements_of(self, leaves: Iterable[int]) -> int:
        """Numbers of some parameter leaves."""
        return sum(self.sizes[leaf] for leaf in leaves)


def _state(problem: PlanningProblem) -> _State:
    program, frozen = problem.program, problem.program.frozen
    sizes: list[int] = []
    whole = updated = sent = 0.0
    for leaf, value in enumerate(program.parameters):
        shape = program.avals[value]
        sizes.append(shape.size)
        held = num_bytes(shape)
        trained = leaf not in frozen.without_gradient
        summed = trained * shape.size * accumulator_dtype(shape.dtype).itemsize
        # Of one group of gradients there are at once what is given to others and what they give.
        whole += held + summed * (1 + 2 / REDUCTION_GROUPS)
        updated += (leaf not in frozen.without_update) * shape.size * problem.optimizer_bytes
        sent += (trained * held + summed) / 2
    return _State(tuple(sizes), whole, updated, sent)


def _mean(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return sum(found) / len(found)
