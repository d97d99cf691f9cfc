"""How a stage's arrays are divided in its submesh, and what a transfer between two must move."""

from hetjax.sharding.layout import Shard, overlap, shards, wanted
from hetjax.sharding.rules import DATA, MESH_AXES, RULES, TENSOR, example_spec, parameter_spec

__all__ = [
    "DATA",
    "MESH_AXES",
    "RULES",
    "TENSOR",
    "Shard",
    "example_spec",
    "overlap",
    "parameter_spec",
    "shards",
    "wanted",
]
