"""Context splits: which device has which tokens and heads of one sequence, and who sends what."""

from hetjax.sharding.context.context_split import ContextGroup, ContextSplit
from hetjax.sharding.context.context_transfers import (
    ContextTransfer,
    HeadBytes,
    heads_to_tokens,
    ring_gradient_step,
    ring_step,
    tokens_to_heads,
)
from hetjax.sharding.context.positions import (
    device_positions,
    group_positions,
    halves,
    places_of,
    positions_in_order,
    seen_pairs,
    seen_rectangle,
)
from hetjax.sharding.context.sub_rings import SubRing, key_value_range, sub_rings

__all__ = [
    "ContextGroup",
    "ContextSplit",
    "ContextTransfer",
    "HeadBytes",
    "SubRing",
    "device_positions",
    "group_positions",
    "halves",
    "heads_to_tokens",
    "key_value_range",
    "places_of",
    "positions_in_order",
    "ring_gradient_step",
    "ring_step",
    "seen_pairs",
    "seen_rectangle",
    "sub_rings",
    "tokens_to_heads",
]
