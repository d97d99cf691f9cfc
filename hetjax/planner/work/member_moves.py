"""What members of a data-parallel stage must tell each other inside a microbatch, by its trace.

Each member has some of the examples. A sum over all of them, as the mean of a batch normalisation
is, lies as one summand on each member, and so may stay while it is only added up and scaled: the
gradients of parameters do so until the end of the step. Where anything else is made of it, the
members exchange their summands. Here these exchanges are counted; deduction, which finds what
really moves, asks every equation for every way that values may lie, and takes a hundred times as
long.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from hetjax import _compat
from hetjax.pipeline.program.traced_program import Constant, Operand, SliceOf, num_bytes
from hetjax.pipeline.stages.traced_stage import TracedStage

Lying = int | None
"""How a value lies: divided along the dimension of the examples, or `_SUMMANDS`; None for the same
on each member."""

_SUMMANDS = -1

_UNARY_LINEAR = frozenset(
    """
    neg convert_element_type reduce_sum reshape transpose broadcast_in_dim squeeze expand_dims copy
    real copy_p hetjax_constraint slice
    """.split()
)
_ADDING = frozenset(("add", "add_any", "sub"))
_SCALING = frozenset(("mul", "div"))
_OVER_ALL = frozenset(
    ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev", "top_k")
)
_CALLS = frozenset(
    """
    jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr
    """.split()
)


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
    lies = _Lies()
    for value in (*traced.batch, *traced.received, *traced.cotangents):
        shape = flat.avals[value].shape
        lies.of[value] = 0 if shape and shape[0] == microbatch_size else None
    reached = set(traced.cotangents)
    passes, given = (_Counter(), _Counter()), _Counter()
    for step in flat.steps:
        is_backward = not reached.isdisjoint(step.values())
        if is_backward:
            reached.update(step.outputs)
        shapes = [_operand_shape(each, flat.avals) for each in step.inputs]
        made = [flat.avals[value] for value in step.outputs]
        keys = [_key(each) for each in step.inputs]
        if step.equation is None:
            primitive, params = "concatenate", {"dimension": 0}
        else:
            primitive, params = step.equation.primitive.name, step.equation.params
        counter = passes[is_backward]
        _follow(primitive, params, step.equation, lies, keys, shapes, step.outputs, made, counter)
    for operands in (traced.sent, traced.returned):
        # What is given at once goes at once, as the loss and what it is divided by.
        keys = [key for key in dict.fromkeys(map(_key, operands)) if key is not None]
        last = [key for key in keys if lies.get(key) == _SUMMANDS]
        if last:
            given.add(sum(lies.least_bytes(key, flat.avals[key]) for key in last))
    return passes[0].found, passes[1].found, given.found


@dataclass
class _Counter:
    """What was found of one pass."""

    found: MemberMoves = field(default_factory=MemberMoves)
    times: int = 1

    def add(self, size: float) -> None:
        self.found += MemberMoves(self.times, self.times * float(size))


@dataclass
class _Lies:
    """How values lie, as far as they are known; of others every member has the same.

    Args:
        of: how.
        least: of summands, the bytes of the smallest of what they were made of one by one, which is
            exchanged in their place.
    """

    of: dict[Hashable, Lying] = field(default_factory=dict)
    least: dict[Hashable, float] = field(default_factory=dict)

    def get(self, key: Hashable) -> Lying:
        """How a value lies; a constant has no key."""
        return None if key is None else self.of.get(key)

    def least_bytes(self, key: Hashable, shape: jax.ShapeDtypeStruct) -> float:
        """Bytes of what is exchanged in the place of summands."""
        return self.least.get(key, num_bytes(shape))

    def settle(self, key: Hashable, shape: jax.ShapeDtypeStruct, counter: _Counter) -> None:
        """Exchange a value, once: from then on each member has it whole."""
        counter.add(self.least_bytes(key, shape))
        self.of[key] = None


def _key(operand: Operand) -> int | None:
    if isinstance(operand, Constant):
        return None
    return operand.value if isinstance(operand, SliceOf) else operand


def _operand_shape(operand: Operand, avals: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
    if isinstance(operand, Constant):
        return jax.ShapeDtypeStruct(np.shape(operand.value), np.asarray(operand.value).dtype)
    if isinstance(operand, SliceOf):
        whole = avals[operand.value]
        return jax.ShapeDtypeStruct((operand.stop - operand.start, *whole.shape[1:]), whole.dtype)
    return avals[operand]


def _follow(
    primitive: str,
    params: Any,
    equation: _compat.JaxprEqn | None,
    lies: _Lies,
    keys: Sequence[Hashable],
    shapes: Sequence[jax.ShapeDtypeStruct],
    outputs: Sequence[Hashable],
    made: Sequence[jax.ShapeDtypeStruct],
    counter: _Counter,
) -> None:
    """Say how the results of one equation lie, and count what has to be exchanged for it."""
    given = [lies.get(key) for key in keys]
    if all(each is None for each in given):
        return
    if equation is not None and primitive in _CALLS:
        body = _compat.inner_jaxprs(equation)[0]
        lies.of.update(zip(outputs, _through(body, given, counter), strict=True))
        return
    if equation is not None and primitive == "scan":
        lies.of.update(zip(outputs, _through_scan(equation, given, counter), strict=True))
        return
    if _SUMMANDS in given:
        summands = {k: s for k, s in zip(keys, shapes, strict=True) if lies.get(k) == _SUMMANDS}
        if _stay_summands(primitive, given):
            least = sum(lies.least_bytes(key, shape) for key, shape in summands.items())
            for output, shape in zip(outputs, made, strict=True):
                lies.of[output] = _SUMMANDS
                lies.least[output] = min(least, num_bytes(shape))
            return
        for key, shape in summands.items():
            lies.settle(key, shape, counter)
        given = [lies.get(key) for key in keys]
        if all(each is None for each in given):
            return
    found = _lying_of_results(primitive, params, given, shapes, made)
    if primitive in _OVER_ALL and _dimension_of(params) in given:
        counter.add(num_bytes(made[0]))
    for output, shape, lying in zip(outputs, made, found, strict=True):
        if lying == _GATHERED:
            is_reduced = primitive.startswith(("reduce_", "arg"))
            counter.add(num_bytes(shape) if is_reduced else max(map(num_bytes, shapes)))
            lying = None
        lies.of[output] = lying


_GATHERED = -2
"""Of a result that each member has once what it is made of was exchanged."""


def _stay_summands(primitive: str, given: Sequence[Lying]) -> bool:
    """Whether a result of summands is one summand on each member as well."""
    if primitive in _UNARY_LINEAR:
        return True
    if primitive in _ADDING:
        return all(each == _SUMMANDS for each in given)
    if primitive in _SCALING:
        others = given[1:] if primitive == "div" else [g for g in given if g != _SUMMANDS]
        return given.count(_SUMMANDS) == 1 and all(each is None for each in others)
    return False


def _through(body: Any, given: Sequence[Lying], counter: _Counter) -> list[Lying]:
    """How the results of a jaxpr lie."""
    lies = _Lies(dict(zip(body.invars, given, strict=True)))
    for equation in body.eqns:
        keys = [None if _is_literal(each) else each for each in equation.invars]
        shapes = [_shape_of(each) for each in equation.invars]
        made = [_shape_of(each) for each in equation.outvars]
        name, params = equation.primitive.name, equation.params
        _follow(name, params, equation, lies, keys, shapes, equation.outvars, made, counter)
    return [None if _is_literal(each) else lies.get(each) for each in body.outvars]


def _through_scan(
    equation: _compat.JaxprEqn, given: Sequence[Lying], counter: _Counter
) -> list[Lying]:
    """How the results of a scan lie, whose iterations are alike."""
    params = equation.params
    consts, carried = params["num_consts"], params["num_carry"]
    body = _compat.inner_jaxprs(equation)[0]
    rows = [lying - 1 if lying is not None and lying > 0 else lying for lying in given]
    start = [*given[: consts + carried], *rows[consts + carried :]]
    # What an iteration makes of its carry, the next one begins with.
    after = _through(body, start, _Counter())[:carried]
    start[consts : consts + carried] = [
        b if a is None else a for a, b in zip(start[consts:], after, strict=False)
    ]
    each = _Counter(times=counter.times * params["length"])
    found = _through(body, start, each)
    counter.found += each.found
    stacked = [
        lying + 1 if lying is not None and lying >= 0 else lying for lying in found[carried:]
    ]
    return [*found[:carried], *stacked]


def _is_literal(operand: Any) -> bool:
    return hasattr(operand, "val")


def _shape_of(variable: Any) -> jax.ShapeDtypeStruct:
    aval = variable.aval
    return jax.ShapeDtypeStruct(getattr(aval, "shape", ()), getattr(aval, "dtype", np.float32))


def _dimension_of(params: Any) -> int | None:
    return params.get("axis", params.get("dimension"))


def _lying_of_results(
    primitive: str,
    params: Any,
    given: Sequence[Lying],
    shapes: Sequence[jax.ShapeDtypeStruct],
    made: Sequence[jax.ShapeDtypeStruct],
) -> list[Lying]:
    """How results lie of operands some of which are divided by examples."""
    place, lying = next((i, d) for i, d in enumerate(given) if d is not None)
    shape, result = shapes[place].shape, made[0].shape
    if primitive.startswith(("reduce_", "arg")) and "axes" in params:
        axes = params["axes"]
        if lying in axes:
            return [_SUMMANDS if primitive == "reduce_sum" else _GATHERED] * len(made)
        return [lying - sum(axis < lying for axis in axes)] * len(made)
    if primitive == "broadcast_in_dim":
        return [params["broadcast_dimensions"][lying]]
    if primitive == "transpose":
        return [tuple(params["permutation"]).index(lying)]
    if primitive in ("reshape", "squeeze", "expand_dims"):
        return [_reshaped(shape, lying, result)]
    if primitive == "dot_general":
        return [_of_product(params["dimension_numbers"], given, shapes)]
    if primitive == "conv_general_dilated":
        return [_of_convolution(params["dimension_numbers"], given)]
    if primitive == "gather":
        return [_of_gather(params, given, shapes, made[0])]
    if primitive.startswith("scatter"):
        return [_of_scatter(primitive, params["dimension_numbers"], given)]
    return [_kept(shape, lying, each.shape) for each in made]


def _kept(before: tuple[int, ...], lying: int, after: tuple[int, ...]) -> Lying:
    """Along the same dimension, which must be as long as it was."""
    alike = len(after) > lying and after[lying] == before[lying]
    return lying if alike else _GATHERED


def _reshaped(before: tuple[int, ...], lying: int, after: tuple[int, ...]) -> Lying:
    """Where the dimension of examples comes to lie, with what is joined to it or cut from it."""
    ahead = math.prod(before[:lying])
    for place, size in enumerate(after):
        if math.prod(after[:place]) == ahead and (size > 1 or before[lying] == 1):
            return place
    return _GATHERED


def _of_product(
    numbers: Any, given: Sequence[Lying], shapes: Sequence[jax.ShapeDtypeStruct]
) -> Lying:
    contracted, batched = numbers
    free_before = len(batched[0])
    for side, lying in enumerate(given):
        if lying is None:
            continue
        if lying in contracted[side]:
            return _SUMMANDS
        if lying in batched[side]:
            return tuple(batched[side]).index(lying)
        bound = {*contracted[side], *batched[side]}
        free = [d for d in range(len(shapes[side].shape)) if d not in bound]
        place = free_before + free.index(lying)
        if side == 1:
            other = {*contracted[0], *batched[0]}
            place += sum(d not in other for d in range(len(shapes[0].shape)))
        return place
    raise AssertionError("an operand is divided by examples")


def _of_convolution(numbers: Any, given: Sequence[Lying]) -> Lying:
    left, right = given
    if left is not None:
        if left == numbers.lhs_spec[0]:
            return numbers.out_spec[0]
        return _SUMMANDS if left == numbers.lhs_spec[1] else _GATHERED
    if right == numbers.rhs_spec[1]:
        return _SUMMANDS
    return numbers.out_spec[1] if right == numbers.rhs_spec[0] else _GATHERED


def _of_scatter(primitive: str, numbers: Any, given: Sequence[Lying]) -> Lying:
    operand, indices = given[:2]
    if operand is not None:
        return operand
    batched = tuple(numbers.scatter_indices_batching_dims)
    if indices in batched:
        return numbers.operand_batching_dims[batched.index(indices)]
    return _SUMMANDS if primitive == "scatter-add" else _GATHERED


def _of_gather(
    params: Any,
    given: Sequence[Lying],
    shapes: Sequence[jax.ShapeDtypeStruct],
    made: jax.ShapeDtypeStruct,
) -> Lying:
    numbers = params["dimension_numbers"]
    operand, indices = given[:2]
    offsets = tuple(numbers.offset_dims)
    if indices is not None:
        others = [d for d in range(len(made.shape)) if d not in offsets]
        return others[indices] if indices < len(others) else _GATHERED
    bound = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    kept = [d for d in range(len(shapes[0].shape)) if d not in bound]
    assert operand is not None, "an operand is divided by examples"
    is_whole = operand in kept and params["slice_sizes"][operand] == shapes[0].shape[operand]
    return offsets[kept.index(operand)] if is_whole else _GATHERED
