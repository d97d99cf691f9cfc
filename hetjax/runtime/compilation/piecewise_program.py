"""Programs compiled piece by piece: pieces that are alike are compiled once, and called in turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetjax.pipeline.program.pieces import Piece
from hetjax.pipeline.program.step_program import StepProgram
from hetjax.pipeline.program.traced_program import Operand, num_bytes
from hetjax.runtime.compilation.compiling import Argument

Compile = Callable[[Callable[..., Any], Sequence[Argument], Any], Any]
"""What compiles a function of sequences of arrays; see
`hetjax.runtime.compilation.compiling.compile_program`."""


@dataclass(frozen=True, eq=False)
class CompiledPiece:
    """A piece and what it is compiled to.

    Args:
        program: ``(values read, sums) -> (values made, sums)``.
        piece: the piece.
        dropped: the values that no later piece reads, and that are no outputs.
    """

    program: Any
    piece: Piece
    dropped: tuple[Operand, ...]


@dataclass(frozen=True)
class PiecewiseMemory:
    """The memory that a program takes beside its arguments and results.

    Args:
        temp_size_in_bytes: bytes of a device: at the piece where it is the most, what that needs by
            itself, and what earlier ones have made for later ones.
    """

    temp_size_in_bytes: int


class PiecewiseProgram:
    """A program that calls compiled pieces.

    Args:
        whole: the program.
        pieces: its pieces, compiled.
        shardings: of each value that a piece reads or makes.
        sums: shardings of the sums.

    Attributes:
        output_shardings: how its results lie, in their structure.
    """

    def __init__(
        self,
        whole: StepProgram,
        pieces: Sequence[CompiledPiece],
        shardings: Mapping[Operand, Any],
        sums: Sequence[Any],
    ):
        self._whole, self._pieces = whole, pieces
        found = [[shardings[operand] for operand in part] for part in whole.outputs]
        self.output_shardings = [*found, list(sums)] if whole.summands is not None else found
        self._shardings = shardings

    @property
    def num_compiled(self) -> int:
        """How many programs were compiled."""
        return len({id(each.program) for each in self._pieces})

    def __call__(self, *arrays: Sequence[Any]) -> list[list[Any]]:
        """Run it."""
        whole = self._whole
        given, sums = arrays, []
        if whole.summands is not None:
            *given, sums = arrays
        values: dict[Operand, Any] = dict(
            zip(itertools.chain(*whole.arguments), itertools.chain(*given), strict=True)
        )
        held, new = list(sums), [None] * len(whole.summands or ())
        for each in self._pieces:
            piece = each.piece
            own = [held[place] for place in piece.summands] if held else []
            made, added = each.program([values[value] for value in piece.reads], own)
            values.update(zip(piece.makes, made, strict=True))
            for place, array in zip(piece.summands, added, strict=True):
                new[place] = array
            for value in each.dropped:
                del values[value]
        returned = [[values[operand] for operand in part] for part in whole.outputs]
        return [*returned, new] if whole.summands is not None else returned

    def memory_analysis(self) -> PiecewiseMemory:
        """What it takes beside its arguments and results."""
        outputs = {*itertools.chain(*self._whole.outputs)}
        alive = most = 0
        for each in self._pieces:
            own = each.program.memory_analysis()
            most = max(most, alive + int(getattr(own, "temp_size_in_bytes", 0) or 0))
            alive += sum(self._bytes(v) for v in each.piece.makes if v not in outputs)
            most = max(most, alive)
            alive -= sum(map(self._bytes, each.dropped))
        return PiecewiseMemory(most)

    def _bytes(self, value: Operand) -> int:
        assert isinstance(value, int), "constants are outputs alone"
        aval = self._whole.avals[value]
        shape = self._shardings[value].shard_shape(aval.shape)
        return num_bytes(aval.update(shape=shape))


def compile_pieces(
    whole: StepProgram,
    pieces: Sequence[Piece],
    arguments: Sequence[Argument],
    outputs: Sequence[Any],
    compile_one: Compile,
) -> PiecewiseProgram:
    """Compile a program piece by piece.

    Args:
        whole: the program.
        pieces: its pieces; see `hetjax.pipeline.program.pieces.pieces_of`.
        arguments: what it takes; of these only sums are donated.
        outputs: how its results shall lie: for each part of them shardings, or None for any.
        compile_one: compiles a piece.

    Returns:
        The program.
    """
    return _Compiler(whole, arguments, outputs, compile_one).compiled(pieces)


class _Compiler:
    def __init__(
        self,
        whole: StepProgram,
        arguments: Sequence[Argument],
        outputs: Sequence[Any],
        compile_one: Compile,
    ):
        self._whole, self._compile_one = whole, compile_one
        given = arguments[: len(whole.arguments)]
        lies = itertools.chain(*(argument.shardings for argument in given))
        self._shardings: dict[Operand, Any] = dict(
            zip(itertools.chain(*whole.arguments), lies, strict=True)
        )
        parts = outputs if outputs is not None else [None] * len(whole.outputs)
        self._wanted: dict[Operand, Any] = {
            operand: sharding
            for part, group in zip(whole.outputs, parts, strict=False)
            for operand, sharding in zip(part, group or (), strict=bool(group))
        }
        self._sums = list(outputs[len(whole.outputs)]) if whole.summands is not None else []
        self._sum_shapes = arguments[-1].shapes if whole.summands is not None else ()
        self._known: dict[Hashable, Any] = {}

    def compiled(self, pieces: Sequence[Piece]) -> PiecewiseProgram:
        every = [(piece, self._one(piece)) for piece in pieces]
        dropped = self._dropped(pieces)
        found = [
            CompiledPiece(program, piece, values)
            for (piece, program), values in zip(every, dropped, strict=True)
        ]
        return PiecewiseProgram(self._whole, found, self._shardings, self._sums)

    def _one(self, piece: Piece) -> Any:
        """A piece compiled, or what one that is alike was compiled to."""
        read = [self._shardings[value] for value in piece.reads]
        wanted = [self._wanted.get(value) for value in piece.makes]
        sums = [self._sums[place] for place in piece.summands]
        key = piece.key, tuple(read), tuple(wanted), tuple(sums)
        program = self._known.get(key)
        if program is None:
            program = self._known[key] = self._compile(piece, read, wanted, sums)
        self._shardings.update(zip(piece.makes, program.output_shardings[0], strict=True))
        return program

    def _compile(
        self, piece: Piece, read: Sequence[Any], wanted: Sequence[Any], sums: Sequence[Any]
    ) -> Any:
        whole = self._whole
        shapes = [whole.avals[value] for value in piece.reads]
        held = [self._sum_shapes[place] for place in piece.summands] if self._sum_shapes else []
        return self._compile_one(
            piece.of(whole),
            [
                Argument(shapes, read),
                Argument(held, list(sums) if held else [], donated=True),
            ],
            (list(wanted), list(sums)),
        )

    def _dropped(self, pieces: Sequence[Piece]) -> Iterator[tuple[Operand, ...]]:
        """For each piece the values that were made in pieces and are of no use after it."""
        outputs = {*itertools.chain(*self._whole.outputs)}
        last: dict[Operand, int] = {}
        for place, piece in enumerate(pieces):
            last |= dict.fromkeys((*piece.makes, *piece.reads), place)
        made = {value for piece in pieces for value in piece.makes}
        for place in range(len(pieces)):
            yield tuple(v for v in made if last[v] == place and v not in outputs)
