"""What mending moves, beside the best reshards of all that a person could write by hand.

Programs are small trees of operations whose inputs lie at random. For these the best is found by
going through all: each value's layouts, with the bytes moved until then, and at each equation that
cannot take its operands as they lie every pair of layouts that it can take.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hspmd_layouts import random_annotation
from jax.sharding import PartitionSpec

from hetjax import HArray, HSharding, Subgroup
from hetjax.runtime.local.local_program import LocalProgram
from hetjax.sharding import DUPLICATE, deduce, specialize
from hetjax.sharding.deduction.annotated_program import AnnotatedProgram, Move
from hetjax.sharding.deduction.bottom_tier import OperandError
from hetjax.sharding.deduction.computing import EquationLayouts
from hetjax.sharding.deduction.flat_program import FlatEquation, flat_program
from hetjax.sharding.resolution.resolve import moved_elements

SIZE = 24
Layout = HSharding | None
Table = Mapping[Layout, int]
"""How a value may lie, and the fewest bytes that are moved until it does."""


@dataclass(frozen=True)
class TreeCase:
    """A program whose values are used once each, and how its inputs lie."""

    program: Callable[..., Any]
    inputs: Sequence[jax.Array]
    annotations: Sequence[HSharding]


def random_case(number: int) -> TreeCase:
    """A tree of one to four operations on square arrays, laid out at random."""
    rng = Random(number)
    groups = _random_union(rng)
    operations = [rng.choice(list(OPERATIONS)) for _ in range(rng.randint(1, 4))]
    num_inputs = 1 + sum(OPERATIONS[name][0] for name in operations)
    draw = np.random.default_rng(number)
    inputs = [jnp.asarray(draw.normal(size=(SIZE, SIZE)), jnp.float32) for _ in range(num_inputs)]
    annotations = [random_annotation(rng, (SIZE, SIZE), groups, sums=False, unit=2) for _ in inputs]

    def program(*values: Any) -> Any:
        result, *rest = values
        for name in operations:
            count, function = OPERATIONS[name]
            taken, rest = rest[:count], rest[count:]
            result = function(result, *taken)
        return result

    return TreeCase(program, inputs, annotations)


OPERATIONS: Mapping[str, tuple[int, Callable[..., Any]]] = {
    "product": (1, lambda x, y: x @ y),
    "sum": (1, jnp.add),
    "scaling": (1, jnp.multiply),
    "maximum": (1, jnp.maximum),
    "tanh": (0, jnp.tanh),
    "transpose": (0, lambda x: x.T),
    "sort": (0, lambda x: jax.lax.sort(x, dimension=1)),
    "running sum": (0, lambda x: jnp.cumsum(x, axis=0)),
}
"""By name, how many more operands an operation takes, and what it does."""


def _random_union(rng: Random) -> list[tuple[int, ...]]:
    numbers = list(range(8))
    rng.shuffle(numbers)
    groups = []
    for _ in range(rng.randint(2, 3)):
        size = rng.choice((1, 2, 2, 4)) if len(numbers) > 4 else rng.choice((1, 2))
        groups.append(tuple(numbers[:size]))
        numbers = numbers[size:]
    return groups


def bytes_of_moves(program: AnnotatedProgram) -> int:
    """The bytes between devices of all moves of a program."""
    total = 0
    for node in program.nodes:
        if isinstance(node, Move):
            shape = program.shapes[node.input]
            elements = moved_elements(node.source, node.destination, shape.shape)
            total += (elements or 0) * shape.dtype.itemsize
    return total


def least_bytes(case: TreeCase) -> int:
    """The bytes of the best reshards, by going through all."""

    def no_body(*_: Any) -> AnnotatedProgram:
        raise AssertionError("the operations hold no jaxprs")

    flat = flat_program(jax.make_jaxpr(case.program)(*case.inputs))
    computing = EquationLayouts(no_body, sums_stay=False)
    tables: dict[int, Table] = {
        v: {a: 0} for v, a in zip(flat.inputs, case.annotations, strict=True)
    }
    tables |= {variable: {None: 0} for variable in flat.constants}
    universe = list(_universe(case.annotations))
    for each in flat.equations:
        (result,) = each.results
        shapes = [flat.shapes[variable] for variable in each.operands]
        operands = [tables[variable] for variable in each.operands]
        tables[result] = _results(each, shapes, operands, universe, computing)
    (output,) = flat.outputs
    return min(tables[output].values())


def _results(
    flat: FlatEquation,
    shapes: Sequence[Any],
    operands: Sequence[Table],
    universe: Sequence[HSharding],
    computing: EquationLayouts,
) -> Table:
    found: dict[Layout, int] = {}
    for now in itertools.product(*operands):
        before = sum(table[layout] for table, layout in zip(operands, now, strict=True))
        result = _computed(computing, flat, shapes, now)
        if result is not None:
            found[result] = min(found.get(result, before), before)
            continue
        others = [
            _targets(shape, layout, [*universe, *now])
            for shape, layout in zip(shapes, now, strict=True)
        ]
        for pairs in itertools.product(*others):
            total = before + sum(cost for _, cost in pairs)
            result = _computed(computing, flat, shapes, [layout for layout, _ in pairs])
            if result is not None and total < found.get(result, math.inf):
                found[result] = total
    return found


_moved = functools.lru_cache(maxsize=None)(moved_elements)


def _targets(shape: Any, layout: Layout, universe: Sequence[Layout]) -> list[tuple[Layout, int]]:
    """How an operand could lie instead, and the bytes until it does."""
    if layout is None:
        return [(None, 0)]
    found = []
    for target in dict.fromkeys((layout, *universe)):
        if target is None:
            continue
        if target == layout:
            found.append((layout, 0))
            continue
        elements = _moved(layout, target, shape.shape)
        if elements is not None:
            found.append((target, elements * shape.dtype.itemsize))
    return found


def _computed(
    computing: EquationLayouts, flat: FlatEquation, shapes: Sequence[Any], held: Sequence[Layout]
) -> Layout:
    try:
        return computing(flat.equation, shapes, held).results[0]
    except OperandError:
        return None


def _universe(annotations: Sequence[HSharding]) -> Iterator[HSharding]:
    """Layouts of a square array on the submeshes of some annotations.

    Whole, or divided along either dimension as one of the annotations is; and inside each submesh
    whole, or divided along one.
    """
    sizes = {each.sizes: None for each in annotations if each.sizes}
    tops: list[tuple[Any, tuple[Any, ...]]] = [(DUPLICATE, ())]
    tops += [(dimension, each) for dimension in (0, 1) for each in sizes]
    for union in {tuple(g.bare for g in a.subgroups): None for a in annotations}:
        for hdim, widths in tops:
            for dimension in (None, 0, 1):
                groups = [_divided(g, dimension, hdim, widths, i) for i, g in enumerate(union)]
                yield HSharding(tuple(groups), hdim, widths)


def _divided(
    group: Subgroup, dimension: int | None, hdim: Any, widths: Sequence[Any], place: int
) -> Subgroup:
    width = widths[place] if hdim == dimension and widths else SIZE
    axes = tuple(name for name, _ in group.axes)
    if dimension is None or not axes or width % len(group.devices):
        return group
    return group.with_spec(PartitionSpec(*[None] * dimension, axes))


def mend_rows(cases: int = 200, seed: int = 0) -> list[Mapping[str, Any]]:
    """A row for all cases: bytes beside the best, and whether every result was the dense one.

    The best is the better of what going through all finds and of what was found: layouts that are
    unlike from submesh to submesh are not gone through.
    """
    ratios, moved, least, wrong, silent = [], 0, 0, 0, 0
    for number in range(seed, seed + cases):
        case = random_case(number)
        with jax.numpy_dtype_promotion("standard"):
            program = deduce(
                jax.make_jaxpr(case.program)(*case.inputs), case.annotations, mend=True
            )
        found = bytes_of_moves(program)
        best = min(found, least_bytes(case))
        moved, least = moved + found, least + best
        ratios.append(found / best if best else (1.0 if not found else math.inf))
        silent += sum(mend.num_bytes for mend in program.mends) != found
        laid_out = map(HArray.of, case.inputs, case.annotations)
        (result,) = LocalProgram(specialize(program))(*laid_out)
        dense = np.asarray(jax.jit(case.program)(*case.inputs))
        wrong += not np.allclose(result.numpy(), dense, atol=1e-4 * float(np.abs(dense).max()))
    ratios.sort()
    return [
        {
            "case": "random programs with wrong annotations",
            "cases": cases,
            "bytes": moved,
            "bound": least,
            "mean_ratio": statistics.mean(ratios),
            "worst_ratio": ratios[-1],
            "ratio_of_95_in_100": ratios[int(len(ratios) * 0.95)],
            "above_1.2": sum(ratio > 1.2 for ratio in ratios),
            "wrong": wrong,
            "moves_not_told": silent,
        }
    ]
