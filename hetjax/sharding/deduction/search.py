"""The search of deduction: equation by equation, with the cheapest reshards where some are missing.

Without mending there is one hypothesis of how values lie. With it several are kept side by side,
one for each way in which the values lie that are needed later, and of these the one that has moved
the fewest bytes; at the end the cheapest is taken.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.deduction.annotated_program import (
    AnnotatedProgram,
    Mend,
    Move,
    Union,
    elements_between,
    union_of,
)
from hetjax.sharding.deduction.assembling import Chain, EquationDone, MoveDone, assembled
from hetjax.sharding.deduction.bottom_tier import ELSEWHERE, OperandError
from hetjax.sharding.deduction.computing import (
    Annotations,
    Computed,
    EquationLayouts,
    kind_of,
)
from hetjax.sharding.deduction.evaluation import holds_jaxprs
from hetjax.sharding.deduction.flat_program import FlatEquation, FlatProgram, flat_program
from hetjax.sharding.deduction.mending import (
    Proposal,
    Widths,
    mended_operand,
    proposals,
    widths_of,
)
from hetjax.sharding.deduction.origins import Origins
from hetjax.sharding.deduction.refinement import refined_together
from hetjax.sharding.deduction.refusing import refuse
from hetjax.sharding.deduction.remembering import Remembered
from hetjax.sharding.deduction.reshard import RESHARD, Resharding
from hetjax.sharding.deduction.signatures import signature_of
from hetjax.sharding.deduction.top_tier import (
    WHOLE,
    cotangent_of,
    indivisible,
    sized,
    top_tier_of,
    without_idle_axes,
)

MOST_HYPOTHESES = 24
"""How many hypotheses are kept after an equation."""

MOST_CHOICES = 8
"""How many ways to compute an equation are tried for each way in which its operands lie."""

MOST_PROPOSALS = 24
"""How many ways in which operands could lie are tried, those first by which devices lack little."""

MOST_REMEMBERED = 2**15
"""How many ways to compute an equation are remembered for other programs, which mostly have the
same equations: another form of the program, its other stages, the same one built again."""

_MOST_RESHARDS = 200
"""Of the operands of one equation: each takes a few for each of its submeshes."""


@dataclass(frozen=True)
class Settings:
    """What deduction is asked for; see `hetjax.sharding.deduce`.

    Args:
        strategy: which annotation of each reshard is meant.
        symbols: numbers for symbols.
        mend: whether to put in the reshards that are missing.
        mend_bodies: whether to do so inside scans, conditionals and loops.
        mend_scalars: whether to do so for values without dimensions, where nothing else is mended.
        sums_stay: whether all sums over divided dimensions stay partial.
        message_bytes: what a move costs beside its bytes.
        body_of: the union of the equation whose body is deduced; None for a whole program.
    """

    strategy: int
    symbols: Mapping[str, int]
    mend: bool
    mend_bodies: bool
    mend_scalars: bool
    sums_stay: bool
    message_bytes: int = 0
    body_of: Union | None = None


@dataclass(frozen=True, eq=False)
class _Hypothesis:
    """One way in which the values lie so far.

    Args:
        held: by variable, the numbers of the layouts that it has been brought to; the first is how
            it was made.
        origins: how operands of reshards lay.
        done: what is done.
        num_bytes: how many bytes that moves.
        mark: tells apart what is held: the hashes of its items, joined bit by bit.
    """

    held: Mapping[int, tuple[int, ...]]
    origins: Origins
    done: Chain = None
    num_bytes: int = 0
    mark: int = 0

    def holding(
        self, changed: Mapping[int, tuple[int, ...]], done: Chain, num_bytes: int
    ) -> _Hypothesis:
        """The next one, in which some variables are made, or brought to other layouts."""
        mark = self.mark
        for variable, layouts in changed.items():
            if variable in self.held:
                mark ^= hash((variable, self.held[variable]))
            mark ^= hash((variable, layouts))
        return _Hypothesis({**self.held, **changed}, self.origins, done, num_bytes, mark)

    def without(self, unneeded: Set[int]) -> _Hypothesis:
        """The same without variables that nothing needs any more."""
        held = {v: layouts for v, layouts in self.held.items() if v not in unneeded}
        return replace(self, held=held, mark=self.mark_without(unneeded))

    def mark_without(self, unneeded: Set[int]) -> int:
        """The mark of `without`."""
        mark = self.mark
        for variable in unneeded:
            if variable in self.held:
                mark ^= hash((variable, self.held[variable]))
        return mark


_NUMBERS = itertools.count()
_KINDS = Remembered[Any, int](MOST_REMEMBERED)
_COMPUTED = Remembered[Any, Computed | OperandError](MOST_REMEMBERED)
_CHOICES = Remembered[Any, tuple[Proposal, ...]](MOST_REMEMBERED)


class Deducer:
    """Walks over one program; each jaxpr inside an equation has a deducer of its own.

    Args:
        settings: what is asked for.
        origins: for a body, how operands of reshards around it lay.
    """

    def __init__(self, settings: Settings, origins: Origins | None = None):
        self._settings, self._origins = settings, origins or Origins()
        self._layouts: list[HSharding | None] = []
        self._numbers: dict[HSharding | None, int] = {}
        self._computing = EquationLayouts(self._body, sums_stay=settings.sums_stay)
        self._tried: dict[Any, tuple[Computed | OperandError, Origins]] = {}
        self._kind_of: dict[int, int] = {}
        self._fitting: set[Any] = set()
        self._lines: dict[int, str] = {}
        self._choices: dict[Any, tuple[tuple[int, ...], ...]] = {}
        self._proposals: dict[Any, tuple[Proposal, ...]] = {}
        self._bytes: dict[Any, int | None] = {}
        # How variables were made; of several hypotheses the last, for messages about one alone.
        self._made: dict[int, int] = {}
        self._body_origins = self._origins
        self._flat: FlatProgram
        self._widths: Widths = {}
        self._shared: Hashable = ()

    def program(self, program: _compat.ClosedJaxpr, annotations: Annotations) -> AnnotatedProgram:
        """Deduce a program.

        Args:
            program: the program.
            annotations: how its inputs lie.

        Returns:
            The annotated program.
        """
        self._flat = flat = flat_program(program)
        shapes = [flat.shapes[variable] for variable in flat.inputs]
        self._widths = widths_of(annotations, shapes)
        self._shared = tuple(sorted(self._widths.items()))
        held = {v: (self._number(a),) for v, a in zip(flat.inputs, annotations, strict=True)}
        held |= {variable: (self._number(None),) for variable in flat.constants}
        self._made.update((variable, layout) for variable, (layout,) in held.items())
        hypotheses = [_Hypothesis(held, self._origins)]
        for equation, unneeded in zip(flat.equations, flat.last_uses(), strict=True):
            hypotheses = self._after(hypotheses, equation, unneeded)
        best = min(hypotheses, key=lambda hypothesis: hypothesis.num_bytes)
        self._origins.take_over(best.origins)
        return assembled(flat, self._layouts, held, best.done, best.held)

    @property
    def _is_searched(self) -> bool:
        """Whether several hypotheses are kept: where values may move among submeshes."""
        settings = self._settings
        several = any(a is not None and len(a.subgroups) > 1 for a in self._layouts)
        return settings.mend and settings.body_of is None and several

    def _after(
        self, hypotheses: Sequence[_Hypothesis], flat: FlatEquation, unneeded: set[int]
    ) -> list[_Hypothesis]:
        """The hypotheses after an equation, the cheapest for each way in which values lie."""
        found: dict[Any, _Hypothesis] = {}
        failure: InputError | None = None
        for hypothesis in hypotheses:
            most = _worth_keeping(found.values())
            try:
                for after in self._successors(hypothesis, flat, most):
                    # One of few who lie alike is kept: two that are taken for alike cost bytes.
                    key = after.mark_without(unneeded), after.origins.key()
                    if key not in found or after.num_bytes < found[key].num_bytes:
                        found[key] = after
            except InputError as error:
                failure = error
        if not found:
            assert failure is not None, "an equation is computed, or refused"
            raise failure from None
        kept = sorted(found.values(), key=lambda h: h.num_bytes)[:MOST_HYPOTHESES]
        return [each.without(unneeded) for each in kept]

    def _successors(
        self, before: _Hypothesis, flat: FlatEquation, most: float
    ) -> Iterator[_Hypothesis]:
        """The hypotheses after one that move no more bytes than are worth keeping."""
        if flat.equation.primitive is RESHARD:
            yield self._resharded(before, flat)
            return
        found = False
        if self._is_searched and not holds_jaxprs(flat.equation):
            for vector in self._vectors(before, flat):
                found = True
                if before.num_bytes + self._bytes_to_bring(before, flat, vector) <= most:
                    yield self._brought(before, flat, vector)
        if not found:
            yield self._settled(before, flat, _as_made(before, flat))

    def _vectors(self, before: _Hypothesis, flat: FlatEquation) -> list[tuple[int, ...]]:
        """Ways in which the operands could lie, from the ways in which they do."""
        combinations = itertools.product(*(before.held[variable] for variable in flat.operands))
        found: dict[tuple[int, ...], None] = {}
        for layouts in itertools.islice(combinations, 4):
            found.update(dict.fromkeys(self._choices_from(flat, layouts)))
        return list(found)

    def _choices_from(
        self, flat: FlatEquation, layouts: tuple[int, ...]
    ) -> tuple[tuple[int, ...], ...]:
        """Ways to compute an equation, those first that move little; one for each result."""
        key = self._kind(flat), layouts
        if key not in self._choices:
            asked = self._asked(flat, layouts)
            known = _CHOICES.of(
                asked and (asked, self._shared, self._settings.message_bytes),
                lambda: tuple(map(self._held, self._chosen_from(flat, layouts))),
            )
            self._choices[key] = tuple(tuple(map(self._number, each)) for each in known)
        return self._choices[key]

    def _chosen_from(
        self, flat: FlatEquation, layouts: tuple[int, ...]
    ) -> Iterator[tuple[int, ...]]:
        plain = self._aligned(flat, layouts)
        found, _ = self._try(flat, plain, self._origins)
        if isinstance(found, OperandError):
            candidates = list(self._proposed(flat, layouts))
        elif self._grows(flat, plain):
            candidates = [plain, *self._proposed(flat, layouts)]
        else:
            candidates = [plain]
        costs = {vector: self._cost(flat, layouts, vector) for vector in candidates}
        chosen: dict[Any, tuple[int, ...]] = {}
        for vector in sorted(candidates, key=lambda vector: costs[vector]):
            found, _ = self._try(flat, vector, self._origins)
            assert isinstance(found, Computed)
            chosen.setdefault(found.results, vector)
        return itertools.islice(chosen.values(), MOST_CHOICES)

    def _grows(self, flat: FlatEquation, layouts: tuple[int, ...]) -> bool:
        """Whether a sum that is added up later would be larger: then it may be so before."""
        largest = max((self._flat.shapes[variable].size for variable in flat.results), default=0)
        held = zip(self._shapes(flat), (self._layouts[n] for n in layouts), strict=True)
        return any(a is not None and a.is_partial and s.size < largest for s, a in held)

    def _proposed(self, flat: FlatEquation, layouts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        shapes, equation = self._shapes(flat), flat.equation
        signature = signature_of(equation) or indivisible(equation)
        holds = holds_jaxprs(equation)
        # Of primitives with the same rule: all that is elementwise has one.
        key = signature.form, holds, layouts, tuple(shape.shape for shape in shapes)
        if key not in self._proposals:
            held = [self._layouts[number] for number in layouts]
            found = proposals(signature, shapes, held, self._widths, holds_jaxprs=holds)
            self._proposals[key] = tuple(itertools.islice(found, MOST_PROPOSALS))
        for proposal in self._proposals[key]:
            vector = self._taken(flat, tuple(map(self._number, proposal)))
            if vector is not None and self._is_possible(flat, layouts, vector):
                yield vector

    def _taken(self, flat: FlatEquation, vector: tuple[int, ...]) -> tuple[int, ...] | None:
        """How operands lie at last that shall lie in some way; None where that does not do."""
        for _ in range(2 * len(vector) + 1):
            problem, _ = self._try(flat, vector, self._origins)
            if not isinstance(problem, OperandError):
                return vector
            if problem.spec is None or problem.operand == ELSEWHERE:
                return None
            mended = self._number(self._mended(flat, vector, problem))
            if mended == vector[problem.operand]:
                return None
            vector = _with(vector, problem.operand, mended)
        return None

    def _is_possible(
        self, flat: FlatEquation, before: tuple[int, ...], after: tuple[int, ...]
    ) -> bool:
        triples = zip(flat.operands, before, after, strict=True)
        return all(self._bytes_moved(*each) is not None for each in triples)

    def _cost(self, flat: FlatEquation, before: tuple[int, ...], after: tuple[int, ...]) -> int:
        triples = zip(flat.operands, before, after, strict=True)
        return sum(self._bytes_moved(*each) or 0 for each in triples)

    def _bytes_moved(self, variable: int, source: int, destination: int) -> int | None:
        """What a move costs, in bytes; None where it is impossible."""
        if source == destination:
            return 0
        shape = self._flat.shapes[variable]
        key = source, destination, shape.shape, shape.dtype
        if key not in self._bytes:
            pair = self._layouts[source], self._layouts[destination]
            elements = elements_between(*pair, shape.shape)
            cost = None if elements is None else elements * shape.dtype.itemsize
            if cost and pair[1] is not None and not Move(0, 0, pair[0], pair[1]).is_inside:
                cost += self._settings.message_bytes
            self._bytes[key] = cost
        return self._bytes[key]

    def _bytes_to_bring(
        self, before: _Hypothesis, flat: FlatEquation, vector: tuple[int, ...]
    ) -> int:
        """How many bytes it moves to bring the operands to lie in some way."""
        wanted = dict.fromkeys(zip(flat.operands, vector, strict=True))
        return sum(
            min(self._bytes_moved(variable, each, layout) or 0 for each in before.held[variable])
            for variable, layout in wanted
            if layout not in before.held[variable]
        )

    def _brought(
        self, before: _Hypothesis, flat: FlatEquation, vector: tuple[int, ...]
    ) -> _Hypothesis:
        """Bring the operands to lie in some way, and compute the equation."""
        after, now = before, self._aligned(flat, _as_made(before, flat))
        problem, _ = self._try(flat, now, self._origins)
        for place, (variable, layout) in enumerate(zip(flat.operands, vector, strict=True)):
            if layout in after.held[variable]:
                continue
            source = min(
                after.held[variable],
                key=lambda each: self._bytes_moved(variable, each, layout) or 0,
            )
            at_fault = isinstance(problem, OperandError) and problem.operand == place
            reason = problem.reason if isinstance(problem, OperandError) and at_fault else ""
            is_mended = vector != now
            mend = self._mend(flat, place, source, layout, reason) if is_mended else None
            after = self._moved(after, MoveDone(variable, source, variable, layout, mend))
        return self._with_results(after, flat, vector)

    def _mend(
        self, flat: FlatEquation, place: int, source: int, destination: int, reason: str
    ) -> Mend | None:
        """What is told of a move that is put in; of one from everywhere, nothing."""
        before, after = self._layouts[source], self._layouts[destination]
        if before is None or after is None:
            return None
        if flat.index not in self._lines:
            self._lines[flat.index] = _compat.source_line(flat.equation)
        line, shape = self._lines[flat.index], self._flat.shapes[flat.operands[place]]
        return Mend(flat.equation.primitive.name, line, place, reason, before, after, shape)

    def _settled(
        self, before: _Hypothesis, flat: FlatEquation, layouts: tuple[int, ...]
    ) -> _Hypothesis:
        """Compute an equation, where that is asked for with reshards of its operands one by one."""
        after = before
        for _ in range(_MOST_RESHARDS):
            aligned = self._aligned(flat, layouts)
            found, origins = self._try(flat, aligned, before.origins)
            if not isinstance(found, OperandError):
                after = self._with_moves(after, flat, layouts, aligned, None)
                return replace(self._with_results(after, flat, aligned), origins=origins)
            problem = found
            if problem.operand == ELSEWHERE:
                if self._settings.body_of is not None:
                    raise problem.at(problem.place)
                problem = self._outside(flat, aligned, problem)
            mended = self._number(self._mended(flat, aligned, problem))
            if not self._is_mended(flat, problem):
                self._refuse(flat, aligned, problem, mended)
            after = self._with_moves(after, flat, layouts, aligned, None)
            layouts = _with(aligned, problem.operand, mended)
            after = self._with_moves(after, flat, aligned, layouts, problem)
        raise InputError(
            f"{flat.equation.primitive.name} at {_compat.source_line(flat.equation)}: reshards of "
            f"its operands do not come to an end; bring them to one union with hetjax.reshard"
        )

    def _is_mended(self, flat: FlatEquation, problem: OperandError) -> bool:
        is_scalar = not self._flat.shapes[flat.operands[problem.operand]].shape
        return self._settings.mend or (self._settings.mend_scalars and is_scalar)

    def _with_moves(
        self,
        before: _Hypothesis,
        flat: FlatEquation,
        layouts: tuple[int, ...],
        wanted: tuple[int, ...],
        problem: OperandError | None,
    ) -> _Hypothesis:
        after = before
        for place, variable in enumerate(flat.operands):
            source, destination = layouts[place], wanted[place]
            if source == destination or destination in after.held[variable]:
                continue
            mend = None
            if problem is not None:
                mend = self._mend(flat, place, source, destination, problem.reason)
            after = self._moved(after, MoveDone(variable, source, variable, destination, mend))
        return after

    def _outside(
        self, flat: FlatEquation, layouts: tuple[int, ...], problem: OperandError
    ) -> OperandError:
        """A problem inside a body, as one of the first operand that submeshes do not have whole."""
        for place, variable in enumerate(flat.operands):
            shape = self._flat.shapes[variable].shape
            if top_tier_of(self._layouts[layouts[place]], shape) != WHOLE:
                return OperandError(place, problem.reason)
        raise InputError(f"{problem.reason}, which a scan, a conditional or a loop cannot do")

    def _aligned(self, flat: FlatEquation, layouts: tuple[int, ...]) -> tuple[int, ...]:
        """The operands on one union, where each device has already what it needs for that."""
        held = {i: a for i, number in enumerate(layouts) if (a := self._layouts[number])}
        if len({union_of(annotation) for annotation in held.values()}) < 2:
            return layouts
        shapes = [self._flat.shapes[flat.operands[place]].shape for place in held]
        found = refined_together(list(held.values()), shapes)
        if found is None:
            return layouts
        aligned = dict(zip(held, map(self._number, found), strict=True))
        return tuple(aligned.get(place, number) for place, number in enumerate(layouts))

    def _mended(
        self, flat: FlatEquation, layouts: tuple[int, ...], problem: OperandError
    ) -> HSharding:
        held = [self._layouts[number] for number in layouts]
        return mended_operand(self._shapes(flat), held, problem)

    def _refuse(
        self, flat: FlatEquation, layouts: tuple[int, ...], problem: OperandError, mended: int
    ) -> NoReturn:
        held = [self._layouts[number] for number in layouts]
        destination = self._layouts[mended]
        assert destination is not None
        made = {variable: self._layouts[number] for variable, number in self._made.items()}
        refuse(self._flat, flat, held, problem, destination, made)

    def _shapes(self, flat: FlatEquation) -> list[Any]:
        return [self._flat.shapes[variable] for variable in flat.operands]

    def _number(self, annotation: HSharding | None) -> int:
        if annotation not in self._numbers:
            plain = annotation and without_idle_axes(annotation)
            if plain not in self._numbers:
                self._numbers[plain] = len(self._layouts)
                self._layouts.append(plain)
            self._numbers[annotation] = self._numbers[plain]
        return self._numbers[annotation]

    def _try(
        self, flat: FlatEquation, layouts: tuple[int, ...], origins: Origins
    ) -> tuple[Computed | OperandError, Origins]:
        """An equation computed as its operands lie, or what is wrong with that."""
        holds = holds_jaxprs(flat.equation)
        key = (flat.index, layouts, origins.key()) if holds else (self._kind(flat), layouts)
        if key not in self._tried:
            if holds:
                self._body_origins = Origins(origins)
                found = self._computed(flat, layouts)
                if isinstance(found, OperandError):
                    self._tried[key] = found, origins
                else:
                    self._body_origins.leave()
                    self._tried[key] = found, self._body_origins
            else:
                asked = self._asked(flat, layouts)
                self._tried[key] = (
                    _COMPUTED.of(asked, lambda: self._computed(flat, layouts)),
                    origins,
                )
        found, after = self._tried[key]
        return found, after if holds else origins

    def _computed(self, flat: FlatEquation, layouts: tuple[int, ...]) -> Computed | OperandError:
        try:
            return self._computing(flat.equation, self._shapes(flat), self._held(layouts))
        except OperandError as problem:
            # It is kept, which what it was raised through should not be.
            return problem.with_traceback(None)

    def _asked(self, flat: FlatEquation, layouts: tuple[int, ...]) -> Hashable:
        """What the ways to compute an equation depend on, in any program; None: it is alone."""
        kind = self._kind(flat)
        return None if kind < 0 else (kind, self._held(layouts), self._settings.sums_stay)

    def _held(self, layouts: tuple[int, ...]) -> tuple[HSharding | None, ...]:
        return tuple(self._layouts[number] for number in layouts)

    def _kind(self, flat: FlatEquation) -> int:
        """A number that equations share which compute alike: models repeat their blocks."""
        if flat.index not in self._kind_of:
            kind = kind_of(flat.equation)
            # What is like no other has a number here alone.
            number = -1 - flat.index if kind is None else _KINDS.of(kind, _NUMBERS.__next__)
            self._kind_of[flat.index] = number
        return self._kind_of[flat.index]

    def _body(
        self, union: Union, program: _compat.ClosedJaxpr, annotations: Annotations
    ) -> AnnotatedProgram:
        settings = replace(self._settings, body_of=union, mend=self._settings.mend_bodies)
        return Deducer(settings, self._body_origins.inside(program)).program(program, annotations)

    def _with_results(
        self, before: _Hypothesis, flat: FlatEquation, layouts: tuple[int, ...]
    ) -> _Hypothesis:
        """A hypothesis after an equation that can be computed."""
        found, _ = self._try(flat, layouts, before.origins)
        assert isinstance(found, Computed)
        results = tuple(map(self._number, found.results))
        made = {v: (number,) for v, number in zip(flat.results, results, strict=True)}
        self._made.update(zip(flat.results, results, strict=True))
        done = before.done, EquationDone(flat, layouts, found.node, results)
        return before.holding(made, done, before.num_bytes)

    def _moved(self, before: _Hypothesis, moved: MoveDone) -> _Hypothesis:
        """A hypothesis after a move."""
        source, destination = self._layouts[moved.source], self._layouts[moved.destination]
        assert destination is not None
        shape = self._flat.shapes[moved.variable].shape
        if (moved.destination, shape) not in self._fitting:
            destination.shards(shape)
            self._fitting.add((moved.destination, shape))
        body_of = self._settings.body_of
        if body_of is not None and not (
            Move(0, 0, source, destination).is_inside and union_of(destination) == body_of
        ):
            raise OperandError(ELSEWHERE, "inside, a value must come to other submeshes")
        held = (*before.held.get(moved.result, ()), moved.destination)
        num_bytes = before.num_bytes
        if self._is_searched:
            num_bytes += self._bytes_moved(moved.variable, moved.source, moved.destination) or 0
        done = before.done, moved
        return before.holding({moved.result: held}, done, num_bytes)

    def _resharded(self, before: _Hypothesis, flat: FlatEquation) -> _Hypothesis:
        resharding: Resharding = flat.equation.params["resharding"]
        (variable,), (result,) = flat.operands, flat.results
        made, *_ = copies = before.held[variable]
        origins = Origins(before.origins)
        if resharding.is_reverse:
            destination = origins.pop(resharding.number, flat.equation)
            destination = destination and cotangent_of(destination)
        else:
            origins.push(resharding.number, self._layouts[made])
            destination = resharding.annotation(self._settings.strategy)
            destination = destination.bind(self._settings.symbols)
            destination = sized(destination, self._flat.shapes[variable].shape)
        after = replace(before, origins=origins)
        number = made if destination is None else self._number(destination)
        self._made[result] = number
        source = number if number in copies else made
        if self._is_searched:
            source = min(copies, key=lambda each: self._bytes_moved(variable, each, number) or 0)
        if source != number:
            moved = MoveDone(variable, source, result, number, is_early=resharding.is_early)
            return self._moved(after, moved)
        done = before.done, MoveDone(variable, source, result, number)
        return after.holding({result: (number,)}, done, after.num_bytes)


def _worth_keeping(found: Collection[_Hypothesis]) -> float:
    """How many bytes a hypothesis may move that is among those that are kept."""
    if len(found) < MOST_HYPOTHESES:
        return math.inf
    return heapq.nsmallest(MOST_HYPOTHESES, (each.num_bytes for each in found))[-1]


def _as_made(hypothesis: _Hypothesis, flat: FlatEquation) -> tuple[int, ...]:
    """The layouts of an equation's operands, as these were made."""
    return tuple(hypothesis.held[variable][0] for variable in flat.operands)


def _with(layouts: tuple[int, ...], place: int, layout: int) -> tuple[int, ...]:
    return (*layouts[:place], layout, *layouts[place + 1 :])
