"""What is kept for the backward pass is the least that spares every expensive step."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given, settings

from hetjax.pipeline.program.traced_program import Step
from hetjax.pipeline.stages.residuals import choose_residuals


@dataclass(frozen=True)
class Graph:
    """Forward steps on numbered values; the first ``inputs`` of them are at hand."""

    inputs: int
    steps: tuple[Step, ...]
    expensive: tuple[bool, ...]
    sizes: tuple[int, ...]
    needed: frozenset[int]

    def choose(self) -> frozenset[int]:
        costly = dict(zip(map(id, self.steps), self.expensive, strict=True))
        return choose_residuals(
            self.steps,
            range(self.inputs),
            self.needed,
            lambda value: self.sizes[value],
            lambda step: costly[id(step)],
        )

    def size(self, kept: Collection[int]) -> int:
        return sum(self.sizes[value] for value in kept)

    def is_enough(self, kept: Collection[int]) -> bool:
        """Whether what is needed follows from what is kept by cheap steps alone."""
        known = set(kept) | set(range(self.inputs))
        for step, expensive in zip(self.steps, self.expensive, strict=True):
            if not expensive and known.issuperset(step.values()):
                known.update(step.outputs)
        return known.issuperset(self.needed)


def step(inputs: Sequence[int], outputs: Sequence[int]) -> Step:
    return Step("any", tuple(inputs), tuple(outputs), lambda *_: [], None)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    inputs = draw(st.integers(1, 2))
    steps: list[Step] = []
    count = inputs
    for _ in range(draw(st.integers(1, 6))):
        read = draw(st.sets(st.integers(0, count - 1), max_size=3))
        made = draw(st.integers(1, 2)) if count < 9 else 1
        steps.append(step(sorted(read), range(count, count + made)))
        count += made
    sizes = draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    return Graph(
        inputs,
        tuple(steps),
        tuple(draw(st.booleans()) for _ in steps),
        tuple(sizes),
        frozenset(draw(st.sets(st.integers(0, count - 1), min_size=1))),
    )


@settings(max_examples=200)
@given(graph=graphs())
def test_no_smaller_choice_is_enough(graph: Graph):
    kept = graph.choose()
    assert graph.is_enough(kept)
    values = range(graph.inputs, len(graph.sizes))
    best = min(
        graph.size(choice)
        for count in range(len(values) + 1)
        for choice in itertools.combinations(values, count)
        if graph.is_enough(choice)
    )
    assert graph.size(kept) == best


def test_among_equals_the_later_value_is_kept():
    steps = (step([0], [1]), step([1], [2]), step([2], [3]))
    graph = Graph(1, steps, (True, False, False), (4, 4, 4, 4), frozenset({3}))
    assert graph.choose() == {3}


def test_a_small_source_is_kept_instead_of_what_follows_from_it():
    steps = (step([0], [1]), step([1], [2]), step([1], [3]))
    graph = Graph(1, steps, (True, False, False), (1, 4, 8, 8), frozenset({2, 3}))
    assert graph.choose() == {1}


def test_inputs_are_never_kept():
    graph = Graph(1, (step([0], [1]),), (False,), (1000, 1), frozenset({0, 1}))
    assert graph.choose() == frozenset()


def test_sizes_beyond_32_bits_keep_their_order():
    steps = (step([0], [1]), step([1], [2]))
    graph = Graph(1, steps, (True, False), (1, 3 * 2**40, 2**40), frozenset({2}))
    assert graph.choose() == {2}
