"""Slices of a stage table that were made before: parts of a cluster are made of the whole's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

Answer = TypeVar("Answer")


class Question(Protocol):
    """What is asked of a slice."""

    def is_same(self, other: Any) -> bool:
        """Whether another question has the same answer."""
        ...


@dataclass(eq=False)
class KnownSlices:
    """What was found of slices for one problem, and for others about the same model.

    A slice is of one subcluster, and knows nothing of how many nodes there are, nor of other
    subclusters. So the tables of parts of a cluster are put together of those of the whole.
    """

    _found: list[tuple[Question, object]] = field(default_factory=list)

    def answer(self, question: Question, find: Callable[[], Answer]) -> Answer:
        """What is known of a slice.

        Args:
            question: what is asked, always in the same words for what `find` tells.
            find: tells it where it is not known yet.
        """
        for before, found in self._found:
            if before.is_same(question):
                return cast(Answer, found)
        found = find()
        self._found.append((question, found))
        return found
