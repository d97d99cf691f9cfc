"""Slices of a stage table that were made before: parts of a cluster are made of the whole's."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast

Answer = TypeVar("Answer")


class Question(Protocol):
    """What is asked of a slice."""

    @property
    def key(self) -> Hashable:
        """What is equal for questions that have the same answer, and for no others."""
        ...


@dataclass(eq=False)
class KnownSlices:
    """What was found of slices for one problem, and for others about the same model.

    A slice is of one subcluster, and knows nothing of how many nodes there are, nor of other
    subclusters. So the tables of parts of a cluster are put together of those of the whole.
    """

    _found: dict[Hashable, object] = field(default_factory=dict)

    def answer(self, question: Question, find: Callable[[], Answer]) -> Answer:
        """What is known of a slice.

        Args:
            question: what is asked, always in the same words for what `find` tells.
            find: tells it where it is not known yet.
        """
        key = question.key
        if key not in self._found:
            self._found[key] = find()
        return cast(Answer, self._found[key])
