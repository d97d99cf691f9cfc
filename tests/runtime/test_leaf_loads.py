"""Parts of a training state put together of saved ones, rows of a leaf and parts of rows too."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.errors import CheckpointError
from hetjax.pipeline.program.stacked_leaves import StackedLeaves, whole_leaves
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.runtime.checkpoints.leaf_loads import LeafLoad
from hetjax.runtime.checkpoints.manifest import SavedPart, uncovered
from hetjax.runtime.checkpoints.saved_leaves import SavedLeaves

LEAF = np.arange(24.0, dtype=np.float32).reshape(4, 3, 2)
SHAPES = (jax.ShapeDtypeStruct(LEAF.shape, LEAF.dtype),)
ROWS = SavedLeaves("parameters", ("blocks/w",), SHAPES, (), StackedLeaves((4,)))
WHOLE = SavedLeaves("parameters", ("blocks/w",), SHAPES, (), whole_leaves(1))

SAVED = {
    "as format 3 has a leaf whose scan was cut": [
        WHOLE.part(ParameterPart(0, 0, 3), "stage_0"),
        WHOLE.part(ParameterPart(0, 3, 4), "stage_1"),
    ],
    "as format 3 has one that members divided": [
        WHOLE.part(ParameterPart(0), "a", ((0, 4), (0, 1), (0, 2))),
        WHOLE.part(ParameterPart(0), "b", ((0, 4), (1, 3), (0, 2))),
    ],
    "whole": [WHOLE.part(ParameterPart(0), "a")],
    "row by row": [ROWS.part(ParameterPart(row), "a") for row in range(4)],
    "rows that members divided": [
        ROWS.part(ParameterPart(row), item, ((start, stop), (0, 2)))
        for row in range(4)
        for item, start, stop in (("a", 0, 2), ("b", 2, 3))
    ],
}
WANTED = {
    "a row": ROWS.part(ParameterPart(2), "x"),
    "a part of a row": ROWS.part(ParameterPart(1), "x", ((1, 3), (0, 2))),
    "some of a row's rows": ROWS.part(ParameterPart(3, 1, 2), "x"),
    "some rows": WHOLE.part(ParameterPart(0, 1, 4), "x"),
    "all": WHOLE.part(ParameterPart(0), "x"),
}


def held(part: SavedPart) -> np.ndarray:
    """What a part holds of the leaf, as an array of its own."""
    array = LEAF[tuple(slice(*bounds) for bounds in part.bounds)]
    return array[0] if part.is_row else array


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
@pytest.mark.parametrize("saved", SAVED.values(), ids=SAVED)
def test_what_is_wanted_is_put_together_of_what_was_saved(
    saved: list[SavedPart], wanted: SavedPart
):
    assert uncovered(saved) is None
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("d",)), PartitionSpec())
    load = LeafLoad(wanted, LEAF.dtype, sharding, {wanted.leaf: saved})
    found = load.assemble({part.key: held(part) for part in saved})
    np.testing.assert_array_equal(found, held(wanted))
    assert len({part.key for part in saved}) == len(saved)


def test_a_row_that_was_not_saved_is_missed():
    saved = SAVED["row by row"][:3]
    assert "are missing" in str(uncovered(saved))
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("d",)), PartitionSpec())
    last = ROWS.part(ParameterPart(3), "x")
    with pytest.raises(CheckpointError, match=r"has 0 of the 6 elements of parameters/blocks/w\[3"):
        LeafLoad(last, LEAF.dtype, sharding, {last.leaf: saved})
