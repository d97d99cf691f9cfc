"""What annotations say becomes a plan, or is refused by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from cases import CLUSTER
from jax.sharding import PartitionSpec as P

import hetjax
from hetjax import HSharding, InputError, Plan, Subgroup, reshard
from hetjax.pipeline.program.tracing import trace
from hetjax.planner import DynamicProgram, Share
from hetjax.planner.plan.plan import validate_for

EXAMPLES, MICROBATCHES = 8, 2
SHAPES = {
    name: jax.ShapeDtypeStruct(shape, "float32")
    for name, shape in {"first": (4, 8), "second": (8, 8), "third": (8, 4)}.items()
}
BATCH = {"x": jax.ShapeDtypeStruct((EXAMPLES, 4), "float32")}


def group(*devices: int, spec: P | None = None, **axes: int) -> Subgroup:
    return Subgroup(devices, tuple(axes.items()), spec or P())


ONE, OTHER, FAR = (HSharding((group(device),)) for device in (0, 1, 4))
BOTH = HSharding((group(0), group(1)))
PAIR = group(0, 1, x=2)


def loss_of(*between: HSharding | None) -> Callable[..., Any]:
    def loss(parameters: Any, batch: Any) -> Any:
        x = batch["x"]
        for annotation, name in zip((*between, None, None, None), sorted(SHAPES), strict=False):
            x = jnp.tanh(x @ parameters[name])
            x = x if annotation is None else reshard(x, annotation)
        return jnp.mean(x**2)

    return loss


def planned(
    parameters: Any, batch: Any = None, loss: Callable[..., Any] | None = None, **changes: Any
) -> Plan:
    given = {"num_microbatches": MICROBATCHES, "optimizer": optax.sgd(0.1), "cluster": CLUSTER}
    annotations = parameters, batch
    return hetjax.plan(loss or loss_of(), SHAPES, BATCH, annotations=annotations, **given | changes)


def refusal(*given: Any, **changes: Any) -> str:
    with pytest.raises(InputError) as error:
        planned(*given, **changes)
    return str(error.value)


def only(first: Any = None, second: Any = None, third: Any = None) -> dict[str, Any]:
    return {"first": first, "second": second, "third": third}


def test_a_plan_of_annotations_is_a_file_like_any_other():
    lies = HSharding((PAIR.with_spec(P(None, "x")), group(2)), 1, (6, 2))
    made = planned(only(lies))
    (stage,) = made.stages
    assert stage.parameters == {"first": (None, "tensor"), "second": (), "third": ()}
    assert stage.shares.parameters == {"first": Share(1, (6, 2))}
    assert Plan.from_json_dict(made.to_json_dict()) == made
    assert "without a prediction" in str(made)


@pytest.mark.parametrize(
    ("lies", "mesh_shape", "spec"),
    [
        (group(0, 1, 2, 3, x=4, spec=P(None, "x")), (1, 4), (None, "tensor")),
        (group(0, 1, 2, 3, data=2, tensor=2, spec=P(None, "tensor")), (2, 2), (None, "tensor")),
        (group(0, 1, 2, 3, a=2, b=2, spec=P("a", "b")), (2, 2), ("data", "tensor")),
        (group(0, 1, 2, 3, data=4), (4, 1), ()),
    ],
)
def test_axes_of_any_names_become_those_of_a_plan(
    lies: Subgroup, mesh_shape: tuple[int, int], spec: Any
):
    (stage,) = planned(only(HSharding((lies,)))).stages
    assert stage.mesh_shape == mesh_shape
    assert stage.parameters.get("first", ()) == spec


def test_submeshes_are_cut_where_one_annotation_cuts_them():
    halves = HSharding((group(0), group(1)), 1)
    (stage,) = planned(only(HSharding((PAIR.with_spec(P(None, "x")),)), halves)).stages
    assert stage.devices_text == "first[0:1] 1x1 + first[1:2] 1x1"
    assert stage.shares.parameters == {"first": Share(1, (4, 4)), "second": Share(1, (4, 4))}


def test_a_member_that_has_nothing_of_a_parameter_divides_it_as_the_others():
    halves = tuple(group(*each, x=2, spec=P(None, "x")) for each in ((0, 1), (2, 3)))
    (stage,) = planned(only(HSharding(halves, 1, (8, 0)), HSharding(halves, 1, (6, 2)))).stages
    assert stage.parameters["first"] == stage.parameters["second"] == (None, "tensor")
    assert stage.shares.parameters["first"] == Share(1, (8, 0))


def test_stages_follow_the_program():
    made = planned(only(ONE, OTHER, OTHER))
    assert [stage.devices_text for stage in made.stages] == ["first[0:1] 1x1", "first[1:2] 1x1"]
    assert made.layers[1] == 2, "behind the first product and its tanh"
    far = planned(only(BOTH), loss=loss_of(None, FAR))
    assert [len(stage.members) for stage in far.stages] == [2, 1]


def test_a_cast_of_a_parameter_is_of_the_stage_that_uses_it():
    def loss(parameters: Any, batch: Any) -> Any:
        half = jax.tree.map(lambda each: each.astype(jnp.bfloat16), parameters)
        x = batch["x"].astype(jnp.bfloat16) @ half["first"] @ half["second"] @ half["third"]
        return jnp.mean(x.astype(jnp.float32) ** 2)

    assert len(planned(only(ONE, OTHER, OTHER), loss=loss).stages) == 2


def test_the_first_reshard_of_a_stage_says_how_its_examples_are_shared():
    shared = HSharding((group(4), group(5)), 0, (3, 1))
    made = planned(only(ONE), loss=loss_of(shared))
    assert made.stages[1].shares.batch == (3, 1)


def test_members_get_meshes_on_which_they_divide_a_parameter_alike():
    """What the second pair has whole, its tensor axis cannot divide: it has a data axis."""
    lies = (group(0, 1, x=2, spec=P(None, "x")), group(2, 3, x=2))
    (stage,) = planned(only(HSharding(lies, 1, (6, 2)))).stages
    assert [member.mesh_shape for member in stage.members] == [(1, 2), (2, 1)]


def test_a_value_that_is_whole_does_not_forbid_a_data_axis():
    four = group(0, 1, 2, 3, a=2, b=2)
    whole, columns = HSharding((four,)), HSharding((four.with_spec(P(None, "b")),))
    (stage,) = planned(only(columns), loss=loss_of(whole)).stages
    assert stage.mesh_shape == (2, 2)
    assert "there is no mesh" in refusal(only(columns), whole)


def test_structures_that_do_not_fit_are_refused():
    assert "a pair of pytrees of HSharding" in refusal_of_annotations(BOTH)
    assert "must be that of what they are of" in refusal({"unknown": BOTH})
    assert "'first': 3 is not allowed: an HSharding, or None" in refusal(only(3))
    assert "no parameter that the loss uses is annotated" in refusal(None, BOTH)
    assert "there is nothing else to choose" in refusal(
        BOTH, options=hetjax.PlanOptions(max_stages=1)
    )
    assert "planner: given beside annotations" in refusal(BOTH, planner=DynamicProgram())


def refusal_of_annotations(annotations: Any) -> str:
    with pytest.raises(InputError) as error:
        hetjax.plan(
            loss_of(),
            SHAPES,
            BATCH,
            annotations=annotations,
            cluster=CLUSTER,
            optimizer=optax.sgd(0.1),
            num_microbatches=MICROBATCHES,
        )
    return str(error.value)


def test_what_a_plan_cannot_hold_is_refused_by_its_name():
    assert "'first' is to be a sum of parts" in refusal(
        only(HSharding((group(0), group(1)), "partial"))
    )
    assert re.search(
        r"'first': sizes: \[3, 3\] make 6",
        refusal(only(HSharding((group(0), group(1)), 1, (3, 3)))),
    )
    four = group(0, 1, 2, 3, a=2, b=2, spec=P(("a", "b")))
    beside = HSharding((four.with_spec(P("a", "b")),))
    found = refusal(only(HSharding((four,)), beside))
    assert "dimension 0 is divided by data and tensor; allowed: one axis a dimension" in found
    unlike = HSharding((group(0, 1, x=2, spec=P("x")), group(2, 3, x=2, spec=P(None, "x"))))
    whole = HSharding((group(0, 1, x=2), group(2, 3, x=2)))
    assert "members divide it unlike" in refusal(only(unlike), whole)
    assert "are one submesh, but no slice of cluster" in refusal(
        only(HSharding((group(1, 2, 4, x=3),)))
    )
    crossed = only(HSharding((group(0), group(1)), 1), HSharding((group(1), group(0)), 1))
    assert "'second' lies as" in refusal(crossed)
    assert "in this order" in refusal(crossed)


def test_a_batch_that_no_stage_can_share_is_refused():
    columns = HSharding((group(0), group(1)), 1)
    assert "shared along dimension 1; allowed: along its examples" in refusal(BOTH, columns)
    odd = HSharding((group(0), group(1)), 0, (5, 3))
    assert "in [5, 3] examples, which num_microbatches, 2, does not divide" in refusal(BOTH, odd)
    assert "which are no stage's; the stages are on [0, 1]" in refusal(BOTH, FAR)
    inside = HSharding((PAIR.with_spec(P(None, "x")),))
    assert "there is no mesh of a data and a tensor axis" in refusal(HSharding((PAIR,)), inside)


def test_a_stage_that_the_program_comes_back_to_is_refused_with_its_lines():
    found = refusal(only(ONE, OTHER, ONE))
    assert re.search(r"'third', used at .*test_annotated_plan.py:\d+, is on devices \[0\]", found)
    assert re.search(r"'first', used at .*; but between them parameter 'second', used at", found)
    found = refusal(only(ONE, OTHER, OTHER), loss=loss_of(None, ONE))
    assert re.search(r"hetjax.reshard at .*test_annotated_plan.py:\d+, is on devices \[0\]", found)


def of_two_pipelines(loss: Callable[..., Any], *sizes: int) -> Plan:
    lies = only(BOTH, HSharding((group(0), group(2))))
    batch = {"x": HSharding((group(0), group(1)), 0, sizes)}
    return planned(lies, batch, loss)


def test_pipelines_have_one_program_or_are_refused_by_their_sizes():
    def of_labels(parameters: Any, batch: Any) -> Any:
        hidden = batch["x"] @ parameters["first"] @ parameters["second"] @ parameters["third"]
        labels = jnp.argmax(batch["x"], 1)[:, None]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(hidden), labels, 1))

    def of_loops(parameters: Any, batch: Any) -> Any:
        return loss_of()(parameters, {"x": jax.lax.map(jnp.tanh, batch["x"])})

    pair = {"x": jax.ShapeDtypeStruct((2, 4), "float32")}
    for loss in (of_labels, of_loops):
        validate_for(of_two_pipelines(loss, 4, 4), trace(loss, SHAPES, pair))
        with pytest.raises(InputError, match="microbatches of 3 and 1 examples of 4"):
            of_two_pipelines(loss, 6, 2)


def test_stages_that_share_devices_must_be_pipelines():
    stages = only(BOTH, HSharding((group(0), group(4))))
    assert "no leaf of the batch is annotated, which says who has" in refusal(stages)
    for alike in (BOTH, HSharding((group(0), group(1)), 1)):
        assert "these share the examples of all leaves alike" in refusal(stages, alike)
    shared = HSharding((group(0), group(1)), 0, (6, 2))
    assert [len(each.stages) for each in planned(stages, shared).pipelines] == [1, 2]
    for dimension in (0, 1):
        divided = only(BOTH, HSharding((group(0), group(4)), dimension))
        assert "have the whole of a parameter each" in refusal(divided, shared)
    three = HSharding((group(0), group(4), group(5)))
    assert "is on 3 submeshes, and batch leaf 'x' on 2" in refusal(only(BOTH, three), shared)
    odd = HSharding((group(0), group(1)), 0, (5, 3))
    assert "allowed: multiples of num_microbatches, 2" in refusal(stages, odd)
    turned = only(BOTH, HSharding((group(4), group(0))))
    assert planned(turned, shared).pipelines == planned(stages, shared).pipelines


def test_a_stage_of_a_pipeline_may_be_told_by_a_reshard_alone():
    shared = HSharding((group(0), group(1)), 0, (6, 2))
    later = HSharding((group(0), group(4)), 0, ("n - n//4", "n//4"))
    made = planned(only(BOTH, BOTH, BOTH), shared, loss_of(None, None, later))
    found = [[stage.devices_text for stage in each.stages] for each in made.pipelines]
    assert found == [["first[0:1] 1x1"], ["first[1:2] 1x1", "second[0:1] 1x1"]]


def test_devices_that_are_of_no_stage_are_refused():
    found = refusal(only(BOTH), loss=loss_of(ONE))
    assert "which makes these a stage; no stage is on [1]" in found
    assert "no slice of cluster 'two by four'" in refusal(only(HSharding((group(9),))))


def test_parameters_of_two_stages_in_one_operation_are_refused():
    def loss(parameters: Any, batch: Any) -> Any:
        x = batch["x"] @ parameters["first"]
        return jnp.mean((x @ (parameters["second"][:, :4] + parameters["third"])) ** 2)

    found = refusal(only(ONE, ONE, OTHER), loss=loss)
    assert re.search(r"'second', used at .*, is on devices \[0\], and .*'third', used at", found)
    assert "all that one operation uses on the same devices" in found
