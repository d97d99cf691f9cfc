"""What deductions of other programs have found out about equations, for those that come later."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class Remembered(Generic[KeyT, ValueT]):
    """Answers by question, all forgotten at once where they become too many.

    Threads may ask at the same time; then some may work out an answer that another one has.

    Args:
        most: how many answers there may be.

    Example:
        >>> squares = Remembered[int, int](2)
        >>> [squares.of(number, lambda number=number: number**2) for number in (3, 4, 3, 5)]
        [9, 16, 9, 25]
        >>> len(squares)
        1
    """

    def __init__(self, most: int):
        self._most = most
        self._known: dict[KeyT, ValueT] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, question: KeyT | None, answer: Callable[[], ValueT]) -> ValueT:
        """The answer to a question.

        Args:
            question: the question; None for one that is not asked again.
            answer: finds the answer, where it is not remembered.

        Returns:
            The answer.
        """
        if question is None:
            return answer()
        try:
            return self._known[question]
        except KeyError:
            found = answer()
        if len(self._known) >= self._most:
            self._known.clear()
        self._known[question] = found
        return found
