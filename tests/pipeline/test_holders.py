"""Who holds and who updates what, for random pipelines of random stages."""

import itertools
from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.pipeline.stages.holders import (
    Holders,
    shared_parts,
    updated_parts,
    with_divided_updates,
    with_same_updates,
)

ROWS = 12
SHAPES = [(ROWS, 3), (1, 5), ()]


def random_holding(rng: Random) -> list[list[ParameterPart]]:
    """What the stages of a few pipelines hold of a stacked leaf and of whole ones."""
    held: list[list[ParameterPart]] = []
    for _ in range(rng.randint(1, 3)):
        ends = (0, *sorted(rng.sample(range(1, ROWS), rng.randint(0, 3))), ROWS)
        stages = [
            [ParameterPart(0) if len(ends) == 2 else ParameterPart(0, start, stop)]
            for start, stop in itertools.pairwise(ends)
        ]
        if len(ends) > 2 and rng.random() < 0.2:
            stages[rng.randrange(len(stages))] = [ParameterPart(0)]
        for leaf in (1, 2):
            stages[rng.randrange(len(stages))].append(ParameterPart(leaf))
        held += stages
    return held


def rows_of(part: ParameterPart, rows: int) -> range:
    return range(part.start, rows if part.stop is None else part.stop)


@given(seed=st.integers(0, 2**32 - 1))
def test_each_row_is_updated_by_one_holder_or_by_all(seed: int):
    held = random_holding(Random(seed))
    shared = with_divided_updates(shared_parts(held, SHAPES), SHAPES)
    counts: Counter[tuple[int, int]] = Counter()
    for stage, parts in enumerate(held):
        for part in updated_parts(parts, shared, stage):
            assert any(each.contains(part) for each in parts)
            rows = SHAPES[part.leaf][0] if SHAPES[part.leaf] else 1
            counts.update((part.leaf, row) for row in rows_of(part, rows))
    for part, holders in shared.items():
        assert set(holders.updaters) <= set(holders.stages)
        rows = SHAPES[part.leaf][0] if SHAPES[part.leaf] else 1
        for row in rows_of(part, rows):
            assert counts[part.leaf, row] == len(holders.updaters)
            assert len(holders.updaters) in (1, len(holders.stages))


@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_held_is_the_sum_of_its_pieces(seed: int):
    """Also where one stage alone holds some rows of a leaf that others share."""
    held = random_holding(Random(seed))
    shared = with_same_updates(shared_parts(held, SHAPES))
    for stage, parts in enumerate(held):
        assert updated_parts(parts, shared, stage) == tuple(parts)
        for part in parts:
            pieces = [piece for piece in shared if piece.leaf == part.leaf and part.contains(piece)]
            rows = [row for piece in pieces for row in rows_of(piece, ROWS)]
            assert not pieces or part.leaf or rows == list(rows_of(part, ROWS))


def test_shares_are_even():
    stages = (0, 1, 2)
    shared = with_divided_updates(
        {ParameterPart(0): stages, ParameterPart(1): stages, ParameterPart(2): stages},
        [(9, 2), (1, 7), ()],
    )
    assert list(shared.values()) == [
        *(Holders(stages, (stage,)) for stage in stages),
        Holders(stages, (0,)),
        Holders(stages, (1,)),
    ]


def test_rows_that_pipelines_cut_at_unlike_places_go_in_turn():
    """What a stage updates of a leaf stays one run of rows."""
    parts = [ParameterPart(0, 0, 8), ParameterPart(0, 8, 12)]
    others = [ParameterPart(0, 0, 4), ParameterPart(0, 4, 12)]
    held = [[part] for part in (*parts, *others)]
    shared = with_divided_updates(shared_parts(held, SHAPES), SHAPES)
    assert [holders.updaters for holders in shared.values()] == [(0,), (3,), (1,)]
