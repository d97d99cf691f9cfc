"""Who holds which rows of the parameters, and who of them updates these rows.

Stages hold the same rows where several pipelines have them each, or where a parameter is used in
several stages of one. Either all holders make the same update, or the rows are divided among them,
so that each row's optimizer state exists once.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.sharding.annotation.bounds import even_ends

Stages = tuple[int, ...]

HeldPart = tuple[ParameterPart, Stages]
"""A finest part, and the stages that hold it."""


@dataclass(frozen=True)
class Holders:
    """The stages that hold some rows of a parameter.

    Args:
        stages: all of them, in order.
        updaters: those that update the rows; the first of them gives all others its values.
    """

    stages: Stages
    updaters: Stages


Shared = Mapping[ParameterPart, Holders]
"""The finest parts of the leaves that several stages hold, leaf by leaf and row by row."""


def shared_parts(
    held: Sequence[Sequence[ParameterPart]], shapes: Sequence[tuple[int, ...]]
) -> dict[ParameterPart, Stages]:
    """The finest parts of leaves of which several stages hold some rows.

    A leaf is cut wherever one of the stages' parts begins or ends.

    Args:
        held: for each stage, the parts that it holds.
        shapes: of every leaf.

    Returns:
        These parts, and for each the stages that hold it.

    Example:
        >>> rows = ParameterPart(0, 0, 6), ParameterPart(0, 0, 4), ParameterPart(0, 4, 6)
        >>> found = shared_parts([[part] for part in rows], [(6, 2)])
        >>> [(part.start, part.stop, stages) for part, stages in found.items()]
        [(0, 4, (0, 1)), (4, 6, (0, 2))]
    """
    of_leaf: dict[int, list[tuple[int, ParameterPart]]] = {}
    for stage, parts in enumerate(held):
        for part in parts:
            of_leaf.setdefault(part.leaf, []).append((stage, part))
    found = {}
    for leaf, holding in sorted(of_leaf.items()):
        pieces = {
            piece: tuple(stage for stage, part in holding if part.contains(piece))
            for piece in _finest(leaf, [part for _, part in holding], shapes[leaf])
        }
        # Rows that one stage alone holds are there too, so that a part is the sum of its pieces.
        if any(len(stages) > 1 for stages in pieces.values()):
            found |= pieces
    return found


def _finest(
    leaf: int, parts: Sequence[ParameterPart], shape: tuple[int, ...]
) -> list[ParameterPart]:
    """A leaf cut where one of some parts begins or ends; whole where all are whole."""
    if all(part.stop is None for part in parts):
        return [ParameterPart(leaf)]
    ends = {part.start for part in parts} | {part.stop or shape[0] for part in parts}
    return [ParameterPart(leaf, start, stop) for start, stop in itertools.pairwise(sorted(ends))]


def covering_stages(parts: Mapping[int, ParameterPart], rows: int) -> tuple[int, ...]:
    """Stages that together have each row of a leaf once.

    Args:
        parts: by stage, what it holds of the leaf; together all of it.
        rows: how many rows the leaf has.

    Returns:
        One that has the leaf whole, or the first ones that have no row in common.

    Example:
        >>> halves = {0: ParameterPart(0, 0, 2), 1: ParameterPart(0, 2, 4)}
        >>> covering_stages({**halves, 2: ParameterPart(0, 0, 3), 3: ParameterPart(0, 3, 4)}, 4)
        (0, 1)
    """
    held = {
        stage: range(part.start, rows if part.stop is None else part.stop)
        for stage, part in sorted(parts.items())
    }
    for stage, mine in held.items():
        if mine == range(rows):
            return (stage,)
    found: list[int] = []
    known: set[int] = set()
    for stage, mine in held.items():
        if known.isdisjoint(mine):
            found.append(stage)
            known.update(mine)
    return tuple(found)


def with_updates(
    held: Sequence[Sequence[ParameterPart]], shapes: Sequence[tuple[int, ...]], *, divided: bool
) -> dict[ParameterPart, Holders]:
    """Who holds and who updates what several stages hold.

    Args:
        held: for each stage, the parts that it holds.
        shapes: of every leaf.
        divided: whether each row is updated by one of its holders, instead of by all.

    Returns:
        The finest parts, leaf by leaf and row by row.
    """
    parts = shared_parts(held, shapes)
    return with_divided_updates(parts, shapes) if divided else with_same_updates(parts)


def with_same_updates(shared: Mapping[ParameterPart, Stages]) -> dict[ParameterPart, Holders]:
    """Every holder updates all that it holds.

    Args:
        shared: what `shared_parts` returned.

    Returns:
        The same parts, with who updates them.
    """
    return {part: Holders(stages, stages) for part, stages in shared.items()}


def with_divided_updates(
    shared: Mapping[ParameterPart, Stages], shapes: Sequence[tuple[int, ...]]
) -> dict[ParameterPart, Holders]:
    """Every row is updated by one of its holders.

    Each has an even share of the rows. What a stage updates of a leaf is one run of rows: so where
    pipelines cut a leaf (one stacked over a ``scan``) at unlike places, each piece between two cuts
    goes to one holder whole; where that leaves a stage with two runs, all update that leaf.

    Args:
        shared: what `shared_parts` returned.
        shapes: of every leaf.

    Returns:
        The parts, cut further where updaters change, with who updates them.

    Source: ZeRO-1 across pipelines; Hetu v2, appendix A.2.

    Example:
        >>> found = with_divided_updates({ParameterPart(0): (0, 2)}, [(5, 3)])
        >>> [(part.start, part.stop, holders.updaters) for part, holders in found.items()]
        [(0, 2, (0,)), (2, 5, (2,))]
    """
    load: Counter[int] = Counter()
    found: dict[ParameterPart, Holders] = {}
    for leaf, group in itertools.groupby(shared.items(), key=lambda item: item[0].leaf):
        for part, holders in _divided(list(group), shapes[leaf], load):
            found[part] = holders
            if len(holders.updaters) == 1:
                load[holders.updaters[0]] += math.prod(part.shape(shapes[leaf]))
    return found


def _divided(
    pieces: Sequence[HeldPart], shape: tuple[int, ...], load: Mapping[int, int]
) -> list[tuple[ParameterPart, Holders]]:
    """The finest parts of a leaf with one updater each, where that can be."""
    counts = Counter(stage for _, stages in pieces for stage in stages)
    if max(counts.values()) == 1:
        return [found for piece in pieces for found in _cut_evenly(piece, shape, load)]
    updaters = _in_turn([stages for _, stages in pieces], load)
    if updaters is None:
        return [(part, Holders(stages, stages)) for part, stages in pieces]
    return [
        (part, Holders(stages, (updater,)))
        for (part, stages), updater in zip(pieces, updaters, strict=True)
    ]


def _cut_evenly(
    piece: HeldPart, shape: tuple[int, ...], load: Mapping[int, int]
) -> Iterator[tuple[ParameterPart, Holders]]:
    """A part in as many runs of rows as it has holders; in one where it has fewer rows."""
    part, stages = piece
    rows = part.shape(shape)[0] if shape else 0
    if rows < len(stages):
        yield part, Holders(stages, (min(stages, key=lambda stage: load[stage]),))
        return
    runs = itertools.pairwise(even_ends(rows, len(stages)))
    for stage, (start, stop) in zip(stages, runs, strict=True):
        rows_of = ParameterPart(part.leaf, part.start + start, part.start + stop)
        yield (part if len(stages) == 1 else rows_of), Holders(stages, (stage,))


def _in_turn(holders: Sequence[Stages], load: Mapping[int, int]) -> list[int] | None:
    """For each piece of a leaf who updates it, so that everybody's pieces follow each other."""
    chosen: list[int] = []
    for stages in holders:
        before = set(chosen) - set(chosen[-1:])
        able = [stage for stage in stages if stage not in before]
        if not able:
            return None
        chosen.append(min(able, key=lambda stage: (stage in chosen, load[stage])))
    return chosen


def updated_parts(
    held: Sequence[ParameterPart], shared: Shared, stage: int
) -> tuple[ParameterPart, ...]:
    """What a stage updates of the parameter parts that it holds.

    Args:
        held: these parts.
        shared: who updates what is shared.
        stage: which stage.

    Returns:
        Its share of each part of which it has one, in their order.
    """
    by_leaf: dict[int, list[tuple[ParameterPart, Holders]]] = {}
    for piece, holders in shared.items():
        by_leaf.setdefault(piece.leaf, []).append((piece, holders))
    found = []
    for part in held:
        pieces = [pair for pair in by_leaf.get(part.leaf, ()) if part.contains(pair[0])]
        mine = [piece for piece, holders in pieces if stage in holders.updaters]
        if len(mine) == len(pieces):
            found.append(part)
        elif mine:
            found.append(ParameterPart(part.leaf, mine[0].start, mine[-1].stop))
    return tuple(found)
