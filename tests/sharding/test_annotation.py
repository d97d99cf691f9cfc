"""Annotations are checked when they are made, printed for people, and written to JSON."""

import json
from typing import Any, cast

import jax
import numpy as np
import pytest
from cases import examples
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from random_annotations import an_annotation, groups_of_devices, summands

from hetjax.errors import InputError
from hetjax.sharding import DUPLICATE, PARTIAL, HSharding, Subgroup
from hetjax.sharding.annotation.symbols import SymbolicSize

TWO = Subgroup((0, 1), (("x", 2),), P("x"))
ONE = Subgroup((2,), (), P())


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.sampled_from((4, 8, 24)), min_size=1, max_size=3)))
    return shape, draw(an_annotation(shape, draw(groups_of_devices()), partial=True))


@given(cases())
def test_shards_hold_the_array_and_json_comes_back(case):
    shape, annotation = case
    text = json.dumps(annotation.to_json_dict())
    again = HSharding.from_json_dict(json.loads(text))
    assert again == annotation
    assert hash(again) == hash(annotation)
    value, arrays = summands(annotation, shape, np.random.default_rng(0))
    sums: dict = {}
    for shard in annotation.shards(shape):
        group = shard.summand.group if shard.summand else None
        sums.setdefault((group, shard.bounds), {})[shard.summand] = arrays[shard.device]
    for (group, bounds), parts in sums.items():
        index = tuple(slice(a, b) for a, b in bounds)
        # Summands of one group with this very part may lie in parts of unlike size elsewhere.
        if group is None or annotation.hdim != PARTIAL:
            np.testing.assert_array_equal(sum(parts.values()), value[index])


def test_a_jax_sharding_is_the_annotation_of_one_submesh():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    sharding = NamedSharding(mesh, P("b", None))
    annotation = HSharding.of(sharding)
    devices = {shard.device: shard.bounds for shard in annotation.shards((8, 2))}
    for device, index in sharding.devices_indices_map((8, 2)).items():
        assert devices[device.id] == tuple(
            part.indices(size)[:2] for part, size in zip(index, (8, 2), strict=True)
        )


def test_it_reads_well():
    annotation = HSharding((TWO, ONE), hdim=0, sizes=("4*batch", 2))
    assert str(annotation) == (
        "HSharding(split on dimension 0 among 2 submeshes:"
        "\n  devices [0-1] as x=2: P('x'), 4*batch of it"
        "\n  devices [2]: P(), 2 of it)"
    )
    partial = TWO.with_spec(P(None, unreduced=frozenset({"x"})))
    assert str(HSharding((partial,))) == ("HSharding(devices [0-1] as x=2: P(unreduced={'x'}))")


def test_symbols_wait_for_the_input():
    annotation = HSharding((TWO, ONE), hdim=0, sizes=("2*batch", "rest"))
    assert annotation.symbols == {"batch", "rest"}
    with pytest.raises(InputError, match=r"symbols \['batch', 'rest'\] have no numbers"):
        annotation.shards((8,))
    bound = annotation.bind({"batch": 3, "rest": 2})
    assert bound.regions((8,)) == (((0, 6),), ((6, 8),))
    with pytest.raises(InputError, match=r"\[6, 2\] make 8, and dimension 0 .* has 9"):
        bound.shards((9,))
    with pytest.raises(InputError, match="'rest' has no number"):
        annotation.bind({"batch": 3})
    with pytest.raises(InputError, match="'batch' is 0"):
        annotation.bind({"batch": 0, "rest": 1})


OPERATIONS = ("+", "*", "//", "-")


@st.composite
def formulas(draw, depth=3):
    """A formula with two symbols."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(("batch", "rest", "2", "7")))
    left, right = draw(formulas(depth - 1)), draw(formulas(depth - 1))
    return f"({left} {draw(st.sampled_from(OPERATIONS))} {right})"


@examples(usual=100, full=2000)
@given(formulas(), st.integers(1, 50), st.integers(1, 50))
def test_formulas_are_what_python_makes_of_them(formula: str, batch: int, rest: int):
    values = {"batch": batch, "rest": rest}
    try:
        expected = eval(formula, {}, dict(values))
    except ZeroDivisionError:
        expected = None
    if len(formula) > 200:
        return
    size = SymbolicSize(formula)
    assert SymbolicSize(str(size)) == size
    if expected is None or expected < 0:
        with pytest.raises(InputError, match=r"divides by 0|must be 0 or more"):
            size.bind(values)
    else:
        assert size.bind(values) == expected


def test_axes_may_be_a_mapping_and_devices_any_numbers():
    assert Subgroup(cast(Any, np.arange(2)), cast(Any, {"x": 2}), P("x")) == TWO
    assert Subgroup((2,), cast(Any, {}), P()) == ONE
    assert HSharding(cast(Any, [TWO, ONE]), cast(Any, np.int64(0)), cast(Any, [4, 2])).hdim == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Subgroup((0, 0), (("x", 2),), P()), "numbers from 0, each once"),
        (lambda: Subgroup((0, 1), (("x", 3),), P()), "holds 3 devices, and 2 are given"),
        (lambda: Subgroup((0, 1), (("x", 2),), P("y")), "names the axis 'y'"),
        (lambda: Subgroup((0, 1), (("x", 2),), P("x", "x")), "uses an axis twice"),
        (lambda: HSharding(()), "none is given"),
        (lambda: HSharding((TWO, TWO)), r"devices \[0, 1\] are in two subgroups"),
        (lambda: HSharding((TWO, ONE), cast(Any, "sum")), "'sum' is not allowed"),
        (lambda: HSharding((ONE,), 0, (3,)), "given for one subgroup"),
        (lambda: HSharding((TWO, ONE), -1), "dimensions count from 0"),
        (lambda: HSharding((TWO, ONE), 0, (1, 2, 3)), "3 are given for 2 subgroups"),
        (lambda: HSharding((TWO, ONE), 0, (-1, 2)), "each is 0 or more"),
        (lambda: HSharding((TWO, ONE), 0, ("a**b", 2)), r"'a\*\*b' is not allowed"),
        (lambda: HSharding((TWO, ONE), 0, ("f(a)", 2)), r"'f\(a\)' is not allowed"),
        (lambda: HSharding((TWO, ONE), 0, ("a.b", 2)), "'a.b' is not allowed"),
        (lambda: HSharding((TWO, ONE), 0, ("1+" * 150 + "1", 2)), "301 characters; at most 200"),
        (lambda: HSharding((TWO, ONE), 0, ("a/2", 2)), "'a/2' is not allowed"),
        (lambda: HSharding((TWO, ONE), 0, ("", 2)), "'' is not allowed"),
        (
            lambda: HSharding((TWO, ONE), 0, (cast(Any, 1.5), 2)),
            "1.5 is not allowed: a whole number",
        ),
        (lambda: HSharding((TWO, ONE), 0, cast(Any, 3)), "sizes: 3 is not allowed"),
        (lambda: HSharding((TWO, ONE), cast(Any, 1.5)), "hdim: 1.5 is not allowed: a dimension"),
        (lambda: HSharding((TWO, ONE), cast(Any, True)), "hdim: True is not allowed"),
        (lambda: HSharding((TWO, ONE), cast(Any, None)), "hdim: None is not allowed"),
        (lambda: HSharding((TWO, ONE), cast(Any, [0])), "ranges: 0 are given for 2 subgroups"),
        (lambda: HSharding((TWO, ONE), (1, 0)), r"hdim: \(1, 0\) is not allowed: rising"),
        (lambda: HSharding((TWO, ONE), (0, 1), (4, 2)), r"sizes: given where hdim is \(0, 1\)"),
        (
            lambda: HSharding((TWO, ONE), 0, ranges=(((0, 2),), ((2, 6),))),
            "several dimensions have",
        ),
        (
            lambda: HSharding((TWO, ONE), (0, 1), ranges=(((0, 2),), ((2, 6),))),
            "a range of each of the dimensions",
        ),
        (lambda: HSharding((TWO, ONE), (0,), ranges=(((2, 0),), ((2, 6),))), "ranges: .* a start"),
        (
            lambda: HSharding((TWO, ONE), (0,), ranges=(((0, 2),), ((2, 9),))).shards((8,)),
            "2 to 9 is not allowed: dimension 0",
        ),
        (lambda: HSharding(cast(Any, (0, 1))), r"subgroups\[0\]: 0 is not allowed: a Subgroup"),
        (lambda: Subgroup((0, 1), cast(Any, {}), P()), "holds 1 devices, and 2 are given"),
        (lambda: Subgroup((0, 1), cast(Any, "x"), P()), "axes: 'x' is not allowed"),
        (lambda: Subgroup((0, 1), cast(Any, ("x", 2)), P()), "axes: 'x' is not allowed"),
        (lambda: Subgroup((0, 1), (("x", cast(Any, 2.0)),), P()), r"axes: \('x', 2.0\) is not"),
        (lambda: Subgroup((0, 1), (("x", -2),), P()), r"sizes from 1"),
        (lambda: Subgroup((0, 1), (("x", 2),), cast(Any, ("x",))), "a jax.sharding.PartitionSpec"),
        (lambda: Subgroup((0, 1), (("x", 2),), cast(Any, None)), "spec: None is not allowed"),
        (lambda: Subgroup(cast(Any, 0), (), P()), "devices: 0 is not allowed: numbers"),
        (lambda: Subgroup(cast(Any, ("a",)), (), P()), "devices: 'a' is not allowed"),
        (lambda: Subgroup(cast(Any, (0.5,)), (), P()), "devices: 0.5 is not allowed"),
        (lambda: HSharding((TWO, ONE), DUPLICATE, (1, 2)), "only a dimension has"),
        (lambda: HSharding((TWO, ONE), 0).shards((7,)), "make 6, and dimension 0"),
        (lambda: HSharding((TWO, ONE), 1).shards((8,)), "1 is no dimension"),
        (lambda: HSharding((TWO,)).shards((7,)), "2 does not divide that"),
        (lambda: HSharding.from_json_dict([]), "annotation: a table is wanted"),
        (lambda: HSharding.from_json_dict({"hdim": 0}), "subgroups"),
    ],
)
def test_wrong_annotations_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
