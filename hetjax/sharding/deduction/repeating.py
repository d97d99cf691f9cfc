"""Values that a segment computes again, in place of taking them from an earlier one.

What a segment hands on is written to memory and read again. A value that simple arithmetic makes of
far less, such as one-hot labels or a row's sum beside all its elements, costs nothing where it is
read: compilers make it there. So it is not handed on, but what it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from hetjax.sharding.annotation.annotation import DUPLICATE
from hetjax.sharding.deduction.annotated_program import AnnotatedProgram, Compute, Move, Node

Makers = Mapping[int, tuple[Node, int]]
"""For each value the node that makes it on a submesh, with the submesh's place in its union."""

_SIMPLE = frozenset(
    """
    broadcast_in_dim iota reshape squeeze expand_dims convert_element_type eq ne lt le gt ge and or
    not add add_any sub mul neg select_n
    """.split()
)

_LESS = 4
"""How many times as large a value must be as all that it is made of."""


def made_again(
    wanted: set[int], makers: Makers, program: AnnotatedProgram
) -> dict[int, tuple[Node, int]]:
    """What a segment had better compute of the values that it takes.

    Args:
        wanted: the values that it takes.
        makers: what makes values on its submesh, before the segment.
        program: the program.

    Returns:
        The nodes that make some of these values again, by what they make; they take less.
    """
    found: dict[int, tuple[Node, int]] = {}
    for value in sorted(wanted):
        nodes: dict[int, tuple[Node, int]] = {}
        sources = _sources(value, makers, nodes)
        if nodes and _LESS * sum(_bytes(program, each) for each in sources) <= _bytes(
            program, value
        ):
            found.update(nodes)
    return found


def _sources(value: int, makers: Makers, nodes: dict[int, tuple[Node, int]]) -> set[int]:
    """What a value is made of by simple nodes, which are noted."""
    if value in nodes:
        return set()
    if value not in makers or not _is_simple(makers[value][0]):
        return {value}
    node, _ = nodes[value] = makers[value]
    inputs = (node.input,) if isinstance(node, Move) else node.inputs
    return set[int]().union(*(_sources(each, makers, nodes) for each in inputs))


def _is_simple(node: Node) -> bool:
    if isinstance(node, Compute):
        return node.equation.primitive.name in _SIMPLE
    if not isinstance(node, Move) or not node.is_inside:
        return False
    return node.source is None or node.source.hdim == DUPLICATE


def _bytes(program: AnnotatedProgram, value: int) -> int:
    shape = program.shapes[value]
    if value in program.constants and not shape.shape:
        return 0
    if jnp.issubdtype(shape.dtype, jax.dtypes.extended):
        return 8 * math.prod(shape.shape)
    return math.prod(shape.shape) * shape.dtype.itemsize
