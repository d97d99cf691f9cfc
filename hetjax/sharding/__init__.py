"""How a stage's arrays are divided in its submesh, and what a transfer between two must move."""

from hetjax.sharding.annotation import DUPLICATE, PARTIAL, HSharding, Subgroup
from hetjax.sharding.bounds import overlap
from hetjax.sharding.crossing import Crossing, Gathering, Piece, crossing
from hetjax.sharding.layout import Shard, shards
from hetjax.sharding.network import Network
from hetjax.sharding.resolve import resolve
from hetjax.sharding.rules import DATA, MESH_AXES, RULES, TENSOR, example_spec, parameter_spec
from hetjax.sharding.union_array import HArray

__all__ = [
    "DATA",
    "DUPLICATE",
    "MESH_AXES",
    "PARTIAL",
    "RULES",
    "TENSOR",
    "Crossing",
    "Gathering",
    "HArray",
    "HSharding",
    "Network",
    "Piece",
    "Shard",
    "Subgroup",
    "crossing",
    "example_spec",
    "overlap",
    "parameter_spec",
    "resolve",
    "shards",
]
