"""The names of buffers: no two kinds have one name, whatever their numbers."""

from typing import Any, get_args

import pytest

from hetjax.runtime.instructions.buffers import ACTIVATIONS, Activation, Buffer

KINDS: tuple[Any, ...] = get_args(Buffer)


def test_every_kind_has_a_tag_of_its_own():
    tags = [kind._field_defaults["kind"] for kind in KINDS]
    assert len(set(tags)) == len(KINDS)
    assert all(kind._fields[-1] == "kind" for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_names_of_two_kinds_differ_where_their_numbers_do_not(kind: Any):
    name = kind(*[0] * (len(kind._fields) - 1))
    others = {each(*[0] * (len(each._fields) - 1)) for each in KINDS if each is not kind}
    assert name not in others
    assert len({name, *others}) == len(KINDS)
    assert repr(name).startswith(kind.__name__)


def test_activations_are_told_by_either_form():
    assert get_args(Activation) == ACTIVATIONS
