"""Switching: how many arrays at once come to lie as another plan wants them.

All arrays are planned together: loads are balanced over all of them, and what one device sends
another in a phase is one message, whatever arrays it is of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter

from hetjax.errors import InputError, unknown_name
from hetjax.sharding.annotation.bounds import volume
from hetjax.sharding.annotation.subgroup import Shard
from hetjax.sharding.resolution.balanced_senders import BalancedSenders
from hetjax.sharding.resolution.exchange import exchange
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.senders import BestLink, MinRank, Senders
from hetjax.sharding.resolution.steps import Phase, SentPiece

POLICIES: Mapping[str, str] = {
    "fused": "all arrays together, over the best links, loads balanced over the whole switch",
    "unfused": "array by array, over the best links, loads balanced within each",
    "min_rank": "the lowest device that holds a slice sends it, whatever its node",
}
"""The ways to choose senders, and what each does."""


@dataclass(frozen=True)
class MovedArray:
    """An array that is to lie in another way.

    Args:
        name: what errors call it.
        shape: its shape.
        itemsize: bytes of an element.
        before: what devices hold of it.
        after: what devices shall hold.
        preference: where copies may differ in rounding, a number for each device that holds one;
            the lowest counts. None: copies are alike.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    before: tuple[Shard, ...]
    after: tuple[Shard, ...]
    preference: Mapping[int, int] | None = None


Messages = tuple[SentPiece, ...]
"""What is sent in a phase, and kept: first what the first device sends the first receiver."""


@dataclass(frozen=True)
class SwitchPlan:
    """All messages of a switch.

    Args:
        arrays: the arrays.
        phases: the messages, phase by phase; those of a later one may pass on what an earlier one
            has brought.
    """

    arrays: tuple[MovedArray, ...]
    phases: tuple[Messages, ...]

    def bytes_sent(self) -> dict[tuple[int, int], int]:
        """How many bytes go from each device to each other one."""
        sent: defaultdict[tuple[int, int], int] = defaultdict(int)
        for messages in self.phases:
            for array, bounds, sender, receiver in messages:
                if sender != receiver:
                    sent[sender, receiver] += volume(bounds) * self.arrays[array].itemsize
        return dict(sent)

    def volumes(self, network: Network) -> dict[int, dict[str, int]]:
        """For each sending device its bytes inside its node and to other nodes.

        Args:
            network: the links.

        Returns:
            By device, ``"intra_node"`` and ``"inter_node"``.

        Source: Hetu v2, table 2.
        """
        found: dict[int, dict[str, int]] = {}
        for (sender, receiver), count in sorted(self.bytes_sent().items()):
            near = network.node(sender) == network.node(receiver)
            row = found.setdefault(sender, {"intra_node": 0, "inter_node": 0})
            row["intra_node" if near else "inter_node"] += count
        return found


def plan_switch(
    arrays: Sequence[MovedArray],
    network: Network,
    *,
    policy: str = "fused",
    lost: Set[int] = frozenset(),
) -> SwitchPlan:
    """Plan how arrays come to lie in another way.

    Args:
        arrays: the arrays, and how they lie before and after.
        network: the links.
        policy: how senders are chosen; see `POLICIES`.
        lost: devices that are gone, and send nothing.

    Returns:
        The messages.

    Raises:
        InputError: the policy is unknown, an array lies in partial sums, or only lost devices hold
            a part of an array, which the message names.

    Source: Hetu v2, section 6.2.

    Example:
        >>> before = (Shard(0, ((0, 4),)), Shard(1, ((4, 8),)))
        >>> weights = MovedArray("weights", (8,), 4, before, (Shard(0, ((0, 8),)),))
        >>> plan_switch([weights], Network.alike()).bytes_sent()
        {(1, 0): 16}
    """
    if policy not in POLICIES:
        raise InputError(unknown_name("policy", policy, POLICIES))
    for array in arrays:
        if any(shard.summand for shard in (*array.before, *array.after)):
            raise InputError(f"{array.name}: it lies in partial sums, which are not switched")
    # The largest first: small ones then even out what is left.
    order = sorted(range(len(arrays)), key=lambda i: -_size(arrays[i]))
    balanced = BalancedSenders(network)
    senders: Mapping[str, Callable[[int], Senders]] = {
        "fused": balanced.of,
        "unfused": lambda _: BestLink(network),
        "min_rank": lambda _: MinRank(),
    }
    if policy == "fused":
        # Who sends what is settled when it is known all that is wanted.
        for i in order:
            _exchanged(arrays[i], network, balanced.of(i), lost)
        balanced.settle()
    phases: list[list[SentPiece]] = []
    for i in order:
        for place, phase in enumerate(_exchanged(arrays[i], network, senders[policy](i), lost)):
            if place == len(phases):
                phases.append([])
            phases[place] += (piece for part in phase for piece in part.pieces(i))
    messages = (tuple(sorted(pieces, key=attrgetter("sender", "receiver"))) for pieces in phases)
    return SwitchPlan(tuple(arrays), tuple(messages))


def _exchanged(
    array: MovedArray, network: Network, senders: Senders, lost: Set[int]
) -> tuple[Phase, ...]:
    try:
        return exchange(
            array.shape,
            [shard for shard in array.before if shard.device not in lost],
            array.after,
            network=network,
            senders=senders,
            itemsize=array.itemsize,
            # Unfused, every slice is a message of its own: nothing is passed on.
            relay=isinstance(senders, BalancedSenders),
            preference=array.preference,
        )
    except InputError as error:
        raise InputError(f"{array.name}: {error}") from None


def _size(array: MovedArray) -> int:
    return array.itemsize * max((volume(shard.bounds) for shard in array.after), default=0)
