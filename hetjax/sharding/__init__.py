"""HSPMD annotations: how arrays lie on unions of unlike meshes, and what follows from that."""

from hetjax.sharding.annotation.annotation import DUPLICATE, PARTIAL, HSharding
from hetjax.sharding.annotation.bounds import overlap
from hetjax.sharding.annotation.rules import (
    DATA,
    MESH_AXES,
    RULES,
    TENSOR,
    example_spec,
    parameter_spec,
    state_spec,
)
from hetjax.sharding.annotation.subgroup import Shard, Subgroup
from hetjax.sharding.deduction.annotated_program import AnnotatedProgram, Compute, Mend, Move
from hetjax.sharding.deduction.deduce import deduce
from hetjax.sharding.deduction.signatures import rules_table
from hetjax.sharding.deduction.specialize import Segment, SpecializedProgram, specialize
from hetjax.sharding.resolution.crossing import Crossing, Gathering, crossing
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.pipelines import find_pipelines
from hetjax.sharding.resolution.resolve import resolve

__all__ = [
    "DATA",
    "DUPLICATE",
    "MESH_AXES",
    "PARTIAL",
    "RULES",
    "TENSOR",
    "AnnotatedProgram",
    "Compute",
    "Crossing",
    "Gathering",
    "HSharding",
    "Mend",
    "Move",
    "Network",
    "Segment",
    "Shard",
    "SpecializedProgram",
    "Subgroup",
    "crossing",
    "deduce",
    "example_spec",
    "find_pipelines",
    "overlap",
    "parameter_spec",
    "resolve",
    "rules_table",
    "specialize",
    "state_spec",
]
