"""How a stage's arrays are divided in its submesh, and what a transfer between two must move."""

from hetjax.sharding.crossing import Crossing, Gathering, Piece, crossing
from hetjax.sharding.layout import Shard, overlap, shards
from hetjax.sharding.rules import DATA, MESH_AXES, RULES, TENSOR, example_spec, parameter_spec

__all__ = [
    "DATA",
    "MESH_AXES",
    "RULES",
    "TENSOR",
    "Crossing",
    "Gathering",
    "Piece",
    "Shard",
    "crossing",
    "example_spec",
    "overlap",
    "parameter_spec",
    "shards",
]
