"""Attention: one primitive, its kernel block by block, and how plain attention is found."""
