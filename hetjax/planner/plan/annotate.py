"""A plan's annotations: how what flows through the model lies, layer by layer."""

from __future__ import annotations

from jax.sharding import PartitionSpec

from hetjax.planner.plan.plan import Plan
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.rules import DATA, MESH_AXES
from hetjax.sharding.annotation.subgroup import Subgroup


def activation_annotations(plan: Plan) -> tuple[HSharding, ...]:
    """How the activations of a step lie in each layer.

    A layer is computed by one stage of each pipeline; the pipelines share the examples.

    Args:
        plan: the plan.

    Returns:
        An annotation for each layer, of arrays whose first dimension is that of a step's examples.

    Source: Hetu v2, sections 3.2 and 5.4.

    Example:
        >>> plan = Plan.load("plan.json")  # doctest: +SKIP
        >>> print(activation_annotations(plan)[0])  # doctest: +SKIP
        HSharding(devices [0-3] as data=4: P('data'))
    """
    examples = tuple(
        pipeline.num_microbatches * pipeline.microbatch_size for pipeline in plan.pipelines
    )
    return tuple(
        HSharding(_stages_of(plan, layer), 0, examples if len(examples) > 1 else ())
        for layer in range(len(plan.layers) - 1)
    )


def _stages_of(plan: Plan, layer: int) -> tuple[Subgroup, ...]:
    """The submesh of each pipeline that computes a layer."""
    return tuple(
        Subgroup(
            tuple(plan.cluster.device_ids(stage.submesh)),
            tuple(zip(MESH_AXES, stage.mesh_shape, strict=True)),
            PartitionSpec(DATA),
        )
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        if stage.layers[0] <= layer < stage.layers[1]
    )
