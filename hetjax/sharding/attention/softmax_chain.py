"""Scores on their way from a product to a softmax, and weights on their way to the next product.

The dimensions of the first product's result are followed by name through all that changes their
places. What happens to scores that an attention has no word for is noted as a problem.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from hetjax import _compat
from hetjax.sharding.attention.forms import (
    Data,
    Form,
    Near,
    Region,
    Same,
    Uniform,
    moved,
    reversed_region,
)

Dims = tuple[tuple[int, ...], ...]
"""For each dimension which of the first product's dimensions it is made of, of those above 1."""

HIDING = -1e4
"""What is put in the place of scores, or added to them, hides them from here down."""

HIDDEN = -300.0
"""What hides scores must still be so low at the softmax, however they are scaled in between: only
then the exponentials are 0 beside others'."""

_COARSEST = jnp.finfo(jnp.bfloat16).nmant
"""Fewer bits of a mantissa round scores more than attention in one equation does."""

OF_MASK = "its mask is not full, causal, a window, or segments"
OF_RULE = "a function with a derivative of its own is between its products"
OF_SUM = "its exponentials are not divided by their sum, and by that alone, before its values"
OF_WEIGHTS = "its weights are dropped (attention dropout), or changed in another way"


@dataclass(frozen=True)
class Scores:
    """Scores, or weights, of a product of queries and keys.

    Args:
        product: the equation of the product.
        sizes: sizes of the product's dimensions.
        dims: which of them the value's are.
        scale: what they were multiplied by.
        shift: what was added to all of them.
        hidden: how high those are at most that are not seen, beside what was added to all.
        conditions: who sees whom, by the product's dimensions.
        varying: dimensions along which what was added to them varies.
        lowered: the dimension of a sum of exponentials that lowered them, as in a log-softmax.
        exponentials: the variable that their exponentials are, once these are taken.
        summed: the dimension along which they were divided by their sum.
        problem: what an attention has no word for; empty for nothing.
    """

    product: _compat.JaxprEqn
    sizes: tuple[int, ...]
    dims: Dims
    scale: float = 1.0
    shift: float = 0.0
    hidden: float = -math.inf
    conditions: frozenset[Near | Same] = frozenset()
    varying: frozenset[int] = frozenset()
    lowered: int | None = None
    exponentials: Any = None
    summed: int | None = None
    problem: str = ""

    def refused(self, problem: str) -> Scores:
        """The same with a problem, if there was none before."""
        return self if self.problem else replace(self, problem=problem)


@dataclass(frozen=True)
class Total:
    """The sum of exponentials.

    Args:
        exponentials: their variable.
        sizes: sizes of the product's dimensions.
        dims: which of them it has.
        is_changed: whether it is another number, made of the sum.
    """

    exponentials: Any
    sizes: tuple[int, ...]
    dims: Dims
    is_changed: bool = False


Followed = Form | Scores | Total | None


def scores_of_product(equation: _compat.JaxprEqn) -> Scores:
    """What a product of matrices makes, as it may be scores."""
    out: Any = equation.outvars[0].aval
    dims = tuple((i,) if size > 1 else () for i, size in enumerate(out.shape))
    scores = Scores(equation, tuple(out.shape), dims)
    if _is_exact_enough(equation):
        return scores
    return scores.refused(
        f"its scores are {out.dtype}, in which they round or wrap (known: bfloat16 and finer "
        f"floats, and int32 of narrower integers)"
    )


def _is_exact_enough(product: _compat.JaxprEqn) -> bool:
    """Whether a product may as well be computed in float32."""
    out: Any = product.outvars[0].aval
    if not jnp.issubdtype(out.dtype, jnp.integer):
        return is_fine(out.dtype)
    operands: list[Any] = [atom.aval for atom in product.invars]
    are_narrow = all(
        jnp.issubdtype(each.dtype, jnp.integer) and each.dtype.itemsize < out.dtype.itemsize
        for each in operands
    )
    return out.dtype.itemsize >= jnp.dtype(jnp.int32).itemsize and are_narrow


def is_fine(dtype: Any) -> bool:
    """Whether a dtype is a float that rounds no more than bfloat16 does.

    Args:
        dtype: the dtype.
    """
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).nmant >= _COARSEST


def with_shape(dims: Dims, sizes: Sequence[int], shape: Sequence[int]) -> Dims | None:
    """Dimensions after a reshape; None where one is split."""
    flat = list(itertools.chain(*dims))
    found: list[tuple[int, ...]] = []
    for size in shape:
        taken: list[int] = []
        while math.prod(sizes[atom] for atom in taken) < size and flat:
            taken.append(flat.pop(0))
        if math.prod(sizes[atom] for atom in taken) != size:
            return None
        found.append(tuple(taken))
    return tuple(found) if not flat else None


def placed(form: Scores | Total, equation: _compat.JaxprEqn) -> Scores | Total | None:
    """Scores or their sum after an equation that moves them; None where it does more."""
    out: Any = equation.outvars[0].aval
    name, params = equation.primitive.name, equation.params
    dims: Dims | None = None
    if name == "transpose":
        dims = tuple(form.dims[i] for i in params["permutation"])
    elif name in ("reshape", "squeeze", "expand_dims"):
        dims = with_shape(form.dims, form.sizes, out.shape)
    elif name == "broadcast_in_dim":
        places = dict(zip(params["broadcast_dimensions"], form.dims, strict=True))
        dims = tuple(places.get(i, ()) for i in range(len(out.shape)))
        is_repeated = any(size > 1 and not dim for size, dim in zip(out.shape, dims, strict=True))
        if is_repeated and isinstance(form, Scores):
            return None
    elif _keeps(equation):
        dims = form.dims
    return None if dims is None else replace(form, dims=dims)


_KEEPING = frozenset(
    "convert_element_type copy name reduce_precision hetjax_constraint sharding_constraint "
    "optimization_barrier".split()
)


def _keeps(equation: _compat.JaxprEqn) -> bool:
    """Whether an equation gives its operand as it is, or as another float, and no more rounded."""
    if equation.primitive.name not in _KEEPING:
        return False
    out: Any = equation.outvars[0].aval
    return is_fine(out.dtype) and equation.params.get("mantissa_bits", _COARSEST) >= _COARSEST


def combined(
    equation: _compat.JaxprEqn, place: int, scores: Scores, others: Sequence[Followed]
) -> Followed:
    """What an elementwise equation makes of scores and other values.

    Args:
        equation: the equation.
        place: which of its operands the scores are.
        scores: the scores.
        others: the forms of all its operands, with the dimensions of the result.

    Returns:
        Scores, with a problem where an attention has no word for it; None where they are none.
    """
    name = equation.primitive.name
    rest = [each for i, each in enumerate(others) if i != place]
    if scores.exponentials is not None:
        masked = _masked_weights(equation, place, scores, others)
        if masked is not None:
            return masked
        if scores.summed is not None:
            return scores.refused(OF_WEIGHTS)
        if isinstance(rest[0], Total) and (name == "mul" or (name == "div" and place == 0)):
            found = _normalised(scores, rest[0])
            is_plain = name == "div" and not rest[0].is_changed
            return found if found is None or is_plain else replace(found, problem=OF_SUM)
        return None
    if name == "select_n":
        return _selected(scores, place, others)
    if name in ("mul", "div") and isinstance(rest[0], Uniform) and (name, place) != ("div", 1):
        value = float(rest[0].value)
        return _scaled(scores, value if name == "mul" else 1 / value) if value else None
    if name == "add" or (name == "sub" and place == 0):
        return _shifted(scores, rest[0], 1 if name == "add" else -1)
    if name == "exp":
        found = replace(scores, exponentials=equation.outvars[0])
        told = f"its mask leaves what is hidden {scores.hidden:g} beside the scores"
        return found if scores.hidden <= HIDDEN else found.refused(told)
    return scores.refused(f"{name} is between the scores and the softmax")


def _scaled(scores: Scores, factor: float) -> Scores:
    hidden = scores.hidden * factor if scores.conditions else scores.hidden
    return replace(scores, scale=scores.scale * factor, shift=scores.shift * factor, hidden=hidden)


def _normalised(scores: Scores, total: Total) -> Scores | None:
    """Exponentials divided by their sum, which make a softmax."""
    axis = _summed_axis(scores, total) if total.exponentials is scores.exponentials else None
    if axis is None:
        return None
    found = replace(scores, summed=axis)
    return found.refused("a bias is added to its scores") if axis in scores.varying else found


def _summed_axis(scores: Scores, total: Total) -> int | None:
    """The one dimension that scores have and a sum does not."""
    if total.sizes != scores.sizes or len(total.dims) != len(scores.dims):
        return None
    gone = [dim for dim, kept in zip(scores.dims, total.dims, strict=True) if dim != kept]
    return gone[0][0] if len(gone) == 1 and len(gone[0]) == 1 else None


def _masked_weights(
    equation: _compat.JaxprEqn, place: int, scores: Scores, operands: Sequence[Followed]
) -> Scores | None:
    """Exponentials or weights that are 0 where a mask says so; None where an equation does more.

    Where the scores were hidden before, nothing changes. Only exponentials may be hidden newly:
    weights would no longer add up to 1.
    """
    seen = _seen_by_factor(equation.primitive.name, place, operands)
    if seen is None:
        return None
    found = _seeing(scores, seen, -math.inf)
    if found.problem or found.conditions == scores.conditions:
        return found
    is_new = scores.summed is None
    return replace(found, exponentials=equation.outvars[0]) if is_new else None


def _seen_by_factor(name: str, place: int, operands: Sequence[Followed]) -> Region | None:
    """Where what an equation makes is as it was, if it is 0 elsewhere."""
    if name == "select_n" and place > 0 and len(operands) == 3:
        which, other, inside = operands[0], operands[3 - place], place - 1
        if not (isinstance(other, Uniform) and other.value == 0):
            return None
    elif name == "mul":
        which, inside = operands[1 - place], 1
    else:
        return None
    if not isinstance(which, Region):
        return None
    seen = which if which.inside == inside else reversed_region(which)
    if seen is None or {seen.inside, seen.outside} != {0, 1}:
        return None
    return seen if seen.inside == inside else None


def _selected(scores: Scores, place: int, operands: Sequence[Followed]) -> Scores:
    which = operands[0]
    if place == 0 or len(operands) != 3:
        return scores.refused(OF_MASK)
    other = operands[3 - place]
    if isinstance(which, Uniform):
        return scores if int(which.value) == place - 1 else scores.refused(OF_MASK)
    if isinstance(which, Region) and isinstance(other, Uniform):
        seen = which if int(which.inside) == place - 1 else reversed_region(which)
        hidden = float(other.value) - scores.shift
        if seen is not None and hidden <= HIDING:
            return _seeing(scores, seen, hidden)
    return scores.refused(OF_MASK)


def _shifted(scores: Scores, other: Followed, sign: int) -> Scores:
    """Scores with something added to them, or, by the sign, taken away."""
    match other:
        case Uniform():
            return replace(scores, shift=scores.shift + sign * float(other.value))
        case Region():
            seen = other if other.inside == 0 else reversed_region(other)
            if seen is not None and seen.inside == 0 and sign * float(seen.outside) <= HIDING:
                return _seeing(scores, seen, sign * float(seen.outside))
        case Data():
            along = {dim for dim in other.dims if dim is not None}
            atoms = itertools.chain(*(scores.dims[dim] for dim in along))
            return replace(scores, varying=scores.varying | frozenset(atoms))
        case Total():
            varying = scores.varying | frozenset(itertools.chain(*other.dims))
            found, axis = replace(scores, varying=varying), _summed_axis(scores, other)
            return found if axis is None else replace(found, lowered=axis)
    return scores.refused("its mask is added, and is not full, causal, a window, or segments")


def _seeing(scores: Scores, region: Region, hidden: float) -> Scores:
    """Scores of which those inside a region alone are seen; how high the others are at most."""
    names: dict[int, int | None] = {}
    for condition in region.conditions:
        for dim in _dims_of(condition):
            atoms = scores.dims[dim]
            if len(atoms) > 1:
                return scores.refused(OF_MASK)
            names[dim] = atoms[0] if atoms else None
    found = moved(region, names)
    if not isinstance(found, Region):
        return scores.refused(OF_MASK)
    return replace(
        scores,
        conditions=scores.conditions | found.conditions,
        hidden=max(scores.hidden, hidden),
    )


def _dims_of(condition: Near | Same) -> Iterator[int]:
    if isinstance(condition, Near):
        yield from (condition.first, condition.second)
        return
    for side in (condition.first, condition.second):
        yield from (dim for dim in side.dims if dim is not None)


def aligned(form: Followed, shape: Sequence[int], out: Sequence[int]) -> Followed:
    """The form of an operand, whose dimensions of size 1 an elementwise equation repeats."""
    if isinstance(form, Scores):
        return form if tuple(shape) == tuple(out) else None
    if isinstance(form, Total):
        return form
    places: Mapping[int, int | None] = {
        i: None if size == 1 != out[i] else i for i, size in enumerate(shape)
    }
    return moved(form, places)


def total_of(scores: Scores, axes: Sequence[int]) -> Total:
    """The sum of exponentials over some of their dimensions."""
    kept = tuple(dim for i, dim in enumerate(scores.dims) if i not in axes)
    return Total(scores.exponentials, scores.sizes, kept)
