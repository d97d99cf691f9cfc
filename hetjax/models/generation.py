"""Tokens that a language model makes: each is drawn from what the model says follows those before.

The whole window is computed again for every token, always of one shape, so that one program does
for prompts of any length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hetjax.draws import check_draws
from hetjax.errors import InputError
from hetjax.models.language_model import LanguageModel


def generate(
    model: LanguageModel,
    parameters: PyTree,
    prompt: Sequence[int] | np.ndarray,
    length: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    vocabulary: int | None = None,
) -> np.ndarray:
    """Go on with a prompt, a token at a time.

    The model sees its last ``model.sequence`` tokens; what was before them is forgotten.

    Args:
        model: the model.
        parameters: its parameters.
        prompt: [n] integers, at least one, each in [0, vocabulary).
        length: how many tokens to make.
        temperature: what logits are divided by before a token is drawn, 0 to 100: 1 follows the
            model, less keeps to what is likely, 0 always takes the likeliest.
        seed: of the draws, in [0, 2**32); the same one makes the same tokens.
        vocabulary: tokens from this one on are not made; None for all of the model's.

    Returns:
        [length] int32, without the prompt.

    Raises:
        InputError: naming the argument, its value and what is allowed.

    Example:
        >>> from hetjax.models import GPTConfig, language_model
        >>> model = language_model(GPTConfig(vocabulary=7, blocks=1, width=8, heads=2, sequence=4))
        >>> generate(model, model.init(jax.random.key(0)), [3, 1], 5).shape
        (5,)
    """
    allowed = model.vocabulary if vocabulary is None else min(vocabulary, model.vocabulary)
    check_draws(length, temperature, seed)
    seen = np.asarray(prompt, np.int64)
    if not len(seen):
        raise InputError("prompt is empty; it must have at least one token to go on from")
    if seen.min() < 0 or seen.max() >= allowed:
        wrong = seen[(seen < 0) | (seen >= allowed)][0]
        raise InputError(f"prompt has the token {wrong}; tokens must be in [0, {allowed})")
    key = jax.random.key(seed)
    tokens = np.concatenate([seen, np.zeros(length, np.int64)]).astype(np.int32)
    for place in range(len(seen), len(tokens)):
        window = np.zeros(model.sequence, np.int32)
        last = tokens[max(0, place - model.sequence) : place]
        window[: len(last)] = last
        tokens[place] = _next_token(
            model.logits,
            allowed,
            parameters,
            window,
            np.int32(len(last)),
            np.float32(temperature),
            key,
            np.int32(place - len(seen)),
        )
    return tokens[len(seen) :]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _next_token(
    logits: Callable[[PyTree, jax.Array], jax.Array],
    vocabulary: int,
    parameters: PyTree,
    window: jax.Array,
    used: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
    draw: jax.Array,
) -> jax.Array:
    # What stands after the used places is not seen by those: attention is causal, and experts
    # take tokens in their order.
    found = logits(parameters, window[None])[0, used - 1, :vocabulary]
    # The likeliest of logits with this noise is a draw of their softmax, also near temperature 0.
    noise = jax.random.gumbel(jax.random.fold_in(key, draw), found.shape, jnp.float32)
    return jnp.argmax(found + temperature * noise).astype(jnp.int32)
