"""What a switch between two plans would move, by each policy; on shapes alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hetjax.configuration.make import Ingredients
from hetjax.errors import InputError
from hetjax.pipeline.program.traced_program import with_examples
from hetjax.planner import Plan
from hetjax.report import format_bytes, format_seconds
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.moves.state_switch import all_lost, moved_arrays
from hetjax.runtime.workers.job import Job, lay_out
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.switch_transfers import POLICIES, MovedArray, plan_switch

if TYPE_CHECKING:
    from rich.table import Table


def switch_figures(
    ingredients: Ingredients,
    source: Plan,
    destination: Plan,
    *,
    lost: Set[int] = frozenset(),
    bytes_per_parameter: int | None = None,
) -> dict[str, Any]:
    """Plan a switch by every policy.

    Args:
        ingredients: the model and the optimizer; nothing of them is allocated.
        source: the plan that is left.
        destination: the plan to switch to, on the same cluster.
        lost: devices that are gone, beside those that the destination names.
        bytes_per_parameter: counts the parameters alone, so many bytes each; None: parameters and
            optimizer state as they are.

    Returns:
        ``plan_seconds`` of the fused plan; ``total_bytes``; ``volumes``: for each policy, for each
        sending device, bytes ``intra_node`` and ``inter_node``; ``busiest``: for each policy the
        bytes of the device that sends most to other nodes.

    Raises:
        InputError: a plan does not fit the model, the clusters or batches differ, or only lost
            devices hold something.
    """
    if source.cluster != destination.cluster:
        raise InputError(
            f"the plans are for the clusters {source.cluster.name!r} and "
            f"{destination.cluster.name!r}; make them for one, in which a plan need not use every "
            f"device"
        )
    if source.batch_size != destination.batch_size:
        raise InputError(
            f"the plans are for batches of {source.batch_size} and {destination.batch_size} "
            f"examples; make them for one"
        )
    lost = all_lost(lost, destination)
    network = Network.of(source.cluster)
    arrays = arrays_between(ingredients, source, destination, bytes_per_parameter)
    volumes: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for policy in POLICIES:
        began = time.perf_counter()
        plan = plan_switch(arrays, network, policy=policy, lost=lost)
        seconds[policy] = time.perf_counter() - began
        volumes[policy] = {str(n): row for n, row in plan.volumes(network).items()}
    return {
        "plan_seconds": seconds["fused"],
        "total_bytes": sum(map(_total, volumes["fused"].values())),
        "busiest": {policy: _busiest(rows) for policy, rows in volumes.items()},
        "volumes": volumes,
    }


def arrays_between(
    ingredients: Ingredients,
    source: Plan,
    destination: Plan,
    bytes_per_parameter: int | None = None,
) -> Sequence[MovedArray]:
    """The arrays of a training state, and how they lie under two plans.

    Args:
        ingredients: the model and the optimizer.
        source: the plan that is left.
        destination: the plan to switch to, on the same cluster.
        bytes_per_parameter: as in `switch_figures`.

    Returns:
        The arrays.
    """
    arrays = moved_arrays(*(_placement(ingredients, plan) for plan in (source, destination)))
    if bytes_per_parameter is None:
        return arrays
    parameters = [each for each in arrays if each.name.startswith("parameters/")]
    return [replace(each, itemsize=bytes_per_parameter) for each in parameters]


def _placement(ingredients: Ingredients, plan: Plan) -> Placement:
    shapes = with_examples(ingredients.batch, plan.batch_size)
    parameters = ingredients.parameter_shapes
    job = Job(ingredients.model.loss, parameters, shapes, ingredients.optimizer, plan)
    return lay_out(job)


def _total(row: Mapping[str, int]) -> int:
    return row["intra_node"] + row["inter_node"]


def _busiest(rows: Mapping[str, Mapping[str, int]]) -> int:
    return max((row["inter_node"] for row in rows.values()), default=0)


def switch_table(figures: Mapping[str, Any]) -> Table:
    """The figures of a switch as a table for rich to print."""
    from rich.table import Table

    table = Table(
        title=f"{format_bytes(figures['total_bytes'])} to move, planned in "
        f"{format_seconds(figures['plan_seconds'])}",
    )
    for name in ("policy", "inside nodes", "between nodes", "busiest sender", "senders"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for policy, rows in figures["volumes"].items():
        table.add_row(
            policy,
            format_bytes(sum(row["intra_node"] for row in rows.values())),
            format_bytes(sum(row["inter_node"] for row in rows.values())),
            format_bytes(figures["busiest"][policy]),
            str(len(rows)),
        )
    return table
