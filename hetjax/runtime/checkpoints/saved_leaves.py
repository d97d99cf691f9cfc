"""What a checkpoint calls the leaves of the training state, and who writes which parts of them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from hetjax.errors import InputError
from hetjax.pipeline.build import PipelinePrograms, Shapes
from hetjax.pipeline.program.loss import path_names
from hetjax.pipeline.program.stacked_leaves import StackedLeaves
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.pipeline.stages.holders import covering_stages
from hetjax.runtime.checkpoints.manifest import SavedPart, row_span
from hetjax.runtime.instructions.annotation_table import AnnotatedLeaves
from hetjax.sharding.annotation.bounds import Bounds, extent, volume


@dataclass(frozen=True, eq=False)
class SavedLeaves:
    """The leaves of one kind of state, and what each stage holds of them.

    Args:
        kind: ``parameters`` or ``optimizer``.
        names: their paths.
        shapes: their shapes.
        held: what each stage holds, of what they count as.
        leaves: which of them count as rows.
    """

    kind: str
    names: tuple[str, ...]
    shapes: Shapes
    held: tuple[tuple[ParameterPart, ...], ...]
    leaves: StackedLeaves

    @functools.cached_property
    def counted(self) -> Shapes:
        """The shapes of what the leaves count as."""
        return tuple(self.leaves.split_shapes(self.shapes))

    def writers(self, leaf: int) -> tuple[int, ...]:
        """The stages that write what leaves count as: together they hold each row of it once."""
        parts = {
            stage: part
            for stage, held in enumerate(self.held)
            for part in held
            if part.leaf == leaf
        }
        return covering_stages(parts, row_span(0, None, self.counted[leaf].shape)[1])

    def part(self, part: ParameterPart, item: str, held: Bounds = ()) -> SavedPart:
        """What an item holds of a leaf.

        Args:
            part: what its stage holds.
            item: the item's folder.
            held: what of that, from its first row on; all of it where nothing is given.
        """
        leaf, row = self.leaves.places[part.leaf]
        shape, dtype = self.shapes[leaf].shape, str(self.shapes[leaf].dtype)
        start, stop, across = part.start, part.stop, held[1:]
        first, end = row_span(start, stop, self.counted[part.leaf].shape)
        if held and held[0] != (0, end - first):
            start, stop = (first + row for row in held[0])
        if row is not None:
            rest = shape[2:]
            across = ((start, end if stop is None else stop), *(across or ((0, n) for n in rest)))
            start, stop, across = row, row + 1, across[: len(shape) - 1]
        if extent(across) == tuple(shape[1:]):
            across = ()
        return SavedPart(
            self.kind,
            self.names[leaf],
            start,
            stop,
            tuple(shape),
            dtype,
            item,
            across,
            row is not None,
        )


class HeldPart(NamedTuple):
    """What a member of a stage holds of what its stage does.

    Args:
        part: what the stage holds.
        bounds: what of that the member has.
        is_written: whether the member writes it.
    """

    part: ParameterPart
    bounds: Bounds
    is_written: bool


def held_parts(leaves: AnnotatedLeaves, member: int, *, by_turns: bool) -> list[HeldPart]:
    """What a member holds of the parameters of its stage, or of the optimizer's state.

    Args:
        leaves: how they lie.
        member: which member.
        by_turns: whether what all members have they write by turns; else the first one does, as
            where copies may differ in rounding: what is written is then of one copy.

    Returns:
        The parts in their order. Together the members write each element once.
    """
    found = []
    for place, (part, shape, annotation) in enumerate(
        zip(leaves.names, leaves.shapes, leaves.annotations, strict=True)
    ):
        assert isinstance(part, ParameterPart)
        bounds = annotation.regions(shape.shape)[member]
        if isinstance(annotation.hdim, int):
            is_written = volume(bounds) > 0 or 0 in shape.shape
        else:
            is_written = (place if by_turns else 0) % len(annotation.subgroups) == member
        found.append(HeldPart(part, bounds, is_written))
    return found


def saved_leaves(pipelines: PipelinePrograms) -> tuple[SavedLeaves, SavedLeaves]:
    """The leaves of the parameters, and those of the optimizer's state.

    Args:
        pipelines: the pipelines' programs.

    Raises:
        InputError: two leaves have one path.
    """
    parameters = _saved_leaves(
        "parameters",
        pipelines.parameter_tree,
        pipelines.parameter_shapes,
        [stage.parameters for stage in pipelines.stages],
        pipelines.program.leaves,
    )
    optimizer = _saved_leaves(
        "optimizer",
        pipelines.state_tree,
        pipelines.state_shapes,
        [update.state for update in pipelines.updates],
        pipelines.state_leaves,
    )
    for leaves in (parameters, optimizer):
        repeated = [name for name, count in Counter(leaves.names).items() if count > 1]
        if repeated:
            raise InputError(
                f"{leaves.kind}: the path {repeated[0]!r} is that of several leaves, so a "
                f"checkpoint could not tell them apart; rename one"
            )
    return parameters, optimizer


def _saved_leaves(
    kind: str,
    tree: Any,
    counted: Shapes,
    held: Sequence[tuple[ParameterPart, ...]],
    leaves: StackedLeaves,
) -> SavedLeaves:
    """The leaves of a pytree, of the shapes of what they count as."""

    def stacked(rows: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(rows), *rows[0].shape), rows[0].dtype)

    shapes = leaves.join(counted, stacked)
    names = path_names(jax.tree.unflatten(tree, shapes))
    return SavedLeaves(kind, names, tuple(shapes), tuple(held), leaves)
