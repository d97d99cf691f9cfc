"""Modules: runs of a program that stand in it several times, found by their structure alone.

Deep models are mostly repetitions. Steps that look alike (the same primitive on values of the same
shapes) get the same letter; the most frequent word with enough matrix products is a module, taken
out wherever it stands, and so on with what is left. A word whose edges more bytes cross than places
inside is a module only where there is no other: the end of a residual block that begins otherwise
than its like is such a word, and blocks that are alike throughout come before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetjax.pipeline.program.costs import is_heavy, step_cost
from hetjax.pipeline.program.forms import Form, form_of
from hetjax.pipeline.program.traced_program import Program

# How many bytes may cross a module's edges over those that cross it inside, where fewest do: as
# many, but for sums that grow a little from one occurrence to the next.
_NEARLY = 1.1


@dataclass(frozen=True)
class Section:
    """A run of positions: one occurrence of a module, or what stands between modules.

    Args:
        start: its first position.
        stop: the one after its last.
        module: which module it is an occurrence of; None for what is not repeated.
    """

    start: int
    stop: int
    module: int | None = None


@dataclass
class _LetterRun:
    """Steps that are in no module yet.

    Args:
        start: its first step.
        stop: the one after its last.
    """

    start: int
    stop: int


def find_modules(
    program: Program, crossing: NDArray[np.float64], min_products: int = 2
) -> tuple[Section, ...]:
    """Divide a program into occurrences of repeated modules and what stands between them.

    A module is grown to both sides as far as all its occurrences agree and nearly the fewest bytes
    cross its edges. Where occurrences follow each other, it is only defined up to a rotation: that
    one is taken whose edges fewest bytes cross.

    Args:
        program: the traced loss function.
        crossing: the bytes that would cross a cut at every position.
        min_products: how many matrix products or convolutions a module has at least.

    Returns:
        The sections, in order; together they are the program. Modules are numbered by their first
        occurrence.

    Source: Harp, section 5.1.

    Example:
        >>> import jax.numpy as jnp
        >>> from hetjax.pipeline.layers.cost_layers import crossing_bytes
        >>> from hetjax.pipeline.program.tracing import trace
        >>> def loss(weights, x):
        ...     for weight in weights:
        ...         x = jnp.tanh(x @ weight)
        ...     return jnp.mean(x**2)
        >>> program = trace(loss, [jnp.ones((8, 8))] * 4, jnp.ones((4, 8)))
        >>> [section.module for section in find_modules(program, crossing_bytes(program))]
        [0, 0, None]
    """
    finder = _Finder(program, crossing, min_products)
    return tuple(finder.sections())


class _Finder:
    def __init__(self, program: Program, crossing: NDArray[np.float64], min_products: int):
        self.steps, self.crossing, self.min_products = program.steps, crossing, min_products
        letters: dict[Form, int] = {}
        self.letters = [letters.setdefault(form_of(step), len(letters)) for step in self.steps]
        self.heavy = [is_heavy(step) for step in self.steps]
        self.flops = np.array([step_cost(step).flops for step in self.steps])

    def sections(self) -> Iterator[Section]:
        """The sections in order, with modules numbered by their first occurrence."""
        found: list[tuple[int, int, Hashable]] = []
        runs = [_LetterRun(0, len(self.steps))]
        while (grown := self._next_module(runs)) is not None:
            found += [(start, stop, ("word", grown[0])) for start, stop in grown]
            runs = _without(runs, grown)
        found += [(run.start, run.stop, None) for run in runs if run.start < run.stop]
        numbers: dict[Hashable, int] = {}
        for start, stop, module in sorted(found, key=lambda each: each[0]):
            number = None if module is None else numbers.setdefault(module, len(numbers))
            yield Section(start, stop, number)

    def _next_module(self, runs: Sequence[_LetterRun]) -> list[tuple[int, int]] | None:
        """The occurrences of the most frequent module that is in one piece; None for none.

        Where no module is in one piece, the most frequent one.
        """
        words = self._by_frequency(runs)
        grown = (self._grown(runs, word) for word in words)
        whole = (module for module in grown if all(map(self._is_one_piece, module)))
        return next(whole, self._grown(runs, words[0]) if words else None)

    def _by_frequency(self, runs: Sequence[_LetterRun]) -> list[list[tuple[int, int]]]:
        """The occurrences of the shortest words with enough products, of the most frequent first.

        Every word with so many products has one of these in it, and is no more frequent.
        """
        words: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for run in runs:
            heavy = [place for place in range(run.start, run.stop) if self.heavy[place]]
            for first, last in zip(heavy, heavy[self.min_products - 1 :], strict=False):
                occurrences = words.setdefault(tuple(self.letters[first : last + 1]), [])
                if not occurrences or occurrences[-1][1] <= first:
                    occurrences.append((first, last + 1))
        repeated = [each for each in words.values() if len(each) > 1]
        return sorted(repeated, key=lambda each: (-len(each), -self._work(each[0]), each[0][0]))

    def _is_one_piece(self, occurrence: tuple[int, int]) -> bool:
        """Whether no more bytes cross the edges of a run of steps than any place inside."""
        first, end = occurrence
        edges = max(self.crossing[first], self.crossing[end])
        return bool(edges <= _NEARLY * self.crossing[first + 1 : end].min(initial=np.inf))

    def _work(self, occurrence: tuple[int, int]) -> float:
        return float(self.flops[slice(*occurrence)].sum())

    def _grown(
        self, runs: Sequence[_LetterRun], occurrences: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Occurrences grown to both sides, as far as all agree and none meets another."""
        spaces = [_space(runs, occurrences, place) for place in range(len(occurrences))]
        left = self._agreeing(
            [(start - 1, -1) for start, _ in occurrences], min(before for before, _ in spaces)
        )
        right = self._agreeing(
            [(stop, 1) for _, stop in occurrences], min(after for _, after in spaces)
        )
        between = min(
            (after for place, (_, after) in enumerate(spaces) if place < len(spaces) - 1),
            default=left + right,
        )
        splits = [
            (to_left, min(right, between - to_left))
            for to_left in range(left + 1)
            if to_left <= between
        ]
        longest = max(sum(split) for split in splits)
        to_left, to_right = min(
            (split for split in splits if sum(split) == longest),
            key=lambda split: sum(self.crossing[start - split[0]] for start, _ in occurrences),
        )
        to_left = self._to_narrow_edges([start for start, _ in occurrences], -1, to_left)
        to_right = self._to_narrow_edges([stop for _, stop in occurrences], 1, to_right)
        return [(start - to_left, stop + to_right) for start, stop in occurrences]

    def _to_narrow_edges(self, edges: Sequence[int], way: int, most: int) -> int:
        """How far to move edges, as far as may be, to where nearly the fewest bytes cross them."""
        widths = [
            max(self.crossing[edge + way * distance] for edge in edges)
            for distance in range(most + 1)
        ]
        return max(d for d, width in enumerate(widths) if width <= _NEARLY * min(widths))

    def _agreeing(self, edges: Sequence[tuple[int, int]], most: int) -> int:
        """How many steps beyond their edges all occurrences have the same letters."""
        for distance in range(most):
            seen = {self.letters[place + way * distance] for place, way in edges}
            if len(seen) > 1:
                return distance
        return most


def _space(
    runs: Sequence[_LetterRun], occurrences: Sequence[tuple[int, int]], place: int
) -> tuple[int, int]:
    """How many steps are free before and after an occurrence."""
    start, stop = occurrences[place]
    run = next(run for run in runs if run.start <= start and stop <= run.stop)
    before = occurrences[place - 1][1] if place else run.start
    after = occurrences[place + 1][0] if place + 1 < len(occurrences) else run.stop
    return start - max(before, run.start), min(after, run.stop) - stop


def _without(runs: Sequence[_LetterRun], taken: Sequence[tuple[int, int]]) -> list[_LetterRun]:
    """What is left of some runs."""
    left: list[_LetterRun] = []
    for run in runs:
        start = run.start
        for first, end in taken:
            if run.start <= first < run.stop:
                left.append(_LetterRun(start, first))
                start = end
        left.append(_LetterRun(start, run.stop))
    return [run for run in left if run.start < run.stop]
