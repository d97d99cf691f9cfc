"""A stage whose members share the context: its tokens in their order, its attentions as rings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.pipeline.program.forms import form_of
from hetjax.pipeline.program.token_dimensions import TokenDimensions
from hetjax.pipeline.program.traced_program import Program, Step
from hetjax.pipeline.stages.cutting import Body, Stage
from hetjax.sharding.attention.equation import attention_of
from hetjax.sharding.attention.primitive import ATTENTION
from hetjax.sharding.context.ring_attention import ContextRing, ring_attention
from hetjax.sharding.deduction.reshard import reshard


def share_context(stage: Stage, program: Program, ring: ContextRing) -> Stage:
    """A stage whose tokens are in the order of a ring, and divided among its members.

    Args:
        stage: the stage, as it was cut.
        program: the program that it is cut of, with its tokens.
        ring: how the members share tokens and heads.

    Returns:
        The stage; the steps that it computes are at the same positions.
    """
    body = stage.function
    assert isinstance(body, Body), "the context is shared before anything else"
    places = {id(step): place for place, step in enumerate(program.steps)}
    steps = tuple(_shared(step, places.get(id(step)), program.tokens, ring) for step in body.steps)
    return replace(stage, function=replace(body, steps=steps))


def _shared(step: Step, place: int | None, tokens: TokenDimensions, ring: ContextRing) -> Step:
    taken = {} if place is None else tokens.taken.get(place, {})
    if step.name == ATTENTION.name:
        beside = ring, form_of(step), tuple(taken.items())
        evaluate = _ordered(_attention(step, ring), taken, {}, ring)
        return replace(step, evaluate=evaluate, equation=None, beside=beside)
    if place is None:
        return step
    made = tokens.made.get(place, {})
    if not taken and not made:
        return step
    # What is repeated for every token is divided all the same.
    evaluate = _ordered(step.evaluate, taken, made, ring)
    return replace(
        step, evaluate=evaluate, beside=(ring, tuple(taken.items()), tuple(made.items()))
    )


def _attention(step: Step, ring: ContextRing) -> Callable[..., list[Any]]:
    equation = step.equation
    assert equation is not None

    def evaluate(*operands: Any) -> list[Any]:
        found = attention_of(equation, operands)
        return list(ring_attention(found, ring))

    return evaluate


def _ordered(
    evaluate: Callable[..., list[Any]],
    taken: Mapping[int, tuple[int, ...]],
    made: Mapping[int, int],
    ring: ContextRing,
) -> Callable[..., list[Any]]:
    def run(*operands: Any) -> list[Any]:
        arrays = [
            _in_order(array, taken[place], ring) if place in taken else array
            for place, array in enumerate(operands)
        ]
        results = evaluate(*arrays)
        return [
            _in_order(array, (made[place],), ring) if place in made else array
            for place, array in enumerate(results)
        ]

    return run


def _in_order(array: Any, dimensions: tuple[int, ...], ring: ContextRing) -> Any:
    """An array with its tokens in the order of the members, each of which has its own.

    What has them along two dimensions is divided along the first alone.
    """
    for dimension in dimensions:
        spans = [
            jax.lax.slice_in_dim(array, span.start, span.stop, axis=dimension)
            for span in ring.order
        ]
        array = jnp.concatenate(spans, axis=dimension)
    return array if len(ring.union) == 1 else reshard(array, ring.by_tokens(dimensions[0]))
