"""How parameters are stored that several modules have: one way for all modules that have them.

Where the ways are few, all are looked at. They multiply with the number of such parameters (blocks
that are gone through twice share all of theirs), so where they are many, a descent begins with what
modules would choose if each had its own, and changes parameters that are used alike together.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.planner.module_programs.module_chain import ModuleChain
from hetjax.planner.module_programs.program import Stored

Held = Mapping[ParameterPart, Stored]
"""How parameters are stored that several modules have."""

Options = Mapping[ParameterPart, Sequence[Stored]]
"""How each of them may be stored."""

MOST_HELD = 1_000
"""Of ways to store such parameters, how many are all looked at."""

Found = TypeVar("Found")


def all_held(options: Options) -> list[Held] | None:
    """All ways to store parameters; None where they are too many.

    Args:
        options: how each parameter may be stored.
    """
    if math.prod(map(len, options.values())) > MOST_HELD:
        return None
    return [dict(zip(options, each, strict=True)) for each in itertools.product(*options.values())]


def used_alike(chain: ModuleChain) -> list[list[ParameterPart]]:
    """The parameters that several modules have, those together that stand at the same places.

    Args:
        chain: the modules.
    """
    places: dict[ParameterPart, list[tuple[int, int]]] = {
        part: [] for part in sorted(chain.shared_parts)
    }
    for module in chain.modules:
        for place, part in enumerate(module.parameters):
            if part in places:
                places[part].append((module.kind, place))
    found: dict[tuple[tuple[int, int], ...], list[ParameterPart]] = {}
    for part, each in places.items():
        found.setdefault(tuple(each), []).append(part)
    return list(found.values())


def most_wanted(alike: Sequence[Sequence[ParameterPart]], wanted: Sequence[Held]) -> Held:
    """What most modules would choose, of parameters that are used alike the same.

    Args:
        alike: the parameters that are used alike.
        wanted: what each module would choose for those that it has.
    """
    held: dict[ParameterPart, Stored] = {}
    for parts in alike:
        votes = Counter(each[part] for each in wanted for part in parts if part in each)
        ((most, _),) = votes.most_common(1)
        held |= dict.fromkeys(parts, most)
    return held


def descended(
    alike: Sequence[Sequence[ParameterPart]],
    options: Options,
    start: Held,
    solve: Callable[[Held], tuple[float, Found]],
) -> tuple[float, Found]:
    """The cheapest that is found where parameters that are used alike are stored alike.

    Args:
        alike: the parameters that are used alike.
        options: how each may be stored.
        start: how they are stored at first.
        solve: from how they are stored to what that takes, and the rest of the choice.

    Returns:
        What it takes, and the choice: none that stores other than these parameters alone
        otherwise is cheaper.
    """
    held, found = start, solve(start)
    improves = True
    while improves:
        improves = False
        for parts in alike:
            for stored in options[parts[0]]:
                changed = {**held, **dict.fromkeys(parts, stored)}
                if changed == held:
                    continue
                other = solve(changed)
                if other[0] < found[0]:
                    held, found, improves = changed, other, True
    return found
