"""Origins: how values lay before forward reshards, which is how their cotangents come back."""

from __future__ import annotations

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.sharding.annotation.annotation import HSharding

Stacks = dict[int, tuple[HSharding | None, ...]]


class Origins:
    """For each reshard of a program, how its operand lay, call by call.

    A function that is traced once and called often has one number in all calls; the cotangent of
    the last one comes first. Bodies of scans, loops and conditionals are deduced until what goes
    round in them stays as it is; only their last deduction counts.

    Example:
        >>> origins = Origins()
        >>> origins.push(3, None)
        >>> origins.depth(3)
        1
    """

    def __init__(self, before: Origins | None = None):
        self._stacks: Stacks = {} if before is None else dict(before._stacks)
        self._bodies: dict[int, Origins] = {}

    def key(self) -> frozenset[tuple[int, tuple[HSharding | None, ...]]]:
        """What tells these origins from others."""
        return frozenset((number, stack) for number, stack in self._stacks.items() if stack)

    def take_over(self, others: Origins) -> None:
        """Become as others are."""
        self._stacks = dict(others._stacks)

    def push(self, number: int, annotation: HSharding | None) -> None:
        """Note how the operand of a forward reshard lies."""
        self._stacks[number] = (*self._stacks.get(number, ()), annotation)

    def pop(self, number: int, equation: _compat.JaxprEqn) -> HSharding | None:
        """How the operand of the forward reshard lay that a reverse one belongs to.

        Raises:
            InputError: the program does not have the forward one.
        """
        if not self.depth(number):
            raise InputError(
                f"hetjax.reshard at {_compat.source_line(equation)}: this program has its backward "
                f"pass alone, and a cotangent lies as the value did; deduce forward and backward "
                f"pass as one program (jax.value_and_grad)"
            )
        *before, last = self._stacks[number]
        self._stacks[number] = tuple(before)
        return last

    def depth(self, number: int) -> int:
        """How many calls of a reshard wait for their cotangents."""
        return len(self._stacks.get(number, ()))

    def inside(self, body: _compat.ClosedJaxpr) -> Origins:
        """The origins for a body; what was noted when it was deduced before is forgotten."""
        self._bodies[id(body)] = found = Origins(self)
        return found

    def leave(self) -> None:
        """Take over what the bodies have noted, and what they have used."""
        before = self._stacks
        after = dict(before)
        for body in self._bodies.values():
            for number, stack in body._stacks.items():
                depth = len(before.get(number, ()))
                if len(stack) > max(depth, len(after.get(number, ()))):
                    after[number] = stack
                elif len(stack) < depth:
                    after[number] = min(stack, after[number], key=len)
        self._stacks = after
