"""Layers: contiguous runs of a program's positions, the units that a planner puts on stages.

They are found by arithmetic alone: runs of similar FLOPs, cut where few bytes cross.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetjax.errors import InputError
from hetjax.pipeline.program.costs import step_cost
from hetjax.pipeline.program.traced_program import Program, num_bytes, operand_value
from hetjax.pipeline.stages.cutting import shared_steps

# Cuts are chosen among this many places a layer, each the one that the fewest bytes cross in its
# stretch of equal FLOPs. More of them cost time and move no cut by more than 1/16 of a layer.
_PLACES_PER_LAYER = 16

# What it costs to cut where twice the usual bytes cross, beside the squares of the layers' relative
# differences from equal FLOPs: as much as one layer that is half too large.
_CROSSING_WEIGHT = 0.25


def cluster_layers(program: Program, num_layers: int) -> tuple[int, ...]:
    """Divide a program into layers of similar FLOPs.

    The cuts minimise the sum over layers of ``(FLOPs / target - 1) ** 2`` plus a quarter of
    ``bytes / usual bytes`` over cuts, exactly, among 16 places a layer. A layer is never without
    FLOPs, so a small program has fewer layers than asked for.

    Args:
        program: the traced loss function.
        num_layers: how many layers there are at most.

    Returns:
        The positions where layers begin, and the end: ``(0, ..., num_positions)``.

    Raises:
        InputError: `num_layers` is less than 1.

    Source: Alpa (Zheng et al., 2022), section 5.2, operator clustering; Harp section 5.1.

    Example:
        >>> import jax.numpy as jnp
        >>> from hetjax.pipeline.program.tracing import trace
        >>> def loss(weights, x):
        ...     for weight in weights:
        ...         x = jnp.tanh(x @ weight)
        ...     return jnp.mean(x**2)
        >>> program = trace(loss, [jnp.ones((8, 8))] * 4, jnp.ones((4, 8)))
        >>> cluster_layers(program, 2)
        (0, 4, 12)
    """
    if num_layers < 1:
        raise InputError(f"num_layers is {num_layers}; it must be 1 or more")
    cuts = even_cuts(position_flops(program), crossing_bytes(program), num_layers)
    return (0, *cuts, program.num_positions)


def even_cuts(
    flops: NDArray[np.float64], crossing: NDArray[np.float64], num_layers: int
) -> tuple[int, ...]:
    """Where to cut a run of positions into layers of similar FLOPs, as `cluster_layers` does.

    Args:
        flops: of every position.
        crossing: bytes that would cross a cut at every position, and at the end.
        num_layers: how many layers there are at most.

    Returns:
        The positions of the cuts, counted from the run's first.
    """
    done = np.concatenate([[0.0], np.cumsum(flops)])
    if done[-1] == 0:
        return ()
    places = _places(done, crossing, num_layers)
    cuts = _best_cuts(done[places] / done[-1] * num_layers, crossing[places], num_layers)
    return tuple(int(places[cut]) for cut in cuts)


def position_flops(program: Program) -> NDArray[np.float64]:
    """The FLOPs of every position; steps that every stage repeats for itself count as none.

    Args:
        program: the traced loss function.

    Returns:
        FLOPs of one microbatch's forward pass, `num_positions` long.
    """
    shared = shared_steps(program)
    return np.array(
        [
            0.0 if shared.issuperset(step.outputs) else step_cost(step).flops
            for step in program.steps
        ]
    )


def crossing_bytes(program: Program) -> NDArray[np.float64]:
    """The bytes that would cross a cut at every position, all found in one sweep.

    Values made before the cut and used after it count; parameters, batch leaves and what every
    stage computes for itself do not.

    Args:
        program: the traced loss function.

    Returns:
        Bytes of one microbatch, ``num_positions + 1`` long, 0 at both ends.
    """
    end = program.num_positions
    shared = shared_steps(program)
    last_use = _last_uses(program)
    change = np.zeros(end + 2)
    for position, step in enumerate(program.steps):
        for value in step.outputs:
            if value in shared or value not in last_use:
                continue
            size = num_bytes(program.avals[value])
            change[position + 1] += size
            change[last_use[value] + 1] -= size
    crossing = np.cumsum(change)[: end + 1]
    crossing[[0, end]] = 0
    return crossing


def _last_uses(program: Program) -> dict[int, int]:
    """The last position at which each value is used."""
    last = {value: p for p, step in enumerate(program.steps) for value in step.values()}
    for operand in program.outputs:
        value = operand_value(operand)
        if value is not None:
            last[value] = program.num_positions - 1
    return last


def _places(
    done: NDArray[np.float64], crossing: NDArray[np.float64], num_layers: int
) -> NDArray[np.int64]:
    """The positions that may be cut: in each stretch of FLOPs the one that fewest bytes cross.

    Both ends come with them. No two have the same FLOPs before them.
    """
    inner = np.flatnonzero((done > 0) & (done < done[-1]))
    stretch = np.floor(done[inner] / done[-1] * num_layers * _PLACES_PER_LAYER)
    # Among equals the last: what follows a product element by element stays with it.
    order = np.lexsort((-inner, crossing[inner], stretch))
    _, first = np.unique(stretch[order], return_index=True)
    chosen = np.sort(inner[order[first]])
    return np.concatenate([[0], chosen, [len(done) - 1]])


def _best_cuts(
    done: NDArray[np.float64], crossing: NDArray[np.float64], num_layers: int
) -> list[int]:
    """The places to cut, by dynamic programming over (number of layers, place).

    Args:
        done: FLOPs before each place, in units of the size that a layer should have.
        crossing: bytes that cross at each place.
        num_layers: how many layers there are at most.
    """
    last = len(done) - 1
    usual = float(np.median(crossing[1:-1])) if last > 1 else 0.0
    penalty = _CROSSING_WEIGHT * crossing / usual if usual > 0 else np.zeros(last + 1)
    imbalance = (done[None, :] - done[:, None] - 1) ** 2 + penalty[None, :]
    imbalance[np.tril_indices(last + 1)] = np.inf
    cost = np.full(last + 1, np.inf)
    cost[0] = 0
    totals, origins = [], []
    for _ in range(min(num_layers, last)):
        through = cost[:, None] + imbalance
        origins.append(through.argmin(axis=0))
        cost = through.min(axis=0)
        totals.append(cost[last])
    cuts, place = [], last
    for origin in reversed(origins[: int(np.argmin(totals)) + 1]):
        place = int(origin[place])
        cuts.append(place)
    return cuts[-2::-1]
