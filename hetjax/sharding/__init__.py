"""HSPMD annotations: how arrays lie on unions of unlike meshes, and what follows from that."""

from hetjax.sharding.annotated_program import AnnotatedProgram, Compute, Move
from hetjax.sharding.annotation import DUPLICATE, PARTIAL, HSharding, Shard, Subgroup
from hetjax.sharding.bounds import overlap
from hetjax.sharding.crossing import Crossing, Gathering, Piece, crossing
from hetjax.sharding.deduction import deduce
from hetjax.sharding.network import Network
from hetjax.sharding.pipelines import find_pipelines
from hetjax.sharding.reshard import reshard
from hetjax.sharding.resolve import resolve
from hetjax.sharding.rules import (
    DATA,
    MESH_AXES,
    RULES,
    TENSOR,
    example_spec,
    parameter_spec,
    state_spec,
)
from hetjax.sharding.run_program import ProgramRunner
from hetjax.sharding.signatures import rules_table
from hetjax.sharding.specialize import Segment, SpecializedProgram, specialize
from hetjax.sharding.union_array import HArray

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
    "HArray",
    "HSharding",
    "Move",
    "Network",
    "Piece",
    "ProgramRunner",
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
    "reshard",
    "resolve",
    "rules_table",
    "specialize",
    "state_spec",
]
