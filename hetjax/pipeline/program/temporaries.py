"""What a program holds beside its arguments and results while it runs, counted from its steps."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hetjax import _compat
from hetjax.pipeline.program.costs import REPEATABLE, is_expensive, is_heavy
from hetjax.pipeline.program.fences import fenced_values
from hetjax.pipeline.program.pieces import pieces_of, where_they_belong
from hetjax.pipeline.program.step_program import StepProgram
from hetjax.pipeline.program.traced_program import Step, num_bytes, operand_value
from hetjax.sharding.attention.work import attention_bytes
from hetjax.sharding.cross_entropy.work import cross_entropy_work

_TRANSCENDENTAL = frozenset("cos erf exp exp2 expm1 log log1p logistic pow rsqrt sin tanh".split())
"""Elementwise functions that XLA does not compute twice."""


@dataclass(frozen=True)
class _Line:
    """A line of a program.

    Args:
        reads: the values that it reads.
        makes: those that it makes.
        is_stored: whether they are; what is not is computed again wherever it is read.
        inside: the most bytes that the programs inside it hold.
    """

    reads: tuple[Hashable, ...]
    makes: tuple[Hashable, ...]
    is_stored: bool
    inside: int


class HeldLine(NamedTuple):
    """What is held while a line of a program runs.

    Args:
        step: the line.
        values: what has been made and is still needed, what the line makes among it.
        inside: the most bytes that the line holds by itself, were all of it on one device.
    """

    step: Step
    values: frozenset[int]
    inside: int


def temporary_bytes(program: StepProgram) -> int:
    """The most bytes that a program holds at once, beside its arguments and results.

    Args:
        program: the program.

    Returns:
        Bytes, were all of it on one device; see `Temporaries`.
    """
    return Temporaries(program).most_bytes()


def temporary_bytes_on_cpu(program: StepProgram) -> int:
    """The same of a program that is compiled for CPUs: piece by piece, each breadth first.

    Args:
        program: the program.

    Returns:
        Bytes, were all of it on one device; see `hetjax.pipeline.program.pieces.pieces_of`.
    """
    pieces = pieces_of(program)
    if not pieces:
        return Temporaries(program, on_cpu=True).most_bytes()
    known: dict[Hashable, int] = {}
    for each in pieces:
        if each.key not in known:
            known[each.key] = Temporaries(each.program, on_cpu=True).most_bytes()
    spans: list[_Span] = [
        (frozenset(each.reads), tuple(v for v in each.makes if isinstance(v, int)), known[each.key])
        for each in pieces
    ]
    apart = {*itertools.chain(*program.arguments), *itertools.chain(*program.outputs)}
    return _most(spans, apart, lambda value: num_bytes(program.avals[value]))


class Temporaries:
    """What a program holds beside its arguments and results.

    Lines run in their order. Elementwise arithmetic is fused into what reads it, and holds nothing
    of its own, but keeps what it reads. A gradient is added to its sum as soon as it is made.

    XLA's compiler for CPUs puts lines into another order, so that many can run at once: each as
    soon as what it reads is there. What is made of arguments alone is then there from the start.
    It also stores transcendental functions that several lines read.

    Args:
        program: the program.
        on_cpu: whether it is compiled for CPUs.
    """

    def __init__(self, program: StepProgram, *, on_cpu: bool = False):
        self._program, self._on_cpu = program, on_cpu
        outputs = list(itertools.chain(*program.outputs))
        wanted = [*outputs, *(program.summands or ())]
        stored = fenced_values(program.steps, wanted, program.avals) | _factors(program.steps)
        stored |= _shared_functions(program.steps) if on_cpu else frozenset[int]()
        steps = where_they_belong(program.steps)
        lines = [_line_of(step, stored, on_cpu=on_cpu) for step in steps]
        self._apart = {*itertools.chain(*program.arguments), *map(operand_value, outputs)}
        spans = _spans(lines, self._apart)
        order = _breadth_first(spans) if on_cpu else range(len(spans))
        self._spans = [(steps[place], spans[place]) for place in order]

    def lines(self) -> tuple[HeldLine, ...]:
        """What is held while each line runs, in their order."""
        spans = [span for _, span in self._spans]
        last = _last_uses(spans)
        alive, found = set[Any](), []
        for place, (step, (read, made, inside)) in enumerate(self._spans):
            alive |= {*made} - self._apart
            found.append(HeldLine(step, frozenset(alive), inside))
            alive -= {value for value in (*read, *made) if last[value] == place}
        return tuple(found)

    def untiled_bytes(self) -> int:
        """The same as `most_bytes`, without the tiles of attention, which are divided by heads."""

        def inside(step: Step) -> int | None:
            held = step.equation and attention_bytes(step.equation, on_cpu=self._on_cpu)
            return 0 if held else None

        return self.most_bytes(inside=inside)

    def most_bytes(
        self,
        size: Callable[[int], int] | None = None,
        inside: Callable[[Step], int | None] | None = None,
    ) -> int:
        """The most bytes that are held at once.

        Args:
            size: the bytes of a value, by its number; None for those of the whole value.
            inside: the most bytes that a step holds by itself; None where that is not told.
        """
        whole = size or (lambda value: num_bytes(self._program.avals[value]))
        told = (None if inside is None else inside(step) for step, _ in self._spans)
        spans = [
            span if known is None else (*span[:2], known)
            for (_, span), known in zip(self._spans, told, strict=True)
        ]
        return _most(spans, self._apart, whole)


def _factors(steps: Iterable[Step]) -> frozenset[int]:
    """What products read: they take it from memory, whatever makes it."""
    return frozenset(value for step in steps if is_heavy(step) for value in step.values())


def _shared_functions(steps: Sequence[Step]) -> frozenset[int]:
    """Results of transcendental functions that several steps read."""
    reads = Counter(value for step in steps for value in {*step.values()})
    functions = (step for step in steps if step.name in _TRANSCENDENTAL)
    return frozenset(v for step in functions for v in step.outputs if reads[v] > 1)


def _line_of(step: Step, fenced: Collection[int], *, on_cpu: bool) -> _Line:
    inside = 0 if step.equation is None else _inside(step.equation)
    if step.equation is not None:
        inside = max(inside, attention_bytes(step.equation, on_cpu=on_cpu) or 0)
    is_stored = is_expensive(step) or any(output in fenced for output in step.outputs)
    return _Line(tuple(step.values()), tuple(step.outputs), is_stored, inside * is_stored)


def _inside(equation: _compat.JaxprEqn) -> int:
    """The most bytes that an equation holds beside its operands and results."""
    losses = cross_entropy_work(equation)
    if losses is not None:
        return losses.memory
    return max(map(_most_of_jaxpr, _compat.inner_jaxprs(equation)), default=0)


def _most_of_jaxpr(jaxpr: _compat.Jaxpr) -> int:
    def values(variables: Iterable[Any]) -> tuple[Hashable, ...]:
        return tuple(each for each in variables if not isinstance(each, _compat.Literal))

    lines = [
        _Line(
            values(equation.invars),
            values(equation.outvars),
            equation.primitive.name not in REPEATABLE,
            _inside(equation),
        )
        for equation in jaxpr.eqns
    ]
    apart = {*values(jaxpr.invars), *values(jaxpr.constvars), *values(jaxpr.outvars)}
    return _most(_spans(lines, apart), apart, lambda value: num_bytes(value.aval))


_Span = tuple[frozenset[Hashable], tuple[Hashable, ...], int]
"""The values that a line reads from memory, those that it writes, and what is held inside it."""


def _spans(lines: Sequence[_Line], apart: set[Any]) -> list[_Span]:
    """What lines read and write, without what is fused."""
    sources: dict[Hashable, frozenset[Hashable]] = {}
    spans: list[_Span] = []
    for line in lines:
        read = frozenset[Hashable]().union(*(sources.get(v, frozenset((v,))) for v in line.reads))
        stored = tuple(value for value in line.makes if line.is_stored or value in apart)
        sources.update(dict.fromkeys(line.makes, read))
        sources.update((value, frozenset((value,))) for value in stored)
        spans.append((read, stored, line.inside))
    return spans


def _breadth_first(spans: Sequence[_Span]) -> list[int]:
    """The places of lines, each as soon as what it reads is there; without what is fused."""
    maker = {value: place for place, (_, made, _) in enumerate(spans) for value in made}
    sources = [{maker[value] for value in read if value in maker} for read, _, _ in spans]
    readers: dict[int, list[int]] = {}
    for place, (_, made, _) in enumerate(spans):
        for source in sources[place] if made else ():
            readers.setdefault(source, []).append(place)
    missing = list(map(len, sources))
    order = [place for place, (_, made, _) in enumerate(spans) if made and not missing[place]]
    # The list grows while it is walked.
    for place in order:
        for reader in readers.get(place, ()):
            missing[reader] -= 1
            if not missing[reader]:
                order.append(reader)
    return order


def _last_uses(spans: Sequence[_Span]) -> dict[Hashable, int]:
    """The last line that reads or writes each value."""
    return {value: place for place, (read, made, _) in enumerate(spans) for value in (*read, *made)}


def _most(spans: Sequence[_Span], apart: set[Any], size: Callable[[Any], int]) -> int:
    """The most that values hold at once, without those that are counted apart."""
    last = _last_uses(spans)
    alive = most = 0
    for place, (read, made, inside) in enumerate(spans):
        alive += sum(size(value) for value in made if value not in apart)
        most = max(most, alive + inside)
        ended = {value for value in (*read, *made) if last[value] == place} - apart
        alive -= sum(map(size, ended))
    return most
