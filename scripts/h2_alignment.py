"""Alignment of a small GPT, for `bench_h2.py align`: does it find what is wrong, and only that?

Kinds are played by what operands of products are rounded to, on the CPU. Every row is of one
question: a clean kind, an error put into one operator, a NaN put into one training step, and the
losses of products in fewer bits beside those in float32.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax._compat import bind
from hetjax.alignment import (
    Injection,
    KindDevice,
    KindTraining,
    Operator,
    OperatorProgram,
    bind_kind,
    compare_kinds,
    mean_relative_error,
    parse_kinds,
    trace_operators,
    train_kind,
)
from hetjax.alignment.comparison import relative_differences
from hetjax.alignment.training import CRITERION
from hetjax.data import DataSet, standard_library_text
from hetjax.models import model_of, recipe

STEPS = 300
"""As many as the paper trains."""

_ERROR = 1e-2
_BATCH = 8
_TRIED = 10
_NAN_STEPS = (2, 7, 12)

PUBLISHED_MRE = {"A": 0.00391, "B": 0.00477, "C": 0.00584, "D": 0.01215}
"""Of the paper's four chips beside an A100, a model of 20B parameters (table 1)."""


@dataclass(frozen=True, eq=False)
class Case:
    """A small GPT, and the kinds that it is compared on.

    Args:
        program: its forward and backward pass.
        parameters: its first parameters.
        data: its data.
        full: the reference.
        same: a kind that is the same.
        other_order: a kind that adds in the opposite order, as another device may.
        narrow: kinds whose products are of fewer bits.
    """

    program: OperatorProgram
    parameters: Any
    data: DataSet
    full: KindDevice
    same: KindDevice
    other_order: KindDevice
    narrow: tuple[KindDevice, ...]

    @property
    def inputs(self) -> list[Any]:
        """What the first step computes on."""
        return [*jax.tree.leaves(self.parameters), *jax.tree.leaves(self.batch(0))]

    @property
    def floating(self) -> list[int]:
        """The operators that an error can be put into."""
        return [
            each.number
            for each in self.program.operators
            if all(jnp.issubdtype(shape.dtype, jnp.floating) for shape in each.given)
        ]

    def batch(self, step: int) -> Mapping[str, np.ndarray]:
        """A step's batch."""
        return self.data.batch(step, _BATCH)

    def train(
        self, kind: KindDevice, steps: int, injection: Injection | None = None
    ) -> KindTraining:
        """A training on a kind."""
        schedule = optax.cosine_decay_schedule(2e-3, steps)
        return train_kind(
            self.program,
            kind,
            optax.adamw(schedule, b2=0.95),
            self.parameters,
            self.batch,
            steps,
            injection=injection,
        )


def make_case() -> Case:
    """A GPT of two blocks on the source of the standard library."""
    model = model_of(recipe("gpt-quickstart", blocks=2, width=64, heads=4, sequence=64))
    data = standard_library_text(model.units_per_example, 0)
    parameters = jax.device_get(model.init(jax.random.key(0)))
    program = trace_operators(model.loss, parameters, data.batch(0, _BATCH))
    names = ["cpu:float32", "same=cpu:float32", "cpu:bfloat16", "cpu:float16"]
    full, same, *narrow = map(bind_kind, parse_kinds(names))
    return Case(
        program, parameters, data, full, same, adding_backwards(same, program), tuple(narrow)
    )


def adding_backwards(kind: KindDevice, program: OperatorProgram) -> KindDevice:
    """A kind whose products and sums add in the opposite order.

    Args:
        kind: a kind.
        program: the operators.

    Returns:
        The kind with these operators replaced.
    """
    replacements = {
        each.number: functools.partial(_backwards, each)
        for each in program.operators
        if each.name in _ADDED_OVER
    }
    return replace(kind, kind=replace(kind.kind, name="another order"), replacements=replacements)


def _backwards(operator: Operator, operands: list[Any], _: list[Any]) -> list[Any]:
    axes = _ADDED_OVER[operator.name](operator.equation.params)
    flipped = [jnp.flip(each, axis) for each, axis in zip(operands, axes, strict=True)]
    return bind(operator.equation, flipped)


_ADDED_OVER: Mapping[str, Callable[[Mapping[str, Any]], Sequence[Sequence[int]]]] = {
    "dot_general": lambda params: params["dimension_numbers"][0],
    "reduce_sum": lambda params: [params["axes"]],
}
"""The axes of each operand that an operator adds over."""


def align_rows(steps: int = STEPS) -> Iterator[dict[str, Any]]:
    """What alignment finds on a small GPT.

    Args:
        steps: training steps whose losses are compared.

    Yields:
        Rows by `check`: ``clean``, ``products``, ``injected`` (one for each operator that was
        tried), ``nan`` and ``losses`` (one for each kind).
    """
    case = make_case()
    yield from _kind_rows(case)
    yield from _injected_rows(case)
    yield from _nan_rows(case)
    yield from _loss_rows(case, steps)


def _kind_rows(case: Case) -> Iterator[dict[str, Any]]:
    kinds = [case.same, case.other_order, *case.narrow]
    began = time.perf_counter()
    found = compare_kinds(case.program, case.inputs, case.full, kinds)
    seconds = time.perf_counter() - began
    for kind in kinds:
        named = found.named(kind.kind.name)
        yield {
            "check": "products" if kind in case.narrow else "clean",
            "kind": kind.kind.name,
            "operators": len(case.program.operators),
            "named": len(named),
            "primitives_named": sorted({each.operator.name for each in named}),
            "largest_error": found.ranked(kind.kind.name)[0].error,
            "seconds": seconds,
        }


def _injected_rows(case: Case) -> Iterator[dict[str, Any]]:
    for number in sorted(Random(0).sample(case.floating, _TRIED)):
        others = {n: each for n, each in case.other_order.replacements.items() if n != number}
        wrong = replace(
            case.same,
            kind=replace(case.same.kind, name="wrong"),
            replacements={**others, number: Injection(number, _ERROR).replacement()},
        )
        found = compare_kinds(case.program, case.inputs, case.full, [case.same, wrong])
        named = [(each.kind, each.operator.number) for each in found.named()]
        operator = case.program.operators[number]
        yield {
            "check": "injected",
            "error": _ERROR,
            "operator": number,
            "equation": operator.signature,
            "direction": operator.direction,
            "line": operator.line.rpartition("/")[2],
            "named": named,
            "is_right": named == [("wrong", number)],
        }


def _nan_rows(case: Case) -> Iterator[dict[str, Any]]:
    numbers = Random(1).sample(case.floating, len(_NAN_STEPS))
    for step, number in zip(_NAN_STEPS, numbers, strict=True):
        injection = Injection(number, math.nan, step)
        overflow = case.train(case.same, max(_NAN_STEPS), injection).overflow
        operator = None if overflow is None else overflow.operator
        found = (
            None if overflow is None else overflow.step,
            None if operator is None else operator.number,
        )
        yield {
            "check": "nan",
            "step": step,
            "operator": number,
            "found_step": found[0],
            "found_operator": found[1],
            "is_right": found == (step, number),
        }


def _loss_rows(case: Case, steps: int) -> Iterator[dict[str, Any]]:
    reference = case.train(case.full, steps).losses
    for kind in (case.same, case.other_order, *case.narrow):
        began = time.perf_counter()
        losses = case.train(kind, steps).losses
        yield {
            "check": "losses",
            "kind": kind.kind.name,
            "steps": len(losses),
            "first_loss": reference[0],
            "last_loss": reference[-1],
            "loss_mre": mean_relative_error(losses, reference),
            "largest": max(relative_differences(losses, reference)),
            "criterion": CRITERION,
            "published": PUBLISHED_MRE,
            "seconds": time.perf_counter() - began,
        }
