"""Pipelines found from the annotations of a plan are the plan's own."""

import pytest
from cases import Case, cases, examples
from hypothesis import given
from jax.sharding import PartitionSpec as P

from hetjax.errors import InputError
from hetjax.planner.plan.annotate import activation_annotations
from hetjax.sharding import HSharding, Subgroup, find_pipelines


@examples(usual=100, full=1000)
@given(case=cases(max_pipelines=3))
def test_pipelines_are_found_from_annotations(case: Case):
    plan = case.plan
    annotations = activation_annotations(plan)
    assert len(annotations) == len(plan.layers) - 1
    assert find_pipelines(annotations, (plan.batch_size, 5)) == tuple(
        tuple(tuple(plan.cluster.device_ids(stage.submesh)) for stage in pipeline.stages)
        for pipeline in plan.pipelines
    )


def test_a_submesh_that_hands_on_to_several_is_no_stage():
    one, two, three = (Subgroup((device,), (), P()) for device in (0, 1, 2))
    split = [HSharding((one,)), HSharding((two, three), 0)]
    with pytest.raises(InputError, match=r"devices \[0\] hand on to several submeshes"):
        find_pipelines(split, (4,))
    with pytest.raises(InputError, match=r"devices \[0\] get from several submeshes"):
        find_pipelines(split[::-1], (4,))
    with pytest.raises(InputError, match=r"devices \[1\] hand on to no submesh"):
        find_pipelines([HSharding((two, three)), HSharding((three,))], (4,))
    with pytest.raises(InputError, match="annotations: none is given"):
        find_pipelines([], (4,))
