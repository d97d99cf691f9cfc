"""Program and ratios found in turn, until neither improves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hetjax.errors import DoesNotFitError
from hetjax.mesh.quantities import format_bytes
from hetjax.planner.hap.chain_search import ChainProgram, ChainSearch
from hetjax.planner.hap.ratios import (
    LinearSpan,
    MovedBytes,
    RatioProblem,
    best_ratios,
    rounded_shares,
)
from hetjax.planner.module_programs.charges import REGROUP, SUM
from hetjax.planner.module_programs.program import ModuleProgram
from hetjax.planner.module_programs.rates import Rates
from hetjax.planner.module_programs.step_time import alike_runs, held_bytes, spans_of, step_time
from hetjax.planner.work.arrays import FloatArray

MOST_ROUNDS = 6
"""How often program and ratios are found in turn at most."""

GOOD_GAP = 1e-3
"""A proven gap that weights of the members are not changed for any more."""

MOST_PRESSURES = 12
"""How often bytes count for more, before a model is said not to fit."""

_MOST_POWER = 8.0
"""How often ratios to begin with are at most made as much smaller as a member's memory is short."""

_HALVINGS = 6
"""How closely is sought how often they must be."""


@dataclass(frozen=True, eq=False)
class Synthesis:
    """A program with its ratios.

    Args:
        program: what each module computes and moves.
        ratios: parts by kind of module and member, `[kinds, members]`.
        shares: for each kind of module what part of each class of dimensions each member has.
        expansions: how many partial programs were looked at.
    """

    program: ChainProgram
    ratios: FloatArray
    shares: tuple[FloatArray, ...]
    expansions: int

    @property
    def seconds(self) -> float:
        """What a step takes."""
        return self.program.seconds


def synthesise(search: ChainSearch, rates: Rates) -> Synthesis:
    """Find the best pair of a program and ratios.

    Args:
        search: finds programs.
        rates: what computing and moving takes.

    Returns:
        The best pair that was met.

    Raises:
        DoesNotFitError: no pair that was met fits into the members' memory.

    Source: HAP, section 3.1 (equations 1 and 2).
    """
    found = _alternated(search, rates)
    if fits(search, rates, found):
        return found
    return _fitting(search, rates, found)


def fits(search: ChainSearch, rates: Rates, found: Synthesis) -> bool:
    """Whether every member has the memory for a program.

    Args:
        search: what found it.
        rates: the members.
        found: the program and its ratios.
    """
    return bool((needed_bytes(search, rates, found) <= _limits(rates)).all())


def needed_bytes(search: ChainSearch, rates: Rates, found: Synthesis) -> FloatArray:
    """What a device of each member holds at most, in bytes, `[members]`.

    Args:
        search: what found the program.
        rates: the members.
        found: the program and its ratios.
    """
    held = held_bytes(search.chain, found.program.modules, rates, found.shares, search.state_bytes)
    return held.state + held.residuals + held.working


def _limits(rates: Rates) -> FloatArray:
    return np.array([member.memory for member in rates.members])


def _fitting(search: ChainSearch, rates: Rates, found: Synthesis) -> Synthesis:
    """The fastest pair that was met that fits.

    Met by going on from what fits rather than from what is fast, and with bytes that count for more
    and more seconds.
    """
    fitting: list[Synthesis] = []
    room = np.minimum(1.0, _limits(rates) / needed_bytes(search, rates, found))
    preferring = _alternated(search, rates, room)
    if fits(search, rates, preferring):
        fitting.append(preferring)
    pressure, tried = found.seconds / np.maximum(1.0, _limits(rates)) / 16, found
    for _ in range(MOST_PRESSURES):
        pressed = replace(rates, pressure=tuple(pressure.tolist()))
        tried = _alternated(search, pressed)
        if fits(search, rates, tried):
            fitting.append(tried)
            break
        over = needed_bytes(search, rates, tried) > _limits(rates)
        pressure = np.where(over, 4 * pressure, pressure)
    if fitting:
        relieved = [_relieved(search, rates, each) for each in fitting]
        return min(relieved, key=lambda each: each.seconds)
    needed, limits = needed_bytes(search, rates, tried), _limits(rates)
    worst = int(np.argmax(needed / limits))
    raise DoesNotFitError(
        f"the model does not fit with any ratios that were tried: members[{worst}] needs "
        f"{format_bytes(needed[worst])} on each device, and has {format_bytes(limits[worst])}; "
        f"take a smaller batch, more microbatches (train.microbatches) or more devices"
    )


def _relieved(search: ChainSearch, rates: Rates, found: Synthesis) -> Synthesis:
    """A program that was found under pressure, with what it takes without; nothing is proved."""
    return replace(found, program=_rated(search, rates, found.program, found.shares))


def _alternated(search: ChainSearch, rates: Rates, room: FloatArray | None = None) -> Synthesis:
    """The best pair that is met.

    Args:
        search: finds programs.
        rates: what computing and moving takes.
        room: for what part of what the fastest pair needs each member has memory, where that does
            not fit: what fits is then better than what does not, however fast that is.
    """
    alternation = _Alternation(search, rates, prefers_what_fits=room is not None)
    alternation.run(rates.proportional)
    if np.ptp(rates.proportional):
        alternation.run(np.full(rates.count, 1 / rates.count))
    if room is not None:
        too_little, enough = 0.0, _MOST_POWER
        for _ in range(_HALVINGS):
            power = (too_little + enough) / 2
            parts = rates.proportional * room**power
            if alternation.run(parts / parts.sum()):
                enough = power
            else:
                too_little = power
    return alternation.checked()


def synthesise_at(search: ChainSearch, rates: Rates, parts: FloatArray) -> Synthesis:
    """The best program for given ratios, the same in all modules.

    Args:
        search: finds programs.
        rates: what computing and moving takes.
        parts: what part of everything that is divided each member has, `[members]`.

    Returns:
        The program with these ratios, whether or not it fits into the members' memory.
    """
    ratios = np.tile(parts, (len(search.networks), 1))
    shares = _shares_of(search, rates, ratios)
    first = search.best(rates, shares, _slowest(rates))
    program = _weighted(search, rates, shares, first)
    return Synthesis(program, ratios, shares, search.expansions)


class _Alternation:
    def __init__(self, search: ChainSearch, rates: Rates, *, prefers_what_fits: bool):
        self._search, self._rates = search, rates
        self._prefers_what_fits = prefers_what_fits
        self.best: Synthesis | None = None

    def run(self, start: FloatArray) -> bool:
        """Go on from some ratios while that makes the step faster.

        Returns:
            Whether the best program in these ratios fits.
        """
        search, rates, has_room = self._search, self._rates, None
        ratios = np.tile(start, (len(search.networks), 1))
        for _ in range(MOST_ROUNDS):
            shares = _shares_of(search, rates, ratios)
            program = search.best(rates, shares, _slowest(rates))
            self._keep(program, ratios, shares)
            if has_room is None:
                has_room = fits(search, rates, Synthesis(program, ratios, shares, 0))
            found = best_ratios(ratio_problem(search, program, rates, shares), rates)
            if found is None:
                break
            # The same program in better ratios is better than the best so far, or nothing is.
            shares = _shares_of(search, rates, found)
            rated = _rated(search, rates, program, shares)
            if not self._keep(rated, found, shares):
                break
            ratios = found
        return bool(has_room)

    def _keep(
        self, program: ChainProgram, ratios: FloatArray, shares: tuple[FloatArray, ...]
    ) -> bool:
        """Keep what is better than the best so far; whether it is."""
        found = Synthesis(program, ratios, shares, self._search.expansions)
        if self.best is not None and not self._is_better(found, self.best):
            return False
        self.best = found
        return True

    def _is_better(self, found: Synthesis, best: Synthesis) -> bool:
        if self._prefers_what_fits:
            has_room, had_room = (fits(self._search, self._rates, e) for e in (found, best))
            if has_room != had_room:
                return has_room
        return found.seconds < best.seconds * (1 - 1e-6)

    def checked(self) -> Synthesis:
        """The best pair, with a bound that is as high as weights make it."""
        assert self.best is not None, "a first program was found"
        search, rates, found = self._search, self._rates, self.best
        first = found.program
        if not first.bound:
            # It was found for other ratios: for these, the search proves the bound.
            best = search.best(rates, found.shares, _slowest(rates))
            faster = best if best.seconds < first.seconds else first
            first = replace(faster, bound=best.bound)
        program = _weighted(search, rates, found.shares, first)
        proved = replace(found, program=program, expansions=search.expansions)
        if self._prefers_what_fits and fits(search, rates, found) > fits(search, rates, proved):
            return found
        return proved


def _shares_of(search: ChainSearch, rates: Rates, ratios: FloatArray) -> tuple[FloatArray, ...]:
    multiples = [member.devices for member in rates.members]
    known: list[tuple[FloatArray, FloatArray]] = []
    found = []
    for row in ratios:
        same = next((shares for other, shares in known if np.allclose(other, row, atol=1e-9)), None)
        if same is None:
            same = rounded_shares(row, search.dimensions, multiples)
            known.append((row, same))
        found.append(same)
    return tuple(found)


def _rated(
    search: ChainSearch, rates: Rates, program: ChainProgram, shares: Sequence[FloatArray]
) -> ChainProgram:
    """A program in other ratios, of which nothing is proved."""
    time = step_time(search.chain, program.modules, rates, shares, search.state_bytes)
    return ChainProgram(program.modules, 0.0, time.step(search.num_microbatches), time)


def _slowest(rates: Rates) -> FloatArray:
    """All weight on the member that computes least."""
    weights = np.zeros(rates.count)
    weights[min(range(rates.count), key=lambda m: rates.members[m].flops)] = 1.0
    return weights


def _weighted(
    search: ChainSearch, rates: Rates, shares: Sequence[FloatArray], best: ChainProgram
) -> ChainProgram:
    """The best program that is met when weights go to the members that others wait for."""
    if best.gap <= GOOD_GAP:
        return best
    other = search.best(rates, shares, best.time.waited)
    fastest = min(best, other, key=lambda program: program.seconds)
    return replace(fastest, bound=max(best.bound, other.bound))


def ratio_problem(
    search: ChainSearch, program: ChainProgram, rates: Rates, shares: Sequence[FloatArray]
) -> RatioProblem:
    """A program, as far as ratios change what it takes.

    Args:
        search: what found it.
        program: the program.
        rates: what computing and moving takes.
        shares: those that it was found with.
    """
    moved: dict[MovedBytes, float] = {}
    kinds, state = len(search.networks), search.state_bytes
    known: dict[int, tuple[list[_FixedAndShared], ...]] = {}
    carried: dict[int, dict[MovedBytes, float]] = {}
    modules = list(zip(search.chain.modules, program.modules, strict=True))
    count = search.num_microbatches
    runs = list(alike_runs(program.modules))
    for place, times in runs:
        module, each = modules[place]
        if id(each) not in known:
            known[id(each)] = _linear_spans(each, rates, shares[module.kind], state)
            carried[id(each)] = _moved_bytes(each, rates, shares[module.kind], count)
        for key, amount in carried[id(each)].items():
            moved[key] = moved.get(key, 0.0) + times * amount
    spans: Counter[LinearSpan] = Counter()
    for which, order in enumerate((runs, reversed(runs), runs)):
        clock = _LinearClock(kinds, rates.count)
        for place, times in order:
            module, each = modules[place]
            clock.run(module.kind, known[id(each)][which], times)
        for span, times in clock.done().items():
            spans[span] += times * (count if which < 2 else 1)
    _add_regrouping(search, program, moved)
    return RatioProblem(spans, moved, kinds, _memory(search, program, rates, shares))


class _LinearClock:
    """Adds up what members compute between moves, as `WaitingClock` does, for any ratios."""

    def __init__(self, kinds: int, members: int):
        self._fixed, self._shared = np.zeros(members), np.zeros((kinds, members))
        self._spans: Counter[LinearSpan] = Counter()

    def run(self, kind: int, spans: Sequence[_FixedAndShared], times: int) -> None:
        """A module of a kind, in all ratios, a number of times."""
        first, *rest = spans
        before = self._spans
        for time in range(min(times, 2)):
            before = self._spans.copy()
            self._add(kind, first, times - 1 if time and not rest else 1)
            for span in rest:
                self._close()
                self._add(kind, span)
        if times > 2 and rest:
            # From the second time on, each adds the same.
            for span, count in (self._spans - before).items():
                self._spans[span] += (times - 2) * count

    def done(self) -> Counter[LinearSpan]:
        """All spans, and how often each is computed."""
        self._close()
        return self._spans

    def _add(self, kind: int, span: _FixedAndShared, times: int = 1) -> None:
        self._fixed = self._fixed + times * span.fixed
        self._shared = self._shared.copy()
        self._shared[kind] += times * span.shared

    def _close(self) -> None:
        shared = tuple(map(tuple, self._shared.tolist()))
        self._spans[LinearSpan(tuple(self._fixed.tolist()), shared)] += 1
        self._fixed, self._shared = np.zeros_like(self._fixed), np.zeros_like(self._shared)


def _moved_bytes(
    program: ModuleProgram, rates: Rates, shares: FloatArray, num_microbatches: int
) -> dict[MovedBytes, float]:
    """What a module's moves carry in a step, but sums that all get whole: they have no ratios."""
    found: dict[MovedBytes, float] = {}
    by_even = rates.go_by_even_parts(program.charged_moves, shares).tolist()
    for each, goes in zip(program.moves, by_even, strict=True):
        move = each.move
        if move.form != SUM:
            key = MovedBytes(move.form, program.kind, program.kind, goes)
            times = 1 if move.once else num_microbatches
            found[key] = found.get(key, 0.0) + times * move.num_bytes
    return found


def _memory(
    search: ChainSearch, program: ChainProgram, rates: Rates, shares: Sequence[FloatArray]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Bytes that members hold whatever their part, those of everything by kind, and limits."""
    where = search.chain, program.modules, rates
    nothing = [np.zeros_like(each) for each in shares]
    fixed = sum(held_bytes(*where, nothing, search.state_bytes))
    shared = []
    for kind in range(len(shares)):
        every = [np.ones_like(each) if k == kind else nothing[k] for k, each in enumerate(shares)]
        shared.append(sum(held_bytes(*where, every, search.state_bytes)) - fixed)
    return np.asarray(fixed), np.array(shared), _limits(rates)


class _FixedAndShared(NamedTuple):
    """What members compute between two moves: whatever their part, and of everything."""

    fixed: FloatArray
    shared: FloatArray


def _linear_spans(
    program: ModuleProgram, rates: Rates, shares: FloatArray, state_bytes: float
) -> tuple[list[_FixedAndShared], ...]:
    """What members compute between moves, forward, backward and in the update."""
    nothing = spans_of(program, rates, np.zeros_like(shares), state_bytes)
    everything = spans_of(program, rates, np.ones_like(shares), state_bytes)
    return tuple(
        [
            _FixedAndShared(a.seconds, b.seconds - a.seconds)
            for a, b in zip(none, every, strict=True)
        ]
        for none, every in zip(nothing, everything, strict=True)
    )


def _add_regrouping(
    search: ChainSearch, program: ChainProgram, moved: dict[MovedBytes, float]
) -> None:
    """What is divided at the edges between modules of unlike kinds."""
    modules = search.chain.modules
    for place in range(1, len(modules)):
        before, after = modules[place - 1].kind, modules[place].kind
        if before == after:
            continue
        each = program.modules[place]
        for value, layout in each.first_edge:
            if layout >= 0:
                size = each.trace.num_bytes[value]
                key = MovedBytes(REGROUP, before, after)
                moved[key] = moved.get(key, 0.0) + search.num_microbatches * size
