"""Pictures of annotations: who holds which part."""

from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hetjax import HArray, HSharding, InputError, Subgroup, visualize
from hetjax.report.annotation_picture import Cell, cells_of

TWO = Subgroup((0, 1), (("x", 2),), P(None, "x"))
ONE = Subgroup((2,), (), P())


def test_each_part_names_its_holders():
    rows = HSharding((TWO, ONE), hdim=0, sizes=(4, 2))
    assert cells_of(rows, (6, 4)) == (
        Cell((0, 4), (0, 2), "0", (0,)),
        Cell((0, 4), (2, 4), "1", (0,)),
        Cell((4, 6), (0, 2), "2", (1,)),
        Cell((4, 6), (2, 4), "2", (1,)),
    )
    assert [cell.holders for cell in cells_of(HSharding((TWO, ONE)), (6, 4))] == ["0 2", "1 2"]


def test_summands_are_joined():
    sums = HSharding((TWO, ONE), hdim="partial")
    assert [cell.holders for cell in cells_of(sums, (6, 4))] == ["0 + 2", "1 + 2"]
    inside = TWO.with_spec(P(unreduced=frozenset({"x"})))
    assert [cell.holders for cell in cells_of(HSharding((inside,)), (4,))] == ["0 + 1"]


def test_of_many_dimensions_the_most_cut_are_drawn():
    deep = HSharding((TWO.with_spec(P(None, None, "x")), ONE), hdim=1, sizes=(5, 1))
    assert [(cell.rows, cell.columns) for cell in cells_of(deep, (9, 6, 4))] == [
        ((0, 5), (0, 2)),
        ((0, 5), (2, 4)),
        ((5, 6), (0, 2)),
        ((5, 6), (2, 4)),
    ]
    assert cells_of(HSharding((ONE,)), ()) == (Cell((0, 1), (0, 1), "2", (0,)),)


def test_an_array_is_drawn_and_written(tmp_path: Path):
    array = HArray.of(np.zeros((6, 4)), HSharding((TWO, ONE), hdim=0, sizes=(4, 2)))
    figure = visualize(array, path=tmp_path / "array.png")
    assert [text.get_text() for text in figure.axes[0].texts] == ["0", "1", "2", "2"]
    assert (tmp_path / "array.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="shape: none is given"):
        visualize(array.annotation)


def test_an_array_without_elements_has_an_empty_frame():
    figure = visualize(HSharding((ONE,)), (0, 4))
    assert not figure.axes[0].texts
