"""Sums of summands that lie on several devices: the forms in which they are added up.

Each form is a list of phases. One by which every receiver adds everything up itself has the least
latency; one by pieces sends less; one by nodes sends the least between nodes: inside each node
summands are added first, and what is summed comes to each node once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hetjax.sharding.annotation.bounds import Bounds, cut
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.step_cost import phase_seconds
from hetjax.sharding.resolution.steps import Combination, Phase

Holders = Sequence[Sequence[int]]
"""For each summand the devices that hold it."""

Choose = Callable[[Sequence[int], int, Bounds], int]
"""From the holders of a part and its receiver to the one that sends it."""

Form = Callable[[Bounds, Holders, Sequence[int], Network, Choose], list[Phase]]


def summed(
    bounds: Bounds,
    holders: Holders,
    wanted: Sequence[int],
    *,
    network: Network,
    itemsize: int,
    choose: Choose,
    trial: Callable[[], Choose],
    others_may_add: bool = True,
) -> list[Phase]:
    """Add summands up, in the form that takes least time.

    Args:
        bounds: the part of an array that they are of.
        holders: for each summand, in the order of addition, the devices that hold it.
        wanted: the devices that shall have the sum.
        network: the links.
        itemsize: bytes of an element.
        choose: who sends what several hold.
        trial: makes such a choice for a form that may not be taken, and leaves no trace.
        others_may_add: whether devices that do not want this sum may add some of it up; not where
            they get other sums of the same part.

    Returns:
        What is combined, phase by phase.

    Example:
        >>> network = Network.alike()
        >>> first = lambda owners, receiver, bounds: owners[0]
        >>> phases = summed(((0, 4096),), [[0], [1]], [0, 1], network=network, itemsize=4,
        ...     choose=first, trial=lambda: first)
        >>> [sorted(pair for part in phase for pair in part.messages) for phase in phases]
        [[(0, 1), (1, 0)]]
    """
    several_nodes = len(network.by_node(device for each in (*holders, wanted) for device in each))
    forms: list[Form] = [at_once]
    if len(wanted) > 1:
        forms += [in_pieces_of_holders, in_pieces]
    if several_nodes > 1 and others_may_add:
        forms.append(by_node)

    def seconds(form: Form) -> float:
        phases = form(bounds, holders, wanted, network, trial())
        return sum(phase_seconds(phase, network, itemsize) for phase in phases)

    fastest = min(forms, key=seconds) if len(forms) > 1 else at_once
    return fastest(bounds, holders, wanted, network, choose)


def at_once(
    bounds: Bounds, holders: Holders, wanted: Sequence[int], network: Network, choose: Choose
) -> list[Phase]:
    """Each receiver adds up all summands: one phase, and the most bytes."""
    return [tuple(Combination(bounds, _givers(bounds, holders, d, choose), (d,)) for d in wanted)]


def in_pieces(
    bounds: Bounds, holders: Holders, wanted: Sequence[int], network: Network, choose: Choose
) -> list[Phase]:
    """Each receiver adds up a piece, and gives it to the others."""
    return _by_homes(bounds, holders, wanted, wanted, choose)


def in_pieces_of_holders(
    bounds: Bounds, holders: Holders, wanted: Sequence[int], network: Network, choose: Choose
) -> list[Phase]:
    """Each receiver that has a summand adds up a piece, and gives it to the others.

    It sends one message less for each piece than where a receiver without a summand adds up.
    """
    held = {device for holding in holders for device in holding}
    homes = [device for device in wanted if device in held]
    return _by_homes(bounds, holders, wanted, homes or wanted, choose)


def _by_homes(
    bounds: Bounds,
    holders: Holders,
    wanted: Sequence[int],
    at_home: Sequence[int],
    choose: Choose,
) -> list[Phase]:
    homes = list(zip(at_home, cut(bounds, len(at_home)), strict=False))
    sums = (Combination(p, _givers(p, holders, home, choose), (home,)) for home, p in homes)
    spread = (
        Combination(piece, (home,), tuple(device for device in wanted if device != home))
        for home, piece in homes
    )
    return [tuple(sums), tuple(spread)]


def by_node(
    bounds: Bounds, holders: Holders, wanted: Sequence[int], network: Network, choose: Choose
) -> list[Phase]:
    """Summands are added inside each node, these sums among nodes, and the result passed on.

    For each piece, one device of every node that has summands adds up those of its node; the
    piece's home adds up these sums. One device of every other node gets the result, and gives it to
    its neighbours.
    """
    giving = _by_giving_node(holders, network)
    taking = network.by_node(wanted)
    at_home = [node for node in taking if node in giving] or list(taking)
    homes = [device for node in at_home for device in taking[node]]
    pieces = list(zip(homes, cut(bounds, len(homes)), strict=False))
    phases: list[list[Combination]] = [[], [], [], []]
    for turn, (home, piece) in enumerate(pieces):
        leaders = []
        for node, summands in giving.items():
            near = taking.get(node) or [holding[0] for holding in summands]
            leader = home if network.node(home) == node else near[turn % len(near)]
            givers = _givers(piece, summands, leader, choose)
            phases[0].append(Combination(piece, givers, (leader,)))
            leaders.append(leader)
        phases[1].append(Combination(piece, tuple(leaders), (home,)))
        for node, receivers in taking.items():
            is_home = network.node(home) == node
            first = home if is_home else receivers[turn % len(receivers)]
            if not is_home:
                phases[2].append(Combination(piece, (home,), (first,)))
            others = tuple(device for device in receivers if device != first)
            if others:
                phases[3].append(Combination(piece, (first,), others))
    return [tuple(phase) for phase in phases]


def _by_giving_node(
    holders: Holders, network: Network
) -> Mapping[tuple[int, int], list[Sequence[int]]]:
    """For each node the summands that it gives, each with its holders there.

    A summand that several nodes hold is given by the one that holds most of all summands.
    """
    held = [network.by_node(holding) for holding in holders]
    counts = {node: sum(node in each for each in held) for each in held for node in each}
    given: dict[tuple[int, int], list[Sequence[int]]] = {}
    for each in held:
        node = max(each, key=lambda node: (counts[node], [-place for place in node]))
        given.setdefault(node, []).append(each[node])
    return given


def _givers(bounds: Bounds, holders: Holders, home: int, choose: Choose) -> tuple[int, ...]:
    """Who gives each summand to a device: itself, where it holds it."""
    return tuple(home if home in holding else choose(holding, home, bounds) for holding in holders)


def paired(
    held: Mapping[int, Sequence[int]], wanted: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """Which summands make up each one of a sum that stays in summands.

    Each goes where a device that shall have it, or a sum with it, has it already; and none is left
    without one as long as there are enough.

    Args:
        held: for each summand that there is, who has it.
        wanted: for each summand that there shall be, who shall have it.

    Returns:
        For each of the latter those of the former that it is the sum of; none: it is zero.

    Example:
        >>> paired({0: [0], 1: [1], 2: [2], 3: [3]}, {0: [0, 1], 1: [2, 3]})
        {0: [0, 1], 1: [2, 3]}
        >>> paired({0: [0]}, {0: [5], 1: [0]})
        {0: [], 1: [0]}
    """
    made: dict[int, list[int]] = {place: [] for place in wanted}

    def common(place: int, target: int) -> int:
        return len(set(held[place]) & set(wanted[target]))

    # Those that have a place of their own choose first.
    by_choice = sorted(held, key=lambda place: -max(common(place, target) for target in wanted))
    for place in by_choice:
        target = max(wanted, key=lambda t: (common(place, t), -len(made[t]), t == place, -t))
        made[target].append(place)
    for target in [target for target, places in made.items() if not places]:
        fullest = max(made, key=lambda t: len(made[t]))
        if len(made[fullest]) > 1:
            taken = min(made[fullest], key=lambda place: (common(place, fullest), place))
            made[fullest].remove(taken)
            made[target].append(taken)
    return {target: sorted(places) for target, places in made.items()}
