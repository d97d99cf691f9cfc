"""The work of a program's steps by class: what devices take unlike long for, each FLOP or byte.

A device seldom multiplies small matrices as fast as large ones, and convolves in other ways than it
multiplies. So products count by how large their smallest side is, between knots: a product between
two of them is in both classes, in parts. All else counts by its bytes, by the kind of what is done
with them. What a class takes on a device is fitted to runs that were measured there; see
`hetjax.planner.profiler.class_rates`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from hetjax import _compat
from hetjax.pipeline.program.costs import convolution_sizes, equation_cost
from hetjax.pipeline.program.traced_program import Step
from hetjax.sharding.attention.work import AttentionWork, attention_work
from hetjax.sharding.cross_entropy.work import cross_entropy_work

Work = Mapping[str, float]
"""FLOPs of products, and bytes of all else, by class."""

PRODUCT, BATCHED = "product", "batched product"
CONVOLUTION, BEYOND, KERNEL = "convolution", "convolution beyond images", "kernel gradient"

KNOTS = (8, 16, 32, 64, 128, 256, 512)
"""Of the smallest side of a product."""

CONVOLVED, MOVED, WINDOWS, INDEXED = "convolved", "moved", "windows", "indexed"
REDUCED, ARITHMETIC = "reduced", "arithmetic"

_MOVED = frozenset(
    "transpose rev pad tile slice concatenate dynamic_slice dynamic_update_slice".split()
)
_WINDOWS = frozenset(
    """
    select_and_scatter_add select_and_scatter reduce_window reduce_window_max reduce_window_min
    reduce_window_sum select_and_gather_add cumsum cummax cummin cumprod cumlogsumexp sort top_k
    """.split()
)
_INDEXED = frozenset(
    "gather scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max".split()
)
_REDUCED = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split()
)
_FREE = frozenset(
    """
    reshape broadcast_in_dim iota squeeze expand_dims stop_gradient copy bitcast_convert_type
    hetjax_constraint
    """.split()
)

_counted: WeakKeyDictionary[Step, Work] = WeakKeyDictionary()


def step_work(step: Step) -> Work:
    """The work of one step, all its iterations.

    Args:
        step: the step.
    """
    found = _counted.get(step)
    if found is None:
        found = {} if step.equation is None else _equation_work(step.equation)
        _counted[step] = found
    return found


def steps_work(steps: Sequence[Step]) -> Work:
    """The work of several steps.

    Args:
        steps: the steps.
    """
    return _added((1.0, step_work(step)) for step in steps)


def _added(parts: Iterable[tuple[float, Work]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for times, work in parts:
        for name, amount in work.items():
            total[name] = total.get(name, 0.0) + times * amount
    return total


def is_product(name: str) -> bool:
    """Whether a class is one of products, which count by their FLOPs.

    Args:
        name: the class.
    """
    return name.rpartition(" ")[0] in (PRODUCT, BATCHED, CONVOLUTION, BEYOND, KERNEL)


def _equation_work(equation: _compat.JaxprEqn) -> Work:
    name, cost = equation.primitive.name, equation_cost(equation)
    if name == "dot_general":
        return _product_work(*_product_sides(equation), cost.flops)
    if name == "conv_general_dilated":
        # It is made of pieces, and these are copies.
        return {**_product_work(*_convolution_sides(equation), cost.flops), CONVOLVED: cost.bytes}
    attention = attention_work(equation)
    if attention is not None:
        return attention_classes(attention)
    losses = cross_entropy_work(equation)
    if losses is not None:
        products = _product_work(PRODUCT, losses.side, losses.products)
        return {**products, ARITHMETIC: losses.traffic}
    inner = [_jaxpr_work(jaxpr) for jaxpr in _compat.inner_jaxprs(equation)]
    if name == "cond":
        return max(inner, key=lambda work: sum(work.values()))
    if inner and "jvp" in name:
        return inner[0]
    if inner and not name.startswith(("reduce", "scatter", "sort", "argm")):
        times = float(equation.params["length"]) if name == "scan" else 1.0
        return _added((times, work) for work in inner)
    return {} if name in _FREE else {_class_of(name): cost.bytes}


def attention_classes(attention: AttentionWork) -> Work:
    """The work of an attention, or of a block of one, by class.

    Args:
        attention: the work.
    """
    products = _product_work(BATCHED, attention.side, attention.products)
    return {**products, ARITHMETIC: attention.traffic}


def _jaxpr_work(jaxpr: _compat.Jaxpr) -> Work:
    return _added((1.0, _equation_work(equation)) for equation in jaxpr.eqns)


def _class_of(name: str) -> str:
    classes = {MOVED: _MOVED, WINDOWS: _WINDOWS, INDEXED: _INDEXED, REDUCED: _REDUCED}
    return next((each for each, names in classes.items() if name in names), ARITHMETIC)


def _product_work(kind: str, side: float, flops: float) -> Work:
    return {f"{kind} {knot}": part * flops for knot, part in _knots(side) if part}


def _knots(side: float) -> Iterator[tuple[int, float]]:
    """The knots beside a length, and in what parts it is of them."""
    side = min(max(side, KNOTS[0]), KNOTS[-1])
    above = next(place for place, knot in enumerate(KNOTS) if side <= knot)
    if above == 0:
        yield KNOTS[0], 1.0
        return
    low, high = KNOTS[above - 1], KNOTS[above]
    part = math.log(side / low) / math.log(high / low)
    yield low, 1 - part
    yield high, part


def _product_sides(equation: _compat.JaxprEqn) -> tuple[str, float]:
    """What kind of product it is, and the smallest of rows, columns and what is summed."""
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    sides: Sequence[Any] = [variable.aval for variable in equation.invars]
    left, right = (side.shape for side in sides)
    count = math.prod(left[d] for d in batch)
    depth = math.prod(left[d] for d in contracted)
    each = max(1, count * depth)
    rows, columns = math.prod(left) // each, math.prod(right) // each
    return BATCHED if count > 1 else PRODUCT, float(min(rows, columns, depth))


def _convolution_sides(equation: _compat.JaxprEqn) -> tuple[str, float]:
    """What kind of convolution it is, and the smaller of features in and out.

    The gradient of a kernel is one, too: it takes features for examples. Where the window is larger
    than the images, compilers know no fast way.
    """
    left, kernel, out = convolution_sizes(equation)
    if equation.params["dimension_numbers"].lhs_spec[0] != 0:
        return KERNEL, float(min(left[0], out[1]))
    beyond = any(window > size for window, size in zip(kernel[2:], left[2:], strict=True))
    return BEYOND if beyond else CONVOLUTION, float(min(left[1], out[1]))
