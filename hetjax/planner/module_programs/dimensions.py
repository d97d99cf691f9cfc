"""Dimensions of a chain's values that are divided together: classes, found by union-find.

Dimensions that a signature gives one label are of one class, through all equations and from one
module to the next. A class has *units*: what a dimension has of them is divided in whole ones, so
that heads stay whole where a dimension of features is split into them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hetjax.pipeline.program.traced_program import Operand
from hetjax.planner.module_programs.module_chain import ModuleChain, ModuleTrace
from hetjax.sharding.deduction.signature import Label, Signature
from hetjax.sharding.deduction.signatures import signature_of

Node = tuple[int, int, int]
"""A dimension of a value: the kind of module, the value's number in its trace, the dimension."""


@dataclass(frozen=True, eq=False)
class Dimensions:
    """The classes of a chain's dimensions.

    Args:
        classes: for each kind of module, for each value, the class of each dimension.
        units: how many units each class has.
        examples: the class of the examples; -1 where there is none.
        signatures: for each kind of module the signature of each equation; None where there is no
            rule.
    """

    classes: tuple[tuple[tuple[int, ...], ...], ...]
    units: np.ndarray
    examples: int
    signatures: tuple[tuple[Signature | None, ...], ...]

    def among(self, classes: Collection[int]) -> Dimensions:
        """The same, of which no other classes than some are divided.

        Args:
            classes: those that may be.
        """
        kept = np.isin(np.arange(len(self.units)), list(classes))
        return replace(self, units=np.where(kept, self.units, 1))

    def class_of(self, kind: int, value: int, dimension: int) -> int:
        """The class of a dimension."""
        return self.classes[kind][value][dimension]


def find_dimensions(chain: ModuleChain) -> Dimensions:
    """Find the classes of a chain's dimensions.

    Args:
        chain: the chain.

    Returns:
        The classes.
    """
    signatures = tuple(tuple(map(_signature, trace.traced.flat.steps)) for trace in chain.kinds)
    offsets: list[list[int]] = []
    sizes: list[int] = []
    for trace in chain.kinds:
        starts = []
        for aval in trace.traced.flat.avals:
            starts.append(len(sizes))
            sizes.extend(aval.shape)
        offsets.append(starts)
    parent = list(range(len(sizes)))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    counts: list[tuple[int, int]] = []
    for kind, trace in enumerate(chain.kinds):
        for group in _labelled(trace, signatures[kind]):
            (value, dimension, _), *others = group
            first = root(offsets[kind][value] + dimension)
            for value, dimension, scale in group:
                node = offsets[kind][value] + dimension
                counts.append((node, sizes[node] // scale))
            for value, dimension, _ in others:
                parent[root(offsets[kind][value] + dimension)] = first
    for (kind, value), (other_kind, other) in _same_values(chain):
        shape = chain.kinds[kind].traced.flat.avals[value].shape
        for dimension in range(len(shape)):
            ours = root(offsets[kind][value] + dimension)
            parent[root(offsets[other_kind][other] + dimension)] = ours
    examples = [
        offsets[kind][value]
        for kind, trace in enumerate(chain.kinds)
        for value in trace.traced.batch
    ]
    for node in examples[1:]:
        parent[root(node)] = root(examples[0])
    roots = [root(node) for node in range(len(sizes))]
    numbers = {each: number for number, each in enumerate(dict.fromkeys(roots))}
    units = np.zeros(len(numbers), np.int64)
    for node, each in enumerate(roots):
        units[numbers[each]] = math.gcd(int(units[numbers[each]]), sizes[node])
    for node, count in counts:
        place = numbers[roots[node]]
        units[place] = math.gcd(int(units[place]), count)
    classes = tuple(
        tuple(
            tuple(numbers[roots[start + d]] for d in range(len(aval.shape)))
            for start, aval in zip(starts, trace.traced.flat.avals, strict=True)
        )
        for starts, trace in zip(offsets, chain.kinds, strict=True)
    )
    first = numbers[roots[examples[0]]] if examples else -1
    return Dimensions(classes, units, first, signatures)


def _signature(step: object) -> Signature | None:
    equation = getattr(step, "equation", None)
    return None if equation is None else signature_of(equation)


def _labelled(
    trace: ModuleTrace, signatures: tuple[Signature | None, ...]
) -> Iterator[list[tuple[int, int, int]]]:
    """For each label of each equation the dimensions that have it, with their scales."""
    for step, signature in zip(trace.traced.flat.steps, signatures, strict=True):
        if signature is None:
            continue
        groups: dict[int, list[tuple[int, int, int]]] = {}
        pairs = [*zip(step.inputs, signature.operands, strict=True)]
        pairs += zip(step.outputs, signature.results, strict=True)
        for operand, labels in pairs:
            if not isinstance(operand, int):
                continue
            for dimension, label in enumerate(labels):
                if isinstance(label, Label):
                    group = groups.setdefault(label.name, [])
                    group.append((operand, dimension, label.scale))
        yield from groups.values()


def _same_values(chain: ModuleChain) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of values, of kinds of modules, that are the same value or lie alike."""
    kinds = chain.kinds
    seen: set[tuple[int, int]] = set()
    for before, after in zip(chain.modules, chain.modules[1:], strict=False):
        pair = before.kind, after.kind
        if pair in seen:
            continue
        seen.add(pair)
        first, second = kinds[before.kind], kinds[after.kind]
        yield from _ints(before.kind, first.traced.sent, after.kind, second.traced.received)
        given = [second.returned[place] for place in sorted(second.returned)]
        yield from _ints(before.kind, first.traced.cotangents, after.kind, given)
    for kind, trace in enumerate(kinds):
        traced = trace.traced
        yield from _ints(kind, traced.parameters, kind, traced.gradients)
        places = sorted(trace.returned)
        received = [traced.received[place] for place in places]
        yield from _ints(kind, received, kind, [trace.returned[place] for place in places])
    held: dict[object, tuple[int, int]] = {}
    for module in chain.modules:
        traced = kinds[module.kind].traced
        named = [*zip(module.parameters, traced.parameters, strict=True)]
        for part, value in named:
            if part in chain.shared_parts:
                yield held.setdefault(part, (module.kind, value)), (module.kind, value)
        for leaf, value in zip(module.batch, traced.batch, strict=True):
            yield held.setdefault(leaf, (module.kind, value)), (module.kind, value)


def _ints(
    kind: int, values: object, other_kind: int, others: object
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    pairs: Iterator[tuple[Operand, Operand]] = zip(values, others, strict=True)  # type: ignore
    for value, other in pairs:
        if isinstance(value, int) and isinstance(other, int):
            yield (kind, value), (other_kind, other)
