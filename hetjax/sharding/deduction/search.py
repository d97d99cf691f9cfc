"""The search of deduction: equation by equation, with the cheapest reshards where some are missing.

Without mending there is one hypothesis of how values lie. With it several are kept side by side,
one for each way in which the values lie that are needed later, and of these the one that has moved
the fewest bytes; at the end the cheapest is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.sharding.deduction.annotated_program import (
    AnnotatedProgram,
    Mend,
    Move,
    Union,
    union_of,
)
from hetjax.sharding.deduction.assembling import EquationDone, MoveDone, assembled
from hetjax.sharding.deduction.bottom_tier import ELSEWHERE, OperandError
from hetjax.sharding.deduction.choices import Choices
from hetjax.sharding.deduction.computing import Annotations, Computed
from hetjax.sharding.deduction.evaluation import holds_jaxprs
from hetjax.sharding.deduction.flat_program import FlatEquation, FlatProgram, flat_program
from hetjax.sharding.deduction.hypothesis import MOST_HYPOTHESES, Hypothesis, worth_keeping
from hetjax.sharding.deduction.numbered_layouts import NumberedLayouts
from hetjax.sharding.deduction.origins import Origins
from hetjax.sharding.deduction.refusing import refuse
from hetjax.sharding.deduction.reshard import RESHARD, Resharding
from hetjax.sharding.deduction.top_tier import WHOLE, cotangent_of, sized, top_tier_of
from hetjax.sharding.deduction.trials import Trials, replaced

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


def deduce_program(
    program: _compat.ClosedJaxpr,
    annotations: Annotations,
    settings: Settings,
    origins: Origins | None = None,
) -> AnnotatedProgram:
    """Deduce a program.

    Args:
        program: the program.
        annotations: how its inputs lie.
        settings: what is asked for.
        origins: for a body, how operands of reshards around it lay.

    Returns:
        The annotated program.
    """
    return _ProgramSearch(
        flat_program(program), annotations, settings, origins or Origins()
    ).found()


class _ProgramSearch:
    """Walks over one program; each jaxpr inside an equation has a search of its own."""

    def __init__(
        self, flat: FlatProgram, annotations: Annotations, settings: Settings, origins: Origins
    ):
        self._flat, self._settings, self._origins = flat, settings, origins
        self._layouts = NumberedLayouts(settings.message_bytes)
        self._trials = Trials(flat, self._layouts, self._body, sums_stay=settings.sums_stay)
        self._choices = Choices(
            flat, annotations, self._layouts, self._trials, origins, settings.message_bytes
        )
        number = self._layouts.number
        self._given = {v: (number(a),) for v, a in zip(flat.inputs, annotations, strict=True)}
        self._given |= {variable: (number(None),) for variable in flat.constants}
        # How variables were made; of several hypotheses the last, for messages about one alone.
        self._made = {variable: layout for variable, (layout,) in self._given.items()}
        self._fitting: set[Any] = set()
        self._lines: dict[int, str] = {}

    def found(self) -> AnnotatedProgram:
        hypotheses = [Hypothesis(self._given, self._origins)]
        for equation, unneeded in zip(self._flat.equations, self._flat.last_uses(), strict=True):
            hypotheses = self._after(hypotheses, equation, unneeded)
        best = min(hypotheses, key=lambda hypothesis: hypothesis.num_bytes)
        self._origins.take_over(best.origins)
        return assembled(self._flat, self._layouts.annotations, self._given, best.done, best.held)

    @property
    def _is_searched(self) -> bool:
        """Whether several hypotheses are kept: where values may move among submeshes."""
        settings, known = self._settings, self._layouts.annotations
        several = any(a is not None and len(a.subgroups) > 1 for a in known)
        return settings.mend and settings.body_of is None and several

    def _after(
        self, hypotheses: Sequence[Hypothesis], flat: FlatEquation, unneeded: set[int]
    ) -> list[Hypothesis]:
        """The hypotheses after an equation, the cheapest for each way in which values lie."""
        found: dict[Any, Hypothesis] = {}
        failure: InputError | None = None
        for hypothesis in hypotheses:
            most = worth_keeping(found.values())
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
        self, before: Hypothesis, flat: FlatEquation, most: float
    ) -> Iterator[Hypothesis]:
        """The hypotheses after one that move no more bytes than are worth keeping."""
        if flat.equation.primitive is RESHARD:
            yield self._resharded(before, flat)
            return
        found = False
        if self._is_searched and not holds_jaxprs(flat.equation):
            for vector in self._choices.of(flat, before.held):
                found = True
                if before.num_bytes + self._bytes_to_bring(before, flat, vector) <= most:
                    yield self._brought(before, flat, vector)
        if not found:
            yield self._settled(before, flat, before.as_made(flat))

    def _bytes_to_bring(
        self, before: Hypothesis, flat: FlatEquation, vector: tuple[int, ...]
    ) -> int:
        """How many bytes it moves to bring the operands to lie in some way."""
        wanted = dict.fromkeys(zip(flat.operands, vector, strict=True))
        return sum(
            min(self._bytes_moved(variable, each, layout) for each in before.held[variable])
            for variable, layout in wanted
            if layout not in before.held[variable]
        )

    def _brought(
        self, before: Hypothesis, flat: FlatEquation, vector: tuple[int, ...]
    ) -> Hypothesis:
        """Bring the operands to lie in some way, and compute the equation."""
        after, now = before, self._aligned(flat, before.as_made(flat))
        problem, _ = self._trials.of(flat, now, self._origins)
        for place, (variable, layout) in enumerate(zip(flat.operands, vector, strict=True)):
            if layout in after.held[variable]:
                continue
            source = min(
                after.held[variable],
                key=lambda each: self._bytes_moved(variable, each, layout),
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
        self, before: Hypothesis, flat: FlatEquation, layouts: tuple[int, ...]
    ) -> Hypothesis:
        """Compute an equation, where that is asked for with reshards of its operands one by one."""
        after = before
        for _ in range(_MOST_RESHARDS):
            aligned = self._aligned(flat, layouts)
            found, origins = self._trials.of(flat, aligned, before.origins)
            if not isinstance(found, OperandError):
                after = self._with_moves(after, flat, layouts, aligned, None)
                return replace(self._with_results(after, flat, aligned), origins=origins)
            problem = found
            if problem.operand == ELSEWHERE:
                if self._settings.body_of is not None:
                    raise problem.at(problem.place)
                problem = self._outside(flat, aligned, problem)
            mended = self._layouts.number(self._choices.mended(flat, aligned, problem))
            if not self._is_mended(flat, problem):
                self._refuse(flat, aligned, problem, mended)
            after = self._with_moves(after, flat, layouts, aligned, None)
            layouts = replaced(aligned, problem.operand, mended)
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
        before: Hypothesis,
        flat: FlatEquation,
        layouts: tuple[int, ...],
        wanted: tuple[int, ...],
        problem: OperandError | None,
    ) -> Hypothesis:
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

    def _refuse(
        self, flat: FlatEquation, layouts: tuple[int, ...], problem: OperandError, mended: int
    ) -> NoReturn:
        held = list(self._layouts.held(layouts))
        destination = self._layouts[mended]
        assert destination is not None
        made = {variable: self._layouts[number] for variable, number in self._made.items()}
        refuse(self._flat, flat, held, problem, destination, made)

    def _body(
        self,
        union: Union,
        program: _compat.ClosedJaxpr,
        annotations: Annotations,
        origins: Origins,
    ) -> AnnotatedProgram:
        settings = replace(self._settings, body_of=union, mend=self._settings.mend_bodies)
        return deduce_program(program, annotations, settings, origins)

    def _aligned(self, flat: FlatEquation, layouts: tuple[int, ...]) -> tuple[int, ...]:
        return self._layouts.aligned(self._flat.operand_shapes(flat), layouts)

    def _bytes_moved(self, variable: int, source: int, destination: int) -> int:
        """What a move costs that is known to be possible, or to be refused where it is made."""
        return self._layouts.bytes_moved(self._flat.shapes[variable], source, destination) or 0

    def _with_results(
        self, before: Hypothesis, flat: FlatEquation, layouts: tuple[int, ...]
    ) -> Hypothesis:
        """A hypothesis after an equation that can be computed."""
        found, _ = self._trials.of(flat, layouts, before.origins)
        assert isinstance(found, Computed)
        results = tuple(map(self._layouts.number, found.results))
        made = {v: (number,) for v, number in zip(flat.results, results, strict=True)}
        self._made.update(zip(flat.results, results, strict=True))
        done = before.done, EquationDone(flat, layouts, found.node, results)
        return before.holding(made, done, before.num_bytes)

    def _moved(self, before: Hypothesis, moved: MoveDone) -> Hypothesis:
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
            num_bytes += self._bytes_moved(moved.variable, moved.source, moved.destination)
        done = before.done, moved
        return before.holding({moved.result: held}, done, num_bytes)

    def _resharded(self, before: Hypothesis, flat: FlatEquation) -> Hypothesis:
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
        number = made if destination is None else self._layouts.number(destination)
        self._made[result] = number
        source = number if number in copies else made
        if self._is_searched:
            source = min(copies, key=lambda each: self._bytes_moved(variable, each, number))
        if source != number:
            moved = MoveDone(variable, source, result, number, is_early=resharding.is_early)
            return self._moved(after, moved)
        done = before.done, MoveDone(variable, source, result, number)
        return after.holding({result: (number,)}, done, after.num_bytes)
