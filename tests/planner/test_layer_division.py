"""How HeteroAuto divides layers: equal to enumeration, whatever the groups."""

import itertools
from collections.abc import Iterator, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.planner.h2.heteroauto import ChipKind, find_strategy
from hetjax.planner.h2.layer_division import ChipGroup, GroupWay, divide_layers

NUMBERS = st.integers(0, 2**32 - 1)


def random_way(rng: Random, tensor: int, *, repeats: bool) -> GroupWay:
    return GroupWay(
        tensor=tensor,
        stages=rng.choice([1, 2, 3]),
        repeats=repeats,
        offloads=False,
        layer_seconds=rng.uniform(0.5, 2) / tensor**0.7 * (1.33 if repeats else 1),
        update_seconds=rng.uniform(0, 0.5),
        handover_seconds=rng.uniform(0, 0.3),
        state_bytes=rng.uniform(1, 3),
        kept_bytes=rng.uniform(0.1, 1) * (0.2 if repeats else 1),
        fixed_bytes=rng.uniform(0, 1),
        exposed_seconds=rng.choice([0.0, 0.2]),
        pace_seconds=rng.choice([0.0, 2.0]),
        first_bytes=rng.choice([0.0, 2.0]),
        last_bytes=rng.choice([0.0, 2.0]),
        last_layers=rng.choice([0, 0, 1]),
    )


def random_groups(rng: Random) -> list[ChipGroup]:
    def group(number: int) -> ChipGroup:
        ways = (
            random_way(rng, tensor, repeats=again) for tensor in (1, 2) for again in (False, True)
        )
        return ChipGroup(str(number), rng.uniform(5, 25), tuple(ways))

    groups = [group(number) for number in range(rng.randint(1, 3))]
    # Two of the same are one after another, as in the second stage of the search.
    return [*groups, groups[-1]] if rng.random() < 0.3 and len(groups) < 3 else groups


def enumerated(
    groups: Sequence[ChipGroup], num_layers: int, microbatches: int, alpha: float
) -> float | None:
    """The least seconds of a step over all ways and numbers of layers."""
    found = [
        _seconds(ways, layers, microbatches, alpha)
        for ways in itertools.product(*(group.ways for group in groups))
        for layers in itertools.product(*_fitting(groups, ways, num_layers, microbatches))
        if sum(n * way.stages for n, way in zip(layers, ways, strict=True))
        >= num_layers + ways[-1].last_layers
    ]
    return min(found, default=None)


def _fitting(
    groups: Sequence[ChipGroup], ways: Sequence[GroupWay], num_layers: int, microbatches: int
) -> Iterator[list[int]]:
    if sum(way.stages for way in ways) > num_layers:
        yield []
        return
    for place, (group, way) in enumerate(zip(groups, ways, strict=True)):
        live = min(microbatches, sum(each.stages for each in ways[place:]))
        is_first, is_last = place == 0, place == len(ways) - 1
        fixed = way.fixed_bytes + is_first * way.first_bytes + is_last * way.last_bytes
        yield [
            layers
            for layers in range(max(1, is_last * way.last_layers), num_layers + 2)
            if layers * (way.state_bytes + way.kept_bytes * live) + fixed <= group.memory_bytes
        ]


def _seconds(
    ways: Sequence[GroupWay], layers: Sequence[int], microbatches: int, alpha: float
) -> float:
    """The formula of the paper, stage by stage."""
    stages = [(way, n) for way, n in zip(ways, layers, strict=True) for _ in range(way.stages)]
    passes = [
        max(n * way.layer_seconds + way.exposed_seconds, way.pace_seconds) for way, n in stages
    ]
    handed = sum(way.handover_seconds for way, _ in stages)
    return handed + max(
        microbatches * own + n * way.update_seconds + alpha * (sum(passes) - own)
        for (way, n), own in zip(stages, passes, strict=True)
    )


@settings(max_examples=200)
@given(number=NUMBERS)
def test_it_is_as_fast_as_enumeration_finds(number: int):
    rng = Random(number)
    groups = random_groups(rng)
    num_layers, microbatches = rng.randint(2, 8), rng.randint(1, 6)
    alpha = rng.choice([0.0, 0.5, 1.0])
    found = divide_layers(groups, num_layers, microbatches, alpha)
    expected = enumerated(groups, num_layers, microbatches, alpha)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.step_time == pytest.approx(expected, rel=1e-9)
    ways = [share.way for share in found.shares]
    layers = [share.layers for share in found.shares]
    assert found.step_time == pytest.approx(_seconds(ways, layers, microbatches, alpha), rel=1e-9)
    assert divide_layers(groups, num_layers, microbatches, alpha, expected * 0.999) is None


def random_kinds(rng: Random) -> list[ChipKind]:
    def kind(number: int) -> ChipKind:
        seconds, memory = rng.uniform(0.5, 2), rng.uniform(10, 40)

        def ways(width: int, chips: int) -> list[GroupWay]:
            return [
                GroupWay(
                    tensor,
                    chips // (tensor * width),
                    repeats,
                    False,
                    seconds / tensor**0.8 * (1.33 if repeats else 1),
                    0.1 * (width - 1),
                    0.05,
                    (1 + 2 / width) / tensor,
                    0.2 if repeats else 1.0 / tensor,
                    0.5,
                )
                for tensor in (1, 2)
                for repeats in (False, True)
                if chips % (tensor * width) == 0
            ]

        return ChipKind(str(number), rng.choice([4, 8]), memory, 4, ways)

    return [kind(number) for number in range(rng.randint(1, 2))]


@settings(max_examples=60)
@given(number=NUMBERS)
def test_a_second_stage_is_never_worse_than_one(number: int):
    rng = Random(number)
    kinds = random_kinds(rng)
    batch = rng.choice([4, 8, 12])
    widths = [width for width in (1, 2, 4) if batch % width == 0]
    one, two = (
        find_strategy(kinds, 10, lambda width: batch // width, widths, is_grouped=grouped)
        for grouped in (False, True)
    )
    assert one is None or (two is not None and two.step_time <= one.step_time)
    if two is not None:
        names = [group.name for group in two.groups]
        memories = {kind.name: kind.memory_bytes for kind in kinds}
        assert [memories[name] for name in names] == sorted(
            (memories[name] for name in names), reverse=True
        )


def test_no_more_stages_than_layers():
    way = GroupWay(1, 4, False, False, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)
    assert divide_layers([ChipGroup("wide", 10.0, (way,))], 3, 2) is None
