"""Layers by structure: modules that are alike are cut alike, into layers of similar cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetjax.pipeline.layers.cost_layers import (
    cluster_layers,
    crossing_bytes,
    even_cuts,
    position_flops,
)
from hetjax.pipeline.layers.modules import Section, find_modules
from hetjax.pipeline.program.costs import is_heavy, step_cost
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.stages.cutting import cut

# What stands between modules is a layer of its own where it has at least this share of a usual
# layer's FLOPs or parameters.
_LIGHT = 0.05


@dataclass(frozen=True)
class LayeredSection:
    """A section of a program, and how it is cut into layers.

    Args:
        section: the section.
        starts: the positions in it where layers begin; none where it goes with a neighbour.
        flops: of one microbatch's forward pass.
        bytes_in: bytes that cross its first edge.
    """

    section: Section
    starts: tuple[int, ...]
    flops: float
    bytes_in: float


@dataclass(frozen=True)
class StructuralLayers:
    """A program's layers, with the structure that they follow.

    Args:
        positions: where layers begin, and the end.
        sections: the occurrences of modules and what stands between them; empty where the program
            repeats nothing.
    """

    positions: tuple[int, ...]
    sections: tuple[LayeredSection, ...]

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.positions) - 1


def structural_layers(
    program: Program, min_products: int = 2, otherwise: int = 32
) -> StructuralLayers:
    """Divide a program into layers that follow its repeated modules.

    A module is cut into as many layers of similar FLOPs as its dearest product goes into it, where
    few bytes cross, and all its occurrences at the same places; each iteration of a loop is one.
    What stands between modules is cut alike, or goes with its neighbour where it is light.

    Args:
        program: the traced loss function.
        min_products: how many matrix products or convolutions a module has at least: more of them
            make longer modules.
        otherwise: how many layers a program has at most that repeats nothing.

    Returns:
        The layers.

    Source: Harp, section 5.1.

    Example:
        >>> import jax.numpy as jnp
        >>> from hetjax.pipeline.program.tracing import trace
        >>> def loss(weights, x):
        ...     for weight in weights:
        ...         x = jnp.tanh(x @ weight)
        ...     return jnp.mean(x**2)
        >>> program = trace(loss, [jnp.ones((64, 64))] * 6, jnp.ones((4, 64)))
        >>> structural_layers(program).num_layers
        6
    """
    flops, crossing = position_flops(program), crossing_bytes(program)
    sections = find_modules(program, crossing, min_products)
    usual = _usual_flops(program, sections, flops)
    if usual == 0:
        return StructuralLayers(cluster_layers(program, otherwise), ())
    light = _light_sections(program, sections, flops, usual)
    cuts_of: dict[int, tuple[int, ...]] = {}
    layered: list[LayeredSection] = []
    for section in sections:
        inside = flops[section.start : section.stop]
        cuts = None if section.module is None else cuts_of.get(section.module)
        if cuts is None:
            edges = crossing[section.start : section.stop + 1]
            cuts = even_cuts(inside, edges, max(1, round(float(inside.sum()) / usual)))
        if section.module is not None:
            cuts_of[section.module] = cuts
        starts = () if section in light else tuple(section.start + place for place in (0, *cuts))
        edge = float(crossing[section.start])
        layered.append(LayeredSection(section, starts, float(inside.sum()), edge))
    positions = [position for each in layered for position in each.starts]
    return StructuralLayers((0, *positions[1:], program.num_positions), tuple(layered))


def _usual_flops(
    program: Program, sections: Sequence[Section], flops: NDArray[np.float64]
) -> float:
    """The FLOPs of a usual layer: of the dearest product of any module, or scan's iteration."""
    repeated = [section for section in sections if section.module is not None]
    products = [
        step_cost(step).flops
        for section in repeated
        for step in program.steps[section.start : section.stop]
        if is_heavy(step)
    ]
    return max(products or [_total(flops, section) for section in repeated], default=0.0)


def _total(flops: NDArray[np.float64], section: Section) -> float:
    return float(flops[section.start : section.stop].sum())


def _light_sections(
    program: Program, sections: Sequence[Section], flops: NDArray[np.float64], usual: float
) -> set[Section]:
    """What stands between modules and is too light for a layer."""
    held = dict(zip(sections, _parameter_bytes(program, sections), strict=True))
    repeated = [section for section in sections if section.module is not None]
    num_layers = sum(_total(flops, section) for section in repeated) / usual
    usual_bytes = sum(held[section] for section in repeated) / max(1.0, num_layers)
    return {
        section
        for section in sections
        if section.module is None
        and _total(flops, section) < _LIGHT * usual
        and (held[section] == 0 or held[section] < _LIGHT * usual_bytes)
    }


def _parameter_bytes(program: Program, sections: Sequence[Section]) -> Iterator[int]:
    """Bytes of the parameters of each section."""
    boundaries = [*(section.start for section in sections), program.num_positions]
    for stage in cut(program, boundaries):
        total = 0
        for part in stage.parameters:
            leaf = program.avals[program.parameters[part.leaf]]
            total += math.prod(part.shape(leaf.shape)) * leaf.dtype.itemsize
        yield total
