"""Annotated programs: equations, each with the submeshes that compute it, and what lies how.

A program is plain data, whoever has deduced it: values are numbers, each with a shape and an HSPMD
annotation; nodes say what is computed where, and where a value comes to lie in another way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from hetjax import _compat
from hetjax.sharding.annotation.annotation import DUPLICATE, PARTIAL, HSharding
from hetjax.sharding.annotation.bounds import extent
from hetjax.sharding.annotation.subgroup import Subgroup, entries_of
from hetjax.sharding.deduction.signature import Signature
from hetjax.sharding.resolution.resolve import moved_elements

Union = tuple[Subgroup, ...]
"""Submeshes that compute an equation together, with no sharding inside them."""


@dataclass(frozen=True)
class Taken:
    """The part of an operand that each submesh takes of what it has; no data moves.

    Args:
        dimension: the dimension along which each takes a part of the whole; None: the first submesh
            takes all, and the others take zeros.
        parts: for a dimension, start and end for each submesh.
    """

    dimension: int | None
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class Compute:
    """An equation that each submesh of a union computes on what it has.

    Args:
        equation: the equation.
        inputs: the values that it takes.
        outputs: the values that it makes.
        union: the submeshes; none where every operand is known everywhere, and so the results are.
        signature: how its dimensions belong together.
        taken: operands of which each submesh takes a part first.
        resized: for each submesh, parameters for the sizes that it has.
        sums_stay: see `hetjax.sharding.deduction.bottom_tier.apply`.
        bodies: for a scan, a conditional or a loop, its jaxprs as annotated programs.
    """

    equation: _compat.JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    union: Union
    signature: Signature
    taken: Mapping[int, Taken] = field(default_factory=dict)
    resized: tuple[Mapping[str, Any], ...] = ()
    sums_stay: bool = False
    bodies: tuple[AnnotatedProgram, ...] = ()


@dataclass(frozen=True, eq=False)
class Move:
    """A value that comes to lie in another way: a communication step.

    Args:
        input: the value.
        output: the same value, as it lies afterwards.
        source: how it lies; None where it is known everywhere.
        destination: how it lies afterwards.
        is_early: whether it is done as soon as the value is there, and not when it is needed.
    """

    input: int
    output: int
    source: HSharding | None
    destination: HSharding
    is_early: bool = False

    @property
    def is_inside(self) -> bool:
        """Whether no submesh needs anything of another one: their own compilers do it.

        Only the sharding inside submeshes changes; or each takes its part of what all have; or
        makes a summand of its part, with zeros around it.
        """
        source, destination = self.source, self.destination
        if source is None:
            return True
        same_top_tier = source.top_tier == destination.top_tier
        has_all = same_top_tier or source.hdim == DUPLICATE
        has_all = has_all or is_padded(source, destination)
        return union_of(source) == union_of(destination) and has_all


@dataclass(frozen=True, eq=False)
class Addition:
    """Summands that each submesh of a union has, and adds up by itself.

    Args:
        inputs: the summands, in the order in which they are added.
        outputs: their sum.
        union: the submeshes.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int]
    union: Union


Node = Compute | Move | Addition
"""What is done in a program."""


def is_padded(source: HSharding, destination: HSharding) -> bool:
    """Whether each submesh makes a summand of its part of a value, with zeros around it.

    Args:
        source: how the value lies.
        destination: how it shall lie.

    Example:
        >>> one, two = Subgroup((0,), (), PartitionSpec()), Subgroup((1,), (), PartitionSpec())
        >>> is_padded(HSharding((one, two), 0, (3, 1)), HSharding((one, two), PARTIAL))
        True
    """
    return isinstance(source.hdim, int) and destination.hdim == PARTIAL


def elements_between(
    source: HSharding | None, destination: HSharding | None, shape: tuple[int, ...]
) -> int | None:
    """How many elements devices send each other for a move.

    Args:
        source: how a value lies; None: it is known everywhere.
        destination: how it shall lie; None: it is known everywhere, and stays so.
        shape: its shape.

    Returns:
        The elements; None where the value cannot come to lie so.
    """
    if source is not None and destination is not None and is_padded(source, destination):
        dimension = source.hdim
        assert isinstance(dimension, int)
        groups = tuple(
            group.with_spec(undivided(group.spec, len(shape), dimension))
            for group in destination.subgroups
        )
        destination = HSharding(groups, dimension, source.sizes)
    return moved_elements(source, destination, shape)


def undivided(spec: PartitionSpec, ndim: int, dimension: int) -> PartitionSpec:
    """A sharding that leaves a dimension whole, and no partial sums.

    Example:
        >>> undivided(PartitionSpec("data", "tensor"), 2, 0)
        P(None, 'tensor')
    """
    entries = entries_of(spec, ndim)
    entries[dimension] = None
    return PartitionSpec(*entries)


@dataclass(frozen=True, eq=False)
class Mend:
    """A reshard that was missing from a program, and has been put in.

    Args:
        equation: the name of the primitive that needs it.
        line: where that stands in the user's program.
        operand: which operand of it.
        reason: why the operand could not be taken as it lay; empty where another one could not, or
            where it is moved for what comes later.
        source: how the operand lay.
        destination: how it lies now.
        shape: its shape and dtype, whole.
    """

    equation: str
    line: str
    operand: int
    reason: str
    source: HSharding
    destination: HSharding
    shape: Any

    @cached_property
    def num_bytes(self) -> int:
        """How many bytes move between devices."""
        elements = elements_between(self.source, self.destination, self.shape.shape)
        return (elements or 0) * self.shape.dtype.itemsize

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return (
            f"{self.equation} at {self.line}, operand {self.operand}{why}. {self.num_bytes} bytes "
            f"move from\n  {self.source}\nto\n  {self.destination}"
        )


@dataclass(frozen=True, eq=False)
class AnnotatedProgram:
    """A program whose every value has an annotation.

    Args:
        inputs: the values that it takes.
        outputs: the values that it gives.
        shapes: shape and dtype of every value, whole.
        annotations: how every value lies; None where it is known everywhere.
        constants: the values that are given.
        nodes: what is done, in order.
        mends: the reshards among them that the program did not ask for.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    shapes: tuple[Any, ...]
    annotations: tuple[HSharding | None, ...]
    constants: Mapping[int, Any]
    nodes: tuple[Node, ...]
    mends: tuple[Mend, ...] = ()

    @property
    def moves(self) -> Iterator[Move]:
        """The moves that need messages between submeshes, or another union."""
        return (node for node in self.nodes if isinstance(node, Move) and not node.is_inside)


def union_of(annotation: HSharding) -> Union:
    """The submeshes of an annotation."""
    return tuple(group.bare for group in annotation.subgroups)


def shape_on(
    mesh: Mesh | AbstractMesh, place: int, shape: Any, annotation: HSharding | None
) -> jax.ShapeDtypeStruct:
    """What one submesh has of a value, as JAX types it there.

    Args:
        mesh: the submesh's mesh, of explicit axes.
        place: which submesh of the annotation.
        shape: shape and dtype of the value, whole.
        annotation: how it lies; None where it is known everywhere.

    Returns:
        Shape, dtype and sharding.
    """
    spec, region = PartitionSpec(), tuple(shape.shape)
    if annotation is not None:
        spec = annotation.subgroups[place].spec
        region = extent(annotation.regions(shape.shape)[place])
    return jax.ShapeDtypeStruct(region, shape.dtype, sharding=NamedSharding(mesh, spec))
