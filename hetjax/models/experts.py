"""A feed-forward layer of experts: each token goes to the one that its router likes best.

Source: Switch Transformer (Fedus et al., 2022, arXiv:2101.03961), section 2.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.models.layers import INIT_STD, gelu, projection, residual_std


class Experts(nnx.Module):
    """Experts, each a feed-forward layer four times as wide as the stream.

    An expert takes so many tokens of each example and no more; those that come later pass the layer
    by. Every example is routed by itself, so that the numbers do not depend on how a batch is cut.

    Args:
        width: size of the residual stream.
        count: how many experts there are.
        capacity: how many tokens an expert takes, over an even share of them.
        blocks: number of Transformer blocks of the model.
        dtype: what the experts compute in; the router computes in float32.
        rngs: where the initial parameters come from.
    """

    def __init__(
        self,
        width: int,
        count: int,
        capacity: float,
        blocks: int,
        dtype: str,
        *,
        rngs: nnx.Rngs,
    ):
        hidden = 4 * width
        self.count, self.capacity = count, capacity
        self.router = projection(
            "btd,de->bte", (width, count), None, std=INIT_STD, dtype="float32", rngs=rngs
        )
        self.up = projection(
            "ebcd,edf->ebcf",
            (count, width, hidden),
            (count, hidden),
            std=INIT_STD,
            dtype=dtype,
            rngs=rngs,
        )
        self.down = projection(
            "ebcf,efd->ebcd",
            (count, hidden, width),
            (count, width),
            std=residual_std(blocks),
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Send every token to its expert and back.

        Args:
            x: [B, T, D].

        Returns:
            [B, T, D], zero for tokens that no expert had room for; and [B] float32, each example's
            loss of balance, which is 1 where all experts get the same share (equation 4).
        """
        likes = jax.nn.softmax(self.router(x.astype(jnp.float32)))
        best = jax.nn.one_hot(jnp.argmax(likes, axis=-1), self.count, dtype=jnp.float32)
        seats = max(1, math.ceil(self.capacity * x.shape[1] / self.count))
        # How many of the example's tokens chose the same expert before; -1 for all other experts.
        seat = (jnp.cumsum(best, axis=1) * best).astype(jnp.int32) - 1
        seated = jax.nn.one_hot(seat, seats, dtype=x.dtype)
        inside = self.down(gelu(self.up(jnp.einsum("btec,btd->ebcd", seated, x))))
        gate = jnp.sum(likes * best, axis=-1).astype(x.dtype)[..., None, None]
        balance = self.count * jnp.sum(jnp.mean(best, axis=1) * jnp.mean(likes, axis=1), axis=-1)
        return jnp.einsum("btec,ebcd->btd", seated * gate, inside), balance
