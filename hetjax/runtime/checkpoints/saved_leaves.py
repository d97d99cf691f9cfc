"""What a checkpoint calls the leaves of the training state, and who writes which parts of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import jax

from hetjax.errors import InputError
from hetjax.pipeline.build import PipelinePrograms, Shapes
from hetjax.pipeline.program.loss import path_names
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
        held: what each stage holds.
    """

    kind: str
    names: tuple[str, ...]
    shapes: Shapes
    held: tuple[tuple[ParameterPart, ...], ...]

    def writers(self, leaf: int) -> tuple[int, ...]:
        """The stages that write a leaf: together they hold each row of it once."""
        parts = {
            stage: part
            for stage, held in enumerate(self.held)
            for part in held
            if part.leaf == leaf
        }
        return covering_stages(parts, row_span(0, None, self.shapes[leaf].shape)[1])

    def part(self, part: ParameterPart, item: str, held: Bounds = ()) -> SavedPart:
        """What an item holds of a leaf.

        Args:
            part: what its stage holds.
            item: the item's folder.
            held: what of that, from its first row on; all of it where nothing is given.
        """
        shape, dtype = self.shapes[part.leaf].shape, str(self.shapes[part.leaf].dtype)
        start, stop, across = part.start, part.stop, held[1:]
        first, end = row_span(start, stop, shape)
        if held and held[0] != (0, end - first):
            start, stop = (first + row for row in held[0])
        if extent(across) == tuple(shape[1:]):
            across = ()
        path = self.names[part.leaf]
        return SavedPart(self.kind, path, start, stop, tuple(shape), dtype, item, across)


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
    state = jax.tree.unflatten(pipelines.state_tree, pipelines.state_shapes)
    parameters = SavedLeaves(
        "parameters",
        pipelines.program.parameter_names,
        pipelines.parameter_shapes,
        tuple(stage.parameters for stage in pipelines.stages),
    )
    optimizer = SavedLeaves(
        "optimizer",
        path_names(state),
        pipelines.state_shapes,
        tuple(update.state for update in pipelines.updates),
    )
    for leaves in (parameters, optimizer):
        repeated = [name for name, count in Counter(leaves.names).items() if count > 1]
        if repeated:
            raise InputError(
                f"{leaves.kind}: the path {repeated[0]!r} is that of several leaves, so a "
                f"checkpoint could not tell them apart; rename one"
            )
    return parameters, optimizer
