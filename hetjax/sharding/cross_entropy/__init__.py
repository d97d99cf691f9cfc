"""Cross-entropy of tokens without their logits: one primitive, and its kernel chunk by chunk."""

from hetjax.sharding.cross_entropy.chunks import chunk_size, token_gradients, token_losses

__all__ = ["chunk_size", "token_gradients", "token_losses"]
