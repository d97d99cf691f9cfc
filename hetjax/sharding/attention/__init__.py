"""Attention: one primitive, its kernel block by block, and how plain attention is found."""

from hetjax.sharding.attention.block import attend_block, merge
from hetjax.sharding.attention.block_backward import attend_block_backward, delta_of
from hetjax.sharding.attention.mask import Mask, Tokens, TokenSpan

__all__ = [
    "Mask",
    "TokenSpan",
    "Tokens",
    "attend_block",
    "attend_block_backward",
    "delta_of",
    "merge",
]
