"""Senders chosen for many arrays together, so that no device has more to send than it must.

What goes over links of one bandwidth is divided among the owners as water among vessels: whoever
has least to send gets more, until all that can share are level. Every array is divided in these
proportions: it is balanced by itself too, in however many slices its rows lie.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hetjax.sharding.annotation.bounds import Bounds, volume
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.senders import BestLink, Shares

SMALLEST_PIECE = 1 << 16
"""Bytes below which a slice is not cut: a piece costs its sender more than the balance is worth."""

_ROUNDS = 40
_SETTLED = 1e-3


class EqualOwners(NamedTuple):
    """Owners that could send as well as one another, and the bandwidth of their links."""

    owners: tuple[int, ...]
    bandwidth: float


class WantedSlice(NamedTuple):
    """A slice that a receiver wants.

    Args:
        array: the number of its array.
        choice: who could send it.
        bounds: the slice.
        itemsize: bytes of an element.
    """

    array: int
    choice: EqualOwners
    bounds: Bounds
    itemsize: int

    @property
    def num_bytes(self) -> int:
        """The slice's size."""
        return volume(self.bounds) * self.itemsize


class BalancedSenders(BestLink):
    """Owners with the best links, balanced over all requests; it is asked for each of them twice.

    The first time it notes the request, and its answer is only a place holder. After `settle` it is
    asked for the same in the same order, and answers with shares that balance the whole.

    Args:
        network: the links.

    Source: Hetu v2, sections 4.3 and 6.2; that shares are settled for all together is ours.

    Example:
        >>> senders = BalancedSenders(Network.alike())
        >>> asked = [senders.shares((0, 1), 2, ((0, 1 << 20),), 1) for _ in range(2)][0]
        >>> senders.settle()
        >>> senders.shares((0, 1), 2, ((0, 1 << 20),), 1)
        ((0, ((0, 1048576),)),)
        >>> senders.shares((0, 1), 2, ((0, 1 << 20),), 1)
        ((1, ((0, 1048576),)),)
    """

    def __init__(self, network: Network):
        super().__init__(network)
        self._array = 0
        self._requests: list[WantedSlice] = []
        self._answers: Iterator[Shares] | None = None

    def of(self, array: int) -> BalancedSenders:
        """The same, asked for slices of an array from now on."""
        self._array = array
        return self

    def shares(self, owners: Sequence[int], receiver: int, bounds: Bounds, itemsize: int) -> Shares:
        """Who sends the slice: one of the owners, or several a piece each."""
        if self._answers is not None:
            return next(self._answers)
        choice = EqualOwners(*self.best(owners, receiver))
        self._requests.append(WantedSlice(self._array, choice, bounds, itemsize))
        return ((choice.owners[0], bounds),)

    def settle(self) -> None:
        """Divide all that was asked for; it is given out from now on."""
        by_choice: defaultdict[EqualOwners, list[int]] = defaultdict(list)
        for number, request in enumerate(self._requests):
            by_choice[request.choice].append(number)
        loads = level_loads(
            {
                choice: sum(self._requests[number].num_bytes for number in numbers)
                for choice, numbers in by_choice.items()
            }
        )
        answers: dict[int, Shares] = {}
        for choice, numbers in by_choice.items():
            answers |= self._divided(choice, numbers, loads[choice])
        self._answers = iter([answers[number] for number in range(len(self._requests))])

    def _divided(
        self, choice: EqualOwners, numbers: Sequence[int], loads: Sequence[float]
    ) -> Iterator[tuple[int, Shares]]:
        """Shares of all requests of a choice, array by array in the proportions of the loads."""
        whole = sum(loads)
        parts = [load / whole if whole else 1 / len(loads) for load in loads]
        due = dict.fromkeys(choice.owners, 0.0)
        by_array: defaultdict[int, list[int]] = defaultdict(list)
        for number in numbers:
            by_array[self._requests[number].array].append(number)
        for of_array in by_array.values():
            sizes = {number: self._requests[number].num_bytes for number in of_array}
            for owner, part in zip(choice.owners, parts, strict=True):
                due[owner] += part * sum(sizes.values())
            # The largest first: small ones then even out what is left.
            for number in sorted(of_array, key=lambda number: -sizes[number]):
                yield number, tuple(_given_out(self._requests[number], due))


def _given_out(request: WantedSlice, due: dict[int, float]) -> Iterator[tuple[int, Bounds]]:
    """Give a slice to whoever is due most, and cut it where that is less than the slice."""
    rest, itemsize = request.bounds, request.itemsize
    while True:
        owner = max(due, key=lambda each: (due[each], -each))
        num_bytes = volume(rest) * itemsize
        is_cut = min(due[owner], num_bytes - due[owner]) >= SMALLEST_PIECE
        cut = _cut_off(rest, due[owner] / num_bytes) if is_cut else None
        given = rest if cut is None else cut[0]
        due[owner] -= volume(given) * itemsize
        yield owner, given
        if cut is None:
            return
        rest = cut[1]


def _cut_off(bounds: Bounds, part: float) -> tuple[Bounds, Bounds] | None:
    """Cut about so much of a slice off, along its longest dimension; None where that is one long.

    Example:
        >>> _cut_off(((0, 4), (0, 8)), 0.25)
        (((0, 4), (0, 2)), ((0, 4), (2, 8)))
    """
    sizes = [stop - start for start, stop in bounds]
    axis = sizes.index(max(sizes))
    start, stop = bounds[axis]
    middle = start + round(part * sizes[axis])
    if not start < middle < stop:
        return None
    before, after = bounds[:axis], bounds[axis + 1 :]
    return (*before, (start, middle), *after), (*before, (middle, stop), *after)


def level_loads(wanted: dict[EqualOwners, int]) -> dict[EqualOwners, list[float]]:
    """How much each owner sends of each choice, so that loads are as level as they can be.

    One choice after the other is poured over what the others have put on its owners. The sum of
    the squares of all loads falls with every turn, to its least value, at which the busiest device
    has no more than it must.

    Args:
        wanted: for each choice, the bytes.

    Returns:
        For each choice the bytes of each of its owners; loads over links of unlike bandwidth are
        levelled apart.

    Example:
        >>> alone, both = EqualOwners((0,), 1.0), EqualOwners((0, 1), 1.0)
        >>> level_loads({alone: 6, both: 10})[both]
        [2.0, 8.0]
    """
    load: defaultdict[tuple[int, float], float] = defaultdict(float)
    found = {choice: [0.0] * len(choice.owners) for choice in wanted}
    # Those without a choice first: the others are poured around them, and they are settled at once.
    order = sorted(wanted, key=lambda choice: (len(choice.owners), choice))
    for _ in range(_ROUNDS):
        moved = 0.0
        for choice in order:
            keys = [(owner, choice.bandwidth) for owner in choice.owners]
            others = [load[key] - own for key, own in zip(keys, found[choice], strict=True)]
            poured = _poured(others, wanted[choice])
            moved += sum(abs(new - old) for new, old in zip(poured, found[choice], strict=True))
            for key, other, new in zip(keys, others, poured, strict=True):
                load[key] = other + new
            found[choice] = poured
        if moved <= _SETTLED * sum(wanted.values()):
            break
    return found


def _poured(levels: Sequence[float], amount: float) -> list[float]:
    """What each vessel gets of an amount that is poured over all of them."""
    surface, lowest = 0.0, sorted(levels)
    for count in range(1, len(levels) + 1):
        surface = (amount + sum(lowest[:count])) / count
        if count == len(levels) or surface <= lowest[count]:
            break
    return [max(0.0, surface - level) for level in levels]
