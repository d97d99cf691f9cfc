"""Plain attention: two products with a softmax between them, as one equation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import _compat
from hetjax.sharding.attention.forms import Data, Near, Same
from hetjax.sharding.attention.mask import Mask, Tokens, TokenSpan, positions_of, segment_numbers
from hetjax.sharding.attention.primitive import bind_attention
from hetjax.sharding.attention.softmax_chain import OF_MASK, Scores, is_fine


class UnknownAttentionError(Exception):
    """A softmax between two products that is no attention hetjax knows."""


@dataclass(frozen=True)
class _Operand:
    """Queries, keys or values.

    Args:
        variable: the array.
        dims: which of its dimensions belongs to which of the scores'.
        size: the dimension that is none of them: of a head's numbers.
    """

    variable: Any
    dims: dict[int, int]
    size: int

    def ordered(self, array: Any, atoms: Sequence[int]) -> Any:
        """The array with dimensions of these names, and then a head's numbers, last."""
        places = [*(self.dims[atom] for atom in atoms), self.size]
        return _arranged(array, places, [array.shape[i] for i in places])


@dataclass(frozen=True)
class PlainAttention:
    """Attention that was found.

    Args:
        q: the queries.
        k: the keys.
        v: the values.
        batch: names of the dimensions of the batch.
        heads: that of key-value heads, if there is one.
        queries: that of queries; None where there is one query.
        keys: that of keys.
        groups: those of the heads that each key-value head serves.
        sizes: sizes by name.
        mask: which keys a query sees.
        scale: what scores are multiplied by.
        segments: of queries and keys; empty for none.
        result: names of the result's dimensions, of those above 1; -1 for a head's numbers.
        aval: the result.
    """

    q: _Operand
    k: _Operand
    v: _Operand
    batch: tuple[int, ...]
    heads: tuple[int, ...]
    queries: tuple[int, ...]
    keys: int
    groups: tuple[int, ...]
    sizes: tuple[int, ...]
    mask: Mask
    scale: float
    segments: tuple[Data, ...]
    result: tuple[int, ...]
    aval: Any

    @property
    def operands(self) -> list[Any]:
        """The variables that `traced` takes."""
        return [*(each.variable for each in (self.q, self.k, self.v)), *self._bases]

    @property
    def is_square(self) -> bool:
        """Whether there are as many queries as keys."""
        return math.prod(self._sized(self.queries)) == self.sizes[self.keys]

    @property
    def _bases(self) -> list[Any]:
        return [each.base for each in self.segments]

    def traced(self) -> _compat.ClosedJaxpr:
        """What computes it from the operands."""
        avals = [jax.ShapeDtypeStruct(o.aval.shape, o.aval.dtype) for o in self.operands]
        return jax.make_jaxpr(self._compute)(*avals)

    def _compute(self, q: Any, k: Any, v: Any, *segments: Any) -> Any:
        dtype = self._dtype(q.dtype, k.dtype, v.dtype)
        batch, batch_sizes = self.batch, self._sized(self.batch)
        length, number = math.prod(self._sized(self.queries)), self.sizes[self.keys]
        heads = math.prod(self._sized(self.heads))
        served = math.prod(self._sized(self.groups))
        rows = self.q.ordered(q, (*batch, *self.queries, *self.heads, *self.groups))
        rows = _arranged(
            rows, range(rows.ndim), (*batch_sizes, length, heads * served, rows.shape[-1])
        )
        columns = [
            part.ordered(each, (*batch, self.keys, *self.heads)).reshape(
                *batch_sizes, number, heads, each.shape[part.size]
            )
            for part, each in ((self.k, k), (self.v, v))
        ]
        given = [
            self._segments(part, each, atoms)
            for part, each, atoms in zip(
                self.segments, segments, (self.queries, (self.keys,)), strict=False
            )
        ]
        spans = [(TokenSpan(0, n),) for n in (length, number)]
        tokens = [
            Tokens(each, None if self.mask.is_full else positions_of(each), segments)
            for each, segments in zip(spans, given or (None, None), strict=True)
        ]
        out, _ = bind_attention(
            *(each.astype(dtype) for each in (rows, *columns)),
            *tokens,
            mask=self.mask,
            scale=self.scale,
        )
        names = (*batch, *self.queries, *self.heads, *self.groups)
        out = _arranged(out, range(out.ndim), (*self._sized(names), out.shape[-1]))
        order = [names.index(name) if name >= 0 else len(names) for name in self.result]
        if out.shape[-1] == 1:
            out, order = out[..., 0], [place for place in order if place < len(names)]
        return _arranged(out, order, self.aval.shape).astype(self.aval.dtype)

    def _dtype(self, *dtypes: Any) -> Any:
        """What is computed in: the widest; of unlike ones as wide, or narrow ones, the result's."""
        widths = {each.itemsize: each for each in dtypes}
        is_mixed = len(set(dtypes)) > len(widths)
        dtype = self.aval.dtype if is_mixed else widths[max(widths)]
        known = (each for each in (dtype, self.aval.dtype) if is_fine(each))
        return next(known, jnp.float32)

    def _sized(self, names: Sequence[int]) -> list[int]:
        return [self.sizes[name] for name in names]

    def _segments(self, part: Data, array: Any, atoms: Sequence[int]) -> Any:
        names = (*self.batch, *atoms)
        places = [part.dims.index(name) for name in names if name in part.dims]
        shape = [self.sizes[name] if name in part.dims else 1 for name in names]
        found = _arranged(array, places, shape)
        whole = [*self._sized(self.batch), math.prod(self._sized(atoms))]
        return segment_numbers(jnp.broadcast_to(found, whole))


def _arranged(array: Any, places: Sequence[int], shape: Sequence[int]) -> Any:
    """An array with its dimensions in another order, those of size 1 wherever, and its shape."""
    order = [*(i for i in range(array.ndim) if i not in places), *places]
    if order != sorted(order):
        array = array.transpose(order)
    return array if array.shape == tuple(shape) else array.reshape(shape)


def plain_attention(equation: _compat.JaxprEqn, place: int, weights: Scores) -> PlainAttention:
    """Attention that ends with a product of weights and values.

    Args:
        equation: the product.
        place: which of its operands the weights are.
        weights: what is known of them.

    Raises:
        UnknownAttentionError: it is none that hetjax knows.
    """
    if weights.problem:
        raise UnknownAttentionError(weights.problem)
    out: Any = equation.outvars[0].aval
    if not jnp.issubdtype(out.dtype, jnp.floating):
        raise UnknownAttentionError(f"its result is {out.dtype} (allowed: floats)")
    q, k, batch, heads, free = _first_product(weights)
    v, result = _second_product(equation, place, weights)
    axis = weights.summed
    assert axis is not None, "weights come of a softmax"
    if set(v.dims) != {*batch, axis}:
        raise UnknownAttentionError("its values are shared among what queries and keys are not")
    ordered = sorted(batch, key=lambda name: q.dims[name])
    examples = tuple(name for name in ordered if name not in heads)
    queries = _queries(weights, free, axis)
    return PlainAttention(
        q=q,
        k=k,
        v=v,
        batch=examples,
        heads=heads,
        queries=queries,
        keys=axis,
        groups=tuple(sorted((n for n in free if n not in queries), key=lambda n: q.dims[n])),
        sizes=weights.sizes,
        mask=_mask(weights, queries, axis),
        scale=weights.scale,
        segments=_segments_of(weights, examples, queries, axis),
        result=result,
        aval=out,
    )


def _first_product(
    weights: Scores,
) -> tuple[_Operand, _Operand, list[int], tuple[int, ...], list[int]]:
    """Queries, keys, and names of the dimensions of both, of heads among these, and of queries."""
    (contracted, batch), shapes = _numbers(weights.product)
    if any(len(sides) != 1 for sides in contracted):
        raise UnknownAttentionError("its scores add up more than one dimension")
    free = [
        [i for i in range(len(shape)) if i not in (*contracted[s], *batch[s])]
        for s, shape in enumerate(shapes)
    ]
    names = [
        dict(enumerate(batch[side])) | dict(enumerate(free[side], start))
        for side, start in ((0, len(batch[0])), (1, len(batch[0]) + len(free[0])))
    ]
    long = [{name: dim for name, dim in each.items() if weights.sizes[name] > 1} for each in names]
    key_side = 0 if weights.summed in names[0] else 1
    shared = [name for name in range(len(batch[0])) if name in long[0]]
    if weights.summed in shared or set(long[key_side]) != {*shared, weights.summed}:
        raise UnknownAttentionError("its softmax goes over a dimension that is not the keys'")
    sides = [
        _Operand(weights.product.invars[side], long[side], contracted[side][0]) for side in (0, 1)
    ]
    of_queries = [name for name in long[1 - key_side] if name not in shared]
    # One example is a dimension, too: the last of several is that of heads.
    ordered = sorted(range(len(batch[0])), key=lambda name: names[1 - key_side][name])
    heads = tuple(name for name in ordered[1:][-1:] if name in shared)
    return sides[1 - key_side], sides[key_side], shared, heads, of_queries


def _numbers(equation: _compat.JaxprEqn) -> tuple[Any, list[tuple[int, ...]]]:
    avals: list[Any] = [atom.aval for atom in equation.invars]
    return equation.params["dimension_numbers"], [each.shape for each in avals]


def _second_product(
    equation: _compat.JaxprEqn, place: int, weights: Scores
) -> tuple[_Operand, tuple[int, ...]]:
    """Values, and the names of the result's dimensions."""
    (contracted, batch), shapes = _numbers(equation)
    other = 1 - place
    mine = [weights.dims[dim] for dim in contracted[place]]
    if sum(mine, ()) != (weights.summed,) or len(mine) != 1:
        raise UnknownAttentionError("its weights are not added up along the keys alone")
    names = {contracted[other][0]: weights.dims[contracted[place][0]]}
    names |= {b: weights.dims[a] for a, b in zip(batch[place], batch[other], strict=True)}
    if any(len(atoms) > 1 for atoms in names.values()):
        raise UnknownAttentionError("dimensions of its weights are merged")
    free = [i for i in range(len(shapes[other])) if i not in names]
    long = [i for i in free if shapes[other][i] > 1] or free[-1:]
    if len(long) != 1:
        raise UnknownAttentionError("its values have more than one dimension of their own")
    dims = {atoms[0]: dim for dim, atoms in names.items() if atoms}
    value = _Operand(equation.invars[other], dims, long[0])
    rows = [
        name
        for dim in range(len(shapes[place]))
        if dim not in (*contracted[place], *batch[place])
        for name in weights.dims[dim]
    ]
    shared = [name for dim in batch[place] for name in weights.dims[dim]]
    return value, (*shared, *((*rows, -1) if place == 0 else (-1, *rows)))


def _queries(weights: Scores, free: Sequence[int], axis: int) -> tuple[int, ...]:
    """The name of the queries' dimension among those of queries alone."""
    named: set[Any] = {
        name
        for each in weights.conditions
        for name in (
            (each.first, each.second)
            if isinstance(each, Near)
            else (*each.first.dims, *each.second.dims)
        )
        if name in free
    }
    if len(named) > 1:
        raise UnknownAttentionError(OF_MASK)
    if named:
        return tuple(named)
    alike = [name for name in free if weights.sizes[name] == weights.sizes[axis]]
    return tuple((alike or list(free))[:1])


def _mask(weights: Scores, queries: Sequence[int], axis: int) -> Mask:
    before: list[int] = []
    after: list[int] = []
    for each in weights.conditions:
        if not isinstance(each, Near):
            continue
        if (each.first, each.second) == (*queries, axis):
            before.append(each.most)
        elif (each.first, each.second) == (axis, *queries):
            after.append(each.most)
        else:
            raise UnknownAttentionError(OF_MASK)
    mask = Mask(min(before, default=None), min(after, default=None))
    length, keys = weights.sizes[queries[0]] if queries else 1, weights.sizes[axis]
    # A softmax over hidden scores alone gives each its part, and attention zeros.
    sees_first = mask.after is None or mask.after >= 0
    sees_last = mask.before is None or (mask.before >= 0 and length - 1 - mask.before < keys)
    if not (sees_first and sees_last):
        raise UnknownAttentionError("there are queries that its mask lets see nothing")
    return mask


def _segments_of(
    weights: Scores, batch: Sequence[int], queries: Sequence[int], axis: int
) -> tuple[Data, ...]:
    """What tells segments apart, of queries and of keys."""
    found = {each for each in weights.conditions if isinstance(each, Same)}
    if not found:
        return ()
    if len(found) > 1:
        raise UnknownAttentionError("its mask has more than one kind of segments")
    (same,) = found
    if same.first.base is not same.second.base:
        # Where a query sees nothing, attention gives zeros, and a softmax the mean of all values.
        raise UnknownAttentionError(
            "its mask compares queries' segments with another array of keys' segments, in which a "
            "query's may be missing (one array for both is known)"
        )
    sides = sorted((same.first, same.second), key=lambda side: axis in side.dims)
    for side, own in zip(sides, (queries, (axis,)), strict=True):
        names = {name for name in side.dims if name is not None}
        is_whole = jnp.issubdtype(side.base.aval.dtype, jnp.integer)
        if not is_whole or not set(own) <= names <= {*batch, *own}:
            raise UnknownAttentionError(OF_MASK)
    return tuple(sides)
