"""The context split: groups of devices, and which tokens and query heads each device has.

Groups share the sequence; the devices of a group share its tokens, and after they have exchanged
them, its heads. Keys and values go round from one group to the next, so the order of the groups is
the order of the ring.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hetjax.errors import InputError, check_flag, is_whole, shown

HeadRange = tuple[int, int]
"""Query heads from the first to the one after the last; none where both are the same."""


@dataclass(frozen=True)
class ContextGroup:
    """Devices that exchange tokens for heads with one another.

    Args:
        devices: their numbers.
        tokens: how many tokens each device has; 0 is allowed.
        heads: the query heads that each device attends with, as ranges; an empty one is allowed.

    Raises:
        InputError: a device is named twice, there are not as many tokens and ranges as devices, or
            one of them is no whole number or negative.

    Example:
        >>> ContextGroup((0, 1, 2), (5, 3, 0), ((0, 4), (4, 5), (5, 6))).length
        8
    """

    devices: tuple[int, ...]
    tokens: tuple[int, ...]
    heads: tuple[HeadRange, ...]

    def __post_init__(self) -> None:
        for field in ("devices", "tokens"):
            object.__setattr__(self, field, _checked_numbers(field, getattr(self, field)))
        object.__setattr__(self, "heads", _checked_ranges(self.heads))
        if not self.devices:
            raise InputError("devices: none is given: a group has one or more")
        for field in ("tokens", "heads"):
            if len(getattr(self, field)) != len(self.devices):
                raise InputError(
                    f"{field}: {len(getattr(self, field))} given for {len(self.devices)} devices: "
                    "each device has one entry"
                )
        _check_once(self.devices)

    @property
    def length(self) -> int:
        """How many tokens the group has."""
        return sum(self.tokens)

    @property
    def head_counts(self) -> tuple[int, ...]:
        """How many query heads each device has."""
        return tuple(stop - start for start, stop in self.heads)


@dataclass(frozen=True)
class ContextSplit:
    """How one sequence lies on groups of devices.

    Args:
        length: tokens of the sequence.
        query_heads: query heads of an attention.
        key_value_heads: heads of keys and values, of which each serves as many query heads.
        groups: the groups in the order of the ring; in each, the devices' ranges cover all query
            heads, every head once.
        is_mirrored: whether a group's tokens are an outer and an inner half around the tokens of
            the groups after it, which balances causal attention; otherwise they are one run.

    Raises:
        InputError: a field has another type, heads of keys and values do not divide the query
            heads, a device is in two groups, the tokens do not add up to the length, a group has
            none, or heads of a group are missing, given twice, or not there.

    Source: HexiSeq, section 4.1. (There, heads add up over all devices; they must in every group.)

    Example:
        >>> first = ContextGroup((0, 1), (6, 2), ((0, 3), (3, 4)))
        >>> second = ContextGroup((2,), (4,), ((0, 4),))
        >>> split = ContextSplit(12, 4, 2, (first, second))
        >>> split.group_lengths
        (8, 4)
        >>> ContextSplit(13, 4, 2, (first, second))
        Traceback (most recent call last):
        hetjax.errors.InputError: groups: their tokens add up to 12, the length is 13
    """

    length: int
    query_heads: int
    key_value_heads: int
    groups: tuple[ContextGroup, ...]
    is_mirrored: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", _checked_groups(self.groups))
        for field in ("length", "query_heads", "key_value_heads"):
            object.__setattr__(self, field, checked_count(field, getattr(self, field)))
        check_flag("is_mirrored", self.is_mirrored)
        if self.query_heads % self.key_value_heads:
            raise InputError(
                f"key_value_heads: {self.key_value_heads} is not allowed: it must divide the "
                f"{self.query_heads} query heads"
            )
        check_num_groups(len(self.groups), self.length)
        _check_once(self.devices)
        for number, group in enumerate(self.groups):
            if not group.length:
                raise InputError(
                    f"groups[{number}].tokens: {group.tokens} are none: a group has one or more"
                )
            _check_heads(group, number, self.query_heads)
        total = sum(self.group_lengths)
        if total != self.length:
            raise InputError(f"groups: their tokens add up to {total}, the length is {self.length}")

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices, group by group."""
        return tuple(device for group in self.groups for device in group.devices)

    @property
    def tokens(self) -> tuple[int, ...]:
        """How many tokens each of them has."""
        return tuple(tokens for group in self.groups for tokens in group.tokens)

    @property
    def head_ranges(self) -> tuple[HeadRange, ...]:
        """The query heads of each of them."""
        return tuple(heads for group in self.groups for heads in group.heads)

    @property
    def group_of(self) -> tuple[int, ...]:
        """The number of the group of each of them."""
        return tuple(number for number, group in enumerate(self.groups) for _ in group.devices)

    @property
    def group_lengths(self) -> tuple[int, ...]:
        """How many tokens each group has."""
        return tuple(group.length for group in self.groups)

    @property
    def heads_per_key_value(self) -> int:
        """How many query heads one head of keys and values serves."""
        return self.query_heads // self.key_value_heads


def check_num_groups(num_groups: int, length: int) -> None:
    """Checks that each group can have a token.

    Args:
        num_groups: how many groups there are.
        length: tokens of the sequence.

    Raises:
        InputError: there is no group, or there are more than tokens.
    """
    if not 1 <= num_groups <= length:
        raise InputError(
            f"groups: {num_groups} are not allowed for a length of {length}: from 1 to {length}, "
            "since each has one token or more"
        )


def checked_count(field: str, value: object) -> int:
    """Something that is counted.

    Args:
        field: what it is called.
        value: what was given.

    Raises:
        InputError: it is no whole number of 1 or more.
    """
    if not (is_whole(value) and value >= 1):
        raise InputError(
            f"{field}: {shown(value)} is not allowed: it must be a whole number, 1 or more"
        )
    return int(value)


def _checked_numbers(field: str, values: object) -> tuple[int, ...]:
    """A number for each device."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise InputError(
            f"{field}: {shown(values)} is not allowed: a whole number for each device, such as "
            f"(0, 1)"
        )
    found = tuple(values)
    for place, number in enumerate(found):
        if not (is_whole(number) and number >= 0):
            raise InputError(
                f"{field}[{place}]: {shown(number)} is not allowed: it must be a whole number, 0 "
                f"or more"
            )
    return tuple(map(int, found))


def _checked_ranges(heads: object) -> tuple[HeadRange, ...]:
    """A range for each device."""
    if not isinstance(heads, Iterable) or isinstance(heads, str | bytes):
        raise InputError(
            f"heads: {shown(heads)} is not allowed: a range for each device, such as "
            f"((0, 2), (2, 4))"
        )
    found: list[HeadRange] = []
    for place, each in enumerate(heads):
        ends = tuple(each) if isinstance(each, Iterable) else ()
        if len(ends) != 2 or not all(map(is_whole, ends)) or not 0 <= ends[0] <= ends[1]:
            raise InputError(
                f"heads[{place}]: {shown(each)} is not allowed: two whole numbers, the first head, "
                f"0 or more, and the end, which is not before it"
            )
        found.append((int(ends[0]), int(ends[1])))
    return tuple(found)


def _checked_groups(groups: object) -> tuple[ContextGroup, ...]:
    if not isinstance(groups, Iterable):
        raise InputError(f"groups: {shown(groups)} is not allowed: a tuple of ContextGroups")
    found = tuple(groups)
    for number, group in enumerate(found):
        if not isinstance(group, ContextGroup):
            raise InputError(f"groups[{number}]: {shown(group)} is not allowed: a ContextGroup")
    return found


def _check_once(devices: Sequence[int]) -> None:
    seen: set[int] = set()
    for device in devices:
        if device in seen:
            raise InputError(f"devices: {device} is given twice: each device has one place")
        seen.add(device)


def _check_heads(group: ContextGroup, number: int, query_heads: int) -> None:
    """Checks that a group's ranges cover each head once."""
    covered = 0
    for start, stop in sorted(each for each in group.heads if each[0] < each[1]):
        if start < covered:
            raise InputError(
                f"groups[{number}].heads: {_named(start, min(stop, covered))} is given twice: in "
                "each group, every head has one device"
            )
        if start > covered:
            break
        covered = stop
    if covered > query_heads:
        raise InputError(
            f"groups[{number}].heads: {_named(query_heads, covered)} is not allowed: there are "
            f"{query_heads} heads, from 0 to {query_heads - 1}"
        )
    if covered < query_heads:
        told = " and ".join(_named(*gap) for gap in _gaps(group, query_heads))
        raise InputError(
            f"groups[{number}].heads: no device has {told} of {query_heads}: in each group, every "
            "head has one device"
        )


def _gaps(group: ContextGroup, query_heads: int) -> Iterator[tuple[int, int]]:
    """Runs of heads that no device of a group has."""
    covered = 0
    for start, stop in sorted(each for each in group.heads if each[0] < each[1]):
        if start > covered:
            yield covered, start
        covered = max(covered, stop)
    if covered < query_heads:
        yield covered, query_heads


def _named(start: int, stop: int) -> str:
    return f"head {start}" if stop == start + 1 else f"each of heads {start} to {stop - 1}"
