"""Programs compiled piece by piece: pieces that are alike are compiled once, and called in turn."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

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
        program: ``(values read, values donated) -> (values made,)``; where there are sums, they are
            one argument and one result more.
        piece: the piece.
        donated: whether each of the values that it reads is donated.
        dropped: the values made by pieces that none reads after this one, and that are no outputs.
    """

    program: Any
    piece: Piece
    donated: tuple[bool, ...]
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
        self._whole, self._pieces, self._shardings = whole, pieces, shardings
        outputs = tuple([shardings[operand] for operand in part] for part in whole.outputs)
        # Devices that are played by one host share its threads: of pieces that do not wait for each
        # other more would begin than there are threads, and each wait for its other devices.
        devices = next(iter(shardings.values())).mesh.devices.flat
        self._waits = len(devices) > 1 and devices[0].platform == "cpu"
        self.output_shardings = outputs if whole.summands is None else (*outputs, list(sums))

    @property
    def num_compiled(self) -> int:
        """How many programs were compiled."""
        return len({id(each.program) for each in self._pieces})

    def __call__(self, *arrays: Sequence[Any]) -> tuple[list[Any], ...]:
        """Run it."""
        whole = self._whole
        given = arrays[: len(whole.arguments)]
        values: dict[Operand, Any] = dict(
            zip(itertools.chain(*whole.arguments), itertools.chain(*given), strict=True)
        )
        held = [list(each) for each in arrays[len(given) :]]
        new = [[None] * len(whole.summands or ()) for _ in held]
        for each in self._pieces:
            piece = each.piece
            own = [[sums[place] for place in piece.summands if sums] for sums in held]
            read = _divided([values[value] for value in piece.reads], each.donated)
            made, *added = each.program(*read, *own)
            if self._waits:
                jax.block_until_ready((made, added))
            values.update(zip(piece.makes, made, strict=True))
            for sums, summed in zip(new, added, strict=True):
                for place, array in zip(piece.summands, summed, strict=True):
                    sums[place] = array
            for value in each.dropped:
                del values[value]
        return (*([values[operand] for operand in part] for part in whole.outputs), *new)

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
        return num_bytes(aval.update(shape=self._shardings[value].shard_shape(aval.shape)))


def _divided(items: Sequence[Any], chosen: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """The items that are not chosen, and those that are.

    Example:
        >>> _divided("abc", (False, True, False))
        (['a', 'c'], ['b'])
    """
    pairs = list(zip(items, chosen, strict=True))
    return [item for item, is_in in pairs if not is_in], [item for item, is_in in pairs if is_in]


def compile_pieces(
    whole: StepProgram,
    pieces: Sequence[Piece],
    arguments: Sequence[Argument],
    outputs: Sequence[Sequence[Any] | None],
    compile_one: Compile,
    everywhere: Any,
) -> PiecewiseProgram:
    """Compile a program piece by piece.

    Args:
        whole: the program.
        pieces: its pieces, in order.
        arguments: what it takes.
        outputs: how its results shall lie: for each sequence of them shardings, or None for any.
        compile_one: compiles a piece.
        everywhere: the sharding of what every device has: of what a piece makes that reads nothing,
            where it may lie in any way. Nothing else would tell the compiler of which devices.

    Returns:
        The program.
    """
    return _Compiler(whole, arguments, outputs, compile_one, everywhere).compiled(pieces)


class _Compiler:
    def __init__(
        self,
        whole: StepProgram,
        arguments: Sequence[Argument],
        outputs: Sequence[Sequence[Any] | None],
        compile_one: Compile,
        everywhere: Any,
    ):
        self._whole, self._compile_one, self._everywhere = whole, compile_one, everywhere
        self._shardings: dict[Operand, Any] = {}
        self._donated: set[int] = set()
        for values, argument in zip(whole.arguments, arguments, strict=False):
            self._shardings.update(zip(values, argument.shardings, strict=True))
            self._donated.update(values if argument.donated else ())
        self._sum_shapes = [each.shapes for each in arguments[len(whole.arguments) :]]
        parts = zip(whole.outputs, outputs, strict=False)
        self._wanted: dict[Operand, Any] = {
            operand: sharding
            for part, group in parts
            if group is not None
            for operand, sharding in zip(part, group, strict=True)
        }
        self._sums = [each or () for each in outputs[len(whole.outputs) :]]
        self._known: dict[Hashable, Any] = {}

    def compiled(self, pieces: Sequence[Piece]) -> PiecewiseProgram:
        last = {
            value: place
            for place, each in enumerate(pieces)
            for value in (*each.makes, *each.reads)
        }
        outputs = {*itertools.chain(*self._whole.outputs)}
        dropped: list[list[Operand]] = [[] for _ in pieces]
        for value in itertools.chain(*(piece.makes for piece in pieces)):
            if value not in outputs:
                dropped[last[value]].append(value)
        found: list[CompiledPiece] = []
        for place, piece in enumerate(pieces):
            ends = {value for value in piece.reads if last[value] == place}
            # An argument that is a result, too, is given to what makes the result.
            free = (ends - (outputs - set(piece.makes))) & self._donated
            donated = self._donatable(piece, free)
            program = self._one(piece, donated)
            found.append(CompiledPiece(program, piece, donated, tuple(dropped[place])))
        (sums,) = self._sums or ((),)
        return PiecewiseProgram(self._whole, found, self._shardings, sums)

    def _donatable(self, piece: Piece, free: set[int]) -> tuple[bool, ...]:
        """Which values that a piece reads may give their memory to its results: those like them."""

        def like(value: int, sharding: Any) -> Hashable:
            aval = self._whole.avals[value]
            return aval.shape, aval.dtype, sharding

        room = Counter(
            like(output, self._wanted.get(makes))
            for output, makes in zip(piece.program.outputs[0], piece.makes, strict=True)
            if isinstance(output, int)
        )
        chosen: list[bool] = []
        for value in piece.reads:
            key = like(value, self._shardings[value])
            chosen.append(value in free and room[key] > 0)
            room[key] -= chosen[-1]
        return tuple(chosen)

    def _one(self, piece: Piece, donated: tuple[bool, ...]) -> Any:
        """A piece compiled, or what one that is alike was compiled to."""
        read = tuple(self._shardings[value] for value in piece.reads)
        default = None if piece.reads else self._everywhere
        wanted = tuple(self._wanted.get(value) or default for value in piece.makes)
        sums = tuple(tuple(each[place] for place in piece.summands) for each in self._sums)
        key = piece.key, donated, read, wanted, sums
        if key not in self._known:
            self._known[key] = self._compile(piece, donated, wanted, sums)
        program = self._known[key]
        self._shardings.update(zip(piece.makes, program.output_shardings[0], strict=True))
        return program

    def _compile(
        self,
        piece: Piece,
        donated: tuple[bool, ...],
        wanted: Sequence[Any],
        sums: Sequence[Sequence[Any]],
    ) -> Any:
        parts = _divided(piece.reads, donated)
        arguments = [
            Argument(
                [self._whole.avals[v] for v in part], [self._shardings[v] for v in part], is_given
            )
            for part, is_given in zip(parts, (False, True), strict=True)
        ]
        for shapes, lies in zip(self._sum_shapes, sums, strict=True):
            own = [shapes[place] for place in piece.summands if shapes]
            arguments.append(Argument(own, list(lies) if own else [], donated=True))
        program = replace(piece.program, arguments=tuple(map(tuple, parts)))
        return self._compile_one(program, arguments, (list(wanted), *map(list, sums)))
