"""How values of a program lie, by number: deduction compares the ways millions of times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.deduction.annotated_program import Move, elements_between, union_of
from hetjax.sharding.deduction.refinement import refined_together
from hetjax.sharding.deduction.top_tier import without_idle_axes


class NumberedLayouts:
    """Annotations by number, and what it costs to bring a value from one to another.

    Args:
        message_bytes: what a move costs beside its bytes.

    Example:
        >>> layouts = NumberedLayouts(0)
        >>> layouts.number(None), layouts[0]
        (0, None)
    """

    def __init__(self, message_bytes: int):
        self._message_bytes = message_bytes
        self._layouts: list[HSharding | None] = []
        self._numbers: dict[HSharding | None, int] = {}
        self._bytes: dict[Any, int | None] = {}

    def __getitem__(self, number: int) -> HSharding | None:
        return self._layouts[number]

    @property
    def annotations(self) -> Sequence[HSharding | None]:
        """All of them, by number."""
        return self._layouts

    def number(self, annotation: HSharding | None) -> int:
        """The number of an annotation: the same where only axes of one device differ."""
        if annotation not in self._numbers:
            plain = annotation and without_idle_axes(annotation)
            if plain not in self._numbers:
                self._numbers[plain] = len(self._layouts)
                self._layouts.append(plain)
            self._numbers[annotation] = self._numbers[plain]
        return self._numbers[annotation]

    def held(self, numbers: Sequence[int]) -> tuple[HSharding | None, ...]:
        """The annotations of some numbers."""
        return tuple(self._layouts[number] for number in numbers)

    def bytes_moved(self, shape: Any, source: int, destination: int) -> int | None:
        """What a move costs, in bytes; None where it is impossible.

        Args:
            shape: shape and dtype of the value.
            source: how it lies.
            destination: how it shall lie.
        """
        if source == destination:
            return 0
        key = source, destination, shape.shape, shape.dtype
        if key not in self._bytes:
            pair = self._layouts[source], self._layouts[destination]
            elements = elements_between(*pair, shape.shape)
            cost = None if elements is None else elements * shape.dtype.itemsize
            if cost and pair[1] is not None and not Move(0, 0, pair[0], pair[1]).is_inside:
                cost += self._message_bytes
            self._bytes[key] = cost
        return self._bytes[key]

    def aligned(self, shapes: Sequence[Any], numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Operands on one union, where each device has already what it needs for that.

        Args:
            shapes: shape and dtype of each operand.
            numbers: how they lie.
        """
        held = {i: a for i, number in enumerate(numbers) if (a := self._layouts[number])}
        if len({union_of(annotation) for annotation in held.values()}) < 2:
            return numbers
        found = refined_together(list(held.values()), [shapes[place].shape for place in held])
        if found is None:
            return numbers
        aligned = dict(zip(held, map(self.number, found), strict=True))
        return tuple(aligned.get(place, number) for place, number in enumerate(numbers))
